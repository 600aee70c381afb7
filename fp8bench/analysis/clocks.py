"""Whether a case and its reference ran at the same clock: what differs by that alone says nothing of their code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from fp8bench import units
from fp8bench.analysis.compare.interval import mean_of
from fp8bench.analysis.labels import Labelled
from fp8bench.model import DeviceWatch, Interval, Label, Timing
from fp8bench.model.stopping import slopes

# A pair whose clocks are so far apart is void, if they surely differ by half of that: drivers tell clocks in steps of
# 15 MHz, which are 0.8% of a fast one.
APART = 0.01
_SURELY = 0.005
# Fewer rounds with all clocks say nothing of how far readings differ by chance.
LEAST_LOOKS = 4


def clock_offset(
    case: Timing, entries: Sequence[Timing], reference: str, ratio: Interval | None = None
) -> Iterator[Labelled]:
    """A hard label for a case whose clock was another one than that of its reference, whose entries count alike.

    Paired by round, so that a device that becomes slower with heat says nothing. With the ratio of times, the speed-up
    by cycles of the clock stands beside both.
    """
    own, *others = (_clocks(timing) for timing in (case, *entries))
    rounds = [number for number in own if others and all(number in other for other in others)]
    if len(rounds) < LEAST_LOOKS:
        return
    apart = [math.log(own[number]) - fmean(math.log(other[number]) for other in others) for number in rounds]
    point, reach = mean_of(apart)
    if abs(point) <= math.log1p(APART) or abs(point) - reach <= math.log1p(_SURELY):
        return
    ran, against = (_mean(timings, rounds) for timings in ([case], entries))
    shown = [units.count(clock, "Hz") for clock in (ran, against)]
    told = f"SM clock {shown[0]} against {reference}'s {shown[1]}, {units.change(math.exp(point))}"
    if ratio is not None and 0 < ratio.point < math.inf:
        told += f"; {units.speed_up(1 / (ratio.point * math.exp(point)))} by its cycles"
    yield Labelled(Label.CLOCK_OFFSET, told, hard=True)


def unsettled(watch: DeviceWatch | None) -> Iterator[Labelled]:
    """A label for a case whose device had not settled when the first round began."""
    found = watch.warm_up if watch is not None else None
    if found is None or found.settled or not found.looks:
        return
    moved = slopes(found.looks)
    told = [f"after {units.seconds(found.seconds)} of warming up"]
    if moved.clock is not None:
        told.append(f"clock {units.count(found.looks[-1].clock, 'Hz')}, {100 * moved.clock:+.1f}% a second")
    if moved.temperature is not None:
        told.append(f"{found.looks[-1].temperature:g} degC, {moved.temperature:+.1f} a second")
    yield Labelled(Label.UNSETTLED, ", ".join(told))


def _clocks(timing: Timing) -> dict[int, float]:
    """By round, where one was read; a file that somebody changed may say anything."""
    found = {slot.round: slot.clock for slot in timing.slots if slot.clock is not None}
    return {number: clock for number, clock in found.items() if 0 < clock < math.inf}


def _mean(timings: Sequence[Timing], rounds: Sequence[int]) -> float:
    slots = tuple(slot for timing in timings for slot in timing.slots if slot.round in rounds)
    return replace(timings[0], slots=slots).clock or 0.0
