"""The middle of a handful of rounds with its interval, or the reason why there is none."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from fp8bench.analysis.metric import Metric
from fp8bench.model.specs import MetricSpec

# How often, at the least, an interval of rounds holds the middle that endless rounds would have.
CONFIDENCE = 0.9


class Middle(NamedTuple):
    """The median of rounds with its interval."""

    value: float
    low: float
    high: float


class Untold(NamedTuple):
    """Why a figure is not told, and a word for it that stands in its place."""

    word: str
    why: str


FEW = Untold("few", "rounds are too few to say within what it is")


def middle(values: Sequence[float]) -> Middle | None:
    """The median between two of the values, which lie so far out that CONFIDENCE holds whatever their distribution.

    So of 5 the smallest and the largest (94%), of 8 the second of either end (93%). None of fewer, or of a value that
    is no number.
    """
    ordered, count = sorted(values), len(values)
    if not all(map(math.isfinite, ordered)):
        return None
    outside, place = 0.0, 0
    while place < count:
        outside += 2 * math.comb(count, place) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        place += 1
    return Middle(statistics.median(ordered), ordered[place - 1], ordered[-place]) if place else None


def figure_of(spec: MetricSpec, found: Middle | Untold, times: float = 1.0) -> Metric:
    if isinstance(found, Untold):
        return Metric(spec, why=found.why)
    return Metric(spec, found.value * times, bounds=(found.low * times, found.high * times))
