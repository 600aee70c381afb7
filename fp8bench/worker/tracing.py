"""Records a trace: a few steps under torch's profiler, their phases as ranges around their operators.

The file has the layout of TensorBoard's profiler plugin, gzipped; it also opens in Perfetto and in chrome://tracing. An
event has `ts` and `dur` in microseconds, `tid` for its thread, `cat` for its kind. Operators and kernels by phase are
computed in whole nanoseconds, so that sums are exact.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8bench.files import write_whole
from fp8bench.model import PHASES, UNATTRIBUTED, OperatorTime
from fp8bench.profiler import activities_of, exported, quiet
from fp8bench.protocols import Markers, Phases

STEPS = 3
# Steps before the profiler is on; one more is taken under it, because its own first calls are slow too.
WARM_UPS = 2

Range = Callable[[str], AbstractContextManager[object]]


@dataclass(slots=True, eq=False)
class RangeMarker:
    """A phase's context manager; entered within itself it opens a range in the range."""

    _name: str
    _range: Range
    _open: list[AbstractContextManager[object]] = field(default_factory=list)

    def __enter__(self) -> None:
        opened = self._range(self._name)
        opened.__enter__()
        self._open.append(opened)

    def __exit__(self, *exc: object) -> None:
        self._open.pop().__exit__(None, None, None)


def traced_phases(range_of: Range) -> Markers[RangeMarker]:
    return Markers(lambda name: RangeMarker(RANGE + name, range_of))


def record(step: Callable[[Phases], None], kind: str) -> dict[str, Any]:
    """Traces a few steps after warm-ups; in the trace phases and operators never partly overlap. `kind` is the kind of
    device. Raises RuntimeError if torch's profiler recorded nothing."""
    from torch.profiler import profile, record_function, schedule

    phases = traced_phases(record_function)
    traces: list[dict[str, Any]] = []
    for _ in range(WARM_UPS):
        step(phases)
    # Steps of the profiler are named by their number, which begins with its warm-up.
    plan = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with (
        quiet(),
        profile(
            activities=activities_of(kind),
            schedule=plan,
            on_trace_ready=lambda profiler: traces.append(exported(profiler)),
            record_shapes=True,
            acc_events=True,  # one cycle is recorded; of several torch 2.11 warns that it forgets them
        ) as profiler,
    ):
        for _ in range(1 + STEPS):
            step(phases)
            profiler.step()
    if not traces:
        raise RuntimeError("torch's profiler recorded nothing")
    trace = traces[0]
    trace["traceEvents"] = mended(trace["traceEvents"])
    if not any(str(event.get("name", "")).startswith(STEP) for event in trace["traceEvents"]):
        raise RuntimeError("torch's profiler recorded no steps")
    return trace


def write(trace: Mapping[str, Any], file: Path) -> None:
    text = json.dumps({**trace, "traceName": file.name}, separators=(",", ":"))
    write_whole(file, gzip.compress(text.encode(), compresslevel=6, mtime=0), sync=False)


Event = dict[str, Any]
# Phase, and name of the operator or kernel.
Key = tuple[str, str]

RANGE = "fp8bench."
STEP = "ProfilerStep#"
MOST = 12
LONGEST_NAME = 160
_OPERATOR = "cpu_op"
_ANNOTATION = "user_annotation"
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_NOWHERE = ""


@dataclass(frozen=True)
class TracedStretch:
    """A stretch of a thread's time, in nanoseconds."""

    name: str
    start: int
    end: int


def mended(events: Iterable[Event]) -> list[Event]:
    """Cuts phases so that of two stretches on one thread one lies within the other, or they are apart. A phase around
    operators that torch differentiates opens in one node of the backward pass and closes in another, so that it begins
    within an operator which it outlives. Viewers drop such overlaps. The cuts are microseconds long."""
    shortened = list(events)
    others: dict[object, list[TracedStretch]] = defaultdict(list)
    edges: dict[object, set[int]] = defaultdict(set)
    for event in shortened:
        if _is_phase(event):
            phase = _stretch(event)
            edges[event.get("tid")] |= {phase.start, phase.end}
        elif _is_timed(event) and event.get("cat") in (_OPERATOR, _ANNOTATION):
            others[event.get("tid")].append(_stretch(event))
    is_open = {thread: _open_at(others[thread], times) for thread, times in edges.items()}
    return [_cut(event, is_open[event.get("tid")]) if _is_phase(event) else event for event in shortened]


