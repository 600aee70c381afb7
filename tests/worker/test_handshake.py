"""A partner's first message, and which partners are refused."""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import fp8bench
from fp8bench.errors import UsageError, WorkerHung, WorkerLost
from fp8bench.features.duel import partners as partner
from fp8bench.features.duel.partners import HandshakeWorker, WorkerStart, explain_handshake_refusal
from fp8bench.model import Case, DeviceFacts, LayerScale
from fp8bench.model.raw import PROTOCOL, RawSlot, RawStep, Settings
from fp8bench.worker.bench import Bench
from fp8bench.worker.main import handshake
from tests.counts import for_each

PACKAGE = Path(fp8bench.__file__).resolve().parent
# The contents of protocol 5: required arguments of requests and fields of values. Others may be added with defaults. A
# change of these lines must raise PROTOCOL. Protocol 4: states follow the case's `cache`, and a slot may have a queue
# to fill. Protocol 5: there is another phase, and codes of phases are indices in their list.
REQUESTS = {
    "probe": (), "software": (), "versions": ("suites",), "modules_under": ("folder",),
    "prepare": ("key", "case", "facts"), "calibrate": ("case", "facts"), "quantisers": (),
    "compile_quantisers": ("key",), "slot": ("key", "calls", "discard"), "check": ("key",), "scales": ("key",),
    "release": ("key",), "error": ("case", "facts"), "memory": ("case", "facts"),
    "hold_phase": ("key", "phase", "most_bytes"), "loop_phase": ("key", "times"), "drop_phase": ("key",),
    "begin_late": ("key",), "is_late_due": ("key",), "end_late": ("key",), "replay_phases": ("key",),
}  # fmt: skip
VALUES: dict[type, tuple[str, ...]] = {
    Settings: (),
    Case: ("workload", "params", "precision", "device"),
    DeviceFacts: ("kind", "index", "name", "memory_bytes", "torch"),
    RawStep: ("codes", "intervals_ns"),
    RawSlot: ("steps", "wall_seconds", "cpu_seconds", "host_seconds"),
    LayerScale: ("layer", "role", "amax", "scale"),
}


def test_the_protocol_stands_for_what_it_stood_for() -> None:
    """An older worker understands all requests, and a newer parent all answers."""
    assert PROTOCOL == 5
    for name, wanted in REQUESTS.items():
        signature = inspect.signature(getattr(Bench, name))
        given = [one.name for one in signature.parameters.values() if one.default is inspect.Parameter.empty]
        assert tuple(given) == ("self", *wanted), name
    # Values are pickled under the names of their classes.
    names_of_raw = {name for name, kind in vars(inspect.getmodule(Settings)).items() if inspect.isclass(kind)}
    assert names_of_raw >= {"Settings", "StateCheck", "RawStep", "Filling", "RawReplay", "RawSlot"}
    for kind, names in VALUES.items():
        must = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
        assert tuple(must) == names, kind


def test_it_says_who_it_is() -> None:
    said = handshake()
    assert said["protocol"] == PROTOCOL and said["fp8bench"] == fp8bench.__version__
    assert said["package"] == str(PACKAGE) and said["executable"] == sys.executable
    assert str(said["torch"]).startswith("2.") and str(said["torch_at"]).endswith("__init__.py")
    assert {type(value) for value in said.values()} <= {str, int}


@for_each(
    ("said", "sentence"),
    [
        ({"protocol": PROTOCOL, "torch": "2.13.0"}, ""),
        ({"protocol": PROTOCOL + 1, "fp8bench": "9.9", "torch": "2.13.0"}, "uses protocol 6 of fp8bench 9.9"),
        ({}, "uses protocol None of fp8bench None"),
        ({"protocol": PROTOCOL, "torch": None, "torch_missing": "ImportError: no libcuda"}, "(ImportError: no libcuda"),
    ],
)
def test_refusals_are_sentences(said: partner.HandshakeFacts, sentence: str) -> None:
    why = explain_handshake_refusal(said, WorkerStart("B", "/env/bin/python", ()))
    assert sentence in why and bool(why) == bool(sentence) == why.startswith("side B (/env/bin/python)")


def changed(file: str, old: str, new: str) -> Callable[[Path], WorkerStart]:
    """A copy of fp8bench with a replacement in one file."""

    def start(folder: Path) -> WorkerStart:
        shutil.copytree(PACKAGE, folder / "fp8bench", ignore=shutil.ignore_patterns("__pycache__"))
        path = folder / "fp8bench" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        return WorkerStart("A", sys.executable, (str(folder),))

    return start


@pytest.mark.slow
@for_each(
    ("start", "error", "sentence"),
    [
        (changed("model/raw.py", "PROTOCOL = 5", "PROTOCOL = 99"), UsageError, "uses protocol 99"),
        (changed("worker/main.py", '"greet"', '"salute"'), UsageError, "its fp8bench is too old for duels"),
        (changed("worker/main.py", "import gc", "import gc, nowhere"), WorkerLost, "No module named 'nowhere'"),
    ],
)
def test_a_partner_of_another_version_is_refused(
    start: Callable[[Path], WorkerStart], error: type[Exception], sentence: str, tmp_path: Path
) -> None:
    with HandshakeWorker(Settings(), start(tmp_path)) as worker:
        with pytest.raises(error, match=r"side A \(.*\)") as raised:
            worker.probe()
        assert sentence in str(raised.value)
        assert worker.pid is None


def test_a_partner_that_says_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nsleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(partner, "START_SECONDS", 0.3)
    with (
        HandshakeWorker(Settings(), WorkerStart("B", str(script), ())) as worker,
        pytest.raises(WorkerHung, match="'greet'"),
    ):
        worker.probe()


@pytest.mark.slow
def test_a_module_that_a_side_cannot_import(tmp_path: Path) -> None:
    (tmp_path / "suite.py").write_text("from pathlib import NoSuchPath\n")
    start = WorkerStart("A", sys.executable, (str(PACKAGE.parent),))
    with HandshakeWorker(Settings(imports=(str(tmp_path / "suite.py"),)), start) as worker:
        with pytest.raises(UsageError, match=r"side A \(.*\): importing '.*suite.py' failed: ImportError"):
            worker.probe()
        assert worker.pid is None


def test_nothing_of_this_interpreter_goes_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("PYTHONHOME", "/this")
    monkeypatch.setenv("MALLOC_TOP_PAD_", "7")
    environment = HandshakeWorker(Settings(threads=3), WorkerStart("A", "python", ("/one", "/two")))._environment()
    assert environment["PYTHONPATH"] == "/one:/two" and "PYTHONHOME" not in environment
    assert environment["MALLOC_TOP_PAD_"] == "7" and environment["MALLOC_TRIM_THRESHOLD_"] == str(1 << 30)
    assert environment["OMP_NUM_THREADS"] == "3"
