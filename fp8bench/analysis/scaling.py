"""What several ranks gain over one that takes the same step alone, and what they send for it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.metric import Metric, Told
from fp8bench.analysis.middles import FEW, Middle, Untold, figure_of, middle
from fp8bench.model import Record, specs
from fp8bench.model.ranks import Scaling

# A wider interval says nothing, as a share of the efficiency: 80% that may be 60% or 100%.
WITHIN = 0.5
WIDE = Untold("wide", f"rounds leave an efficiency within more than {WITHIN:.0%} of it")
UNPAIRED = Untold(units.NONE, "one rank and all of them were not measured in the same rounds")


class StepSeconds(NamedTuple):
    """A step of one rank with the whole batch (`whole`) and with its share of it, and of all ranks together: medians,
    None where no round was kept."""

    whole: float | None
    share: float | None
    together: float | None


@dataclass(frozen=True)
class Efficiency:
    """`strong` is what is left of n ranks' speed-up by n, `weak` what is left of one rank's pace while each has as much
    to do. Neither is cut to 1."""

    seconds: StepSeconds
    strong: Middle | Untold
    weak: Middle | Untold


def efficiency(record: Record) -> Efficiency | None:
    """Round by round, of which each has one rank's step and all ranks': what is slow for a while is so on both sides
    of a ratio, and falls out. None where one rank did not take such a step."""
    found = record.scaling
    if found is None:
        return None
    medians = (statistics.median(one) if one else None for one in (found.whole, found.share, found.together))
    strong, weak = _ratios(found.whole, found), _ratios(found.share, found)
    return Efficiency(StepSeconds(*medians), _told(strong, 1 / record.case.ranks), _told(weak))


def _ratios(alone: tuple[float, ...], found: Scaling) -> list[float]:
    """Of one rank's step over that of all, a round each; [] where they are no rounds of the same run."""
    if len(alone) != len(found.together) or not all(one > 0 for one in (*alone, *found.together)):
        return []
    return [one / all_ranks for one, all_ranks in zip(alone, found.together, strict=True)]


def _told(ratios: list[float], times: float = 1.0) -> Middle | Untold:
    if not ratios:
        return UNPAIRED
    found = middle([one * times for one in ratios])
    if found is None:
        return FEW
    return WIDE if found.high - found.low > WITHIN * found.value else found


def sent_by_rank(record: Record) -> tuple[float, ...]:
    """Bytes that each rank sends in a step, by its number; () where they are not counted."""
    if not record.sent:
        return ()
    return tuple(sum(one.bytes for one in record.sent if one.rank == rank) for rank in range(record.case.ranks))


def scaling_metrics(told: Told) -> Iterator[Metric]:
    """Efficiencies in percent, with their bounds or the reason why there are none; and the bytes of the rank that sends
    most."""
    if (found := efficiency(told.record)) is not None:
        yield figure_of(specs.STRONG_SCALING, found.strong, 100)
        yield figure_of(specs.WEAK_SCALING, found.weak, 100)
    if sent := sent_by_rank(told.record):
        yield Metric(specs.WIRE_BYTES, float(max(sent)))
