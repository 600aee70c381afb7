"""Matrices that lie in memory otherwise than row by row: the same numbers behind other strides."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8bench.protocols.axes import CONTIGUOUS, PADDED, STRIDED, TRANSPOSED

# Elements between one row and the next.
GAP = 64


def laid_out(matrix: Tensor, layout: str) -> Tensor:
    """The matrix with other strides. What lies between its elements are numbers of its own once more: a gap of zeros
    would take less power than any operand."""
    if layout == CONTIGUOUS:
        return matrix
    if layout == TRANSPOSED:
        return matrix.t().contiguous().t()
    columns = matrix.shape[1]
    if layout == PADDED:
        wide = torch.cat([matrix, matrix[:, torch.arange(GAP, device=matrix.device) % columns]], 1)
        return wide[:, :columns]
    assert layout == STRIDED, layout
    return matrix.repeat_interleave(2, 1)[:, ::2]
