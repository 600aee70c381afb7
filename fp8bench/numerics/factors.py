"""What a scaling multiplies a tensor's elements by, block by block: the way from the elements' grid to values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8bench.formats.grids import Format
from fp8bench.formats.scaled import blocks_of, matrix_of
from fp8bench.formats.scalings import Scaling

Place = tuple[slice, slice]


@dataclass(frozen=True)
class Factors:
    """A value is its element times the factor of its block.

    `steps` has one number for each block, (blocks down, blocks across), on the tensor's device; a block is `rows` x
    `columns` elements, 0 standing for all there are. A factor that is 0, infinite or NaN left nothing of its block.
    """

    steps: Tensor
    rows: int = 0
    columns: int = 0

    def over(self, place: Place) -> Tensor:
        """The factor of every element of a piece, in fp64, in a shape that broadcasts over it."""
        down, across = (self._blocks(one, size) for one, size in zip(place, (self.rows, self.columns), strict=True))
        return self.steps.index_select(0, down).index_select(1, across).to(torch.float64)

    def none(self) -> Tensor:
        """A zero for every block."""
        return torch.zeros(self.steps.shape, dtype=torch.float64, device=self.steps.device)

    def raise_to_peaks(self, peaks: Tensor, magnitudes: Tensor, place: Place) -> None:
        """Take the largest of a piece's magnitudes into the `peaks` of their blocks."""
        highest = in_blocks(magnitudes, self.columns).amax(-1)
        rows = self._blocks(place[0], self.rows).unsqueeze(1).expand(highest.shape)
        left = place[1].start // self.columns if self.columns else 0
        peaks[:, left : left + highest.shape[1]].scatter_reduce_(0, rows, highest, "amax")

    def _blocks(self, place: slice, size: int) -> Tensor:
        """The block of each row (or column) of a piece; one for all where there is but one."""
        if not size:
            return torch.zeros(1, dtype=torch.int64, device=self.steps.device)
        return torch.arange(place.start, place.stop, device=self.steps.device).div_(size, rounding_mode="floor")


def factors_of(x: Tensor, fmt: Format, scaling: Scaling | None, scale: Tensor | None = None) -> Factors:
    """Those that a tensor gets by itself, or with a `scale` of earlier steps; 1 without a scaling."""
    if scaling is None:
        return Factors(torch.ones(1, 1, device=x.device))
    steps = blocks_of(x.detach().to(torch.float32).abs(), fmt, scaling, scale).steps
    down = -(-matrix_of(x.shape)[0] // scaling.rows) if scaling.rows else 1
    return Factors(steps.reshape(down, -1), scaling.rows, scaling.columns)


def in_blocks(x: Tensor, columns: int) -> Tensor:
    """(rows, blocks, columns), the last block filled with zeros; 0 columns are all there are."""
    size = columns or x.shape[1]
    missing = -x.shape[1] % size
    filled = pad(x, (0, missing)) if missing else x
    return filled.reshape(x.shape[0], filled.shape[1] // size, size)
