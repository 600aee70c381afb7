"""What a run of a case would say once more: how far runs of the same case lie apart on one machine, learned from runs.

Rounds of one run share its processes, its memory and its minutes, so that their noise says nothing of the next run's.
On a machine with neighbours a 99% interval of rounds held the long run in 58% of 96 runs. What earlier runs differed by
is therefore in the interval: it is never narrower than they lie apart, nor than the rounds say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fp8bench.analysis.compare.interval import quantile
from fp8bench.analysis.labels import AHEAD, disturbed_slots
from fp8bench.analysis.verdicts import FINAL_LEVEL
from fp8bench.model import Reruns, Timing

# Of fewer comparisons nobody knows a spread.
LEAST_FREEDOM = 4
# A case that was run a few times is taken for one like the others, with the weight of so many comparisons: few, since
# the spreads of cases lie far apart, and a run in ten falls into a mode of its process that the others were not in.
_PRIOR = 2
# Of the comparisons, in the order of their cases' variances: where a case stands that others are taken for.
_USUAL = 2 / 3
# A logarithm: intervals that reach further say nothing either, and their ends are no numbers.
_MOST = 100.0
# Of the slots: where others held up more of them, a run says nothing of what quiet ones differ by.
_BUSY = 0.2


@dataclass(frozen=True)
class Seen:
    """The runs of one case: how many, the mean of the logarithms of their ratios, and the sum of squares about it."""

    runs: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def freedom(self) -> int:
        return max(0, self.runs - 1)

    def also(self, log: float) -> Seen:
        apart, runs = log - self.mean, self.runs + 1
        mean = self.mean + apart / runs
        return Seen(runs, mean, self.squares + apart * (log - mean))


def is_busy(*timings: Timing) -> bool:
    """Whether others took the processor while these were measured: such runs lie further apart."""
    slots = sum(len(timing.slots) for timing in timings)
    return sum(disturbed_slots(timing, AHEAD) for timing in timings) > _BUSY * slots


def learned(case: str, seen: Mapping[str, Seen]) -> Reruns | None:
    """What is known of a case by its own runs and by those of the others; None where that is too little."""
    own = seen.get(case, Seen())
    others = [tensor for name, tensor in seen.items() if name != case and tensor.freedom]
    freedom = sum(other.freedom for other in others)
    if own.freedom + freedom < LEAST_FREEDOM:
        return None
    prior = min(_PRIOR, freedom)
    known = own.freedom + prior
    runs = own.runs + sum(other.runs for other in others)
    return Reruns(math.sqrt((own.squares + prior * _usual(others)) / known), known, runs)


def _usual(seen: Sequence[Seen]) -> float:
    """The variance of a case that varies more than most, where a case counts as often as it was compared.

    The mean would be that of the worst case, and no other one would have a verdict beside it; with that of the middle
    one, 89% of 73 long runs of ten cases were held on a machine with neighbours, with this one 94.5%.
    """
    variances = sorted((tensor.squares / tensor.freedom, tensor.freedom) for tensor in seen)
    reached = accumulate(freedom for _, freedom in variances)
    most = _USUAL * sum(freedom for _, freedom in variances)
    return next((variance for (variance, _), so_far in zip(variances, reached, strict=True) if so_far >= most), 0.0)


def reach_of(reruns: Reruns | None) -> float:
    """How far from its point an interval reaches at least, as a logarithm."""
    if reruns is None or reruns.freedom < 1 or not 0 <= reruns.spread < math.inf:  # who changes a file may write any
        return 0.0
    return min(quantile(FINAL_LEVEL, reruns.freedom) * reruns.spread, _MOST)
