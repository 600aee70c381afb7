"""Labels that compare several cases: time that does not grow with the declared work, a clock that differs from the
reference's, and a position in the round that makes slots longer."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, permutations
from statistics import NormalDist, fmean
from typing import NamedTuple, TypeGuard

import numpy as np

from fp8bench import units
from fp8bench.analysis import stats, verdicts
from fp8bench.analysis.compare.interval import mean_with_reach
from fp8bench.analysis.labels import HOST_PARTLY, Labelled, host_share
from fp8bench.analysis.stats import Floats
from fp8bench.analysis.verdicts import FINAL_LEVEL, LEAST_FOR_VERDICT, means
from fp8bench.model import DeviceWatch, Interval, Label, Record, Scalar, SlotSample, Timing, Work
from fp8bench.model.stopping import EMULATED_ROUNDS, slopes

# A size counts as larger if it has at least this many times the work.
_TWICE = 2.0
# Times count as equal if their ratio is below the second number by the first number of standard errors.
_ERRORS, _AT_MOST = 3.0, 1.1
# The host's time per operator, with autograd and Python around it: twice the 14 us of a convolution of 8 channels on an
# AMD EPYC (Zen 5). Steps with less time per operator need not grow with their work.
_OPERATOR_SECONDS = 30e-6


def flat_times(records: Iterable[Record], threads: int = 1) -> dict[str, Labelled]:
    """Returns labels by case for the larger of two sizes that takes no longer.

    They are not hard, because work that the counts do not show may be the same in both. A GPU, or several threads, that
    were half idle take as long for twice the work, so they are checked only if the larger size claims more than half of
    what they can do. Cases with fewer rounds than an emulated one gets are left out.
    """
    sizes: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        case = record.case
        if record.timing and record.timing.num_rounds >= EMULATED_ROUNDS:
            sizes.setdefault((case.workload, case.version, case.mode, case.device), []).append(record)
    labels: dict[str, Labelled] = {}
    for small, large in chain.from_iterable(permutations(of_mode, 2) for of_mode in sizes.values()):
        if _is_larger(small, large) and _is_busy(large, threads) and (reason := _describe_flat_time(small, large)):
            labels.setdefault(large.case.id, Labelled(Label.FLAT_TIME, reason))
    return labels


def _is_larger(small: Record, large: Record) -> bool:
    """Whether it has at least twice the work in every declared count, and differs only in larger parameters.

    The least memory that a state needs stands for undeclared bytes: a product of one row takes as long as one of two,
    because both read all weights.
    """
    few, many = small.work, large.work
    if not (few.flops or few.bytes or few.tokens) or many.tokens < few.tokens:
        return False
    counts = [(few.flops, many.flops), (few.bytes or few.least_memory, many.bytes or many.least_memory)]
    if not (few.flops or few.bytes):
        counts.append((few.tokens, many.tokens))
    if not all(count >= _TWICE * small_count for small_count, count in counts):
        return False
    small_params, params = dict(small.case.params), dict(large.case.params)
    return small_params.keys() == params.keys() and all(
        _is_at_least(params[name], value) for name, value in small_params.items()
    )


def _is_at_least(value: Scalar, bound: Scalar) -> bool:
    if isinstance(value, str | bool) or isinstance(bound, str | bool):
        return value == bound
    return value >= bound


def _describe_flat_time(small: Record, large: Record) -> str:
    """Returns both times and works if the larger size provably takes no longer; else ''."""
    assert small.timing is not None and large.timing is not None
    small_seconds, seconds = verdicts.best_seconds(small.timing), verdicts.best_seconds(large.timing)
    # 1. Steps limited by the host's time per operator need not grow with the work.
    operators = None if small.products is None else small.products.operators
    if operators is None or small_seconds <= _OPERATOR_SECONDS * operators:
        return ""
    if host_share(small.timing, small.case.device) > HOST_PARTLY or seconds > _AT_MOST * small_seconds:
        return ""
    # 2. The ratio must be the same beyond its error.
    error = _ERRORS * math.hypot(_best_error(small.timing), _best_error(large.timing))
    log = math.log(seconds / small_seconds)
    if log - error > 0 or log + error > math.log(_AT_MOST):
        return ""
    words = f"{units.seconds(seconds)} for {_describe_work(large.work)}"
    return f"{words}, {units.seconds(small_seconds)} for {_describe_work(small.work)}"


def _best_error(timing: Timing) -> float:
    return stats.best_case(verdicts.cells(timing, verdicts.fewest_calls(timing))).error


def _is_busy(record: Record, threads: int) -> bool:
    """Whether the whole device was busy: with a single CPU thread, or if the work claims more than half of a
    ceiling."""
    if threads == 1 and record.case.device.startswith("cpu"):
        return True
    if record.ceiling is None or record.timing is None:
        return False
    half = verdicts.best_seconds(record.timing) / 2
    flops, moved = record.ceiling.flops or math.inf, record.ceiling.bytes or math.inf
    return record.work.flops > half * flops or record.work.bytes > half * moved


def _describe_work(work: Work) -> str:
    if work.flops:
        return units.count(work.flops, "FLOP")
    return units.count(work.bytes, "B") if work.bytes else units.count(work.tokens, "tokens")


# A comparison is void if clocks differ by the first share, or certainly by the second: drivers report clocks in steps
# of 15 MHz, which is 0.8% of a fast one.
APART = 0.01
_SURELY = 0.005
# Fewer rounds with clock readings do not show how far readings differ by chance.
LEAST_LOOKS = 4


def clock_offset(case: Timing, entries: Sequence[Timing], reference: str) -> Iterator[Labelled]:
    """Yields a hard label for a case whose clock differed from its reference's; all entries of the reference count
    equally.

    Clocks are compared round by round, so heat that slows both equally has no effect.
    """
    case_clocks = _clocks(case)
    entry_clocks = [_clocks(timing) for timing in entries]
    logs: dict[int, float] = {}
    for number, clock in case_clocks.items():
        of_round = [math.log(clocks[number]) for clocks in entry_clocks if number in clocks]
        if entry_clocks and len(of_round) == len(entry_clocks):
            logs[number] = math.log(clock) - fmean(of_round)
    if len(logs) < LEAST_LOOKS:
        return
    point, reach = mean_with_reach([*logs.values()])
    if abs(point) <= math.log1p(APART) or abs(point) - reach <= math.log1p(_SURELY):
        return
    words, reference_words = (units.count(_mean_clock(timings, logs), "Hz") for timings in ([case], entries))
    reason = f"SM clock {words} against {reference}'s {reference_words}, {units.change(math.exp(point))}"
    yield Labelled(Label.CLOCK_OFFSET, reason, hard=True)


def label_unsettled_device(watch: DeviceWatch | None) -> Iterator[Labelled]:
    """Yields a label for a case whose device had not settled when the first round began."""
    course = watch.warm_up if watch is not None else None
    if course is None or course.settled or not course.looks:
        return
    moved = slopes(course.looks)
    words = [f"after {units.seconds(course.seconds)} of warming up"]
    if moved.clock is not None:
        words.append(f"clock {units.count(course.looks[-1].clock, 'Hz')}, {100 * moved.clock:+.1f}% a second")
    if moved.temperature is not None:
        words.append(f"{course.looks[-1].temperature:g} degC, {moved.temperature:+.1f} a second")
    yield Labelled(Label.UNSETTLED, ", ".join(words))


def _clocks(timing: Timing) -> dict[int, float]:
    """Returns the clocks by round, without impossible values (the file may have been edited)."""
    clocks = {slot.round: slot.clock for slot in timing.slots if slot.clock is not None}
    return {number: clock for number, clock in clocks.items() if 0 < clock < math.inf}


def _all_slots(timings: Sequence[Timing]) -> list[SlotSample]:
    return list(chain.from_iterable(timing.slots for timing in timings))


def _mean_clock(timings: Sequence[Timing], rounds: Container[int]) -> float:
    slots = [slot for slot in _all_slots(timings) if slot.round in rounds]
    return replace(timings[0], slots=tuple(slots)).clock or 0.0


# No round has more slots than this.
_MOST = 1000


class PlaceEffect(NamedTuple):
    """How many times as long a slot takes at this position (counted from 0) as the other slots of its round."""

    place: int
    ratio: Interval

    @property
    def label(self) -> Labelled:
        where = "the first of its round" if self.place == 0 else f"number {self.place + 1} of its round"
        point, low, high = map(units.change, (self.ratio.point, self.ratio.low, self.ratio.high))
        return Labelled(Label.POSITION, f"{where} takes {point} time [{low}, {high}]")


def place_effect(timings: Sequence[Timing]) -> PlaceEffect | None:
    """Returns the position with the most certain effect among arms that shared rounds; None if no position has one.

    A slot counts by the distance of its mean from its arm's median, and is compared with the rest of its round, so a
    machine that slows down has no effect. The variance comes from permuting the slots of a round, as if positions had
    no effect. Across all positions the false alarm rate is one in 100 groups.
    """
    # 1. How far each slot lies from the mean of the other slots of its round.
    table = _tabulate_slots(timings)
    table = table[(~np.isnan(table)).sum(axis=1) > 1]
    counts = (~np.isnan(table)).sum(axis=1, keepdims=True)
    from_round = table - np.nansum(table, axis=1, keepdims=True) / counts
    from_rest = from_round * counts / (counts - 1)
    variance = np.nansum(from_rest**2, axis=1, keepdims=True) / counts
    # 2. With two positions, one gains what the other loses, so checking one is enough.
    places = [place for place in range(table.shape[1]) if (~np.isnan(table[:, place])).sum() >= LEAST_FOR_VERDICT]
    if table.shape[1] == 2:
        places = places[:1]
    reach = NormalDist().inv_cdf(1 - (1 - FINAL_LEVEL) / 2 / max(1, len(places)))
    # 3. Choose the most certain effect.
    surest, effect = 0.0, None
    for place in places:
        present = ~np.isnan(table[:, place])
        point = float(from_rest[present, place].mean())
        error = math.sqrt(float(variance[present].sum())) / int(present.sum())
        if abs(point) > reach * error and abs(point) / error > surest:
            surest = abs(point) / error
            middle, low, high = (math.exp(point + side * reach * error) for side in (0, -1, 1))
            effect = PlaceEffect(place, Interval(middle, low, high, FINAL_LEVEL))
    return effect


def _is_sound(place: int | None) -> TypeGuard[int]:
    """Whether a position is valid: older runs have none, and an edited file may hold any number."""
    return place is not None and 0 <= place < _MOST


def _tabulate_slots(timings: Sequence[Timing]) -> Floats:
    """Returns by round and place the logarithm of a slot's mean over its arm's median; NaN if unknown."""
    slots = _all_slots(timings)
    numbers = sorted({slot.round for slot in slots})
    rows = {number: row for row, number in enumerate(numbers)}
    places = 1 + max((slot.place for slot in slots if _is_sound(slot.place)), default=-1)
    table: Floats = np.full((len(rows), places), np.nan)
    for timing in timings:
        seconds = means(timing, [slot.round for slot in timing.slots])
        if not len(seconds) or seconds.min() <= 0:
            continue
        logs = np.log(seconds / np.median(seconds))
        for slot, log in zip(timing.slots, logs, strict=True):
            if _is_sound(slot.place):
                table[rows[slot.round], slot.place] = log
    return table
