"""Labels that need several cases or arms: time that does not grow with the declared work, a clock that differs from
the reference's, and a place in the round that makes slots longer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from statistics import NormalDist, fmean
from typing import NamedTuple, TypeGuard

import numpy as np

from fp8bench import units
from fp8bench.analysis import stats, verdicts
from fp8bench.analysis.compare.interval import mean_of
from fp8bench.analysis.labels import HOST_PARTLY, Labelled, host_share
from fp8bench.analysis.stats import Floats
from fp8bench.analysis.verdicts import FINAL_LEVEL, LEAST_FOR_VERDICT, means
from fp8bench.model import DeviceWatch, Interval, Label, Record, Scalar, Timing, Work
from fp8bench.model.stopping import EMULATED_ROUNDS, slopes

# So many times the work is another size.
_TWICE = 2.0
# The ratio of two times must be known to so many standard errors, and may be this much; a wider one shows nothing.
_ERRORS, _AT_MOST = 3.0, 1.1
# The host's time for an operator of any size, with autograd and Python around it: twice the 14 us of a convolution of 8
# channels on an AMD EPYC (Zen 5). Steps that take less than that an operator need not grow with their work.
_OPERATOR_SECONDS = 30e-6


def flat_times(records: Iterable[Record], threads: int = 1) -> dict[str, Labelled]:
    """Returns labels by case for the larger of two sizes that takes no longer.

    They are not hard, because what the counts do not show may be the same in both. A GPU, or several threads, that were
    half idle take as long for twice the work, so they are checked only where the larger size claims more than half of
    what they can do. Cases with fewer rounds than an emulated one gets are left out.
    """
    kinds: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        case = record.case
        if record.timing and record.timing.num_rounds >= EMULATED_ROUNDS:
            kinds.setdefault((case.workload, case.version, case.mode, case.device), []).append(record)
    labels: dict[str, Labelled] = {}
    for alike in kinds.values():
        for small, large in permutations(alike, 2):
            if _grown(small, large) and _is_busy(large, threads) and (reason := _flat(small, large)):
                labels.setdefault(large.case.id, Labelled(Label.FLAT_TIME, reason))
    return labels


def _grown(small: Record, large: Record) -> bool:
    """Whether it is at least twice the work in every declared count, by larger numbers and in nothing else.

    The memory that a state surely needs stands for undeclared bytes: a product of one row takes as long as one of two,
    because both read all weights.
    """
    before, after = small.work, large.work
    if not (before.flops or before.bytes or before.tokens) or after.tokens < before.tokens:
        return False
    pairs = [(before.flops, after.flops), (before.bytes or before.least_memory, after.bytes or after.least_memory)]
    if not (before.flops or before.bytes):
        pairs.append((before.tokens, after.tokens))
    few, many = dict(small.case.params), dict(large.case.params)
    larger = few.keys() == many.keys() and all(_at_least(many[name], value) for name, value in few.items())
    return larger and all(more >= _TWICE * less for less, more in pairs)


def _at_least(value: Scalar, other: Scalar) -> bool:
    if isinstance(value, str | bool) or isinstance(other, str | bool):
        return value == other
    return value >= other


def _flat(small: Record, large: Record) -> str:
    """Returns both times and works where the larger size provably takes no longer; else ''."""
    assert small.timing is not None and large.timing is not None
    before, after = verdicts.best_seconds(small.timing), verdicts.best_seconds(large.timing)
    operators = None if small.products is None else small.products.operators
    if operators is None or before <= _OPERATOR_SECONDS * operators:
        return ""  # its time is not that of its work: it may grow with nothing
    if host_share(small.timing, small.case.device) > HOST_PARTLY:
        return ""
    if after > _AT_MOST * before:
        return ""
    fewest = ((timing, min(len(slot.calls_ns) for slot in timing.slots)) for timing in (small.timing, large.timing))
    error = _ERRORS * math.hypot(*(stats.best_case(verdicts.cells(timing, calls)).error for timing, calls in fewest))
    grown = math.log(after / before)
    if grown - error > 0 or grown + error > math.log(_AT_MOST):
        return ""
    return (
        f"{units.seconds(after)} for {_work_words(large.work)}, {units.seconds(before)} for {_work_words(small.work)}"
    )


def _is_busy(record: Record, threads: int) -> bool:
    """Whether the whole device was at work: one CPU thread, or more than half of a ceiling claimed."""
    if threads == 1 and record.case.device.startswith("cpu"):
        return True
    if record.ceiling is None or record.timing is None:
        return False
    half = verdicts.best_seconds(record.timing) / 2
    flops, moved = record.ceiling.flops or math.inf, record.ceiling.bytes or math.inf
    return record.work.flops > half * flops or record.work.bytes > half * moved


def _work_words(work: Work) -> str:
    if work.flops:
        return units.count(work.flops, "FLOP")
    return units.count(work.bytes, "B") if work.bytes else units.count(work.tokens, "tokens")


# A pair is void if its clocks differ by this and surely by half of it: drivers report clocks in steps of 15 MHz, which
# are 0.8% of a fast one.
APART = 0.01
_SURELY = 0.005
# Fewer rounds with all clocks do not show how far readings differ by chance.
LEAST_LOOKS = 4


def clock_offset(case: Timing, entries: Sequence[Timing], reference: str) -> Iterator[Labelled]:
    """Yields a hard label for a case whose clock differed from its reference's, whose entries count alike.

    It is paired by round, so that a device that slows down with heat shows nothing.
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
    yield Labelled(Label.CLOCK_OFFSET, told, hard=True)


