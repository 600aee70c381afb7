"""Two sides by their samples alone: several entries each, all in the same rounds.

The best case of a side is the geometric mean of those of its entries, and the verdict that of a suite. The band is as
much as two entries of one side provably differ: they run the same code.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fp8bench import stats
from fp8bench.analysis import verdicts
from fp8bench.model import Interval, Timing, Verdict


@dataclass(frozen=True)
class Judged:
    """What the times of one case say. `floor` is the farthest that two processes of one side may differ, as a share.

    `band` is what they provably differ by, and at least 0.5%: nothing within it is called faster or slower.
    """

    verdict: Verdict
    ratio: Interval
    before: float
    after: float
    band: float
    floor: float | None
    rounds: int


def judge(
    before: Sequence[Timing], after: Sequence[Timing], level: float = verdicts.FINAL_LEVEL, same: float = verdicts.SAME
) -> Judged | None:
    """The verdict on the entries of both sides; None without a round that all of them were in."""
    best, rounds = verdicts.best_cases([*before, *after])
    if not rounds:
        return None
    ours, theirs = best[len(before) :], best[: len(before)]
    ratio = stats.ratio(_mean(ours), theirs, level)
    aa = [stats.ratio(side[1], side[:1], verdicts.FINAL_LEVEL) for side in (theirs, ours) if len(side) > 1]
    band = max([verdicts.BAND, *(one.clearance for one in aa)])
    verdict = verdicts.rule(ratio, band, same) if rounds >= verdicts.LEAST_FOR_VERDICT else Verdict.UNSURE
    floor = max(one.reach for one in aa) if aa else None
    return Judged(verdict, ratio, math.exp(_mean(theirs).point), math.exp(_mean(ours).point), band, floor, rounds)


def decided(before: Sequence[Timing], after: Sequence[Timing]) -> bool:
    """Whether measuring may stop: a clear verdict and a narrow interval, at an early look's level."""
    known = judge(before, after, verdicts.EARLY_LEVEL, verdicts.EARLY_SAME)
    narrow = known is not None and known.ratio.half_width <= verdicts.EARLY_HALF_WIDTH
    return known is not None and narrow and known.verdict is not Verdict.UNSURE


def chance(found: Judged) -> float | None:
    """The chance of so great a difference if there were none but the band; None where too few rounds were taken."""
    if found.rounds < verdicts.LEAST_FOR_VERDICT or not math.isfinite(found.ratio.half_width):
        return None
    beyond = max(0.0, abs(math.log(found.ratio.point)) - math.log1p(found.band))
    if found.ratio.half_width == 0:
        return 0.0 if beyond else 1.0
    tail = statistics.NormalDist().inv_cdf((1 + found.ratio.level) / 2)
    return math.erfc(beyond * tail / found.ratio.half_width / math.sqrt(2))


def _mean(entries: Sequence[stats.BestCase]) -> stats.BestCase:
    """The geometric mean of several entries of one side."""
    points = float(np.mean([one.point for one in entries]))
    return stats.BestCase(points, np.mean([one.resampled for one in entries], axis=0))


def why_unsure(found: Judged) -> str:
    if found.rounds < verdicts.LEAST_FOR_VERDICT:
        return f"{found.rounds} rounds are too few for an interval; give it more time (--budget) or rounds"
    if found.ratio.clearance > verdicts.BAND:
        return "two processes of one side differ by as much"
    return "the interval is too wide to tell; give it more time (--budget), or a quieter machine"
