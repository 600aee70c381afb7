"""Numbers that a format cannot hold."""

from __future__ import annotations

import torch

from fp8bench.formats.grids import E4M3
from fp8bench.numerics.ranges import outside


def test_half_of_the_smallest_subnormal_becomes_zero_and_the_largest_stays() -> None:
    half, largest = E4M3.smallest_subnormal / 2, float(E4M3.largest)
    assert outside(torch.tensor([0.0, half, half * 1.01]), E4M3) == (0, 1)
    assert outside(torch.tensor([largest, largest * 1.01]), E4M3) == (1, 0)
