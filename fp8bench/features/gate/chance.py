"""What chance does among many figures: which p-values are news, and how far two runs lie apart where nothing changed.

Of one run against another nobody knows what is noise. But most cases did not change, and how far these moved says how
far any may move.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fp8bench.analysis.compare.interval import ALONE


def discoveries(p_values: Sequence[float], share: float) -> list[bool]:
    """Benjamini and Hochberg's rule: of those it picks, no more than `share` are expected to be chance.

    Where all are chance, it picks any at all with a probability of `share`.
    """
    ranked = sorted(range(len(p_values)), key=lambda place: p_values[place])
    passing = [rank for rank, place in enumerate(ranked, 1) if p_values[place] <= share * rank / len(p_values)]
    chosen = set(ranked[: max(passing, default=0)])
    return [place in chosen for place in range(len(p_values))]


# Fewer cases do not say how far one of them may move.
LEAST_CASES = 12
# Deviations that a second look must be off, too: it shares its baseline, and so that one's noise, with the first.
AGAIN = 3.0
_QUARTILE = statistics.NormalDist().inv_cdf(0.75)
# By how much the nearer of two quartiles of n values lies too near, times the root of n.
_NEARER = 0.888


@dataclass(frozen=True)
class Spread:
    """Logarithms: by how much all cases moved together, and the deviation of one of them beside that."""

    shift: float
    deviation: float

    def chance(self, log: float) -> float:
        """Of a logarithm at least as far off, on either side."""
        beside = abs(log - self.shift)
        if not self.deviation:
            return 0.0 if beside else 1.0
        return math.erfc(beside / self.deviation / math.sqrt(2))

    def beyond(self, ratio: float) -> bool:
        """Whether another look is far enough off."""
        return math.log(ratio) > AGAIN * self.deviation


def spread_of(logs: Sequence[float]) -> Spread | None:
    """The spread of unchanged cases among all; None for a few.

    The deviation is told by the quartile that lies nearer, so that neither what became worse nor what became better
    counts as noise, though half of the cases did. What all have in common is none of a case's own; from 10% on it is no
    machine's mood any more, and counts.
    """
    if len(logs) < LEAST_CASES:
        return None
    low, middle, high = statistics.quantiles(logs, n=4)
    shift = middle if abs(middle) < math.log1p(ALONE) else 0.0
    nearer = min(max(shift - low, 0.0), max(high - shift, 0.0))
    return Spread(shift, nearer / (_QUARTILE - _NEARER / math.sqrt(len(logs))))
