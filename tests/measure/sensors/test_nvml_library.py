"""NVML's life in a process, through the real pynvml; and calls that come back, fail, or never come back."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pynvml
import pytest

from fp8bench.measure.sensors import nvml as own_nvml
from fp8bench.measure.sensors.energy import THREAD_NAME
from fp8bench.measure.sensors.nvml import ERROR_REASONS, Library, describe_error
from fp8bench.model.readings import NoReading
from tests.counts import for_each
from tests.measure.sensors.nvml.library import Simulation

ROOT = Path(__file__).resolve().parents[3]


def left_behind() -> None:
    """Waits for hung threads of fp8bench to return. Other threads of this process may remain."""
    for thread in threading.enumerate():
        if thread.name in (own_nvml.LIBRARY_NAME, THREAD_NAME):
            thread.join(30)


def test_it_is_initialised_while_anyone_uses_it(nvml: Simulation, library: Library) -> None:
    for round_ in (1, 2):
        library.open()
        library.open()
        assert (nvml.state.inits, nvml.state.shutdowns) == (round_, round_ - 1)
        library.close()
        assert nvml.state.shutdowns == round_ - 1
        library.close()
        assert (nvml.state.inits, nvml.state.shutdowns) == (round_, round_)


def test_an_initialisation_that_fails_may_be_tried_again(nvml: Simulation, library: Library) -> None:
    nvml.fail("nvmlInitWithFlags", 9, last=0)
    with pytest.raises(NoReading, match="the NVIDIA driver is not loaded"):
        library.open()
    library.open()
    library.close()
    assert (nvml.state.inits, nvml.state.shutdowns) == (1, 1)


@for_each(("module", "why"), [(None, "nvidia-ml-py is not installed"), ("nvml_of_yore", "has no nvmlInitWithFlags")])
def test_a_missing_or_old_package_gives_a_reason(
    module: str | None, why: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType(module) if module else None)
    with pytest.raises(NoReading, match=why):
        library.open()


def test_without_a_driver_there_is_a_reason() -> None:
    script = (
        "from fp8bench.measure.sensors.nvml import NVML_LIBRARY\n"
        "from fp8bench.model.readings import NoReading\n"
        "import pynvml, ctypes\n"
        "class Missing:\n    def __getattr__(self, name): raise OSError('no such file')\n"
        "pynvml.CDLL = lambda path: (_ for _ in ()).throw(OSError(path))\n"
        "try:\n    NVML_LIBRARY.open()\nexcept NoReading as failure:\n    print(failure.reason)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "the NVML library (libnvidia-ml.so.1) is missing: no NVIDIA driver here (NVML error 12)\n"


@pytest.mark.slow
def test_a_call_that_hangs_is_the_last_and_an_initialisation_is_given_up(nvml: Simulation) -> None:
    library = Library()
    library.open()
    library.timeout = 0.1
    nvml.fail("nvmlDeviceGetCount_v2", delay=1.0)
    with pytest.raises(NoReading, match=r"^NVML gave no answer for 0\.1 s, and is not called again$"):
        library.call_within_timeout(lambda: library.call("nvmlDeviceGetCount"))
    while not (calls := nvml.calls()).get("nvmlDeviceGetCount_v2"):
        time.sleep(0.01)  # on a busy machine its thread may be given up before
    with pytest.raises(NoReading, match="not called again"):
        library.call("nvmlSystemGetDriverVersion")
    with pytest.raises(NoReading, match="not called again"):
        library.call_within_timeout(lambda: None)
    library.close()
    assert nvml.calls() == calls
    nvml.fail("nvmlInitWithFlags", delay=1.0)
    with pytest.raises(NoReading, match="gave no answer"):
        Library(timeout=0.1).open()
    left_behind()


def test_a_process_ends_although_a_call_never_does(nvml: Simulation) -> None:
    nvml.fail("nvmlDeviceGetCount_v2", delay=3600.0)
    script = (
        "from fp8bench.measure.sensors.nvml import Library\n"
        "from fp8bench.model.readings import NoReading\n"
        "library = Library()\n"
        "library.open()\n"
        "print(library.call_within_timeout(lambda: library.call('nvmlSystemGetDriverVersion')))\n"
        "library.timeout = 0.1\n"
        "try:\n    library.call_within_timeout(lambda: library.call('nvmlDeviceGetCount'))\n"
        "except NoReading as failure:\n    print(failure.reason)\n"
        "library.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=nvml.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.splitlines() == ["570.00.1", "NVML gave no answer for 0.1 s, and is not called again"]


def test_every_nvml_error_has_a_text() -> None:
    codes = {value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
    assert len(codes) > 25 and codes == set(ERROR_REASONS) and len(set(ERROR_REASONS.values())) == len(ERROR_REASONS)
    assert describe_error(15) == "the GPU is lost: it fell off the bus or cannot be reached (NVML error 15)"
    assert describe_error(4711) == "an error that fp8bench does not know (NVML error 4711)"
