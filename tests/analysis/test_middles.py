"""The interval of a handful of rounds."""

from __future__ import annotations

import math

from fp8bench.analysis.ranks import FEW, Middle, middle


def test_an_interval_lies_between_rounds() -> None:
    """By what coins do: of 5 all heads or all tails are 1 in 16; of 8 all but one at the most 18 in 256."""
    assert middle([3.0, 1.0, 2.0, 5.0, 4.0]) == Middle(3.0, 1.0, 5.0)
    assert middle([float(one) for one in range(8)]) == Middle(3.5, 1.0, 6.0)
    assert middle([1.0] * 4) is FEW and middle([]) is FEW and middle([1.0] * 5 + [math.nan]) is FEW
