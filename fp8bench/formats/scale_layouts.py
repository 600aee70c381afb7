"""Converts scales of blocks to the memory layouts that a GPU's scaled products read, and back. Plain torch operations.

A matrix of scales is (down, across): a row for each row of blocks, a column for each stretch of the contraction.

Hopper's float32 scales are stored column by column: those of 1x128 as (down, across) with strides (1, down), those of
128x128 transposed, as (across, down) with across filled up to a multiple of 4 and strides (1, that).

Blackwell's bytes are stored in whole tiles of 128 x 4, row after row of tiles. In a tile of 512 bytes the scale of row
r and column c is number (r % 32) * 16 + (r // 32) * 4 + c: torch's SWIZZLE_32_4_4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE_ROWS, TILE_COLUMNS = 128, 4
_QUARTER = TILE_ROWS // TILE_COLUMNS


def by_columns(scales: Tensor) -> Tensor:
    return turned_rows(scales.t())


def squares(scales: Tensor) -> Tensor:
    return turned_rows(pad(scales, (0, -scales.shape[1] % TILE_COLUMNS)))


def filled_squares(down: int, across: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for scales of 128x128 blocks of a matrix and of its transpose, with zeros as filling; apply turned_rows to
    it."""
    wide, high = across + -across % TILE_COLUMNS, down + -down % TILE_COLUMNS
    make = torch.empty if (wide, high) == (across, down) else torch.zeros
    memory = make(down * wide + across * high, dtype=torch.float32, device=device)
    return memory[: down * wide].view(down, wide), memory[down * wide :].view(across, high)


def turned_rows(matrix: Tensor) -> Tensor:
    """The transpose of a matrix that lies row by row, with its strides even if a side is 1: torch checks them."""
    rows, columns = matrix.shape
    return matrix.contiguous().as_strided((columns, rows), (1, columns))


def of_squares(laid: Tensor, across: int) -> Tensor:
    return laid.t()[:, :across]


def swizzle(scales: Tensor) -> Tensor:
    """Bytes of 1x32 or 1x16 blocks, in one dimension; tiles are filled with zeros."""
    return swizzled_into(torch.empty(bytes_in_tiles(*scales.shape), dtype=scales.dtype, device=scales.device), scales)


def swizzled_into(memory: Tensor, scales: Tensor) -> Tensor:
    """Like `swizzle`, into memory of that size."""
    down, across = scales.shape
    filled = pad(scales, (0, -across % TILE_COLUMNS, 0, -down % TILE_ROWS))
    high, wide = filled.shape[0] // TILE_ROWS, filled.shape[1] // TILE_COLUMNS
    tiles = filled.view(high, TILE_COLUMNS, _QUARTER, wide, TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    memory.view(tiles.shape).copy_(tiles)
    return memory


def bytes_in_tiles(down: int, across: int) -> int:
    return (down + -down % TILE_ROWS) * (across + -across % TILE_COLUMNS)


def unswizzle(laid: Tensor, down: int, across: int) -> Tensor:
    wide = -(-across // TILE_COLUMNS)
    tiles = laid.view(-1, wide, _QUARTER, TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1, wide * TILE_COLUMNS)[:down, :across]
