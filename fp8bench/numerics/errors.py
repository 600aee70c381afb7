"""Error metrics: how far a result is from its reference, and how much of it is gone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def relative_frobenius(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||, Frobenius norms, sums in fp64.

    Against a zero reference: 0 where the value is zero too, infinity where it is not. NaN where the difference has
    one. Shapes must agree: broadcasting would give a number that means nothing.
    """
    if value.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(value.shape)} and {tuple(reference.shape)}")
    exact = reference.detach().to(torch.float64)
    difference = float(torch.linalg.vector_norm(value.detach().to(torch.float64) - exact))
    size = float(torch.linalg.vector_norm(exact))
    if size == 0:
        return math.nan if math.isnan(difference) else (math.inf if difference else 0.0)
    return difference / size


def joint_relative_frobenius(values: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """The relative Frobenius error of many tensors taken as one long vector, without joining them in memory."""
    difference = size = 0.0
    for value, reference in zip(values, references, strict=True):
        exact = reference.detach().to(torch.float64)
        difference += float(torch.linalg.vector_norm(value.detach().to(torch.float64) - exact)) ** 2
        size += float(torch.linalg.vector_norm(exact)) ** 2
    if size == 0:
        return math.inf if difference else 0.0
    return math.sqrt(difference / size)


def vanished_share(values: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """The share of all values that are zero and are not in the reference; 0 where there are none.

    What a norm cannot see: it knows the largest values only, and most of the others may be gone.
    """
    gone = count = 0
    for value, reference in zip(values, references, strict=True):
        if value.shape != reference.shape:
            raise ValueError(f"shapes differ: {tuple(value.shape)} and {tuple(reference.shape)}")
        gone += int(torch.count_nonzero((value.detach() == 0) & (reference.detach() != 0)))
        count += value.numel()
    return gone / count if count else 0.0
