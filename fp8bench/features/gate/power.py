"""The smallest slow-down that the gate would detect, by its rules and the noise of this comparison.

A slow-down is detected if it passes both looks. Each look requires a minimum logarithm: for its interval, for its
p-value among that many figures, and for stored times. A look measures the true slow-down plus noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from statistics import NormalDist
from typing import NamedTuple

from fp8bench.analysis import verdicts
from fp8bench.analysis.compare.interval import ALONE, quantile
from fp8bench.analysis.steps.change_points import LEAST_VALUES, PieceLevel, least_step
from fp8bench.features.gate.judging import (
    AGAIN,
    CHANCE,
    NOT_TESTED,
    POWER,
    JudgedFigure,
    Sight,
    chance_of,
    discoveries,
    is_alone,
    is_exact,
)
from fp8bench.features.gate.thresholds import Rules, Threshold, threshold_of
from fp8bench.model import Comparison, Evidence, Noise
from fp8bench.model.specs import BAND, spec_of

# The largest slow-down considered, as a logarithm: a factor of a thousand.
_MOST = math.log(1000.0)
_NORMAL = NormalDist()


class Second(StrEnum):
    """How suspects will be re-measured."""

    NONE = "not"
    AGAIN = "measured again"
    DUEL = "in a duel"


class _Look(NamedTuple):
    """The least logarithm that passes, and the standard deviation of this look's measurement."""

    cut: float
    error: float


def _look(fixed: float, evidence: float, error: float, freedom: float) -> _Look:
    """Makes a look that requires a fixed logarithm, and evidence against noise. If the noise has few degrees of
    freedom, the requirement is larger (Student's distribution is wider than the normal one), and varies."""
    error *= math.sqrt(freedom / (freedom - 2)) if math.isfinite(freedom) else 1.0
    if evidence <= fixed:
        return _Look(fixed, error)
    return _Look(evidence, math.hypot(error, evidence / math.sqrt(freedom)))


def sights_of(judged: Sequence[JudgedFigure], second: Second) -> tuple[Sight, ...]:
    """Returns the sights of all varying figures, the least sensitive first."""
    chance = _chance_among(judged)
    varying = [figure for figure in judged if _is_tested(figure) and not is_exact(figure.comparison)]
    return _sort_sights(_sight_of(figure, chance, second) for figure in varying)


def _chance_among(judged: Sequence[JudgedFigure]) -> float:
    chances = [chance for figure in judged if _is_tested(figure) and (chance := chance_of(figure)) is not None]
    return CHANCE * min(1.0, (1 + sum(discoveries(chances, CHANCE))) / max(1, len(chances)))


def _is_tested(figure: JudgedFigure) -> bool:
    return figure.outcome not in NOT_TESTED and figure.comparison.ratio is not None


def _sort_sights(sights: Iterable[Sight]) -> tuple[Sight, ...]:
    def blindness(sight: Sight) -> tuple[bool, float]:
        return sight.enough, -math.log1p(sight.smallest) / math.log1p(sight.threshold or 1e-9)

    return tuple(sorted(sights, key=blindness))


def _sight_of(figure: JudgedFigure, chance: float, second: Second) -> Sight:
    change = figure.comparison
    blank = Sight(change.case, change.metric, _least(figure.threshold, change.before), math.inf)
    if change.noise is None or change.ratio is None or change.ratio.level == 0 or change.ratio.low <= 0:
        return replace(blank, unknown=change.why or "too few processes for an interval (--sessions)")
    unknown = ""
    if is_alone(change) and figure.spread is None:
        unknown = "too few runs, and too few other figures, to know how far runs lie apart"
    return replace(blank, smallest=_smallest(_looks(figure, chance, second)), unknown=unknown)


def _least(threshold: Threshold, baseline: float | None) -> float:
    return max(threshold.relative, threshold.smallest / baseline if baseline else 0.0)


def _smallest(looks: Sequence[_Look]) -> float:
    """Returns the least slow-down that passes all looks in `POWER` of builds.

    Each noisy look may miss an equal part of the rest: then all of them together miss no more, even if they are
    correlated.
    """
    noisy = sum(look.error > 0 for look in looks)
    reach = _NORMAL.inv_cdf(1 - (1 - POWER) / max(1, noisy))
    log = max(look.cut + reach * look.error for look in looks)
    return math.expm1(max(log, 0.0)) if log < _MOST else math.inf


