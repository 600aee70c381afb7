"""How much of what ranks send hides behind products, as far as a handful of rounds can say."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.metric import Metric, Told
from fp8bench.analysis.middles import FEW, Middle, Untold, figure_of, middle
from fp8bench.analysis.pipelines import microbatches_of
from fp8bench.model import Record, specs
from fp8bench.model.ranks import Overlap

# Products and communication in turn take as long as both alone, or they disturb each other and nothing can be told.
SUM_MAY_BE = (0.9, 1.1)
# A wider interval says nothing: of `exposed` as a share of both at once, of `hidden` as it is.
EXPOSED_WITHIN = 0.25
HIDDEN_WITHIN = 0.5


OFF = Untold(
    "off", "both in turn do not take {} to {} of the sum of both alone: they disturb each other".format(*SUM_MAY_BE)
)
SHORT = Untold("short", "both at once take less time than one of them alone: something else disturbs the rounds")
WIDE = Untold(
    "wide",
    f"rounds leave exposed time within more than {EXPOSED_WITHIN:.0%} of both at once, the hidden share within more "
    f"than {100 * HIDDEN_WITHIN:.0f} points",
)
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


def overlap_metrics(told: Told) -> Iterator[Metric]:
    """What is not told has its reason."""
    if (found := overlap_of(told.record)) is not None:
        yield figure_of(specs.EXPOSED, found.exposed)
        yield figure_of(specs.HIDDEN_COMMUNICATION, found.hidden, 100.0)
