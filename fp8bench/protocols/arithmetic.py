"""How a precision casts and multiplies. torch appears in annotations only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from fp8bench.protocols.scales import ScaleBook

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Role(StrEnum):
    """What a tensor is in a product; recipes give formats by role."""

    INPUT = "input"
    WEIGHT = "weight"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class Operand:
    """A tensor made ready for a product: its codes or rounded values, and the scale that gives the values back.

    Two dimensions, contraction last. `scale` is None where the data are the values themselves. `gradient` says that a
    gradient was cast: sums with one may be kept more carefully than those of a forward product.
    """

    data: Tensor
    scale: Tensor | None = None
    gradient: bool = False


class Arithmetic(ABC):
    """How a precision casts and multiplies on one device.

    `casts` is False where a cast changes nothing, so that nobody opens a CAST phase around nothing; `keeps_source`
    says that the second orientation of an operand must be cast from the source again (block scales run along the
    contraction) and cannot be had by transposing the codes. `explicit` says that a product is more than one of its
    operands' values (they are rotated, or summed in few bits), so that it can be had as a product of matrices only.
    `settles` says that its first casts are unlike those that follow: their scales come from what was cast before.
    """

    carrier: torch.dtype
    casts: bool = True
    keeps_source: bool = False
    explicit: bool = False
    settles: bool = False

    def layer(self, name: str) -> Arithmetic:
        """The arithmetic of one layer: one of its own where it remembers something of what it cast (scales, seeds)."""
        return self

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        """The same for one layer, with scales from data that the book keeps; itself where no tensor has one scale."""
        return self

    @abstractmethod
    def cast(self, tensor: Tensor, role: Role) -> Operand:
        """`tensor` (2-D, contraction last) in this precision."""

    @abstractmethod
    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """a (M, K) times b (N, K) transposed, as (M, N) in `dtype`."""

    def turned(self, source: Tensor, role: Role) -> Operand:
        """`source` (2-D, contraction last) for the product that its role is turned for.

        That is the input gradient for weights, the weight gradient for inputs and gradients. A cast, unless a recipe
        does something else there.
        """
        return self.cast(source, role)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        """The operand with its dimensions swapped, for a product that contracts over the other one."""
        return self.turned(source.t(), role)

    def unscaled(self, tensor: Tensor, role: Role) -> Operand:
        """`tensor` on the elements' own grid, without looking for a scale; the cast itself where it has none."""
        return self.cast(tensor, role)

    def restore(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        """The values of an operand in `dtype`: the way back from low precision."""
        import torch

        if operand.scale is None:
            return operand.data.to(dtype)
        return (operand.data.to(torch.float32) * operand.scale).to(dtype)
