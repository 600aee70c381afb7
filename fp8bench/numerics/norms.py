"""Errors of a result against its reference. Sums are in fp64, piece by piece, so that no whole fp64 copy is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Elements of a piece: 8 MiB in fp64, and a multiple of every scaling's blocks, so that none is cut.
TILE = 1 << 20


def as_rows(x: Tensor) -> Tensor:
    """Returns `x` without its gradient, as rows of its last dimension; a number is one row of one."""
    width = x.shape[-1] if x.dim() else 1
    return x.detach().reshape(x.numel() // width if width else 0, width)


def tiles(height: int, width: int) -> Iterator[tuple[slice, slice]]:
    if not height or not width:
        return
    rows = max(1, TILE // width)
    for top in range(0, height, rows):
        for column in range(0, width, TILE):
            yield slice(top, min(top + rows, height)), slice(column, min(column + TILE, width))


def relative_frobenius(value: Tensor, reference: Tensor) -> float:
    """Returns ||value - reference|| / ||reference|| in Frobenius norms.

    For a zero reference it is 0 for a zero value, else infinity; NaN if the difference has one. Shapes must agree,
    because broadcasting would give a meaningless number.
    """
    return joint_relative_frobenius([value], [reference])


def joint_relative_frobenius(values: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    difference = size = 0.0
    for value, reference in zip(values, references, strict=True):
        noise, signal = _squares(value, reference)
        difference = difference + noise
        size = size + signal
    return math.sqrt(_share(difference, size))


def relative_error(value: float, reference: float) -> float:
    """Returns |value - reference| / |reference| of numbers, with zero treated as in `relative_frobenius`."""
    return _share(abs(value - reference), abs(reference))


def _share(difference: float, size: float) -> float:
    if size == 0:
        return math.nan if math.isnan(difference) else (math.inf if difference else 0.0)
    return difference / size


def vanished_share(values: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """Returns the share of all values that are zero but not in the reference; 0 without values. Norms depend only on
    the largest values, and would not show that most others are gone."""
    vanished = count = 0
    for value, reference in zip(values, references, strict=True):
        _check_shapes(value, reference)
        vanished += int(torch.count_nonzero((value.detach() == 0) & (reference.detach() != 0)))
        count += value.numel()
    return vanished / count if count else 0.0


def _squares(value: Tensor, reference: Tensor) -> tuple[float, float]:
    _check_shapes(value, reference)
    rows = as_rows(value)
    reference_rows = as_rows(reference)
    difference = size = torch.zeros((), dtype=torch.float64, device=reference.device)
    for place in tiles(*reference_rows.shape):
        exact = reference_rows[place].to(torch.float64)
        difference = difference + (rows[place].to(torch.float64) - exact).square().sum()
        size = size + exact.square().sum()
    return float(difference), float(size)


def _check_shapes(value: Tensor, reference: Tensor) -> None:
    if value.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(value.shape)} and {tuple(reference.shape)}")