def unsettled(watch: DeviceWatch | None) -> Iterator[Labelled]:
    """Yields a label for a case whose device had not settled when the first round began."""
    course = watch.warm_up if watch is not None else None
    if course is None or course.settled or not course.looks:
        return
    moved = slopes(course.looks)
    told = [f"after {units.seconds(course.seconds)} of warming up"]
    if moved.clock is not None:
        told.append(f"clock {units.count(course.looks[-1].clock, 'Hz')}, {100 * moved.clock:+.1f}% a second")
    if moved.temperature is not None:
        told.append(f"{course.looks[-1].temperature:g} degC, {moved.temperature:+.1f} a second")
    yield Labelled(Label.UNSETTLED, ", ".join(told))


def _clocks(timing: Timing) -> dict[int, float]:
    """Returns the clocks by round, without those that a changed file made impossible."""
    clocks = {slot.round: slot.clock for slot in timing.slots if slot.clock is not None}
    return {number: clock for number, clock in clocks.items() if 0 < clock < math.inf}


def _mean(timings: Sequence[Timing], rounds: Sequence[int]) -> float:
    slots = tuple(slot for timing in timings for slot in timing.slots if slot.round in rounds)
    return replace(timings[0], slots=slots).clock or 0.0


# No round has more slots.
_MOST = 1000


class PlaceEffect(NamedTuple):
    """A slot at this place, counted from 0, takes so many times as long as the others of its round."""

    place: int
    ratio: Interval

    @property
    def label(self) -> Labelled:
        where = "the first of its round" if self.place == 0 else f"number {self.place + 1} of its round"
        point, low, high = map(units.change, (self.ratio.point, self.ratio.low, self.ratio.high))
        return Labelled(Label.POSITION, f"{where} takes {point} time [{low}, {high}]")


def place_effect(timings: Sequence[Timing]) -> PlaceEffect | None:
    """Returns the place that differs most surely, of arms that shared rounds; None where none does.

    A slot counts by how far its mean lies from its arm's median, and is compared with the rest of its round, so that a
    machine that slows down shows nothing. If places had no effect, whatever the noise is like, any slot of the round
    might have been there: that gives the variance. All places together err in one of 100 groups.
    """
    table = _table(timings)
    table = table[(~np.isnan(table)).sum(axis=1) > 1]
    counts = (~np.isnan(table)).sum(axis=1, keepdims=True)
    apart = table - np.nansum(table, axis=1, keepdims=True) / counts
    # A slot against the others of its round, of which it is none.
    against = apart * counts / (counts - 1)
    variance = np.nansum(against**2, axis=1, keepdims=True) / counts
    judged = [place for place in range(table.shape[1]) if (~np.isnan(table[:, place])).sum() >= LEAST_FOR_VERDICT]
    judged = judged[:1] if table.shape[1] == 2 else judged  # of two places, what one gains is what the other loses
    reach = NormalDist().inv_cdf(1 - (1 - FINAL_LEVEL) / 2 / max(1, len(judged)))
    effects: list[tuple[float, PlaceEffect]] = []
    for place in judged:
        there = ~np.isnan(table[:, place])
        point = float(against[there, place].mean())
        error = math.sqrt(float(variance[there].sum())) / int(there.sum())
        if abs(point) > reach * error:
            middle, low, high = (math.exp(point + side * reach * error) for side in (0, -1, 1))
            effects.append((abs(point) / error, PlaceEffect(place, Interval(middle, low, high, FINAL_LEVEL))))
    return max(effects, key=lambda effect: effect[0])[1] if effects else None


def _is_known(place: int | None) -> TypeGuard[int]:
    """Older runs have no places, and a changed file may have any."""
    return place is not None and 0 <= place < _MOST


def _table(timings: Sequence[Timing]) -> Floats:
    """Returns by round and place the logarithm of a slot's mean over its arm's median; NaN where unknown."""
    slots = [slot for timing in timings for slot in timing.slots]
    rounds = {number: row for row, number in enumerate(sorted({slot.round for slot in slots}))}
    places = 1 + max((slot.place for slot in slots if _is_known(slot.place)), default=-1)
    table: Floats = np.full((len(rounds), places), np.nan)
    for timing in timings:
        seconds = means(timing, [slot.round for slot in timing.slots])
        if not len(seconds) or seconds.min() <= 0:
            continue
        logs = np.log(seconds / np.median(seconds))
        for slot, log in zip(timing.slots, logs, strict=True):
            if _is_known(slot.place):
                table[rounds[slot.round], slot.place] = log
    return table
