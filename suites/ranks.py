"""What several ranks cost: a step of about 50 ms that two of them take, from the request to both answers."""

from __future__ import annotations

import functools
import math
import statistics
import time
from typing import NamedTuple

from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.model import Request
from fp8bench.model.raw import Settings
from fp8bench.plan.make import make_plan

_SHAPE = "1408"
# As many pairs as tell the ratio to 1% either way where pairs differ by 5%.
PAIRS = 150
_SECONDS = 60.0


class Pair(NamedTuple):
    """Seconds of a slot of one call, from the request to both answers; of the step within it, on the slowest rank; and
    of the same step in a bare loop, on the slowest rank. Ranks begin either together."""

    slot: float
    step: float
    bare: float


class Cost(NamedTuple):
    """The median of slots over bare loops, pair by pair, with the ends of its 95% interval; and the median of the
    seconds of a slot that are not its step."""

    ratio: float
    low: float
    high: float
    beside: float


@functools.cache
def cost(pairs: int = PAIRS) -> Cost:
    """Of so many pairs of a slot and a bare loop."""
    measured = _pairs(pairs)
    low, ratio, high = median_interval([pair.slot / pair.bare for pair in measured])
    return Cost(ratio, low, high, statistics.median(pair.slot - pair.step for pair in measured))


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """A median between the two values that hold it in 95% of samples, whatever they are distributed like."""
    ordered, away = sorted(values), math.ceil(0.98 * math.sqrt(len(values)))
    middle = len(ordered) // 2
    return ordered[max(0, middle - away)], statistics.median(ordered), ordered[min(len(ordered) - 1, middle + away)]


def _pairs(pairs: int) -> list[Pair]:
    with RanksWorker(Settings(), 2) as worker:
        facts = worker.probe()
        request = Request("gemm", ("fp32",), ("cpu",), axes=(("shape", (_SHAPE,)),), ranks=2)
        case = make_plan(request, facts).groups[0].cases[0].case
        worker.within(_SECONDS).prepare("a", case, facts[0])
        return [_pair(worker, turn % 2 == 0) for turn in range(pairs)]


def _pair(worker: RanksWorker, bare_first: bool) -> Pair:
    bare = worker.within(_SECONDS).loop("a", 1) if bare_first else math.nan
    start = time.perf_counter()
    slot = worker.within(_SECONDS).slot("a", 1, 0)
    seconds = time.perf_counter() - start
    if not bare_first:
        bare = worker.within(_SECONDS).loop("a", 1)
    return Pair(seconds, slot.steps[0].seconds, bare)
