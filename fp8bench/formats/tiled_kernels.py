"""Kernels of native casts to MX and NVFP4: codes along the contraction, and the bytes of their blocks' scales.

Products of compute capability 10.0 look for scales in tiles of 128 x 4 (scale_layouts.py). Where a matrix fills its
tiles, one kernel writes codes and scales to where they belong; else scales come out row by row, to be laid afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fp8bench.formats.blocks import block_elements, mx_scale, nvfp4_tensor_scale
from fp8bench.formats.code_kernels import IN_ORDER
from fp8bench.formats.codes import elements, encoded
from fp8bench.formats.compiling import Kernel
from fp8bench.formats.grids import E2M1, E4M3, Format
from fp8bench.formats.random_bits import drawn_bits, key_of
from fp8bench.formats.scale_layouts import TILE_COLUMNS, TILE_ROWS
from fp8bench.formats.scalings import Scaling

_QUARTER = TILE_ROWS // TILE_COLUMNS
# Free sizes of examples, in tiles or blocks; those of what is turned are others, for both may be halves of a pair.
_DOWN, _ACROSS = 9, 10
_TURNED_DOWN, _TURNED_ACROSS = 11, 13
# The rows of a block and their columns, of what `Places` gives.
_INSIDE = (5, 6)
_SEED_AND_KEY = ((1,), torch.int64), ((), torch.int32)


@dataclass(frozen=True)
class Places:
    """Where a matrix, its codes and its scales lie, all in one order of dimensions.

    (tiles down, quarters, blocks down, tiles across, blocks across, rows of a block, its columns); not `tiled`, a block
    is a tile. Of a matrix that lies `turned` tiles across come first, so that neighbours in memory are looked at
    together.
    """

    scaling: Scaling
    tiled: bool
    turned: bool

    @property
    def least(self) -> tuple[int, int]:
        """Rows and columns of what a matrix is made of: tiles, or blocks."""
        return (TILE_ROWS, TILE_COLUMNS * self.scaling.columns) if self.tiled else self.block

    @property
    def block(self) -> tuple[int, int]:
        return self.scaling.rows, self.scaling.columns

    @property
    def free(self) -> tuple[int, int]:
        """The dimensions that count tiles."""
        return (0, 2) if self.turned else (0, 3)

    def matrix(self, memory: Tensor) -> Tensor:
        """Of the operand, which lies row by row, or its transpose does."""
        return self._seen(memory.t() if self.turned else memory, self.scaling.columns)

    def codes(self, memory: Tensor, in_byte: int) -> Tensor:
        """Of codes that lie row by row, so many in a byte."""
        return self._seen(memory, self.scaling.columns // in_byte)

    def scales(self, memory: Tensor, down: int) -> Tensor:
        """Of the bytes of scales, which lie in tiles, or in rows."""
        if not self.tiled:
            return self._seen(memory.view(down, -1), 1)
        rows = self.scaling.rows
        tiles = memory.view(down // TILE_ROWS, -1, _QUARTER // rows, rows, TILE_COLUMNS, TILE_COLUMNS, 1)
        return self.ordered(tiles.permute(0, 4, 2, 3, 1, 5, 6))

    def _seen(self, matrix: Tensor, length: int) -> Tensor:
        """A matrix in which a block has so many columns."""
        rows = self.scaling.rows
        quarters, lines, columns = (TILE_COLUMNS, _QUARTER // rows, TILE_COLUMNS) if self.tiled else (1, 1, 1)
        across = matrix.shape[1] // (columns * length)
        return self.ordered(matrix.view(-1, quarters, lines, rows, across, columns, length))

    def ordered(self, parts: Tensor) -> Tensor:
        """(tiles down, quarters, blocks down, rows, tiles across, blocks across, columns) in the order above."""
        return parts.permute((4, 5, 0, 1, 2, 3, 6) if self.turned else (0, 1, 2, 4, 5, 3, 6))


@dataclass(frozen=True)
class TiledCodesKernel(Kernel):
    """Codes of blocks, and the bytes of their scales, each row's own.

    Called with the operand and memory for both in their places, NVFP4's tensor scale, and the key of `stochastic`
    rounding's seed. E2M1 has two codes in a byte.
    """

    fmt: Format
    places: Places
    source: torch.dtype
    device: str
    stochastic: bool = False

    @property
    def in_byte(self) -> int:
        return 2 if self.fmt is E2M1 else 1

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        given, out, scales, *others = tensors
        scaling = self.places.scaling
        assert scaling.scale is not None
        drawn = self._drawn(given, others.pop()) if self.stochastic else None
        if self.in_byte == 1 and not self.stochastic:  # torch's cast rounds to nearest even
            amax = given.abs().amax(_INSIDE, keepdim=True).to(torch.float32)
            kept, inverse = mx_scale(amax, self.fmt, scaling.rounding)
            found = [elements(torch.where(kept.isnan(), 0.0, given), self.fmt, inverse).view(torch.uint8)]
        else:
            lanes = [one.to(torch.float32) for one in self._lanes(given)]
            above = others[0] if others else None
            left, kept, _ = block_elements(lanes, self.fmt, scaling, above, drawn, _INSIDE)
            found = [encoded(torch.where(kept.isnan(), 0.0, one), self.fmt) for one in left]
        out.copy_(found[0] if len(found) == 1 else found[0].bitwise_or(found[1].bitwise_left_shift(4)))
        scales.copy_(encoded(kept, scaling.scale))
        return ()

    def _lanes(self, given: Tensor) -> list[Tensor]:
        return [given[..., first :: self.in_byte] for first in range(self.in_byte)]

    def _drawn(self, given: Tensor, key: Tensor) -> list[Tensor]:
        """Random numbers for each lane, counted along the operand's rows."""
        order = (2, 3, 4, 0, 1) if self.places.turned else (0, 1, 2, 3, 4)
        down, across = ([given.shape[order[one]] for one in part] for part in ((0, 1, 2), (3, 4)))
        rows, columns = prod(down) * given.shape[5], prod(across) * given.shape[6]
        every = (torch.arange(one, dtype=torch.int32, device=key.device) for one in (rows, columns))
        numbered = next(every).view(*down, given.shape[5], 1, 1, 1) * columns + next(every).view(*across, -1)
        index = self.places.ordered(numbered)
        return [drawn_bits(one, key) for one in self._lanes(index)]

    def examples(self) -> list[Tensor]:
        (high, wide), device = self.places.least, torch.device(self.device)
        down, across = (_TURNED_DOWN, _TURNED_ACROSS) if self.places.turned else (_DOWN, _ACROSS)
        rows, columns = down * high, across * wide
        shape = (columns, rows) if self.places.turned else (rows, columns)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, self.source)
        out = torch.empty(rows, columns // self.in_byte, dtype=torch.uint8, device=device)
        scales = torch.empty(rows * (columns // self.places.scaling.columns), dtype=torch.uint8, device=device)
        above = [torch.full((), 0.75, device=device)] if self.places.scaling.scale is E4M3 else []
        key = [torch.zeros((), dtype=torch.int32, device=device)] if self.stochastic else []
        seen = self.places.matrix(x), self.places.codes(out, self.in_byte), self.places.scales(scales, rows)
        return [*seen, *above, *key]

    def free(self) -> list[Sequence[int]]:
        others = (self.places.scaling.scale is E4M3) + self.stochastic
        return [*[self.places.free] * 3, *[()] * others]

    def options(self) -> Mapping[str, object]:
        return IN_ORDER


@dataclass(frozen=True)
class TensorScaleKernel(Kernel):
    """NVFP4's scale above those of blocks, from the largest magnitudes of a tensor's parts.

    Called with those, and memory for it; of `stochastic` rounding with the seed too, and memory for its key.
    """

    device: str
    stochastic: bool = False

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        amaxes, out, *others = tensors
        out.copy_(nvfp4_tensor_scale(amaxes.amax()))
        if others:
            seed, key = others
            key.copy_(key_of(seed))
        return ()

    def examples(self) -> list[Tensor]:
        found = [torch.ones(_DOWN * _ACROSS, device=self.device), torch.ones((), device=self.device)]
        if self.stochastic:
            found += [torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in _SEED_AND_KEY]
        return found

    def free(self) -> list[Sequence[int]]:
        return [(0,), *[()] * (3 if self.stochastic else 1)]

    def options(self) -> Mapping[str, object]:
        return IN_ORDER