def _open_at(stretches: Sequence[TracedStretch], times: Iterable[int]) -> dict[int, list[TracedStretch]]:
    waiting = sorted(stretches, key=lambda stretch: stretch.start, reverse=True)
    now_open: list[TracedStretch] = []
    opened = {}
    for time in sorted(times):
        while waiting and waiting[-1].start < time:
            now_open.append(waiting.pop())
        now_open = [stretch for stretch in now_open if stretch.end > time]
        opened[time] = now_open.copy()
    return opened


def _cut(event: Event, is_open: Mapping[int, Sequence[TracedStretch]]) -> Event:
    phase = _stretch(event)
    start = max((stretch.end for stretch in is_open[phase.start] if stretch.end < phase.end), default=phase.start)
    end = min((stretch.start for stretch in is_open[phase.end] if stretch.start >= start), default=phase.end)
    if (start, end) == (phase.start, phase.end):
        return event
    return {**event, "ts": start / 1000, "dur": (end - start) / 1000}


def operators_of(events: Sequence[Event]) -> tuple[OperatorTime, ...]:
    """Returns the operators and kernels that take most of a step, phase by phase, and the rest of each phase. An
    operator belongs to the phase in which it begins, on whatever thread, because a step is in one phase at a time. A
    kernel belongs to the phase in which it was launched."""
    timed = [event for event in events if _is_timed(event)]
    steps = [
        _stretch(annotation)
        for annotation in timed
        if annotation.get("cat") == _ANNOTATION and str(annotation.get("name")).startswith(STEP)
    ]
    if not steps:
        return ()
    phases = _Timeline(steps, [_stretch(event) for event in timed if _is_phase(event)])
    host = _host(timed, phases)
    device = _device(timed, phases)
    rows: list[OperatorTime] = []
    for phase in (*PHASES, UNATTRIBUTED):
        kernels = device.of(phase)
        most = MOST // 2 if kernels else MOST
        rows += host.rows(phase, len(steps), most, phases.total(phase))
        rows += device.rows(phase, len(steps), most, sum(nanoseconds for _, _, nanoseconds in kernels))
    return tuple(rows)


def _is_timed(event: Event) -> bool:
    return event.get("ph") == "X" and all(isinstance(event.get(key), int | float) for key in ("ts", "dur"))


def _is_phase(event: Event) -> bool:
    name = event.get("name")
    named = isinstance(name, str) and name.startswith(RANGE) and name.removeprefix(RANGE) in PHASES
    return named and event.get("cat") == _ANNOTATION and _is_timed(event)


def _stretch(event: Event) -> TracedStretch:
    start = round(event["ts"] * 1000)
    return TracedStretch(str(event.get("name", "")), start, start + round(event["dur"] * 1000))


class _Timeline:
    def __init__(self, steps: Sequence[TracedStretch], ranges: Sequence[TracedStretch]) -> None:
        whole = [TracedStretch(UNATTRIBUTED, step.start, step.end) for step in steps]
        phases = [TracedStretch(span.name.removeprefix(RANGE), span.start, span.end) for span in ranges]
        edges: list[tuple[int, int, int, TracedStretch]] = []
        for phase in (*whole, *phases):
            if phase.start < phase.end:  # of edges at one time an end comes first, then the stretch that ends last
                edges += [(phase.start, 1, -phase.end, phase), (phase.end, 0, 0, phase)]
        edges.sort(key=lambda edge: edge[:3])
        self._times: list[int] = []
        self._names: list[str] = []
        is_open: list[TracedStretch] = []
        for time, begins, _, stretch in edges:
            if begins:
                is_open.append(stretch)
            else:
                is_open.remove(stretch)
            self._times.append(time)
            self._names.append(is_open[-1].name if is_open else _NOWHERE)

    def at(self, time: int) -> str:
        place = bisect_right(self._times, time)
        return self._names[place - 1] if place else _NOWHERE

    def within(self, phase: str, start: int, end: int) -> int:
        total, place = 0, max(0, bisect_right(self._times, start) - 1)
        while place < len(self._times) and self._times[place] < end:
            until = self._times[place + 1] if place + 1 < len(self._times) else end
            if self._names[place] == phase:
                total += max(0, min(end, until) - max(start, self._times[place]))
            place += 1
        return total

    def total(self, phase: str) -> int:
        return self.within(phase, self._times[0], self._times[-1]) if self._times else 0


