"""Which of several candidates is the fastest, and what may be said of it."""

from __future__ import annotations

from collections.abc import Sequence

from fp8bench.analysis.verdicts import best_ratio, common_rounds
from fp8bench.model import Timing


def fastest(candidates: Sequence[Timing], reference: Timing, control: Timing | None) -> int | None:
    """The one with the smallest ratio of best cases to the reference; None where none is faster than that."""
    entries = [one for one in (reference, control) if one is not None]
    ratios = {
        number: best_ratio([timing, *entries], rounds).point
        for number, timing in enumerate(candidates)
        if (rounds := common_rounds([timing, *entries]))
    }
    best = min(ratios, key=lambda number: ratios[number], default=None)
    return best if best is not None and ratios[best] < 1 else None
