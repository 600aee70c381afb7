"""Errors of a result against its reference. Sums are computed in fp64 tile by tile, without an fp64 copy of the whole
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# The largest number of elements of a tile, which take 8 MiB in fp64. A tile has whole rows, or a part of one long row.
# Such a part begins at a whole block, because this number is a multiple of every block's width.
TILE_ELEMENTS = 1 << 20


def view_as_rows(x: Tensor) -> Tensor:
    """Returns `x` without gradient, as rows of its last dimension. A scalar becomes one row with one element."""
    width = x.shape[-1] if x.dim() else 1
    return x.detach().reshape(x.numel() // width if width else 0, width)


def iterate_tiles(height: int, width: int) -> Iterator[tuple[slice, slice]]:
    if not height or not width:
        return
    rows = max(1, TILE_ELEMENTS // width)
    for first_row in range(0, height, rows):
        for first_column in range(0, width, TILE_ELEMENTS):
            yield (
                slice(first_row, min(first_row + rows, height)),
                slice(first_column, min(first_column + TILE_ELEMENTS, width)),
            )


def relative_frobenius(value: Tensor, reference: Tensor) -> float:
    """Returns ||value - reference|| / ||reference|| in Frobenius norms.

    If the reference is zero, the result is 0 for a zero value, else infinity. If the difference has a NaN,
    the result is NaN. Shapes must agree, because broadcasting would give a meaningless number.
    """
    return joint_relative_frobenius([value], [reference])


def joint_relative_frobenius(values: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    error_square_sum = reference_square_sum = 0.0
    for value, reference in zip(values, references, strict=True):
        difference_square, reference_square = _sum_squares(value, reference)
        error_square_sum = error_square_sum + difference_square
        reference_square_sum = reference_square_sum + reference_square
    return math.sqrt(_divide_or_infinite(error_square_sum, reference_square_sum))


def relative_error(value: float, reference: float) -> float:
    """Returns |value - reference| / |reference| of two numbers, with the special cases of `relative_frobenius`."""
    return _divide_or_infinite(abs(value - reference), abs(reference))


def _divide_or_infinite(difference: float, size: float) -> float:
    if size == 0:
        return math.nan if math.isnan(difference) else (math.inf if difference else 0.0)
    return difference / size


def compute_vanished_share(values: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """Returns the share of values that are zero in the result but not in the reference, or 0 without values.

    Norms depend on the largest values, so they would not show that most small values vanished.
    """
    vanished_count = count = 0
    for value, reference in zip(values, references, strict=True):
        _check_shapes(value, reference)
        vanished_count += int(torch.count_nonzero((value.detach() == 0) & (reference.detach() != 0)))
        count += value.numel()
    return vanished_count / count if count else 0.0


def _sum_squares(value: Tensor, reference: Tensor) -> tuple[float, float]:
    _check_shapes(value, reference)
    rows = view_as_rows(value)
    reference_rows = view_as_rows(reference)
    error_square_sum = reference_square_sum = torch.zeros((), dtype=torch.float64, device=reference.device)
    for tile in iterate_tiles(*reference_rows.shape):
        exact = reference_rows[tile].to(torch.float64)
        error_square_sum = error_square_sum + (rows[tile].to(torch.float64) - exact).square().sum()
        reference_square_sum = reference_square_sum + exact.square().sum()
    return float(error_square_sum), float(reference_square_sum)


def _check_shapes(value: Tensor, reference: Tensor) -> None:
    if value.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(value.shape)} and {tuple(reference.shape)}")
