"""From which size on a precision pays: stretches and crossings with intervals, from the ratios at several sizes.

Between two measured sizes the logarithm of the speed-up is interpolated over the logarithm of the size, within a band.
The band has the intervals of both points, and as much as a curve may deviate from a straight line that bends there as
it does at its neighbours. Where the curve leaps, the leap may be at any size in between. A crossing's interval has all
sizes at which the band holds 1, so it holds the true crossing at least as often as a point's interval its ratio.
Nothing is said of sizes beyond those measured.
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
# The band is computed at so many places between two measured sizes.
_STEPS = 64
# A step between two sizes is a leap if it is so many times as large as those beside it.
_LEAP = 3.0


class SizedRatio(NamedTuple):
    """The time over that of what it is compared with, at one size."""

    size: int
    ratio: Interval

    @property
    def within_noise(self) -> bool:
        return self.ratio.low <= 1 + BAND and self.ratio.high >= 1 - BAND


class SizeStretch(NamedTuple):
    """Sizes over which it pays, costs, or cannot be told (None)."""

    pays: bool | None
    first: float
    last: float


class Crossing(NamedTuple):
    """The size where it begins to pay, or ceases to; the true one lies between `low` and `high`."""

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
    """Returns None for fewer than three sizes. Each size must be there once, all ratios must be above 0."""
    ordered = sorted(points)
    if len(ordered) < LEAST_SIZES:
        return None
    places, low, middle, high = _band(ordered)
    signs = np.where(low > 0, 1, np.where(high < 0, -1, 0))
    runs = [[place for place, _ in run] for _, run in groupby(enumerate(signs.tolist()), key=lambda pair: pair[1])]
    stretches = tuple(
        SizeStretch(None if signs[run[0]] == 0 else bool(signs[run[0]] > 0), places[run[0]], places[run[-1]])
        for run in runs
    )
    sure = [run for run in runs if signs[run[0]]]
    crossings = tuple(
        Crossing(
            _zero(places, middle, first[-1], other[0]), places[first[-1]], places[other[0]], bool(signs[other[0]] > 0)
        )
        for first, other in pairwise(sure)
        if signs[first[0]] != signs[other[0]]
    )
    noise = tuple(ratio.size for ratio in ordered if ratio.within_noise)
    return BreakEven(stretches, crossings, noise, min(ratio.ratio.level for ratio in ordered))


def _band(ordered: Sequence[SizedRatio]) -> tuple[list[float], Floats, Floats, Floats]:
    """Returns sizes, and over them the lower end, the middle and the upper end of the logarithm of the speed-up."""
    known = np.log([ratio.size for ratio in ordered])
    at = np.concatenate([np.linspace(*ends, _STEPS, endpoint=False) for ends in pairwise(known)] + [known[-1:]])
    speeds = [ratio.ratio.inverse for ratio in ordered]
    middle, low, high = (
        np.interp(at, known, np.log(values))
        for values in zip(*((speed.point, speed.low, speed.high) for speed in speeds), strict=True)
    )
    beside = _beside(known, np.log([speed.point for speed in speeds])) + BAND
    sizes = [float(value) for value in np.exp(at)]
    sizes[::_STEPS] = [float(ratio.size) for ratio in ordered]
    return sizes, low - beside, middle, high + beside


def _beside(known: Floats, values: Floats) -> Floats:
    """Returns how far from a straight line a curve may be between two points: as if it bends as at either.

    Where it leaps, its course is unknown: a library may have chosen another kernel anywhere in between.
    """
    widths, steps = np.diff(known), np.diff(values)
    bends = np.abs(2 * np.diff(steps / widths) / (widths[:-1] + widths[1:]))
    bend = np.maximum(np.append(bends[0], bends), np.append(bends, bends[-1]))
    sides = np.pad(np.abs(steps), 1)
    leaps = np.abs(steps) > _LEAP * np.maximum(sides[:-2], sides[2:])
    share = np.arange(_STEPS) / _STEPS
    smooth = np.outer(bend * widths**2 / 2, share * (1 - share))
    apart: Floats = np.append(np.where(leaps[:, None] & (share > 0), np.abs(steps)[:, None], smooth).ravel(), 0.0)
    return apart


def _zero(places: Sequence[float], middle: Floats, first: int, last: int) -> float:
    """Returns where the middle goes through 0 between two places; of several crossings the middle one."""
    turns = [at for at in range(first, last) if (middle[at] > 0) != (middle[at + 1] > 0)]
    at = turns[len(turns) // 2]
    share = middle[at] / (middle[at] - middle[at + 1])
    return math.exp((1 - share) * math.log(places[at]) + share * math.log(places[at + 1]))


# Low precisions are compared with this one if it was measured, since they would replace it.
USUAL = "bf16"
_NOT_BELOW = frozenset({"fp32", "tf32", "bf16", "fp16"})

# A case with its finding.
Told = tuple[Record, Finding | None]


@dataclass(frozen=True)
class Sweep:
    """Cases that differ in one number: its name, the parameters that they share, and their places, smallest first."""

    axis: str
    held: Params
    places: tuple[tuple[int, int], ...]  # the number, and the place of its setting


@dataclass(frozen=True)
class SweptMode:
    """One precision over a sweep. `found` is None where too few sizes have a ratio.

    `refused` says why sizes have none; `doubted` are those whose ratio has a label that casts doubt on it.
    """

    mode: str
    against: str
    points: tuple[SizedRatio, ...]
    refused: tuple[tuple[int, str], ...]
    doubted: tuple[int, ...]
    found: BreakEven | None


def sweeps_of(settings: Sequence[Params]) -> list[Sweep]:
    """Returns every number that varies alone over at least three settings."""
    sizes_by_axis: dict[tuple[str, Params], dict[int, int]] = {}
    for place, params in enumerate(settings):
        for name, value in params:
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                held = tuple(pair for pair in params if pair[0] != name)
                sizes_by_axis.setdefault((name, held), {})[value] = place
    return [
        Sweep(axis, held, tuple(sorted(sizes.items())))
        for (axis, held), sizes in sizes_by_axis.items()
        if len(sizes) >= LEAST_SIZES
    ]


def swept_modes(sweep: Sweep, groups: Sequence[Sequence[Told]]) -> Iterator[SweptMode]:
    """Yields every precision of a sweep but that of comparison; `groups` are by the places of their settings."""
    for mode in dict.fromkeys(record.case.mode for _, place in sweep.places for record, _ in groups[place]):
        points, refused, doubted, against = [], [], [], ""
        for size, place in sweep.places:
            own = next((pair for pair in groups[place] if pair[0].case.mode == mode), None)
            base = _base(own, groups[place]) if own is not None else None
            if own is None or base is None or own is base:
                continue
            against = base[0].case.mode
            ratio = _ratio(own, base)
            if isinstance(ratio, Interval):
                points.append(SizedRatio(size, ratio))
                doubted += [size] if any(pair[1] is not None and pair[1].doubts(ratio) for pair in (own, base)) else []
            else:
                refused.append((size, ratio))
        if points or refused:
            yield SweptMode(mode, against, tuple(points), tuple(refused), tuple(doubted), break_even(points))


def _base(own: Told, group: Sequence[Told]) -> Told | None:
    """Returns what a case is compared with: for what lies below bf16 bf16, if it has a speed here, else the
    reference."""
    if own[0].case.precision not in _NOT_BELOW:
        usual = next((pair for pair in group if pair[0].case.mode == USUAL and pair[0].support.is_native), None)
        if usual is not None and usual[0].timing is not None:
            return usual
    return next((pair for pair in group if pair[0].is_reference), None)


def _ratio(own: Told, base: Told) -> Interval | str:
    record, finding = own
    if record.support.is_emulated:
        return "emulated here: no speed"
    if finding is None or finding.best_seconds is None:
        return record.reason or "not timed"
    hard = finding.hard or (base[1].hard if base[1] is not None else ())
    if hard:
        return f"labelled {', '.join(hard)}"
    if base[0].is_reference:
        ratio = finding.ratio
    elif record.timing is not None and base[0].timing is not None and not (record.paired_with or base[0].paired_with):
        rounds = common_rounds([record.timing, base[0].timing])
        ratio = best_ratio([record.timing, base[0].timing], rounds) if rounds else None
    else:
        ratio = None
    sound = ratio is not None and 0 < ratio.low <= ratio.point <= ratio.high < float("inf")
    return ratio if ratio is not None and sound else f"no rounds in common with {base[0].case.mode}"
