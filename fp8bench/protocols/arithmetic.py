"""How a precision casts and multiplies, scales from data, and the roles of tensors. torch appears in annotations
only."""

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
    """A kept scale: the largest magnitude that it comes from, the scale, and how often it was renewed."""

    amax: float
    scale: float
    renewals: int


class ScaleBook:
    """The scales of all layers of one state.

    While `watching`, a tensor is cast with its current scale, and its largest magnitude is recorded; otherwise with the
    recorded scale. A book without known magnitudes always watches: it calibrates.
    """

    def __init__(self, rule: StaticScales, known: Mapping[tuple[str, str], float] | None = None) -> None:
        self.rule = rule
        self.known = known
        self.watching = known is None
        self._steps = 0
        self._kept: dict[tuple[str, str], Callable[[], ScaleState | None]] = {}

    def begin_step(self) -> None:
        self._steps += 1
        # A book that calibrates watches anyway; one with known scales looks again every so many steps.
        if self.known is not None and self.rule.refresh:
            self.watching = self._steps % self.rule.refresh == 0

    def keep(self, layer: str, role: str, state: Callable[[], ScaleState | None]) -> None:
        """Registers a scale; `state` reads it, which waits for the device, and returns None if it cast nothing.

        A model that is built again with the same book replaces its earlier scales.
        """
        self._kept[layer, role] = state

    def states(self) -> tuple[LayerScale, ...]:
        # A scale that has cast nothing, as of an expert without tokens, has no state yet.
        states = ((*key, state()) for key, state in self._kept.items())
        return tuple(LayerScale(layer, role, *state) for layer, role, state in states if state is not None)


class Role(StrEnum):
    """A tensor's part in a product; recipes give formats by role."""

    INPUT = "input"
    WEIGHT = "weight"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class Operand:
    """A tensor made ready for a product: its codes or rounded values, and the scale that gives the values back.

    Two dimensions, contraction last. `scale` is None where the data are the values themselves. `gradient`: a gradient
    was cast, and sums with one may be kept more precisely than those of a forward product. `columns`: how many values a
    row has, where the codes may have room for one more.
    """

    data: Tensor
    scale: Tensor | None = None
    gradient: bool = False
    columns: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.data] if self.scale is None else [self.data, self.scale]


@dataclass(frozen=True)
class Fused:
    """Weights that may be executed as one layer: an RMS norm and the product behind it; an RMS norm and both products
    of a feed-forward block, with the activation between them (`gated`: Llama's, else GELU); or GPT-2's whole block:
    both layer norms, and qkv, out, up and down, for `heads` heads."""

    norms: tuple[nn.Parameter, ...]
    weights: tuple[nn.Parameter, ...]
    gated: bool = False
    heads: int = 0


