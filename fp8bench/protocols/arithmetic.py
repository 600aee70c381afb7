"""Defines how a precision casts and multiplies, how scales that come from data are stored, and which roles tensors have
in products. This module uses torch in annotations only.
"""

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
    """The state of a static scale: the largest magnitude from which it was computed, the scale itself, and how often it
    was computed again (`renewals`).
    """

    amax: float
    scale: float
    renewals: int


class ScaleBook:
    """The static scales of all layers of one model.

    While `watching` is True, a cast uses a scale computed from its tensor, and records the tensor's largest magnitude.
    Otherwise a cast uses the scale of the recorded magnitude.

    A book that starts without known magnitudes watches in every step, because it calibrates the scales.
    """

    def __init__(self, rule: StaticScales, known: Mapping[tuple[str, str], float] | None = None) -> None:
        self.rule = rule
        self.known = known
        self.watching = known is None
        self._steps = 0
        self._readers: dict[tuple[str, str], Callable[[], ScaleState | None]] = {}

    def begin_step(self) -> None:
        self._steps += 1
        # If the magnitudes are known, calibrate again only in every `refresh`-th step.
        if self.known is not None and self.rule.refresh:
            self.watching = self._steps % self.rule.refresh == 0

    def keep(self, layer: str, role: str, state: Callable[[], ScaleState | None]) -> None:
        """Registers `state`, a function that reads the scale of a layer and role, for which it waits for the device. It
        returns None if nothing was cast with the scale.

        If a model is built again with the same book, the new functions replace the old ones.
        """
        self._readers[layer, role] = state

    def states(self) -> tuple[LayerScale, ...]:
        # Skip a scale that has no state yet because nothing was cast with it, like that of an expert without tokens.
        scale_readings = ((key, read_state()) for key, read_state in self._readers.items())
        return tuple(LayerScale(layer, role, *state) for (layer, role), state in scale_readings if state is not None)


