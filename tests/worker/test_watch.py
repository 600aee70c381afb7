"""Real workers, and processes of somebody's own, whose switches and clocks are not as they should be."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

import fp8bench
from fp8bench.errors import ImportFailed, UsageError, WorkerFault
from fp8bench.measure.handle import ProcessWorker
from fp8bench.model import Case
from fp8bench.model.raw import Settings
from fp8bench.user_code import import_user_modules
from fp8bench.user_code.switches import read_values, restore_values
from fp8bench.worker.switches import switches
from tests.counts import for_each
from tests.worker.test_switches import KEPT, LEFT


@for_each(
    ("line", "words"),
    [
        ("import time; time.perf_counter = lambda: 0.0", "time.perf_counter at "),
        ("import os; os.environ['OMP_WAIT_POLICY'] = 'active'", "the environment at .*OMP_WAIT_POLICY=active"),
        ("import gc; gc.disable()", "garbage collection at False"),
    ],
)
def test_a_file_whose_import_sets_switches_is_refused(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "sets_at_import.py"
    path.write_text(line)
    before = read_values(switches())
    for _ in range(2):
        with pytest.raises(ImportFailed, match=rf"importing '.*sets_at_import.py' leaves {words}.*: all later"):
            import_user_modules([str(path)])
        assert read_values(switches()) == before


def test_a_file_whose_import_sets_switches_of_torch_is_refused_by_the_worker(tmp_path: Path) -> None:
    path = tmp_path / "sets_at_import.py"
    path.write_text("import torch; torch.backends.mkldnn.enabled = False; torch.set_default_dtype(torch.float64)")
    words = r"importing .* leaves the default dtype at torch.float64 .*, oneDNN at False"
    with ProcessWorker(Settings(imports=(str(path),))) as worker:
        with pytest.raises(ImportFailed, match=f"^{words}"):
            worker.probe()
        with pytest.raises(WorkerFault, match=f"^ImportFailed: {words}"):
            worker.probe()


# The message for each switch that a workload may leave changed (`LEFT`, `KEPT`) and that affects a reference.
BENT = {
    "autocast": r"autocast on cpu at True \(expected False\).*set_autocast_enabled",
    "inference": r"inference mode at True \(expected False\).*leave torch.inference_mode",
    "grad": r"gradients at False \(expected True\).*torch.set_grad_enabled\(True\)",
    "dtype": r"the default dtype at torch.bfloat16 \(expected torch.float32\)",
    "device": r"the default device at cpu \(expected None\)",
    "oneDNN": r"oneDNN at False \(expected True\), .*Correct that first \(torch.backends.mkldnn.enabled = True\)",
    "its convolutions": r"oneDNN's float32 convolutions at bf16 \(expected ieee\)",
    "its products": r"float32 products at mixed \(expected highest\)",
    "accumulators": r"fp16's accumulators at True \(expected False\)",
    "flash": r"flash attention at False \(expected T",
    "denormals": r"denormals as zero at True \(expected False\)",
    "anomaly": r"anomaly detection at True \(expected False\)",
    "operators": r"modes of torch's dispatcher at 1 \(expected 0\)",
    "clock": r"time.perf_counter at time.time \(ex",
    "variable": r"the environment at .*ONEDNN_DEFAULT_FPMATH_MODE=BF16.* \(expected none of NVIDIA_TF32_OVER",
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@for_each("which", BENT)
def test_a_process_that_would_bend_its_reference_is_refused(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = read_values(switches())
    with KEPT[which][0]() if which in KEPT else nullcontext():
        if which in LEFT:
            LEFT[which][0]()
        elif which not in KEPT:
            monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
        before = read_values(switches())
        with pytest.raises(UsageError, match=BENT[which]):
            fp8bench.run("gemm", dtypes="fp32", set={"shape": 8}, rounds=1, isolation=False, store=tmp_path)
        assert read_values(switches()) == before
    if which in LEFT:
        restore_values(switches(), usual)


@pytest.mark.slow
def test_clocks_replaced_before_the_worker_began_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.perf_counter = time.monotonic\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with ProcessWorker(Settings()) as worker, pytest.raises(WorkerFault, match=r"time.perf_counter at time.monotonic"):
        worker.probe()


def test_a_clock_that_looks_as_it_should_and_goes_wrong_fails_the_slot(tmp_path: Path) -> None:
    path = tmp_path / "half_speed.py"
    path.write_text(
        "import time\nfrom fp8bench.devices import cpu\n"
        "cpu.HostStamper.source = lambda self: lambda: time.perf_counter_ns() // 2\n"
    )
    case = Case("gemm", (("m", 64), ("n", 64), ("k", 64), ("product", "forward"), ("operands", "cast")), "fp32", "cpu")
    with ProcessWorker(Settings(imports=(str(path),))) as worker:
        worker.with_time_limit(60.0).prepare("one", case, worker.probe()[0])
        with pytest.raises(WorkerFault, match="ClocksDisagree: the clock of phases counted "):
            worker.with_time_limit(60.0).slot("one", 2000, 1)
