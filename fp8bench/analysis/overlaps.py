"""How much of what ranks send hides behind products, as far as a handful of rounds can say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.metric import Better, Metric, Rank
from fp8bench.analysis.pipelines import microbatches_of
from fp8bench.model import Provenance, Record
from fp8bench.model.metric_names import OwnMetric
from fp8bench.model.ranks import Overlap

# Products and communication in turn take as long as both alone, or they disturb each other and nothing can be told.
SUM_MAY_BE = (0.9, 1.1)
# How often, at the least, an interval of rounds holds the middle that endless rounds would have.
CONFIDENCE = 0.9
# A wider interval says nothing: of `exposed` as a share of both at once, of `hidden` as it is.
EXPOSED_WITHIN = 0.25
HIDDEN_WITHIN = 0.5


class Middle(NamedTuple):
    """The median of rounds with its interval."""

    value: float
    low: float
    high: float


class Untold(NamedTuple):
    """Why a figure is not told, and a word for it that stands in its place."""

    word: str
    why: str


OFF = Untold(
    "off", "both in turn do not take {} to {} of the sum of both alone: they disturb each other".format(*SUM_MAY_BE)
)
SHORT = Untold("short", "both at once take less time than one of them alone: something else disturbs the rounds")
WIDE = Untold(
    "wide",
    f"rounds leave exposed time within more than {EXPOSED_WITHIN:.0%} of both at once, the hidden share within more "
    f"than {100 * HIDDEN_WITHIN:.0f} points",
)
FEW = Untold("few", "rounds are too few to say within what it is")
WAITING = Untold(units.NONE, "what a pipeline exposes is its waiting, too")


@dataclass(frozen=True)
class OverlapFigures:
    """Seconds of a step that communication adds to products (`exposed`), and the share of it that hides (`hidden`).

    Either may be negative, and no figure is cut to what one would like: what would mislead is not told. The check sum
    is the time of both in turn over the sum of both alone.
    """

    exposed: Middle | Untold
    hidden: Middle | Untold
    check_sum: float | None = None


class _Round(NamedTuple):
    compute: float
    communication: float
    both: float
    in_turn: float


def overlap_figures(found: Overlap) -> OverlapFigures:
    """Round by round: what is slow for a while is so on both sides of a difference, and falls out."""
    rounds = tuple(map(_Round, found.compute, found.communication, found.both, found.in_turn))
    if found.why or not rounds or not all(one.compute > 0 and one.communication > 0 for one in rounds):
        why = Untold(units.NONE, found.why or "no round of it was kept")
        return OverlapFigures(why, why)
    check = statistics.median(one.in_turn / (one.compute + one.communication) for one in rounds)
    if not SUM_MAY_BE[0] <= check <= SUM_MAY_BE[1]:
        return OverlapFigures(OFF, OFF, check)
    exposed = middle([one.both - one.compute for one in rounds])
    beyond = middle([one.both - max(one.compute, one.communication) for one in rounds])
    hidden = middle([1 - (one.both - one.compute) / one.communication for one in rounds])
    if exposed is None or beyond is None or hidden is None:
        return OverlapFigures(FEW, FEW, check)
    if beyond.high < 0:
        return OverlapFigures(SHORT, SHORT, check)
    most = EXPOSED_WITHIN * statistics.median(one.both for one in rounds)
    return OverlapFigures(
        WIDE if exposed.high - exposed.low > most else exposed,
        WIDE if hidden.high - hidden.low > HIDDEN_WITHIN else hidden,
        check,
    )


def overlap_of(record: Record) -> OverlapFigures | None:
    """Of a case. A step of a pipeline is longer than its products by its waiting too: of its sending no share hides."""
    if record.overlap is None:
        return None
    found = overlap_figures(record.overlap)
    if isinstance(found.exposed, Untold) or microbatches_of(record) is None:
        return found
    return replace(found, hidden=WAITING)


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


def overlap_metrics(record: Record) -> Iterator[Metric]:
    """What is not told has its reason."""
    if (found := overlap_of(record)) is None:
        return
    yield _figure(OwnMetric.EXPOSED, "s", found.exposed, Better.LOWER, 1.0)
    yield _figure(OwnMetric.HIDDEN_COMMUNICATION, "%", found.hidden, Better.HIGHER, 100.0)


def _figure(name: str, unit: str, found: Middle | Untold, better: Better, times: float) -> Metric:
    empty = Metric(name, unit, provenance=Provenance.DERIVED, better=better, rank=Rank.DETAIL)
    if isinstance(found, Untold):
        return replace(empty, why=found.why)
    return replace(empty, value=found.value * times, bounds=(found.low * times, found.high * times))
