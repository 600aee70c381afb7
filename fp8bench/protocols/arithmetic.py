"""How a precision casts and multiplies, scales from data, what a tensor is for. torch appears in annotations only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from fp8bench.model import LayerScale, MemoryRole, StaticScales

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class ScaleState(NamedTuple):
    """What a kept scale is at the moment: it comes from that largest magnitude, and was renewed so often."""

    amax: float
    scale: float
    renewals: int


class ScaleBook:
    """The scales of all layers of one state.

    While `watching` a tensor is cast with its current scale and its largest magnitude is entered; else with the scale
    that stands. A book without known magnitudes watches always: it calibrates.
    """

    def __init__(self, rule: StaticScales, known: Mapping[tuple[str, str], float] | None = None) -> None:
        self.rule = rule
        self.known = known
        self.watching = known is None
        self._steps = 0
        self._kept: dict[tuple[str, str], Callable[[], ScaleState | None]] = {}

    def begin_step(self) -> None:
        """A step begins: every `refresh`-th one watches."""
        self._steps += 1
        if self.known is not None and self.rule.refresh:
            self.watching = self._steps % self.rule.refresh == 0

    def keep(self, layer: str, role: str, state: Callable[[], ScaleState | None]) -> None:
        """Enter a scale by what tells its state: that waits for the device, and is None for one that cast nothing.

        A model that is built again under the same book replaces what it had.
        """
        self._kept[layer, role] = state

    def states(self) -> tuple[LayerScale, ...]:
        """All scales that something was cast with, in the order their layers were made."""
        found = ((*key, state()) for key, state in self._kept.items())
        return tuple(LayerScale(layer, role, *state) for layer, role, state in found if state is not None)


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

    @property
    def tensors(self) -> list[Tensor]:
        return [self.data] if self.scale is None else [self.data, self.scale]


@dataclass(frozen=True)
class Fused:
    """What may be one layer, by its weights.

    An RMS norm and the product behind it; an RMS norm and both products of a feed-forward block, with the activation
    between them (`gated`: Llama's, else GELU); or GPT-2's whole block: both layer norms, and qkv, out, up and down, for
    so many `heads`.
    """

    norms: tuple[nn.Parameter, ...]
    weights: tuple[nn.Parameter, ...]
    gated: bool = False
    heads: int = 0


class Arithmetic(ABC):
    """How a precision casts and multiplies on one device.

    `casts` is False where a cast changes nothing, so that nobody opens a CAST phase around nothing; `keeps_source`
    says that the second orientation of an operand must be cast from the source again (block scales run along the
    contraction) and cannot be had by transposing the codes. `explicit` says that a product is more than one of its
    operands' values (they are rotated, or summed in few bits), so that it can be had as a product of matrices only.
    `settles` says that its first casts are unlike those that follow: their scales come from what was cast before.
    `plain` says that operands are torch's own values in the carrier's dtype, without scales. `takes_amax` says that
    `cast_both` has a use for a tensor's largest magnitude that somebody has found already. Where it has one product
    for several weights (`grouped`), `groups` is what sides must be multiples of, and `part_rows` what the rows of each
    weight's part are; else `groups` is 0.
    """

    carrier: torch.dtype
    casts: bool = True
    keeps_source: bool = False
    explicit: bool = False
    settles: bool = False
    plain: bool = False
    takes_amax: bool = False
    groups: int = 0
    part_rows: int = 32

    def layer(self, name: str) -> Arithmetic:
        """The arithmetic of one layer: one of its own where it remembers something of what it cast (scales, seeds)."""
        return self

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        """The same for one layer, with scales from data that the book keeps; itself where no tensor has one scale."""
        return self

    def whole(self, weight: nn.Parameter) -> Callable[[Tensor], Tensor] | None:
        """What multiplies inputs by a layer's weight, casts included, gradients too; None: `cast` and `product` do."""
        return None

    def fused(self, layers: Fused) -> Callable[[Tensor], Tensor] | None:
        """The same of more than a product; None where there is no such layer."""
        return None

    def layer_scales(self) -> tuple[LayerScale, ...]:
        """The scales that a library keeps for the layers made by `whole`, as they are now. Waits for the device."""
        return ()

    def memory(self) -> dict[str, Tensor]:
        """All that casts to come depend on, of those before, by name. A cast may write into these tensors."""
        return {}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Go on as if what another one had in memory had been cast here. The tensors are its own from now on."""

    @abstractmethod
    def cast(self, tensor: Tensor, role: Role) -> Operand:
        """`tensor` (2-D, contraction last) in this precision."""

    @abstractmethod
    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """a (M, K) times b (N, K) transposed, as (M, N) in `dtype`."""

    def grouped(self, a: Operand, b: Operand, ends: Tensor) -> Tensor:
        """Several products at once, in the carrier's dtype; `ends` (int32) is where their parts end.

        Rows of a (M, K), each part times its own of b (groups, N, K) transposed: (M, N). Or columns of a (N, M) times
        those of b (K, M) transposed, part by part: (groups, N, K); their scales are then those of every part's rows.
        """
        raise NotImplementedError

    def turned(self, source: Tensor, role: Role) -> Operand:
        """`source` (2-D, contraction last) for the product that its role is turned for.

        That is the input gradient for weights, the weight gradient for inputs and gradients. A cast, unless a recipe
        does something else there.
        """
        return self.cast(source, role)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        """The operand with its dimensions swapped, for a product that contracts over the other one.

        Without `keeps_source` there may be no source, and one scale is that of all values.
        """
        if self.keeps_source:
            return self.turned(source.t(), role)
        return Operand(operand.data.t(), operand.scale, operand.gradient)

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        """The operand, and the same turned where one look at the tensor gives both; None: turn it when it is needed.

        The same bits as `cast` and then `turn`. `amax` is the tensor's largest magnitude, float32 on its device, if it
        is known already; it counts only where the arithmetic `takes_amax`.
        """
        return self.cast(tensor, role), None

    def unscaled(self, tensor: Tensor, role: Role) -> Operand:
        """`tensor` on the elements' own grid, without looking for a scale; the cast itself where it has none."""
        return self.cast(tensor, role)

    def restore(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        """The values of an operand in `dtype`: the way back from low precision."""
        import torch

        if operand.scale is None:
            return operand.data.to(dtype)
        return (operand.data.to(torch.float32) * operand.scale).to(dtype)


# Told of a cast: the operand, its source (None where it was not kept), its role, the operand that was turned if any.
Watch = Callable[[Operand, "Tensor | None", Role, Operand | None], None]


# What a watched arithmetic says and does as the one that it watches.
AS_IT_IS = (
    "carrier", "casts", "keeps_source", "explicit", "settles", "plain", "takes_amax",
    "whole", "fused", "layer_scales", "memory", "recall", "restore",
)  # fmt: skip


class WatchedArithmetic(Arithmetic):
    """Another arithmetic as it is, and its layers': somebody is told of each cast when it is done."""

    def __init__(self, inner: Arithmetic, watch: Watch, turned: bool = True) -> None:
        """Not `turned`: of casts alone, and not of values that are cast once more, turned."""
        self.inner, self.watch, self.tells_turned = inner, watch, turned
        vars(self).update({name: getattr(inner, name) for name in AS_IT_IS})

    def layer(self, name: str) -> Arithmetic:
        return self._around(self.inner.layer(name))

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        return self._around(self.inner.scaled_by(book, name))

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return self._told(self.inner.cast(tensor, role), tensor, role)

    def unscaled(self, tensor: Tensor, role: Role) -> Operand:
        return self._told(self.inner.unscaled(tensor, role), tensor, role)

    def turned(self, source: Tensor, role: Role) -> Operand:
        operand = self.inner.turned(source, role)
        return self._told(operand, source, role) if self.tells_turned else operand

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        turned = self.inner.turn(operand, source, role)
        return self._told(turned, source, role, operand) if self.tells_turned else turned

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        operand, turned = self.inner.cast_both(tensor, role, amax)
        self._told(operand, tensor, role)
        if turned is not None and self.tells_turned:
            self._told(turned, tensor, role, operand)
        return operand, turned

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return self.inner.product(a, b, dtype)

    def _around(self, other: Arithmetic) -> Arithmetic:
        return self if other is self.inner else WatchedArithmetic(other, self.watch, self.tells_turned)

    def _told(self, operand: Operand, source: Tensor, role: Role, before: Operand | None = None) -> Operand:
        self.watch(operand, source, role, before)
        return operand


# What a tensor is for that has a role in products, before it is cast.
MEMORY_OF: Mapping[Role, MemoryRole] = {
    Role.INPUT: MemoryRole.ACTIVATIONS,
    Role.WEIGHT: MemoryRole.WEIGHTS,
    Role.GRADIENT: MemoryRole.GRADIENTS,
}
