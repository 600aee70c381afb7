"""Records a trace of a few steps under torch's profiler, with phases as ranges around their operators.

The gzipped file has the layout of TensorBoard's profiler plugin. Perfetto and chrome://tracing can open it as well.
An event has `ts` and `dur` in microseconds, `tid` for its thread, and `cat` for its kind.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fp8bench.files import write_whole
from fp8bench.model import PHASES
from fp8bench.profiler import export_trace, list_activities, silence_kineto
from fp8bench.protocols import Device, Markers, Phases, SilentPhases

TRACED_STEPS = 3
# Warm-up steps before the profiler starts. One more follows under the profiler, whose first calls are slow.
WARM_UP_STEPS_BEFORE_TRACE = 2

_RANGE_PREFIX = "fp8bench."
_PHASE_RANGE_NAMES = frozenset(_RANGE_PREFIX + phase for phase in PHASES)
_PROFILER_STEP_PREFIX = "ProfilerStep#"

MakeProfilerRange = Callable[[str], AbstractContextManager[object]]


@dataclass(slots=True, eq=False)
class RangeMarker:
    """The context manager of a phase. If it is entered within itself, it opens a nested range."""

    _name: str
    _make_profiler_range: MakeProfilerRange
    _open_range_contexts: list[AbstractContextManager[object]] = field(default_factory=list)

    def __enter__(self) -> None:
        range_context = self._make_profiler_range(self._name)
        range_context.__enter__()
        self._open_range_contexts.append(range_context)

    def __exit__(self, *exc: object) -> None:
        self._open_range_contexts.pop().__exit__(None, None, None)


def make_range_markers(range_of: MakeProfilerRange) -> Markers:
    return Markers(lambda name: RangeMarker(_RANGE_PREFIX + name, range_of))


def record_trace(step: Callable[[Phases], None], kind: str) -> dict[str, Any]:
    """Traces a few steps after warm-up steps. In the trace, a phase and an operator do not partly overlap: they are
    nested or disjoint.

    `kind` is the kind of device. Raises RuntimeError if torch's profiler recorded nothing.
    """
    from torch.profiler import profile, record_function, schedule

    phases = make_range_markers(record_function)
    chrome_traces: list[dict[str, Any]] = []
    for _ in range(WARM_UP_STEPS_BEFORE_TRACE):
        step(phases)
    profiler_schedule = schedule(wait=0, warmup=1, active=TRACED_STEPS, repeat=1)
    with (
        silence_kineto(),
        profile(
            activities=list_activities(kind),
            schedule=profiler_schedule,
            on_trace_ready=lambda profiler: chrome_traces.append(export_trace(profiler)),
            record_shapes=True,
            acc_events=True,  # avoids torch 2.11's warning that events of several cycles get lost
        ) as profiler,
    ):
        for _ in range(1 + TRACED_STEPS):  # the first step warms up the profiler
            step(phases)
            profiler.step()
    if not chrome_traces:
        raise RuntimeError("torch's profiler recorded nothing")
    trace = chrome_traces[0]
    trace["traceEvents"] = cut_event_overlaps(trace["traceEvents"])
    if not any(str(event.get("name", "")).startswith(_PROFILER_STEP_PREFIX) for event in trace["traceEvents"]):
        raise RuntimeError("torch's profiler recorded no steps")
    return trace


def mark_slot(step: Callable[[Phases], None], device: Device, index: int, name: str) -> None:
    """Runs a few steps for an external profiler that watches this process, in named ranges for case, steps and phases.
    Warm-up steps come first, outside of the ranges. `index` is the number of the device.

    Raises CannotMark if the device has no ranges.
    """
    for _ in range(WARM_UP_STEPS_BEFORE_TRACE):
        step(SilentPhases())
    # The external profiler only records within `collecting`.
    with device.collecting(index) as range_of, range_of(name):
        phases = make_range_markers(range_of)
        for step_number in range(TRACED_STEPS):
            with range_of(f"step {step_number}"):
                step(phases)


def write_trace(trace: Mapping[str, Any], file: Path) -> None:
    trace_text = json.dumps({**trace, "traceName": file.name}, separators=(",", ":"))
    # Without a time of modification, equal traces give equal files.
    write_whole(file, gzip.compress(trace_text.encode(), compresslevel=6, mtime=0), sync=False)


Event = dict[str, Any]

_OPERATOR_CATEGORY = "cpu_op"
_ANNOTATION_CATEGORY = "user_annotation"


class TracedInterval(NamedTuple):
    """An interval of a thread in a trace (an operator or a phase), in nanoseconds."""

    start: int
    end: int


# Maps a time in nanoseconds to the intervals of a thread that are open at this time.
OpenIntervalsByTime = dict[int, list[TracedInterval]]


def cut_event_overlaps(events: Iterable[Event]) -> list[Event]:
    """Shortens phases so that no two intervals of a thread overlap partly, because trace viewers drop such intervals.
    In backward, a phase may begin within an operator of one autograd node and end after it, in a later node. The parts
    that are cut off are microseconds long.
    """
    trace_events = list(events)
    intervals_by_thread = defaultdict[object, list[TracedInterval]](list)
    phase_edges_by_thread = defaultdict[object, set[int]](set)
    for event in trace_events:
        if _is_phase_event(event):
            phase_interval = _make_traced_interval(event)
            phase_edges_by_thread[event.get("tid")] |= {phase_interval.start, phase_interval.end}
        elif _has_start_and_duration(event) and event.get("cat") in (_OPERATOR_CATEGORY, _ANNOTATION_CATEGORY):
            intervals_by_thread[event.get("tid")].append(_make_traced_interval(event))
    open_intervals_by_thread = {
        thread: _find_open_intervals(intervals_by_thread[thread], phase_edges)
        for thread, phase_edges in phase_edges_by_thread.items()
    }
    return [
        _shorten_phase_event(event, open_intervals_by_thread[event.get("tid")]) if _is_phase_event(event) else event
        for event in trace_events
    ]


def _find_open_intervals(intervals: list[TracedInterval], times: Iterable[int]) -> OpenIntervalsByTime:
    """Returns for each time the intervals that have begun before it and end after it."""
    upcoming_intervals = sorted(intervals, key=lambda interval: interval.start, reverse=True)
    unfinished_intervals: list[TracedInterval] = []
    open_intervals_by_time = {}
    for time in sorted(times):
        while upcoming_intervals and upcoming_intervals[-1].start < time:
            unfinished_intervals.append(upcoming_intervals.pop())
        unfinished_intervals = [interval for interval in unfinished_intervals if interval.end > time]
        open_intervals_by_time[time] = unfinished_intervals.copy()
    return open_intervals_by_time


def _shorten_phase_event(event: Event, open_intervals: OpenIntervalsByTime) -> Event:
    phase = _make_traced_interval(event)
    # Begin the phase after every interval that begins before it and ends within it.
    start = max(
        (interval.end for interval in open_intervals[phase.start] if interval.end < phase.end), default=phase.start
    )
    # End it before every interval that begins within it, after its new start, and ends after it. An interval that
    # begins before the new start contains the phase.
    end = min((interval.start for interval in open_intervals[phase.end] if interval.start >= start), default=phase.end)
    if phase == TracedInterval(start, end):
        return event
    return {**event, "ts": start / 1000, "dur": (end - start) / 1000}


def _has_start_and_duration(event: Event) -> bool:
    return event.get("ph") == "X" and all(isinstance(event.get(key), int | float) for key in ("ts", "dur"))


def _is_phase_event(event: Event) -> bool:
    is_phase_name = str(event.get("name")) in _PHASE_RANGE_NAMES
    return is_phase_name and event.get("cat") == _ANNOTATION_CATEGORY and _has_start_and_duration(event)


def _make_traced_interval(event: Event) -> TracedInterval:
    interval_start_ns = round(event["ts"] * 1000)
    return TracedInterval(interval_start_ns, interval_start_ns + round(event["dur"] * 1000))