def _looks(figure: JudgedFigure, chance: float, second: Second) -> list[_Look]:
    change = figure.comparison
    assert change.noise is not None
    if change.evidence is Evidence.PAIRED:
        # The second duel has fresh processes on both sides.
        error, sure = change.noise.error, math.log1p(verdicts.BAND) + _inside(change)
        evidence = max(sure, error * quantile(1 - chance, change.noise.freedom))
        asked = (evidence, sure) if second is Second.DUEL else (evidence,)
        return [_look(0.0, least, error, change.noise.freedom) for least in asked]
    first, demand_again, error, error_again = (
        _demands_of_few(figure, chance) if is_alone(change) else _demands_of_many(change, chance)
    )
    freedom, band = change.noise.freedom or math.inf, math.log1p(ALONE if is_alone(change) else BAND)
    if second is Second.NONE:  # suspects then do not pass
        return [_look(band, first, error, freedom)]
    if second is Second.DUEL:  # its noise is unknown yet, and far smaller than that of stored runs
        return [_look(0.0, first, error, freedom), _Look(math.log1p(verdicts.BAND), 0.0)]
    return [
        _look(0.0 if is_alone(change) else band, first, error, freedom),
        _look(max(band, demand_again), 0.0, error_again, freedom),
    ]


def _demands_of_few(figure: JudgedFigure, chance: float) -> tuple[float, float, float, float]:
    """Returns, for single runs, what each look requires, and the error of each."""
    change, spread = figure.comparison, figure.spread
    assert change.noise is not None
    inside = _inside(change)
    if spread is None:
        return inside, inside, change.noise.error, _error_again(change.noise.error, change.noise)
    first = spread.shift + spread.deviation * _NORMAL.inv_cdf(1 - chance / 2)
    error_again = _error_again(spread.deviation, change.noise)
    return max(inside, first), max(inside, AGAIN * spread.deviation), spread.deviation, error_again


def _demands_of_many(change: Comparison, chance: float) -> tuple[float, float, float, float]:
    assert change.noise is not None and change.ratio is not None
    error, freedom, level = change.noise.error, change.noise.freedom, change.ratio.level
    alone = _error_again(error, change.noise)
    return error * quantile(max(level, 1 - chance), freedom), alone * quantile(level, freedom), error, alone


def _error_again(error: float, noise: Noise) -> float:
    """Returns the error of a second look, in which the first side has all its runs and the second side one."""
    share_before = (1 / noise.before) / (1 / noise.before + 1 / noise.after)
    return error * math.sqrt(share_before + (1 - share_before) * noise.after)


def _inside(change: Comparison) -> float:
    assert change.ratio is not None
    return math.log(change.ratio.point / change.ratio.low)


class Newest(NamedTuple):
    """The present state of a history's series: as a comparison, and its newest level. The level is None if there are
    too few nights to look for steps."""

    comparison: Comparison
    level: PieceLevel | None


def sights_of_history(series: Sequence[Newest], rules: Rules, changes: int, second: Second) -> tuple[Sight, ...]:
    """Returns which steps a history could show, if they came with the latest nights that allow it. `changes` is how
    many it already shows."""
    chance, sights = CHANCE / (1 + changes), []
    for comparison, level in series:
        threshold = threshold_of(comparison, rules)
        if threshold.ignored:
            continue
        blank = Sight(comparison.case, comparison.metric, _least(threshold, comparison.before), math.inf, nights=0)
        if level is None:
            sights.append(replace(blank, unknown=f"fewer than {LEAST_VALUES} nights, so that no step can show"))
            continue
        looks = _looks_of_step(level, chance, second, spec_of(comparison.metric).least_change)
        sights.append(replace(blank, smallest=_smallest(looks), nights=level.length))
    return _sort_sights(sights)


def _looks_of_step(level: PieceLevel, chance: float, second: Second, band: float) -> list[_Look]:
    cut, error = least_step(level, chance)
    looks = [_look(math.log1p(band), cut, error, level.freedom)]
    if second is Second.AGAIN:
        # One value, which must be above the middle of both levels: half of the step plus its noise.
        looks.append(_Look(0.0, 2 * level.noise))
    if second is Second.DUEL:
        looks.append(_Look(math.log1p(min(verdicts.BAND, band)), 0.0))
    return looks
