"""How small a slow-down the gate could have seen, by its own rules and the noise of the very comparison.

A slow-down is found if it passes both looks. Each look asks for a least logarithm: for its interval, for its p-value
among so many, and for what stored times may say. What a look finds is the true slow-down and noise; looks share the
noise of the runs that they share. `suites/gate.py` plants slow-downs and counts how many fail.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from fp8bench.analysis import verdicts
from fp8bench.analysis.compare.interval import ALONE, quantile
from fp8bench.analysis.steps.change_points import LEAST_VALUES, PieceLevel, least_step
from fp8bench.features.gate.judging import (
    AGAIN,
    CHANCE,
    NOT_TESTED,
    JudgedFigure,
    Sight,
    Sights,
    chance_of,
    discoveries,
    is_alone,
    is_exact,
)
from fp8bench.features.gate.thresholds import Rules, Threshold, threshold_of
from fp8bench.model import Comparison, Evidence, Noise
from fp8bench.model.specs import BAND, spec_of

# The largest slow-down that is considered, a logarithm: a thousand times.
_MOST = math.log(1000.0)
# Noise further off than so many deviations is neglected.
_DEVIATIONS = 6.0
_HALVINGS = 15
_NODES = 8
# More nights than this are not considered.
_MOST_NIGHTS = 100
_NORMAL = NormalDist()


class Second(StrEnum):
    """How suspects will be measured again."""

    NONE = "not"
    AGAIN = "measured again"
    DUEL = "in a duel"


class _Look(NamedTuple):
    """The least logarithm that passes, and the standard deviation of what only this look measures."""

    cut: float
    error: float


def _look(fixed: float, evidence: float, error: float, freedom: float) -> _Look:
    """Makes a look that asks for two things: a fixed logarithm, and so much evidence against noise. If noise is
    known by few degrees of freedom, it may be larger (Student's distribution is wider than the normal one), and the
    evidence itself varies."""
    error *= math.sqrt(freedom / (freedom - 2)) if math.isfinite(freedom) else 1.0
    if evidence <= fixed:
        return _Look(fixed, error)
    return _Look(evidence, math.hypot(error, evidence / math.sqrt(freedom)))


class _Looks(NamedTuple):
    """Both looks, and the standard deviation of what they share."""

    first: _Look
    second: _Look
    shared: float = 0.0


def sights_of(judged: Sequence[JudgedFigure], second: Second, power: float, required: bool) -> Sights:
    chance = chance_among(judged)
    varying = [figure for figure in judged if _is_tested(figure) and not is_exact(figure.comparison)]
    return _sorted((sight_of(figure, chance, second, power) for figure in varying), power, required)


def chance_among(judged: Sequence[JudgedFigure]) -> float:
    chances = [chance for figure in judged if _is_tested(figure) and (chance := chance_of(figure)) is not None]
    return CHANCE * min(1.0, (1 + sum(discoveries(chances, CHANCE))) / max(1, len(chances)))


def _is_tested(figure: JudgedFigure) -> bool:
    return figure.outcome not in NOT_TESTED and figure.comparison.ratio is not None


def _sorted(sights: Iterable[Sight], power: float, required: bool) -> Sights:
    figures = sorted(
        sights, key=lambda sight: (sight.enough, -math.log1p(sight.seen) / math.log1p(sight.threshold or 1e-9))
    )
    return Sights(tuple(figures), power, required)


def sight_of(figure: JudgedFigure, chance: float, second: Second, power: float) -> Sight:
    change, least = figure.comparison, _least(figure.threshold, figure.comparison.before)
    blank = Sight(change.case, change.metric, least, math.inf, math.inf)
    if change.noise is None or change.ratio is None or change.ratio.level == 0 or change.ratio.low <= 0:
        return replace(blank, unknown=change.why or "too few processes for an interval (--sessions)")
    unknown = ""
    if is_alone(change) and figure.spread is None:
        unknown = "too few runs, and too few other figures, to know how far runs lie apart"

    def looks(at_least: float) -> _Looks:
        return _looks(figure, chance, second, at_least)

    return replace(blank, seen=_smallest(looks(0.0), power), fails=_smallest(looks(least), power), unknown=unknown)


def _least(threshold: Threshold, before: float | None) -> float:
    return max(threshold.relative, threshold.smallest / before if before else 0.0)


def _looks(figure: JudgedFigure, chance: float, second: Second, least: float) -> _Looks:
    change, floor = figure.comparison, math.log1p(least)
    assert change.noise is not None
    if change.evidence is Evidence.PAIRED and not change.noise.before:
        # The second duel has fresh processes on both sides: the looks share nothing.
        error, sure = change.noise.error, math.log1p(verdicts.BAND) + _inside(change)
        evidence = max(sure, error * quantile(1 - chance, change.noise.freedom))
        other = _look(floor, sure, error, change.noise.freedom) if second is Second.DUEL else _PASSES
        return _Looks(_look(floor, evidence, error, change.noise.freedom), other)
    first, again, error = _of_few(figure, chance) if is_alone(change) else _of_many(change, chance)
    freedom, band = change.noise.freedom or math.inf, math.log1p(ALONE if is_alone(change) else BAND)
    if second is Second.NONE:
        return _Looks(_look(max(floor, math.log1p(ALONE)), first, error, freedom), _PASSES)
    if second is Second.DUEL:  # its noise is not known yet, and far smaller than that of stored runs
        return _Looks(_look(floor, first, error, freedom), _Look(max(floor, math.log1p(verdicts.BAND)), 0.0))
    # The first side's runs are in both looks; of the second side one run is measured again.
    own, shared = (math.sqrt(share) * error for share in (1 - _before(change.noise), _before(change.noise)))
    later = _look(max(floor, band, again), 0.0, own * math.sqrt(change.noise.after), freedom)
    return _Looks(_look(max(floor, 0.0 if is_alone(change) else band), first, own, freedom), later, shared)


def _before(noise: Noise) -> float:
    return (1 / noise.before) / (1 / noise.before + 1 / noise.after)


def _of_few(figure: JudgedFigure, chance: float) -> tuple[float, float, float]:
    change, spread = figure.comparison, figure.spread
    assert change.noise is not None
    if spread is None:
        return _inside(change), _inside(change), change.noise.error
    first = spread.shift + spread.deviation * _NORMAL.inv_cdf(1 - chance / 2)
    return max(_inside(change), first), max(_inside(change), AGAIN * spread.deviation), spread.deviation


def _of_many(change: Comparison, chance: float) -> tuple[float, float, float]:
    assert change.noise is not None and change.ratio is not None
    error, freedom, level = change.noise.error, change.noise.freedom, change.ratio.level
    before = _before(change.noise)
    alone = error * math.sqrt(before + (1 - before) * change.noise.after)
    return error * quantile(max(level, 1 - chance), freedom), alone * quantile(level, freedom), error


def _inside(change: Comparison) -> float:
    assert change.ratio is not None
    return math.log(change.ratio.point / change.ratio.low)


_PASSES = _Look(-math.inf, 0.0)


def _smallest(looks: _Looks, power: float) -> float:
    far = _DEVIATIONS * (looks.first.error + looks.second.error + looks.shared)
    low, high = 0.0, min(max(looks.first.cut, looks.second.cut) + far, _MOST)
    if _chance(looks, high) < power:
        return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _chance(looks, middle) >= power else (middle, high)
    return math.expm1(high)


def _chance(looks: _Looks, effect: float) -> float:
    places, weights = _nodes() if looks.shared else ([0.0], [1.0])

    def passing(look: _Look, mean: float) -> float:
        if look.error == 0 or math.isinf(look.cut):
            return float(mean >= look.cut)
        return math.erfc((look.cut - mean) / look.error / math.sqrt(2)) / 2

    return sum(
        weight * math.prod(passing(look, effect + looks.shared * place) for look in looks[:2])
        for place, weight in zip(places, weights, strict=True)
    )  # fmt: skip


@cache
def _nodes() -> tuple[list[float], list[float]]:
    hermite: Any = np.polynomial.hermite_e.hermegauss(_NODES)
    places, weights = hermite
    return places.tolist(), (weights / weights.sum()).tolist()


class Newest(NamedTuple):
    """A series of a history as it is now: as a comparison, its newest level, and its nights. The level is None where
    nights are too few to look for steps."""

    comparison: Comparison
    level: PieceLevel | None
    nights: int


def sights_of_history(
    series: Sequence[Newest], rules: Rules, changes: int, second: Second, power: float, required: bool
) -> Sights:
    """Returns which steps a history could show, if they came with the last nights in which one can be found.
    `changes` is how many it shows anyway."""
    judged = [(level, threshold_of(level.comparison, rules)) for level in series]
    return _sorted(
        (
            _of_series(level, _least(threshold, level.comparison.before), CHANCE / (1 + changes), second, power)
            for level, threshold in judged if not threshold.ignored
        ),
        power, required,
    )  # fmt: skip


def _of_series(series: Newest, least: float, chance: float, second: Second, power: float) -> Sight:
    blank = Sight(series.comparison.case, series.comparison.metric, least, math.inf, math.inf, nights=series.nights)
    if series.level is None:
        few = f"fewer than {LEAST_VALUES} nights, so that no step can show"
        return replace(blank, unknown=few, missing=LEAST_VALUES - series.nights)
    level = series.level

    band = spec_of(series.comparison.metric).least_change

    def smallest(nights: int, at_least: float) -> float:
        return _smallest(_of_step(level.longer(nights), chance, second, at_least, band), power)

    seen = smallest(0, 0.0)
    missing = None
    if seen > least and smallest(_MOST_NIGHTS, 0.0) <= least:
        missing = next(more for more in range(1, _MOST_NIGHTS + 1) if smallest(more, 0.0) <= least)
    return replace(blank, seen=seen, fails=smallest(0, least), missing=missing)


def _of_step(level: PieceLevel, chance: float, second: Second, least: float, band: float) -> _Looks:
    cut, error = least_step(level, chance)
    floor = math.log1p(least)
    again = {
        Second.NONE: _PASSES,
        # One value, which must lie above the middle of both levels: half of the step and its noise.
        Second.AGAIN: _Look(0.0, 2 * level.noise),
        Second.DUEL: _Look(max(floor, math.log1p(min(verdicts.BAND, band))), 0.0),
    }
    return _Looks(_look(max(floor, math.log1p(band)), cut, error, level.freedom), again[second])