class _Tally:
    """Sums calls and nanoseconds by phase and name. What lies outside of the steps has the phase ''."""

    def __init__(self, on_device: bool) -> None:
        self._on_device = on_device
        self._counts: dict[Key, tuple[int, int]] = {}

    def add(self, phase: str, name: str, calls: int, nanoseconds: int) -> None:
        before = self._counts.get((phase, name), (0, 0))
        self._counts[phase, name] = before[0] + calls, before[1] + nanoseconds

    def of(self, phase: str) -> list[tuple[str, int, int]]:
        """Returns names, calls and nanoseconds, the longest first."""
        rows = [(name, *counts) for (where, name), counts in self._counts.items() if where == phase]
        return sorted(rows, key=lambda row: (-row[2], row[0]))

    def rows(self, phase: str, num_steps: int, most: int, whole: int) -> Iterator[OperatorTime]:
        times = self.of(phase)
        for name, calls, nanoseconds in times[:most]:
            short = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
            yield OperatorTime(phase, short, calls / num_steps, nanoseconds / 1e9 / num_steps, self._on_device)
        rest = max(0, whole - sum(nanoseconds for _, _, nanoseconds in times[:most]))
        if rest:
            calls = sum(calls for _, calls, _ in times[most:])
            yield OperatorTime(phase, "", calls / num_steps, rest / 1e9 / num_steps, self._on_device)


def _host(events: Iterable[Event], phases: _Timeline) -> _Tally:
    """Sums operators by their own time. What an operator takes in a later phase is in that phase's rest."""
    tally = _Tally(on_device=False)
    by_thread: dict[object, list[TracedStretch]] = defaultdict(list)
    for event in events:
        if event.get("cat") == _OPERATOR:
            by_thread[event.get("tid")].append(_stretch(event))
    for operators in by_thread.values():
        operators.sort(key=lambda stretch: (stretch.start, -stretch.end))
        for operator in operators:
            tally.add(phases.at(operator.start), operator.name, 1, 0)
        for stretch, start, end in _innermost(operators):
            phase = phases.at(stretch.start)
            tally.add(phase, stretch.name, 0, phases.within(phase, start, end))
    return tally


def _innermost(operators: Sequence[TracedStretch]) -> Iterator[tuple[TracedStretch, int, int]]:
    """Yields which operator is the innermost on its thread, and from when to when; needs outer ones first."""
    stack: list[TracedStretch] = []
    reached = 0

    def leave(until: int | None) -> Iterator[tuple[TracedStretch, int, int]]:
        nonlocal reached
        while stack and (until is None or stack[-1].end <= until):
            done = stack.pop()
            if done.end > reached:
                yield done, reached, done.end
                reached = done.end

    for operator in operators:
        yield from leave(operator.start)
        if stack and operator.start > reached:
            yield stack[-1], reached, operator.start
        reached = max(reached, operator.start)
        stack.append(operator)
    yield from leave(None)


def _device(events: Sequence[Event], phases: _Timeline) -> _Tally:
    tally = _Tally(on_device=True)
    launched = {_correlation(event): _stretch(event).start for event in events if event.get("cat") in _LAUNCHES}
    for event in events:
        if event.get("cat") in _ON_DEVICE:
            stretch = _stretch(event)
            phase = phases.at(launched.get(_correlation(event), stretch.start))
            tally.add(phase, stretch.name, 1, stretch.end - stretch.start)
    return tally


def _correlation(event: Event) -> object:
    arguments = event.get("args")
    return arguments.get("correlation") if isinstance(arguments, Mapping) else None
