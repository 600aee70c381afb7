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


class Cost(NamedTuple):
    """The median of slots over bare loops, pair by pair, with the ends of its 95% interval; and the median of the
    seconds of a slot that are not its step."""

    ratio: float
    low: float
    high: float
    beside: float


@functools.cache
def cost(pairs: int = PAIRS) -> Cost:
    """Of so many pairs of a slot of one call and a bare loop over the same step, both on the slowest rank.

    Ranks begin either together. A median lies between the two values that hold it in 95% of samples, whatever they are
    distributed like.
    """
    with RanksWorker(Settings(), 2) as worker:
        facts = worker.probe()
        request = Request("gemm", ("fp32",), ("cpu",), axes=(("shape", (_SHAPE,)),), ranks=2)
        case = make_plan(request, facts).groups[0].cases[0].case
        worker.within(_SECONDS).prepare("a", case, facts[0])
        measured = [_pair(worker, turn % 2 == 0) for turn in range(pairs)]
    ratios, away = sorted(ratio for ratio, _ in measured), math.ceil(0.98 * math.sqrt(pairs))
    ends = max(0, pairs // 2 - away), min(pairs - 1, pairs // 2 + away)
    low, high = (ratios[end] for end in ends)
    return Cost(statistics.median(ratios), low, high, statistics.median(beside for _, beside in measured))


def _pair(worker: RanksWorker, bare_first: bool) -> tuple[float, float]:
    """A slot over a bare loop, and the seconds of the slot that are not its step."""
    bare = worker.within(_SECONDS).loop("a", 1) if bare_first else math.nan
    start = time.perf_counter()
    slot = worker.within(_SECONDS).slot("a", 1, 0)
    seconds = time.perf_counter() - start
    if not bare_first:
        bare = worker.within(_SECONDS).loop("a", 1)
    return seconds / bare, seconds - slot.steps[0].seconds
