"""The pass that records a trace: a few steps under torch's profiler, their phases as ranges around their operators.

In the layout of TensorBoard's profiler plugin, gzipped: the same file opens in Perfetto and in chrome://tracing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8bench.files import write_whole
from fp8bench.profiler import activities_of, exported, quiet
from fp8bench.protocols import Markers, Phases
from fp8bench.worker.trace_operators import RANGE, STEP, mended

STEPS = 3
# Before the profiler is on, and under it: its own first calls are slow, too.
WARM_UPS = 2

Range = Callable[[str], AbstractContextManager[object]]


@dataclass(slots=True, eq=False)
class RangeMarker:
    """One phase's context manager; entered within itself it opens a range in the range."""

    _name: str
    _range: Range
    _open: list[AbstractContextManager[object]] = field(default_factory=list)

    def __enter__(self) -> None:
        one = self._range(self._name)
        one.__enter__()
        self._open.append(one)

    def __exit__(self, *exc: object) -> None:
        self._open.pop().__exit__(None, None, None)


def traced_phases(range_of: Range) -> Markers[RangeMarker]:
    """Phases that are ranges of a trace: `fp8bench.gemm`."""
    return Markers(lambda name: RangeMarker(RANGE + name, range_of))


def record(step: Callable[[Phases], None], kind: str) -> dict[str, Any]:
    """The trace of a few steps on a device of that kind, after a warm-up; phases and operators in it never overlap."""
    from torch.profiler import profile, record_function, schedule

    phases = traced_phases(record_function)
    told: list[dict[str, Any]] = []
    for _ in range(WARM_UPS):
        step(phases)
    # Steps of the profiler are named by their number, which begins with its warm-up.
    plan = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with (
        quiet(),
        profile(
            activities=activities_of(kind),
            schedule=plan,
            on_trace_ready=lambda one: told.append(exported(one)),
            record_shapes=True,
            acc_events=True,  # one cycle is recorded; of several torch 2.11 warns that it forgets them
        ) as one,
    ):
        for _ in range(1 + STEPS):
            step(phases)
            one.step()
    if not told:
        raise RuntimeError("torch's profiler recorded nothing")
    trace = told[0]
    trace["traceEvents"] = mended(trace["traceEvents"])
    if not any(str(event.get("name", "")).startswith(STEP) for event in trace["traceEvents"]):
        raise RuntimeError("torch's profiler recorded no steps")
    return trace


def write(trace: Mapping[str, Any], file: Path) -> None:
    """The trace under that name, whole or not at all."""
    text = json.dumps({**trace, "traceName": file.name}, separators=(",", ":"))
    write_whole(file, gzip.compress(text.encode(), compresslevel=6, mtime=0), sync=False)
