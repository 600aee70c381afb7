"""Records a trace: a few steps under torch's profiler, with phases as ranges around their operators.

The file has the layout of TensorBoard's profiler plugin, gzipped; it also opens in Perfetto and in chrome://tracing. An
event has `ts` and `dur` in microseconds, `tid` for its thread, `cat` for its kind.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8bench.files import write_whole
from fp8bench.model import PHASES
from fp8bench.profiler import activities_of, export_trace, quiet
from fp8bench.protocols import Device, Markers, Phases, SilentPhases

STEPS = 3
# Steps before the profiler is on; one more is taken under it, because its first calls are slow too.
WARM_UPS = 2

Range = Callable[[str], AbstractContextManager[object]]


@dataclass(slots=True, eq=False)
class RangeMarker:
    """A phase's context manager; entered within itself it opens a nested range."""

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
            on_trace_ready=lambda profiler: traces.append(export_trace(profiler)),
            record_shapes=True,
            acc_events=True,  # a single cycle is recorded; with several torch 2.11 warns that it forgets them
        ) as profiler,
    ):
        for _ in range(1 + STEPS):
            step(phases)
            profiler.step()
    if not traces:
        raise RuntimeError("torch's profiler recorded nothing")
    trace = traces[0]
    trace["traceEvents"] = cut_overlaps(trace["traceEvents"])
    if not any(str(event.get("name", "")).startswith(STEP) for event in trace["traceEvents"]):
        raise RuntimeError("torch's profiler recorded no steps")
    return trace


def mark_slot(step: Callable[[Phases], None], device: Device, index: int, name: str) -> None:
    """Runs a slot of steps for a profiler around this process, with ranges by case, step and phase; raises CannotMark.

    Warm-up steps run before, outside the profiled range.
    """
    for _ in range(WARM_UPS):
        step(SilentPhases())
    with device.collecting(index) as range_of, range_of(name):
        phases = traced_phases(range_of)
        for number in range(STEPS):
            with range_of(f"step {number}"):
                step(phases)


def write(trace: Mapping[str, Any], file: Path) -> None:
    text = json.dumps({**trace, "traceName": file.name}, separators=(",", ":"))
    write_whole(file, gzip.compress(text.encode(), compresslevel=6, mtime=0), sync=False)


Event = dict[str, Any]

RANGE = "fp8bench."
STEP = "ProfilerStep#"
_OPERATOR = "cpu_op"
_ANNOTATION = "user_annotation"


@dataclass(frozen=True)
class TracedStretch:
    """An interval on a thread, in nanoseconds."""

    name: str
    start: int
    end: int


def cut_overlaps(events: Iterable[Event]) -> list[Event]:
    """Shortens phases so that two intervals on one thread are nested or disjoint. A phase around operators that torch
    differentiates opens in one node of the backward pass and closes in another, so it may begin within an operator that
    it outlives. Viewers drop such overlaps. The cuts are microseconds long."""
    shortened = list(events)
    stretches: dict[object, list[TracedStretch]] = defaultdict(list)
    edges: dict[object, set[int]] = defaultdict(set)
    for event in shortened:
        if _is_phase(event):
            phase = _stretch(event)
            edges[event.get("tid")] |= {phase.start, phase.end}
        elif _is_timed(event) and event.get("cat") in (_OPERATOR, _ANNOTATION):
            stretches[event.get("tid")].append(_stretch(event))
    is_open = {thread: _open_at(stretches[thread], times) for thread, times in edges.items()}
    return [_cut_phase(event, is_open[event.get("tid")]) if _is_phase(event) else event for event in shortened]


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


def _cut_phase(event: Event, is_open: Mapping[int, Sequence[TracedStretch]]) -> Event:
    phase = _stretch(event)
    start = max((stretch.end for stretch in is_open[phase.start] if stretch.end < phase.end), default=phase.start)
    end = min((stretch.start for stretch in is_open[phase.end] if stretch.start >= start), default=phase.end)
    if (start, end) == (phase.start, phase.end):
        return event
    return {**event, "ts": start / 1000, "dur": (end - start) / 1000}


def _is_timed(event: Event) -> bool:
    return event.get("ph") == "X" and all(isinstance(event.get(key), int | float) for key in ("ts", "dur"))


def _is_phase(event: Event) -> bool:
    name = event.get("name")
    named = isinstance(name, str) and name.startswith(RANGE) and name.removeprefix(RANGE) in PHASES
    return named and event.get("cat") == _ANNOTATION and _is_timed(event)


def _stretch(event: Event) -> TracedStretch:
    start = round(event["ts"] * 1000)
    return TracedStretch(str(event.get("name", "")), start, start + round(event["dur"] * 1000))
