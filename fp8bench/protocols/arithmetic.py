"""How a precision casts and multiplies, how it keeps scales that come from data, and which roles tensors have in
products. torch appears in annotations only.
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
    """The state of a static scale: the largest magnitude from which it was computed, the scale, and how often it was
    computed again.
    """

    amax: float
    scale: float
    renewals: int


class ScaleBook:
    """The static scales of all layers of one model.

    While the book is `watching`, a cast uses the tensor's current scale, and its largest magnitude is recorded. When
    the book is not watching, a cast uses the scale of the recorded magnitude.

    A book that starts without known magnitudes watches in every step, to calibrate.
    """

    def __init__(self, rule: StaticScales, known: Mapping[tuple[str, str], float] | None = None) -> None:
        self.rule = rule
        self.known = known
        self.watching = known is None
        self._steps = 0
        self._readers: dict[tuple[str, str], Callable[[], ScaleState | None]] = {}

    def begin_step(self) -> None:
        self._steps += 1
        # A book without stored magnitudes watches in every step. A book that has them watches in one of `refresh`
        # steps.
        if self.known is not None and self.rule.refresh:
            self.watching = self._steps % self.rule.refresh == 0

    def keep(self, layer: str, role: str, state: Callable[[], ScaleState | None]) -> None:
        """Registers a scale. `state` is a function that reads the scale, which waits for the device. It returns None
        if nothing was cast with the scale.

        If a model is built again with the same book, its scales replace the earlier ones.
        """
        self._readers[layer, role] = state

    def states(self) -> tuple[LayerScale, ...]:
        # Skip a scale with which nothing was cast, like that of an expert without tokens. It has no state yet.
        readings = ((key, read_state()) for key, read_state in self._readers.items())
        return tuple(LayerScale(layer, role, *state) for (layer, role), state in readings if state is not None)


class Role(StrEnum):
    """The role of a tensor in a product. Recipes choose a format for each role."""

    INPUT = "input"
    WEIGHT = "weight"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class Operand:
    """A tensor that is ready for a product. It has two dimensions, and the product sums over the last one.

    `data` are codes or rounded values. `scale` turns codes into values. It is None if `data` are values. `gradient`
    is True if it is a cast gradient, because hardware may sum the products of gradients more precisely. `columns` is
    the number of values in a row. It is needed if a row of codes has room for one value more.
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
    """The weights of layers that a library may execute as one layer. There are three kinds. The first is an RMS norm
    and one product. The second is an RMS norm and a feed-forward block: two products with an activation between them
    (`gated`: SwiGLU as in Llama, otherwise GELU). The third is a GPT-2 block with `heads` heads, which has two layer
    norms and the weights qkv, out, up and down.
    """

    norms: tuple[nn.Parameter, ...]
    weights: tuple[nn.Parameter, ...]
    gated: bool = False
    heads: int = 0


