"""Tensors piece by piece, so that sums in fp64 never need an fp64 copy of a whole tensor."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

# Elements of a piece: 8 MiB in fp64. A multiple of every block of a scaling, so that no block is cut.
TILE = 1 << 20


def as_rows(x: Tensor) -> Tensor:
    """`x` without its gradient, as rows of its last dimension; a number is one row of one."""
    width = x.shape[-1] if x.dim() else 1
    return x.detach().reshape(x.numel() // width if width else 0, width)


def tiles(height: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Slices (rows, columns) that cover a matrix once, whole rows where a row is no longer than a piece."""
    if not height or not width:
        return
    rows = max(1, TILE // width)
    for top in range(0, height, rows):
        for left in range(0, width, TILE):
            yield slice(top, min(top + rows, height)), slice(left, min(left + TILE, width))
