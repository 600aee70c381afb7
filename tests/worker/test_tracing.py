"""The pass that records a trace: what it writes, what it leaves alone, and where it may fail."""

from __future__ import annotations

import gzip
import json
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from fp8bench import files
from fp8bench.model import PHASES, Case
from fp8bench.profiler import exported
from fp8bench.protocols import Phases, Setup
from fp8bench.worker import tracing
from fp8bench.worker.bench import Bench
from fp8bench.worker.step_guards import LeftRunning
from fp8bench.worker.tracing import STEPS, WARM_UPS, traced_phases, write
from tests.counts import for_each
from tests.worker.told import CPU, Tell
from tests.worker.told import tell as tell

Step = Callable[[Phases], None]


STATES: list[weakref.ref[torch.Tensor]] = []


@pytest.fixture
def stepping(tell: Tell) -> Callable[[Step], Case]:
    """Makes the bench find a workload of the test's own; its state refers to itself."""

    def make(setup: Setup) -> list[Any]:
        state: list[Any] = [torch.empty(100)]
        STATES.append(weakref.ref(state[0]))
        state.append(state)
        return state

    return lambda step: tell(make, lambda state, phase: step(phase))


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
    return found


def test_every_phase_is_a_range_of_its_name() -> None:
    told: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            told.append(f"+{self.name}")

        def __exit__(self, *exc: object) -> None:
            told.append(f"-{self.name}")

    phases = traced_phases(Range)
    for name in PHASES:
        with getattr(phases, name):
            pass
    assert told == [sign + f"fp8bench.{name}" for name in PHASES for sign in "+-"]
    told.clear()
    with phases.gemm, phases.cast, phases.gemm:
        pass
    order = ("gemm", "cast", "gemm")
    assert told == [sign + f"fp8bench.{name}" for sign in "+-" for name in order]


def test_a_few_steps_after_a_warm_up(bench: Bench, stepping: Callable[[Step], Case], tmp_path: Path) -> None:
    calls = []
    operand = torch.ones(8, 8)

    def step(phase: Phases) -> None:
        calls.append(1)
        with phase.gemm:
            operand @ operand

    file = tmp_path / "new" / "fp8bench.1.pt.trace.json.gz"
    told = bench.trace(stepping(step), CPU, str(file))
    assert len(calls) == WARM_UPS + 1 + STEPS
    events = read(file)["traceEvents"]
    steps = [one for one in events if str(one.get("name")).startswith("ProfilerStep#")]
    ranges = [one for one in events if one.get("name") == "fp8bench.gemm"]
    products = [one for one in events if one.get("name") == "aten::mm"]
    assert len(steps) == len(ranges) == len(products) == STEPS
    assert products[0]["args"]["Input Dims"] == [[8, 8], [8, 8]]
    assert [(one.phase, one.calls) for one in told if one.name == "aten::mm"] == [("gemm", 1.0)]
    assert STATES[-1]() is None, "the state is given back"
    assert sum(one.seconds for one in told) == pytest.approx(sum(one["dur"] for one in steps) * 1e-6 / STEPS)


def test_a_trace_names_itself_and_no_folder_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same trace gives the same bytes, in the place of an older one; half a file would be read by somebody."""
    file = tmp_path / "case" / "fp8bench.1.pt.trace.json.gz"
    write({"traceEvents": [], "traceName": "/tmp/elsewhere/trace.json"}, file)
    first = file.read_bytes()
    assert read(file) == {"traceEvents": [], "traceName": file.name}
    write({"traceEvents": [], "traceName": "another"}, file)
    assert file.read_bytes() == first and list(file.parent.iterdir()) == [file]

    def full(file: IO[bytes], content: bytes, sync: bool) -> None:
        file.write(content[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "append", full)
    with pytest.raises(OSError, match="No space left"):
        write({"traceEvents": []}, tmp_path / "a.pt.trace.json.gz")
    assert list(tmp_path.iterdir()) == [file.parent]


def test_an_exception_leaves_no_profiler_behind(bench: Bench, stepping: Callable[[Step], Case], tmp_path: Path) -> None:
    environment, calls = dict(os.environ), []

    def step(phase: Phases) -> None:
        calls.append(1)
        with phase.gemm:
            if len(calls) == WARM_UPS + 3:
                raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        bench.trace(stepping(step), CPU, str(tmp_path / "a.pt.trace.json.gz"))
    assert not torch.autograd._profiler_enabled() and dict(os.environ) == environment
    assert list(tmp_path.iterdir()) == []
    assert bench.trace(stepping(lambda phase: None), CPU, str(tmp_path / "b.pt.trace.json.gz"))


@pytest.mark.parametrize(
    "ask",
    [
        lambda bench, case, folder: bench.trace(case, CPU, str(folder / "a.pt.trace.json.gz")),
        lambda bench, case, folder: bench.memory(case, CPU),
    ],
    ids=["trace", "memory"],
)
def test_threads_that_are_left_are_an_error(
    ask: Callable[[Bench, Case, Path], object], bench: Bench, stepping: Callable[[Step], Case], tmp_path: Path
) -> None:
    """They would be timed with what comes next; the profiler itself leaves none of Python's, memory measured or not."""
    before, done = set(threading.enumerate()), threading.Event()

    def step(phase: Phases) -> None:
        threading.Thread(target=done.wait, name="stayer", daemon=True).start()

    with pytest.raises(LeftRunning, match="stayer"):
        ask(bench, stepping(step), tmp_path)
    done.set()
    for one in set(threading.enumerate()) - before:
        assert one.name == "stayer"
        one.join()


@for_each("told", ["[]", "{}", '{"traceEvents": 3}'])
def test_something_that_is_no_trace_is_an_error(told: str) -> None:

    class Profile:
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text(told)

    with pytest.raises(RuntimeError, match="no trace"):
        exported(Profile())


def test_a_kind_of_device_that_the_profiler_does_not_know_is_seen_from_the_host() -> None:
    """And a kind that it knows under its own name."""
    trace = tracing.record(lambda phase: None, "abacus")
    assert any(str(one.get("name")).startswith("ProfilerStep#") for one in trace["traceEvents"])