class Arithmetic(ABC):
    """How a precision casts and multiplies on one device.

    `casts` is False if casts change nothing. Then no CAST phase is opened.

    `keeps_source` is True if codes cannot be transposed, because their block scales run along the contraction. Then
    the source is cast again instead.

    `explicit` is True if a product is more than the product of its operands' values: they are rotated, or sums have
    few bits. Such a product exists only for two matrices.

    `settles` is True if scales come from earlier casts. Then the first casts differ from later ones.

    `plain` is True if operands are torch tensors in the carrier's dtype, without scales.

    `takes_amax` is True if `cast_both` can use the largest magnitude of a tensor that the caller has computed.

    `groups` is not 0 if one product can serve several weights (`multiply_groups`). Then the sides of weights must be
    multiples of `groups`, and the rows of each weight's part must be multiples of `part_rows`.
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
        """Returns the arithmetic of one layer. It is a separate instance if casts have state (scales, seeds), and
        otherwise this one.
        """
        return self

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        """Returns the arithmetic of one layer with static scales that the book keeps. If the recipe does not have one
        scale for each tensor, returns this arithmetic.
        """
        return self

    def whole(self, weight: nn.Parameter) -> Callable[[Tensor], Tensor] | None:
        """Returns a library's layer as a function that multiplies inputs by `weight`. The layer casts, and computes
        its gradients. Returns None if products consist of `cast` and `product`.
        """
        return None

    def separate(self) -> Arithmetic:
        """Returns an arithmetic that calls a library's casts and products separately, where the library's layers call
        both at once. Returns this one if it does so already.
        """
        return self

    def fuse(self, layers: Fused) -> Callable[[Tensor], Tensor] | None:
        """Returns a library's layer for several operations, as one function. Returns None if the library has no such
        layer.
        """
        return None

    def layer_scales(self) -> tuple[LayerScale, ...]:
        """Returns the current scales of the library's layers that this arithmetic has made. Waits for the device."""
        return ()

    def memory(self) -> dict[str, Tensor]:
        """Returns by name all tensors on which later casts depend. A cast may write into these tensors."""
        return {}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Continues from the tensors that `memory()` returned for an earlier instance. They are used without a copy."""

    @abstractmethod
    def cast(self, tensor: Tensor, role: Role) -> Operand:
        """Casts a tensor of two dimensions to this precision. The last dimension is the contraction."""

    @abstractmethod
    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """Multiplies a (M, K) by the transpose of b (N, K). Returns (M, N) in `dtype`."""

    def multiply_groups(self, a: Operand, b: Operand, ends: Tensor) -> Tensor:
        """Computes several products in one call, in the carrier's dtype. `ends` (int32) holds the index at which each
        part ends.

        If a is (M, K) and b is (groups, N, K), rows of a are grouped. Each part of the rows is multiplied by its own
        transposed matrix of b, which gives (M, N).

        If a is (N, M) and b is (K, M), columns are grouped. Each part of the columns of a is multiplied by the same
        transposed columns of b, which gives (groups, N, K). Each row of each part has a scale.
        """
        raise NotImplementedError

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        """Casts `source` for the product that needs this role transposed. `source` has two dimensions, and the last
        is the contraction.

        Weights are transposed in the input gradient. Inputs and gradients are transposed in the weight gradient. A
        recipe may cast differently here than in `cast`.
        """
        return self.cast(source, role)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        """Returns the operand with its dimensions swapped, for a product that sums over the other dimension.

        If `keeps_source` is False, `source` may be missing, and any scale of the operand is one number for all its
        values.
        """
        if self.keeps_source:
            return self.cast_transpose(source.t(), role)
        return Operand(operand.data.t(), operand.scale, operand.gradient)

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        """Casts a tensor, and possibly also its transpose. The transposed operand is the second result if one pass
        over the tensor gives both. Otherwise the second result is None, and the caller uses `turn` when it needs the
        transposed operand. Results have the same bits as those of `cast` and `turn`.

        `amax` is the largest magnitude of the tensor, in float32 on its device, if the caller has it. Only an
        arithmetic that `takes_amax` uses it.
        """
        return self.cast(tensor, role), None

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        """Rounds `tensor` to the element format without a scale. In a precision without scales that is the same as
        `cast`.
        """
        return self.cast(tensor, role)

    def restore(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        import torch

        if operand.scale is None:
            return operand.data.to(dtype)
        return (operand.data.to(torch.float32) * operand.scale).to(dtype)


# A function that is called after each cast. It gets the operand, its source (None if it was not kept), its role, and,
# after a transposition, the operand before it.
Watch = Callable[[Operand, "Tensor | None", Role, Operand | None], None]


# A watched arithmetic copies these attributes from the arithmetic inside it.
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
        """If `turned` is False, `watch` is not called for transposed operands."""
        self.inner, self.watch, self.reports_transposed = inner, watch, turned
        vars(self).update({name: getattr(inner, name) for name in DELEGATED_ATTRIBUTES})

    def layer(self, name: str) -> Arithmetic:
        return self._wrap(self.inner.layer(name))

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        return self._wrap(self.inner.scaled_by(book, name))

    def separate(self) -> Arithmetic:
        return self._wrap(self.inner.separate())

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

    def _wrap(self, arithmetic: Arithmetic) -> Arithmetic:
        return self if arithmetic is self.inner else WatchedArithmetic(arithmetic, self.watch, self.reports_transposed)

    def _report(self, operand: Operand, source: Tensor, role: Role, untransposed: Operand | None = None) -> Operand:
        self.watch(operand, source, role, untransposed)
        return operand


# The memory role of a tensor that has this role in a product and is not yet cast.
MEMORY_ROLES: Mapping[Role, MemoryRole] = {
    Role.INPUT: MemoryRole.ACTIVATIONS,
    Role.WEIGHT: MemoryRole.WEIGHTS,
    Role.GRADIENT: MemoryRole.GRADIENTS,
}
