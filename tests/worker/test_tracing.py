"""The pass that records a trace: what it writes, and where it may fail."""

from __future__ import annotations

import gzip
import json
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations
from pathlib import Path
from typing import IO, Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8bench import files
from fp8bench.devices.cpu import Cpu
from fp8bench.model import Case
from fp8bench.protocols import Phases, Setup
from fp8bench.worker import untimed_passes
from fp8bench.worker.bench import Bench
from fp8bench.worker.tracing import TRACED_STEPS, WARM_UP_STEPS_BEFORE_TRACE, cut_event_overlaps, write_trace
from tests.counts import for_each
from tests.worker.scripted import CPU, Script
from tests.worker.scripted import script as script

Step = Callable[[Phases], None]


STATES: list[weakref.ref[torch.Tensor]] = []


@pytest.fixture
def stepping(script: Script) -> Callable[[Step], Case]:
    """Makes the bench find the test's workload; its state refers to itself."""

    def make(setup: Setup) -> list[Any]:
        state: list[Any] = [torch.empty(100)]
        STATES.append(weakref.ref(state[0]))
        state.append(state)
        return state

    return lambda step: script(make, lambda state, phase: step(phase))


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
    return found


class Collected(Cpu):
    """A device whose ranges go into a list, between the profiler's start and stop."""

    log: ClassVar[list[str]] = []

    @contextmanager
    def collecting(self, index: int) -> Iterator[Callable[[str], AbstractContextManager[object]]]:
        self.log.append("start")
        yield self.range
        self.log.append("stop")

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        self.log.append(f"{name} [")
        yield
        self.log.append("]")


def test_a_profiler_around_the_process_sees_one_slot_with_its_phases(
    bench: Bench, stepping: Callable[[Step], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm-up steps come before the profiler collects."""

    def step(phase: Phases) -> None:
        Collected.log.append("step")
        with phase.cast:
            pass

    case = stepping(step)
    monkeypatch.setattr(untimed_passes.devices, "get", lambda kind: Collected())
    Collected.log.clear()
    bench.mark_slot(case, CPU)
    one = [part for number in range(TRACED_STEPS) for part in (f"step {number} [", "step", "fp8bench.cast [", "]", "]")]
    assert Collected.log == [*["step"] * WARM_UP_STEPS_BEFORE_TRACE, "start", f"{case.id} [", *one, "]", "stop"]


def test_a_few_steps_after_a_warm_up(bench: Bench, stepping: Callable[[Step], Case], tmp_path: Path) -> None:
    calls = []
    operand = torch.ones(8, 8)

    def step(phase: Phases) -> None:
        calls.append(1)
        with phase.gemm:
            operand @ operand

    file = tmp_path / "new" / "fp8bench.1.pt.trace.json.gz"
    bench.trace(stepping(step), CPU, str(file))
    assert len(calls) == WARM_UP_STEPS_BEFORE_TRACE + 1 + TRACED_STEPS
    events = read(file)["traceEvents"]
    steps = [event for event in events if str(event.get("name")).startswith("ProfilerStep#")]
    ranges = [event for event in events if event.get("name") == "fp8bench.gemm"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(steps) == len(ranges) == len(products) == TRACED_STEPS
    assert products[0]["args"]["Input Dims"] == [[8, 8], [8, 8]]
    assert STATES[-1]() is None, "the state is given back"


def test_a_trace_names_itself_and_no_folder_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "case" / "fp8bench.1.pt.trace.json.gz"
    write_trace({"traceEvents": [], "traceName": "/tmp/elsewhere/trace.json"}, file)
    first = file.read_bytes()
    assert read(file) == {"traceEvents": [], "traceName": file.name}
    write_trace({"traceEvents": [], "traceName": "another"}, file)
    assert file.read_bytes() == first and list(file.parent.iterdir()) == [file]

    def full(file: IO[bytes], content: bytes, sync: bool) -> None:
        file.write(content[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "append", full)
    with pytest.raises(OSError, match="No space left"):
        write_trace({"traceEvents": []}, tmp_path / "a.pt.trace.json.gz")
    assert list(tmp_path.iterdir()) == [file.parent]


def test_an_exception_leaves_no_profiler_behind(bench: Bench, stepping: Callable[[Step], Case], tmp_path: Path) -> None:
    environment = dict(os.environ)
    calls = []

    def step(phase: Phases) -> None:
        calls.append(1)
        with phase.gemm:
            if len(calls) == WARM_UP_STEPS_BEFORE_TRACE + 3:
                raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        bench.trace(stepping(step), CPU, str(tmp_path / "a.pt.trace.json.gz"))
    assert not torch.autograd._profiler_enabled() and dict(os.environ) == environment
    assert list(tmp_path.iterdir()) == []
    bench.trace(stepping(lambda phase: None), CPU, str(tmp_path / "b.pt.trace.json.gz"))


Event = dict[str, Any]


def event(name: str, start: float, end: float, cat: str = "cpu_op", tid: object = 1, **args: object) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "pid": 9, "ts": start, "dur": end - start, "args": args}


def step(start: float, end: float, number: int = 1) -> Event:
    return event(f"ProfilerStep#{number}", start, end, "user_annotation")


@for_each(
    "wrong",
    [
        {"ph": "X", "name": "no times", "cat": "cpu_op"},
        {"ph": "X", "name": None, "cat": "user_annotation", "ts": 1, "dur": 1},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        event("fp8bench.nonsense", 1, 2, "user_annotation"),
        event("gemm", 1, 2, "user_annotation"),
    ],
)
def test_events_that_say_nothing_are_passed_over(wrong: Event) -> None:
    events = [step(0, 10), wrong, event("mm", 2, 4)]
    assert cut_event_overlaps(events) == events


def overlaps(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Pairs on one thread that partly overlap."""
    crossing = []
    for event, other in combinations(events, 2):
        start = event["ts"]
        end = event["ts"] + event["dur"]
        begin = other["ts"]
        until = other["ts"] + other["dur"]
        apart = end <= begin or until <= start
        if event["tid"] == other["tid"] and not (
            apart or (start <= begin and until <= end) or (begin <= start and end <= until)
        ):
            crossing.append((event, other))
    return crossing


@st.composite
def nested(draw: st.DrawFn, name: str, cat: str) -> list[Event]:
    made: list[Event] = []

    def fill(low: int, high: int, depth: int) -> None:
        at = low
        while depth and at < high and draw(st.booleans()):
            start = draw(st.integers(at, high))
            end = draw(st.integers(start, high))
            made.append(event(name, start, end, cat))
            fill(start, end, depth - 1)
            at = end

    fill(0, 1000, 3)
    return made


@given(nested("aten::op", "cpu_op"), nested("fp8bench.gemm", "user_annotation"))
def test_overlaps_are_cut(operators: list[Event], phases: list[Event]) -> None:
    before = [step(0, 1000), *operators, *phases]
    after = cut_event_overlaps(before)
    assert not overlaps(after) and after[: 1 + len(operators)] == before[: 1 + len(operators)]
    for old, new in zip(before, after, strict=True):
        assert old["ts"] <= new["ts"] and new["ts"] + new["dur"] <= old["ts"] + old["dur"] and new["dur"] >= 0