class Arithmetic(ABC):
    """How a precision casts and multiplies on one device.

    `casts` is False where a cast changes nothing, so that no CAST phase is opened. `keeps_source`: the second
    orientation of an operand must be cast from the source again (block scales run along the contraction), because the
    codes cannot be transposed. `explicit`: a product is more than one of its operands' values (they are rotated, or
    summed in few bits), so it exists only as a product of matrices. `settles`: the first casts are unlike later ones,
    whose scales come from earlier casts. `plain`: operands are torch's own values in the carrier's dtype, without
    scales. `takes_amax`: `cast_both` can use a tensor's known largest magnitude. Where one product serves several
    weights (`multiply_groups`), `groups` is what sides must be multiples of, and `part_rows` what the rows of each
    weight's part must be; else `groups` is 0.
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
        """The arithmetic of one layer: a separate instance if it has state between casts (scales, seeds)."""
        return self

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        """The arithmetic of one layer with scales from data that the book keeps; itself where no tensor has one
        scale."""
        return self

    def whole(self, weight: nn.Parameter) -> Callable[[Tensor], Tensor] | None:
        """A function that multiplies inputs by a layer's weight, with casts and gradients; None: use `cast` and
        `product`."""
        return None

    def separate(self) -> Arithmetic:
        """The casts and products of a library's layers, one by one; itself where it has them anyway."""
        return self

    def fuse(self, layers: Fused) -> Callable[[Tensor], Tensor] | None:
        """Like `whole`, for more than a product; None where there is no such layer."""
        return None

    def layer_scales(self) -> tuple[LayerScale, ...]:
        """The present scales of a library's layers that `whole` made. Waits for the device."""
        return ()

    def memory(self) -> dict[str, Tensor]:
        """Everything that later casts depend on, by name. A cast may write into these tensors."""
        return {}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Continues from another instance's memory, and takes over its tensors."""

    @abstractmethod
    def cast(self, tensor: Tensor, role: Role) -> Operand:
        """`tensor` (2-D, contraction last) in this precision."""

    @abstractmethod
    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """a (M, K) times b (N, K) transposed, as (M, N) in `dtype`."""

    def multiply_groups(self, a: Operand, b: Operand, ends: Tensor) -> Tensor:
        """Several products at once, in the carrier's dtype; `ends` (int32) is where their parts end.

        Rows of a (M, K), each part times its own of b (groups, N, K) transposed: (M, N). Or columns of a (N, M) times
        those of b (K, M) transposed, part by part: (groups, N, K); their scales are then those of every part's rows.
        """
        raise NotImplementedError

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        """Casts `source` (2-D, contraction last) for the product in which its role is transposed.

        That is the input gradient for weights, the weight gradient for inputs and gradients. A recipe may treat it
        differently from `cast`.
        """
        return self.cast(source, role)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        """The operand with its dimensions swapped, for a product that contracts over the other one.

        Without `keeps_source` there may be no source, and one scale is that of all values.
        """
        if self.keeps_source:
            return self.cast_transpose(source.t(), role)
        return Operand(operand.data.t(), operand.scale, operand.gradient)

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        """The operand, and the transposed one where one pass over the tensor gives both; else None: call `turn` when
        needed.

        The bits are those of `cast` and then `turn`. `amax` is the tensor's largest magnitude, float32 on its device,
        if known; it is used only where the arithmetic `takes_amax`.
        """
        return self.cast(tensor, role), None

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        """`tensor` on the elements' own grid, without a scale; `cast` itself where it has none."""
        return self.cast(tensor, role)

    def restore(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        import torch

        if operand.scale is None:
            return operand.data.to(dtype)
        return (operand.data.to(torch.float32) * operand.scale).to(dtype)


# Receives the operand, its source (None where it was not kept), its role, and the operand that was transposed, if any.
Watch = Callable[[Operand, "Tensor | None", Role, Operand | None], None]


# Attributes that a watched arithmetic takes from the inner one.
AS_IT_IS = (
    "carrier",
    "casts",
    "keeps_source",
    "explicit",
    "settles",
    "plain",
    "takes_amax",
    "whole",
    "fuse",
    "layer_scales",
    "memory",
    "recall",
    "restore",
)


class WatchedArithmetic(Arithmetic):
    """Wraps another arithmetic and its layers, and calls `watch` after each cast."""

    def __init__(self, inner: Arithmetic, watch: Watch, turned: bool = True) -> None:
        """Without `turned`, `watch` is called for plain casts only, not for transposed ones."""
        self.inner, self.watch, self.tells_turned = inner, watch, turned
        vars(self).update({name: getattr(inner, name) for name in AS_IT_IS})

    def layer(self, name: str) -> Arithmetic:
        return self._around(self.inner.layer(name))

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        return self._around(self.inner.scaled_by(book, name))

    def separate(self) -> Arithmetic:
        return self._around(self.inner.separate())

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return self._tell(self.inner.cast(tensor, role), tensor, role)

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        return self._tell(self.inner.cast_without_scale(tensor, role), tensor, role)

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        operand = self.inner.cast_transpose(source, role)
        return self._tell(operand, source, role) if self.tells_turned else operand

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        turned = self.inner.turn(operand, source, role)
        return self._tell(turned, source, role, operand) if self.tells_turned else turned

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        operand, turned = self.inner.cast_both(tensor, role, amax)
        self._tell(operand, tensor, role)
        if turned is not None and self.tells_turned:
            self._tell(turned, tensor, role, operand)
        return operand, turned

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return self.inner.product(a, b, dtype)

    def _around(self, arithmetic: Arithmetic) -> Arithmetic:
        return self if arithmetic is self.inner else WatchedArithmetic(arithmetic, self.watch, self.tells_turned)

    def _tell(self, operand: Operand, source: Tensor, role: Role, earlier: Operand | None = None) -> Operand:
        self.watch(operand, source, role, earlier)
        return operand


# The memory role of a tensor by its role in products, before it is cast.
MEMORY_OF: Mapping[Role, MemoryRole] = {
    Role.INPUT: MemoryRole.ACTIVATIONS,
    Role.WEIGHT: MemoryRole.WEIGHTS,
    Role.GRADIENT: MemoryRole.GRADIENTS,
}
