"""Converts scales of blocks to the memory layouts that scaled products on GPUs read, and back. Uses plain torch
operations.

A matrix of scales is (down, across). It has a row for each row of blocks, and a column for each block along the
contraction.

Hopper's float32 scales are stored column by column. Scales of 1x128 blocks are (down, across) with strides (1, down).
Scales of 128x128 blocks are transposed to (across, down), and across is filled up to a multiple of 4. Their strides
are (1, that multiple).

Blackwell's byte scales are stored in complete tiles of 128 x 4, one row of tiles after another. In a tile of 512
bytes, the scale of row r and column c has the index (r % 32) * 16 + (r // 32) * 4 + c. torch calls this
SWIZZLE_32_4_4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8bench.formats.recipes import count_blocks, round_up

TILE_ROWS, TILE_COLUMNS = 128, 4
_ROWS_PER_TILE_QUARTER = TILE_ROWS // TILE_COLUMNS


def store_by_columns(scales: Tensor) -> Tensor:
    """Returns the scales of 1x128 blocks, stored column by column."""
    return transpose_row_major(scales.t())


def store_square_scales(scales: Tensor) -> Tensor:
    """Returns the scales of 128x128 blocks in the layout that Hopper's products read."""
    return transpose_row_major(pad(scales, (0, -scales.shape[1] % TILE_COLUMNS)))


def allocate_square_scales(down: int, across: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocates scales for the 128x128 blocks of a matrix and of its transpose. Rows are padded with zeros to multiples
    of 4. `transpose_row_major` converts either result to the layout that products read.
    """
    padded_across, padded_down = round_up(across, TILE_COLUMNS), round_up(down, TILE_COLUMNS)
    # Casts write all scales, so only padding needs zeros.
    allocate_tensor = torch.empty if (padded_across, padded_down) == (across, down) else torch.zeros
    memory = allocate_tensor(down * padded_across + across * padded_down, dtype=torch.float32, device=device)
    return memory[: down * padded_across].view(down, padded_across), memory[down * padded_across :].view(
        across, padded_down
    )


def transpose_row_major(matrix: Tensor) -> Tensor:
    """Returns the transpose of a row-major matrix. Sets its strides explicitly, because torch also checks those of
    dimensions of size 1.
    """
    rows, columns = matrix.shape
    return matrix.contiguous().as_strided((columns, rows), (1, columns))


def read_square_scales(stored: Tensor, across: int) -> Tensor:
    """Returns the matrix of scales that `store_square_scales` has stored. It has `across` columns."""
    return stored.t()[:, :across]


def swizzle(scales: Tensor) -> Tensor:
    """Returns byte scales of 1x32 or 1x16 blocks as tiles, in a tensor with one dimension. Zeros fill incomplete
    tiles.
    """
    return swizzle_into(torch.empty(count_tile_bytes(*scales.shape), dtype=scales.dtype, device=scales.device), scales)


def swizzle_into(memory: Tensor, scales: Tensor) -> Tensor:
    """Writes scales as tiles into `memory`, which must have the size of the tiles. Returns `memory`."""
    scales_down, scales_across = scales.shape
    padded_scales = pad(scales, (0, -scales_across % TILE_COLUMNS, 0, -scales_down % TILE_ROWS))
    tiles_down, tiles_across = padded_scales.shape[0] // TILE_ROWS, padded_scales.shape[1] // TILE_COLUMNS
    scale_tiles = padded_scales.view(
        tiles_down, TILE_COLUMNS, _ROWS_PER_TILE_QUARTER, tiles_across, TILE_COLUMNS
    ).permute(0, 3, 2, 1, 4)
    memory.view(scale_tiles.shape).copy_(scale_tiles)
    return memory


def count_tile_bytes(down: int, across: int) -> int:
    """Returns the number of bytes of complete tiles for a matrix of scales. Each scale takes one byte."""
    return round_up(down, TILE_ROWS) * round_up(across, TILE_COLUMNS)


def unswizzle_scales(swizzled: Tensor, down: int, across: int) -> Tensor:
    """Returns the (down, across) matrix of the scales in tiles. It reverses `swizzle`."""
    horizontal_tile_count = count_blocks(across, TILE_COLUMNS)
    scale_tiles = swizzled.view(-1, horizontal_tile_count, _ROWS_PER_TILE_QUARTER, TILE_COLUMNS, TILE_COLUMNS)
    return scale_tiles.permute(0, 3, 2, 1, 4).reshape(-1, horizontal_tile_count * TILE_COLUMNS)[:down, :across]
