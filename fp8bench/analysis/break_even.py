"""From which size on a precision pays: stretches and crossings with intervals, from the ratios at several sizes.

Between two measured sizes the logarithm of the speed-up is interpolated over the logarithm of the size, within a band.
The band has the intervals of both points, and as much as a curve may deviate from a straight line that bends there as
it does at its neighbours. Where the curve leaps, the leap may be at any size in between. A crossing's interval has all
sizes at which the band holds 1, so it holds the true crossing at least as often as a point's interval its ratio. Sizes
beyond the measured ones are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from fp8bench.analysis.stats import Floats
from fp8bench.analysis.verdicts import BAND, best_ratio, common_rounds
from fp8bench.model import Finding, Interval, Params, Record

# Fewer sizes make no curve.
LEAST_SIZES = 3
# The band is computed at this many places between two measured sizes.
_STEPS = 64
# The change between two sizes is a leap if it is this many times as large as both of its neighbours.
_LEAP = 3.0


class SizedRatio(NamedTuple):
    """The ratio of the time to that of the comparison base, at one size."""

    size: int
    ratio: Interval

    @property
    def within_noise(self) -> bool:
        return self.ratio.low <= 1 + BAND and self.ratio.high >= 1 - BAND


class SizeStretch(NamedTuple):
    """A range of sizes over which the precision pays (1), costs time (-1), or neither is certain (None)."""

    pays: bool | None
    first: float
    last: float


class Crossing(NamedTuple):
    """The size where a precision begins or ceases to pay; `low` and `high` enclose the true one."""

    size: float
    low: float
    high: float
    begins: bool


@dataclass(frozen=True)
class BreakEven:
    """Stretches from the smallest measured size to the largest, crossings between them, and sizes within noise.

    `level` is that of the intervals; 0 where some are the range of a few rounds.
    """

    stretches: tuple[SizeStretch, ...]
    crossings: tuple[Crossing, ...]
    within_noise: tuple[int, ...]
    level: float


def break_even(points: Sequence[SizedRatio]) -> BreakEven | None:
    """Finds stretches and crossings; None for fewer than three sizes. Sizes must be distinct and all ratios above 0."""
    ordered = sorted(points)
    if len(ordered) < LEAST_SIZES:
        return None
    # 1. Cut the sizes into stretches of one sign: pays (1), costs (-1), unclear (0).
    places, low, middle, high = _band(ordered)
    signs = np.where(low > 0, 1, np.where(high < 0, -1, 0)).tolist()
    stretches: list[SizeStretch] = []
    crossings: list[Crossing] = []
    sure_end: int | None = None
    first = 0
    for sign, run in groupby(signs):
        last = first + len(list(run)) - 1
        stretches.append(SizeStretch(sign > 0 if sign else None, places[first], places[last]))
        # 2. Find a crossing between two clear stretches of opposite signs.
        if sign and sure_end is not None and signs[sure_end] != sign:
            zero = _find_zero(places, middle, sure_end, first)
            crossings.append(Crossing(zero, places[sure_end], places[first], sign > 0))
        if sign:
            sure_end = last
        first = last + 1
    noise = tuple(ratio.size for ratio in ordered if ratio.within_noise)
    return BreakEven(tuple(stretches), tuple(crossings), noise, min(ratio.ratio.level for ratio in ordered))


def _band(ordered: Sequence[SizedRatio]) -> tuple[list[float], Floats, Floats, Floats]:
    """Returns the sizes, and at each the lower bound, middle and upper bound of the logarithm of the speed-up."""
    measured = np.log([ratio.size for ratio in ordered])
    pieces = [np.linspace(*ends, _STEPS, endpoint=False) for ends in pairwise(measured)]
    at = np.concatenate([*pieces, measured[-1:]])
    speeds = [ratio.ratio.inverse for ratio in ordered]
    points = np.log([speed.point for speed in speeds])
    low = np.interp(at, measured, np.log([speed.low for speed in speeds]))
    high = np.interp(at, measured, np.log([speed.high for speed in speeds]))
    deviation = _deviation(measured, points) + BAND
    # Measured sizes are exact, not the exponential of their logarithm.
    sizes = [float(value) for value in np.exp(at)]
    sizes[::_STEPS] = [float(ratio.size) for ratio in ordered]
    return sizes, low - deviation, np.interp(at, measured, points), high + deviation


def _deviation(measured: Floats, values: Floats) -> Floats:
    """Returns how far a curve may deviate from a straight line between two points, judged by how it bends at them.

    If it leaps, its course is unknown: a library may switch kernels anywhere in between.
    """
    widths, steps = np.diff(measured), np.diff(values)
    bends = np.abs(2 * np.diff(steps / widths) / (widths[:-1] + widths[1:]))
    bend = np.maximum(np.append(bends[0], bends), np.append(bends, bends[-1]))
    sides = np.pad(np.abs(steps), 1)
    leaps = np.abs(steps) > _LEAP * np.maximum(sides[:-2], sides[2:])
    share = np.arange(_STEPS) / _STEPS
    smooth = np.outer(bend * widths**2 / 2, share * (1 - share))
    by_place = np.where(leaps[:, None] & (share > 0), np.abs(steps)[:, None], smooth)
    deviation: Floats = np.append(by_place.ravel(), 0.0)
    return deviation


def _find_zero(places: Sequence[float], middle: Floats, first: int, last: int) -> float:
    """Returns the size where the middle of the band crosses 0 between two places; the median of several crossings."""
    turns = [at for at in range(first, last) if (middle[at] > 0) != (middle[at + 1] > 0)]
    at = turns[len(turns) // 2]
    share = middle[at] / (middle[at] - middle[at + 1])
    return math.exp((1 - share) * math.log(places[at]) + share * math.log(places[at + 1]))


# Low precisions are compared with this one if it was measured, because they would replace it.
USUAL = "bf16"
_NOT_BELOW = frozenset({"fp32", "tf32", "bf16", "fp16"})

JudgedCase = tuple[Record, Finding | None]


@dataclass(frozen=True)
class Sweep:
    """Cases that differ in one number: its name, the parameters that they share, and their settings, smallest first."""

    axis: str
    held: Params
    places: tuple[tuple[int, int], ...]  # the number, and the index of its setting


@dataclass(frozen=True)
class SweptMode:
    """One precision over a sweep. `found` is None if too few sizes have a ratio.

    `refused` maps sizes without a ratio to the reason; `doubted` are sizes whose ratio has a label that casts doubt on
    it.
    """

    mode: str
    against: str
    points: tuple[SizedRatio, ...]
    refused: tuple[tuple[int, str], ...]
    doubted: tuple[int, ...]
    found: BreakEven | None


def sweeps_of(settings: Sequence[Params]) -> list[Sweep]:
    """Returns every number that varies alone over at least three settings."""
    places: dict[tuple[str, Params], dict[int, int]] = {}
    for place, params in enumerate(settings):
        for name, value in params:
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                held = tuple(pair for pair in params if pair[0] != name)
                places.setdefault((name, held), {})[value] = place
    sweeps = [Sweep(axis, held, tuple(sorted(sizes.items()))) for (axis, held), sizes in places.items()]
    return [sweep for sweep in sweeps if len(sweep.places) >= LEAST_SIZES]


def swept_modes(sweep: Sweep, groups: Sequence[Sequence[JudgedCase]]) -> Iterator[SweptMode]:
    """Yields every precision of a sweep except the comparison base; `groups` are in the order of the settings."""
    modes: dict[str, None] = {}
    for _, place in sweep.places:
        modes |= dict.fromkeys(record.case.mode for record, _ in groups[place])
    for mode in modes:
        swept = _sweep_mode(mode, sweep, groups)
        if swept.points or swept.refused:
            yield swept


def _sweep_mode(mode: str, sweep: Sweep, groups: Sequence[Sequence[JudgedCase]]) -> SweptMode:
    points, refused, doubted, against = [], [], [], ""
    for size, place in sweep.places:
        case = next((pair for pair in groups[place] if pair[0].case.mode == mode), None)
        base = _base(case, groups[place]) if case is not None else None
        if case is None or base is None or case is base:
            continue
        against = base[0].case.mode
        ratio = _ratio(case, base)
        if isinstance(ratio, str):
            refused.append((size, ratio))
            continue
        points.append(SizedRatio(size, ratio))
        if any(finding is not None and finding.doubts(ratio) for _, finding in (case, base)):
            doubted.append(size)
    return SweptMode(mode, against, tuple(points), tuple(refused), tuple(doubted), break_even(points))


def _base(case: JudgedCase, group: Sequence[JudgedCase]) -> JudgedCase | None:
    """Returns what a case is compared with: precisions below bf16 with bf16 if it has a speed here, else the
    reference."""
    if case[0].case.precision not in _NOT_BELOW:
        for pair in group:
            if pair[0].case.mode == USUAL and pair[0].support.is_native and pair[0].timing is not None:
                return pair
    return next((pair for pair in group if pair[0].is_reference), None)


def _ratio(case: JudgedCase, base: JudgedCase) -> Interval | str:
    """Returns the ratio of the case to its base, or why it has none."""
    record, finding = case
    base_record, base_finding = base
    if record.support.is_emulated:
        return "emulated here: no speed"
    if finding is None or finding.best_seconds is None:
        return record.reason or "not timed"
    hard = finding.hard or (base_finding.hard if base_finding is not None else ())
    if hard:
        return f"labelled {', '.join(hard)}"
    ratio = None
    if base_record.is_reference:
        ratio = finding.ratio
    elif record.timing is not None and base_record.timing is not None:
        timings = [record.timing, base_record.timing]
        # Cases of other sittings share no rounds, whatever their numbers are.
        same_sitting = not (record.paired_with or base_record.paired_with)
        if same_sitting and (rounds := common_rounds(timings)):
            ratio = best_ratio(timings, rounds)
    if ratio is None or not 0 < ratio.low <= ratio.point <= ratio.high < math.inf:
        return f"no rounds in common with {base_record.case.mode}"
    return ratio
