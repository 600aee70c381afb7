"""Fits a line to the times over contexts, finds where two lines cross, and computes intervals for both by resampling
rounds.

A context's figure is the best case of its rounds, as everywhere in fp8bench. All arms were measured in the same rounds,
so these are resampled jointly; each context is resampled separately. Few rounds are less certain than their resamples
suggest, so the spread of resamples is widened, like a mean's by Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8bench.analysis.stats import Floats, best_case
from fp8bench.features.infer.values import LEAST_CONTEXTS, ContextCrossing, TimeLine
from fp8bench.model import Interval
from fp8bench.model.measured import Ceiling, Limit

# An interval with confidence LEVEL spans the share _DRAWN of resamples: in simulated sweeps of 10 rounds and more, such
# intervals contain the truth in 95 of 100 cases.
LEVEL, _DRAWN = 0.95, 0.99
_ENDS = ((1 - _DRAWN) / 2, (1 + _DRAWN) / 2)
# The number of contexts at which two lines are compared.
_PLACES = 256
# In simulated sweeps of arms that read whole pages of any size, this many times the range of distances from the lines
# covered every context at which the faster arm changes in 9 of 10 cases, and in all if page sizes are powers of two.
_STEPS = 2.0


@dataclass(frozen=True)
class LineDraws:
    """A fitted line: `point` is a and b, `draws` those of each resample (resamples, 2).

    `above` is the seconds by which each measured context is above the line, `off` the largest such distance relative to
    the context's time; `measured` are each resample's seconds at the contexts.
    """

    point: Floats
    draws: Floats
    off: float
    above: Floats
    measured: Floats

    @property
    def line(self) -> TimeLine:
        low, high = np.quantile(self.draws, _ENDS, axis=0)
        a, b = (
            Interval(float(point), float(least), float(most), LEVEL)
            for point, least, most in zip(self.point, low, high, strict=True)
        )
        return TimeLine(a, b, self.off)

    def at(self, contexts: Floats) -> Floats:
        """Returns each resample's seconds at these contexts: (resamples, contexts)."""
        seconds: Floats = self.draws[:, :1] + self.draws[:, 1:] * contexts
        return seconds


def fastest(samples: Sequence[float]) -> float:
    """Returns the rounds' best case, to which the line is fitted as well, so that a printed figure is on its line."""
    return math.exp(best_case(np.array(samples, dtype=np.float64)[:, None]).point)


def line_of(rounds: Mapping[int, Sequence[float]]) -> LineDraws | None:
    """Fits seconds over contexts by least squares of relative errors; None for fewer than LEAST_CONTEXTS contexts."""
    if len(rounds) < LEAST_CONTEXTS:
        return None
    contexts, points, logs = sorted(rounds), [], []
    for place, context in enumerate(contexts):
        case = best_case(np.array(rounds[context], dtype=np.float64)[:, None])
        order = np.random.default_rng(place).permutation(len(case.resampled))
        widened = case.point + widening(len(rounds[context])) * (case.resampled[order] - case.point)
        points.append(case.point)
        logs.append(widened)
    seconds = np.exp(np.array(points))
    weights = np.stack((1 / seconds, np.array(contexts) / seconds), 1)
    solve = np.linalg.pinv(weights) / seconds
    point = solve @ seconds
    above = seconds - (point[0] + point[1] * np.array(contexts))
    off = float((np.abs(above) / seconds).max())
    measured = np.exp(np.array(logs)).T
    return LineDraws(point, measured @ solve.T, off, above, measured)


def widening(rounds: int) -> float:
    """Returns the factor by which the spread of resamples is too small for few rounds.

    It is Student's t over the normal distribution's 1.96, times the spread lost by resampling n values, times how much
    slower the fastest of few rounds are than the fastest of many (found by simulation).
    """
    freedom = max(1, rounds - 1)
    t = 1.96 + 2.37 / freedom + 2.8 / freedom**2 + 5.6 / freedom**3  # within 1% from 2 degrees on
    return t / 1.96 * math.sqrt(rounds / freedom) * (1 + 6 / rounds)


def crossing_of(arm: LineDraws, reference: LineDraws, contexts: Sequence[int]) -> ContextCrossing:
    """Returns where the arm's line crosses the reference's, within the measured contexts only.

    The interval contains every context at which resamples disagree on the faster one, or agree by less than a step
    could change: an arm that reads whole pages has steps, which resampling a line cannot show.
    """
    measured = np.array(sorted(contexts))
    first, last = int(measured[0]), int(measured[-1])
    places = np.geomspace(first, last, _PLACES)
    margin = _step_height(arm, reference, measured, places)
    ends_of = np.quantile(arm.at(places) - reference.at(places), _ENDS, axis=0)
    low, high = ends_of[0] - margin, ends_of[1] + margin
    signs = np.where(high < 0, 1, np.where(low > 0, -1, 0))
    seen_low, seen_high = np.quantile(arm.measured - reference.measured, _ENDS, axis=0)
    measured_signs = np.where(seen_high < 0, 1, np.where(seen_low > 0, -1, 0))
    ends = tuple(bool(signs[end] > 0) if signs[end] and measured_signs[end] != -signs[end] else None for end in (0, -1))
    faster = ends[0], ends[1]
    if None in faster or faster[0] == faster[1]:
        return ContextCrossing(None, first, last, faster)
    a, b = arm.point - reference.point
    at = float(min(max(-a / b, first), last))
    # Lines cross once: the interval is between the last place with the first sign and the first with the last.
    start, end = np.flatnonzero(signs == signs[0])[-1], np.flatnonzero(signs == signs[-1])[0]
    begin, until = min(float(places[start]), at), max(float(places[end]), at)
    # Measurements take precedence over the lines.
    contrary = measured[
        ((measured < begin) & (measured_signs == signs[-1])) | ((measured > until) & (measured_signs == signs[0]))
    ]
    bounds = [begin, until, *map(float, contrary)]
    return ContextCrossing(at, min(bounds), max(bounds), faster, tuple(map(int, contrary)))


def _step_height(arm: LineDraws, reference: LineDraws, measured: Any, places: Floats) -> Floats:
    """Returns the seconds by which either arm may be off its line at these places.

    It is twice the range of the measured contexts' distances, as few contexts seldom meet both ends of a step; a step
    is assumed to be as high at shorter contexts. Contexts that are all multiples of a number cannot show steps within
    it.
    """
    expected = reference.point[0] + reference.point[1] * measured
    missed = (arm.above - reference.above) / expected
    seen_at = expected[np.abs(missed).argmax()]
    measured_steps: Floats = (
        _STEPS * np.ptp(missed) * np.maximum(seen_at, reference.point[0] + reference.point[1] * places)
    )
    unseen = (math.gcd(*map(int, measured)) - 1) * float(max(arm.point[1], reference.point[1], 0.0))
    return measured_steps + unseen


def copy_rate(ceiling: Ceiling | None) -> float | None:
    """Returns bytes per second beyond caches, from measured rates: `ceiling.bytes` is an upper bound that includes
    copies inside caches."""
    rates = ceiling.rates if ceiling is not None else ()
    return next((rate.value for rate in rates if rate.limit is Limit.COPY and rate.steady), None)
