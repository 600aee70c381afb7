"""What looking costs: the marker, the stamp, the event pair, and the whole harness against a bare loop."""

from __future__ import annotations

import time
from collections.abc import Callable

from fp8bench.measure.clock import PhaseClock
from fp8bench.model import Overheads
from fp8bench.protocols import Device, Phases, SilentPhases

_REPEATS = 2000
_TRIES = 15


def calibrate(device: Device, index: int) -> Overheads:
    """Best-case costs in seconds. Host time: on a GPU a marker costs the host this much and the device an event."""
    stamper = device.stamper(index)
    clock = PhaseClock(stamper)
    now = stamper.source()

    def fresh() -> None:
        device.synchronise(index)
        stamper.recycle()
        clock.begin()

    loop = _best(lambda: None, _empty)
    on = _best(fresh, lambda: _enter(clock)) - loop
    off = _best(fresh, lambda: _enter(SilentPhases())) - loop
    stamp = _best(fresh, lambda: _call(now)) - loop
    pair = None
    if device.kind != "cpu":
        fresh()
        stamps = [now() for _ in range(_REPEATS)]
        intervals = sorted(stamper.intervals_ns(stamps))
        pair = intervals[len(intervals) // 2] * 1e-9
    return Overheads(max(on, 0.0), max(off, 0.0), max(stamp, 0.0), pair)


def _best(before: Callable[[], None], body: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(_TRIES):
        before()
        start = time.perf_counter()
        body()
        best = min(best, time.perf_counter() - start)
    return best / _REPEATS


def _empty() -> None:
    for _ in range(_REPEATS):
        pass


def _enter(phases: Phases) -> None:
    for _ in range(_REPEATS):
        with phases.gemm:
            pass


def _call(function: Callable[[], object]) -> None:
    for _ in range(_REPEATS):
        function()


def loop_pairs(
    bare: Callable[[], None], harness: Callable[[], object], steps: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Process CPU seconds a step of a harness slot and of a bare loop, alternating which goes first."""
    inside, outside = [], []
    for turn in range(rounds):
        for which in (turn % 2, 1 - turn % 2):
            start = time.process_time()
            if which:
                harness()
                inside.append((time.process_time() - start) / steps)
            else:
                for _ in range(steps):
                    bare()
                outside.append((time.process_time() - start) / steps)
    return inside, outside