class Role(StrEnum):
    """The role of a tensor in a product. Recipes choose a format for each role."""

    INPUT = "input"
    WEIGHT = "weight"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class Operand:
    """A tensor that is ready for a product. It has two dimensions, and the product sums over the last one.

    `data` has codes or rounded values. `scale` turns codes into values; it is None if `data` has values. `gradient` is
    True for a cast gradient, because hardware may sum the products of gradients more precisely. `columns` is the number
    of values in a row. It is needed if codes are packed in pairs, because an odd row has room for one more value.
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
    """The weights of several layers that a library may execute as one layer. There are three kinds of such a layer.

    1. an RMS norm and one product.
    2. an RMS norm and a feed-forward block: two products with an activation between them (SwiGLU as in Llama if
       `gated` is True, otherwise GELU).
    3. a GPT-2 block with `heads` heads: two layer norms and the weights qkv, out, up and down.
    """

    norms: tuple[nn.Parameter, ...]
    weights: tuple[nn.Parameter, ...]
    gated: bool = False
    heads: int = 0


class Arithmetic(ABC):
    """How a precision casts and multiplies on one device.

    `casts` is False if casts change nothing, so that steps have no CAST phase.

    `keeps_source` is True if codes cannot be transposed, because their block scales run along the contraction. A
    transposed operand is then cast again from the source.

    `explicit` is True if a product does more than multiply the values of its operands: it rotates them, or sums in few
    bits. Such a product exists only for two matrices.

    `settles` is True if scales come from earlier casts, so that the first casts differ from later ones.

    `plain` is True if operands are torch tensors in the carrier's dtype, without scales.

    `takes_amax` is True if `cast_both` can use the largest magnitude of a tensor that its caller has computed.

    `groups` is 0, unless `multiply_groups` can multiply several weights in one call. Then both sides of a weight must
    be multiples of `groups`, and each weight must get a number of rows that is a multiple of `part_rows`.
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
        """Returns the arithmetic of one layer: a separate instance if casts have state (scales, seeds), otherwise this
        instance.
        """
        return self

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        """Returns the arithmetic of the layer `name` with static scales, which `book` stores. Returns this arithmetic
        if the recipe does not have one scale for each tensor.
        """
        return self

    def whole(self, weight: nn.Parameter) -> Callable[[Tensor], Tensor] | None:
        """Returns a library's function that multiplies inputs by `weight`. The function includes the casts and the
        gradients. Returns None if this arithmetic has `cast` and `product` instead.
        """
        return None

    def separate(self) -> Arithmetic:
        """Returns an arithmetic that calls the casts and the products of a library separately, and not in one layer.
        Returns this arithmetic if it already does so.
        """
        return self

    def fuse(self, layers: Fused) -> Callable[[Tensor], Tensor] | None:
        """Returns a layer of a library that executes several layers at once, as one function. Returns None if the
        library has no such layer.
        """
        return None

    def layer_scales(self) -> tuple[LayerScale, ...]:
        """Returns the current scales of the library layers that this arithmetic has made. Waits for the device to read
        them.
        """
        return ()

    def memory(self) -> dict[str, Tensor]:
        """Returns all tensors on which later casts depend, by name. Casts may write into these tensors."""
        return {}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Continues with the tensors that `memory()` of an earlier instance returned, without a copy."""

    @abstractmethod
    def cast(self, tensor: Tensor, role: Role) -> Operand:
        """Casts a tensor of two dimensions to this precision. The last dimension is the contraction."""

    @abstractmethod
    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """Multiplies a (M, K) by the transpose of b (N, K). Returns (M, N) in `dtype`."""

    def multiply_groups(self, a: Operand, b: Operand, ends: Tensor) -> Tensor:
        """Computes several products in one call, in the carrier's dtype. The rows or columns of a are divided into
        parts, one for each product, and `ends` (int32) has the index at which each part ends.

        If a is (M, K) and b is (groups, N, K), the rows of a are divided. Part i of the rows is multiplied by the
        transposed matrix i of b, which gives (M, N).

        If a is (N, M) and b is (K, M), the columns of a and b are divided. Part i of the columns of a is multiplied by
        the transposed part i of the columns of b, which gives (groups, N, K). Then each row has a scale in each part.
        """
        raise NotImplementedError

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        """Casts `source` for a product in which the tensor with this role is transposed. `source` has two dimensions,
        of which the last is the contraction.

        The product for the input gradient transposes the weight. The product for the weight gradient transposes the
        input and the gradient. A recipe may cast differently here than in `cast`.
        """
        return self.cast(source, role)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        """Returns the transposed operand, for a product that sums over the first dimension of `operand`.

        If `keeps_source` is True, the source is cast again. Otherwise `source` is not needed, and the operand must have
        no scale or a single number as its scale.
        """
        if self.keeps_source:
            return self.cast_transpose(source.t(), role)
        return Operand(operand.data.t(), operand.scale, operand.gradient)

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        """Returns the cast tensor, and the cast transposed tensor if one pass over the tensor gives both. Otherwise the
        second result is None, and the caller transposes with `turn`. Both results have the same bits as those of `cast`
        and `turn`.

        `amax` is the largest magnitude of the tensor, in float32 on its device, if the caller has computed it. Only an
        arithmetic with `takes_amax` uses `amax`.
        """
        return self.cast(tensor, role), None

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        """Rounds `tensor` to the element format without a scale. In a precision without scales, this does the same as
        `cast`.
        """
        return self.cast(tensor, role)

    def restore(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        import torch

        if operand.scale is None:
            return operand.data.to(dtype)
        return (operand.data.to(torch.float32) * operand.scale).to(dtype)


# A function that is called after each cast with the operand, its source (None if it was not kept), its role and, for a
# transposed operand, the operand before the transposition.
Watch = Callable[[Operand, "Tensor | None", Role, Operand | None], None]


# WatchedArithmetic copies these attributes from the arithmetic that it wraps.
DELEGATED_ATTRIBUTES = (
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
    """Wraps an arithmetic, and the arithmetics of its layers. It calls `watch` after each cast."""

    def __init__(self, inner: Arithmetic, watch: Watch, turned: bool = True) -> None:
        """Wraps `inner`. `watch` is called for transposed operands only if `turned` is True."""
        self.inner, self.watch, self.reports_transposed = inner, watch, turned
        vars(self).update({name: getattr(inner, name) for name in DELEGATED_ATTRIBUTES})

    def layer(self, name: str) -> Arithmetic:
        return self._wrap_arithmetic(self.inner.layer(name))

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        return self._wrap_arithmetic(self.inner.scaled_by(book, name))

    def separate(self) -> Arithmetic:
        return self._wrap_arithmetic(self.inner.separate())

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return self._report(self.inner.cast(tensor, role), tensor, role)

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        return self._report(self.inner.cast_without_scale(tensor, role), tensor, role)

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        operand = self.inner.cast_transpose(source, role)
        return self._report(operand, source, role) if self.reports_transposed else operand

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        transposed_operand = self.inner.turn(operand, source, role)
        return (
            self._report(transposed_operand, source, role, operand) if self.reports_transposed else transposed_operand
        )

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        operand, transposed = self.inner.cast_both(tensor, role, amax)
        self._report(operand, tensor, role)
        if transposed is not None and self.reports_transposed:
            self._report(transposed, tensor, role, operand)
        return operand, transposed

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return self.inner.product(a, b, dtype)

    def _wrap_arithmetic(self, arithmetic: Arithmetic) -> Arithmetic:
        return self if arithmetic is self.inner else WatchedArithmetic(arithmetic, self.watch, self.reports_transposed)

    def _report(self, operand: Operand, source: Tensor, role: Role, operand_before: Operand | None = None) -> Operand:
        self.watch(operand, source, role, operand_before)
        return operand


# The purpose of a tensor's memory before the tensor is cast, by its role in a product.
MEMORY_ROLES: Mapping[Role, MemoryRole] = {
    Role.INPUT: MemoryRole.ACTIVATIONS,
    Role.WEIGHT: MemoryRole.WEIGHTS,
    Role.GRADIENT: MemoryRole.GRADIENTS,
}
