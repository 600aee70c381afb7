"""Numbers that a format cannot hold."""

from __future__ import annotations

import torch

from fp8bench.formats.grids import E4M3
from fp8bench.numerics.ranges import compute_statistics, count_out_of_range


def test_half_of_the_smallest_subnormal_becomes_zero_and_the_largest_stays() -> None:
    half, largest = E4M3.smallest_subnormal / 2, float(E4M3.largest)
    assert count_out_of_range(torch.tensor([0.0, half, half * 1.01]), E4M3) == (0, 1)
    assert count_out_of_range(torch.tensor([largest, largest * 1.01]), E4M3) == (1, 0)


def test_tensors_are_tallied_by_kind_and_role() -> None:
    tensors = [("mlp", "input", [1.0, -3.0]), ("mlp", "weight", [0.5]), ("mlp", "input", [2.0]), ("norm", "input", [])]
    result = compute_statistics((kind, role, torch.tensor(values)) for kind, role, values in tensors)
    assert [(one.kind, one.role, one.count, one.amax) for one in result] == [
        ("mlp", "input", 3, 3.0),
        ("mlp", "weight", 1, 0.5),
        ("norm", "input", 0, 0.0),
    ]
