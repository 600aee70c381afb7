"""Products and phase regions that mark their own backward pass, and the linear layer made of them.

A linear layer's three products run in a chosen arithmetic, its casts and products under their phases. Forward contracts
inputs and weights over the input features, the input gradient contracts gradients and weights over the output features,
the weight gradient contracts gradients and inputs over the tokens. Each operand is cast along the dimension that its
product contracts. The master weight stays fp32 and is cast in every forward pass, as under autocast, unless the layer
holds operands of it.

A region is a phase around operators that torch differentiates itself. Identity Functions surround it: the one after it
runs first in backward and opens the phase, the one before it closes it. If an input needs no gradient the closing one
might never run, so that is refused.

A grouped product is one product for many weights, each with its own rows: that of a block's experts. Each weight has
the operands that it would have by itself. Rows of inputs and gradients are cast in one call, since every row has its
own scale or no row has one; weights and transposes are cast one by one. For the weight gradient the codes of all parts
are adjacent along the contraction, which ends with each part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.nn.around import wide_dtype
from fp8bench.protocols import Arithmetic, Operand, Phases, Role

Marker = AbstractContextManager[None]


class _RegionBegin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marker: Marker, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.marker = marker
        marker.__enter__()
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.marker.__exit__(None, None, None)
        return (None, *gradients)


class _RegionEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marker: Marker, tensor: Tensor) -> Tensor:
        ctx.marker = marker
        marker.__exit__(None, None, None)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.marker.__enter__()
        return (None, *gradients)


def region(marker: Marker, function: Callable[..., Tensor], *tensors: Tensor, **options: Any) -> Tensor:
    """Returns function(*tensors, **options) with `marker` around both its forward and its backward pass.

    A null context marks nothing; while a graph is compiled, no marker reaches the backward pass.
    """
    if torch.compiler.is_compiling() or isinstance(marker, nullcontext) or not torch.is_grad_enabled():
        with marker:
            return function(*tensors, **options)
    if not all(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "a phase region was given a tensor that needs no gradient: its backward marker would never fire. Pass "
            "such tensors as options, or run the region under torch.no_grad()."
        )
    inside = _RegionBegin.apply(marker, *tensors)  # type: ignore[no-untyped-call]
    return _RegionEnd.apply(marker, function(*inside, **options))  # type: ignore[no-untyped-call]


# Returns the arithmetic of the layer with that name.
Choose = Callable[[str], Arithmetic]

_NOTHING: AbstractContextManager[None] = nullcontext()


def prefix_names(choose: Choose, part: str) -> Choose:
    """`choose` for the layers of a part, which name themselves by their path inside it."""
    return lambda name: choose(f"{part}.{name}")


def cast_marker(arithmetic: Arithmetic, phase: Phases) -> AbstractContextManager[None]:
    return phase.cast if arithmetic.casts else _NOTHING


def refuse_twice() -> None:
    """Raises UsageError in a backward pass that autograd records: what is differentiated again would silently lack
    these products."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UsageError(
            "a converted layer is differentiated twice (create_graph=True, as for a gradient penalty or forces), and "
            "its products have one derivative: leave such layers out by --skip"
        )


# The operands of a weight in both orientations.
Both = tuple[Operand, Operand]


class _LinearProduct(torch.autograd.Function):
    """x (T, I) times w (O, I) transposed. It marks its own backward, which autograd may run on another thread.

    For backward it keeps one orientation of each operand: the turned one if it was cast together with the other, else
    the one of forward, with the source where the arithmetic has to cast that again. Operands that no gradient needs are
    not kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        arithmetic: Arithmetic,
        phase: Phases,
        training: bool,
        operands: Both | None,
    ) -> Tensor:
        # Transposed operands are kept only for gradients that will be asked for.
        for_x, for_weight = (training and needed for needed in ctx.needs_input_grad[:2])
        with cast_marker(arithmetic, phase):
            a, a_turned = _operands(arithmetic, x, Role.INPUT, for_weight)
            b, b_turned = operands or _operands(arithmetic, weight, Role.WEIGHT, for_x)
        # Tensors that autograd saves count as memory of the step: save codes instead of sources where they suffice.
        ctx.save_for_backward(
            *_keep(arithmetic, a, a_turned, x, for_weight),
            *_keep(arithmetic, b, b_turned, weight, for_x),
        )
        ctx.input_is_turned = a_turned is not None
        ctx.weight_is_turned = b_turned is not None
        ctx.arithmetic = arithmetic
        ctx.phase = phase
        with phase.gemm:
            return arithmetic.product(a, b, arithmetic.carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice()
        gradient = gradients[0]
        arithmetic = ctx.arithmetic
        phase = ctx.phase
        a_data, a_scale, x, b_data, b_scale, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad[:2]
        # 1. Cast the gradient, and turn what forward has not turned.
        with cast_marker(arithmetic, phase):
            g, g_turned = _operands(arithmetic, gradient, Role.GRADIENT, for_weight)
            b = Operand(b_data, b_scale)
            a = Operand(a_data, a_scale)
            if for_x and not ctx.weight_is_turned:
                b = arithmetic.turn(b, weight, Role.WEIGHT)
            if for_weight and g_turned is None:
                g_turned = arithmetic.turn(g, gradient, Role.GRADIENT)
            if for_weight and not ctx.input_is_turned:
                a = arithmetic.turn(a, x, Role.INPUT)
        input_gradient = weight_gradient = None
        # 2. Multiply for each gradient that is asked for.
        if for_x:
            with phase.gemm:
                input_gradient = arithmetic.product(g, b, arithmetic.carrier)
        if for_weight:
            assert g_turned is not None
            with phase.gemm:
                weight_gradient = arithmetic.product(g_turned, a, arithmetic.carrier)
            # The master weight is fp32, and autograd would convert outside any phase.
            with cast_marker(arithmetic, phase):
                weight_gradient = weight_gradient.to(wide_dtype(arithmetic.carrier))
        return input_gradient, weight_gradient, None, None, None, None


def _operands(arithmetic: Arithmetic, tensor: Tensor, role: Role, both: bool) -> tuple[Operand, Operand | None]:
    return arithmetic.cast_both(tensor, role) if both else (arithmetic.cast(tensor, role), None)


def _keep(
    arithmetic: Arithmetic, operand: Operand, turned: Operand | None, source: Tensor, needed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if not needed:
        return None, None, None
    if turned is not None:
        return turned.data, turned.scale, None
    return operand.data, operand.scale, source if arithmetic.keeps_source else None


def linear(x: Tensor, weight: Tensor, arithmetic: Arithmetic, phase: Phases, operands: Both | None = None) -> Tensor:
    """x (..., I) times w (O, I) transposed: (..., O) in the carrier. `operands` are those of w if already cast."""
    flat = x.reshape(-1, x.shape[-1]).to(arithmetic.carrier)
    training = torch.is_grad_enabled()  # a Function cannot know: weights need gradients under no_grad as well
    y: Tensor = _LinearProduct.apply(flat, weight, arithmetic, phase, training, operands)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


# Attributes that hold what a layer multiplies by. A convolution lacks `_whole`.
_MULTIPLIER = ("arithmetic", "operands", "_whole")


class Linear(nn.Module):
    """y = x W^T without bias. `operands` of W are used while they exist; unit scaling (`unit`) casts `factor` W.

    A shared `weight` keeps the values that the first module drew.
    """

    unit: Callable[[Linear, Tensor, Phases], Tensor] | None = None
    factor: float = 1.0

    def __init__(
        self,
        inputs: int,
        outputs: int,
        arithmetic: Arithmetic,
        gain: float = 1.0,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.operands: Both | None = None
        if weight is None:
            weight = nn.Parameter(torch.empty(outputs, inputs))
            nn.init.normal_(weight, std=gain / math.sqrt(inputs))
        self.weight = weight
        self._whole = arithmetic.whole(self.weight)

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        if self._whole is not None:  # it casts inside, where no phase can be opened
            return region(phase.gemm, self._whole, x.to(self.arithmetic.carrier))
        if self.unit is not None:
            return self.unit(self, x, phase)
        return linear(x, self.weight, self.arithmetic, phase, self.operands)


def cast_once(model: nn.Module) -> None:
    """Casts weights for all passes to come, forward alone, and lets go of what they were made of, as in serving."""
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.arithmetic.casts and layer._whole is None and layer.unit is None:
            operand = layer.arithmetic.cast(layer.weight.detach(), Role.WEIGHT)
            layer.operands = operand, operand  # no gradient needs a turned one
            let_go(layer.weight)


def let_go(weight: nn.Parameter) -> None:
    """Keeps a weight's shape and dtype without its memory."""
    weight.data = weight.new_zeros(()).expand(weight.shape)


@contextmanager
def multiplied_by(model: nn.Module, arithmetics: Mapping[str, Arithmetic]) -> Iterator[None]:
    """Layers of a model, by path, multiply in other arithmetics in the body; each casts its own weight."""
    usual: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for path, arithmetic in arithmetics.items():
            layer = model.get_submodule(path)
            # Only what the layer itself has is put back; the rest it has from its class.
            multiplier = {name: vars(layer)[name] for name in _MULTIPLIER if name in vars(layer)}
            usual.append((layer, multiplier))
            vars(layer).update(dict.fromkeys(multiplier), arithmetic=arithmetic)
        yield
    finally:
        for layer, multiplier in usual:
            vars(layer).update(multiplier)


class _GroupedProduct(torch.autograd.Function):
    """Parts of x (T, I) times their weights (O, I) transposed; marks its own backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        arithmetic: Arithmetic,
        phase: Phases,
        sizes: Sequence[int],
        ends: Tensor,
        operands: Sequence[Both | None],
        *weights: Tensor,
    ) -> Tensor:
        with cast_marker(arithmetic, phase):
            # All experts' weights are one stacked operand, but each is cast under its own scales.
            a = arithmetic.cast(x, Role.INPUT)
            both = [pair or cast_both_ways(arithmetic, weight) for pair, weight in zip(operands, weights, strict=True)]
            b = stack_operands([operand for operand, _ in both])
        # The transposes are taken now: the weights may have changed before the backward pass.
        turned_parts: list[Tensor | None] = []
        for _, operand in both:
            turned_parts += (operand.data, operand.scale)
        source = x if arithmetic.keeps_source else a.data
        ctx.save_for_backward(source, ends, *turned_parts)
        ctx.arithmetic = arithmetic
        ctx.phase = phase
        ctx.sizes = sizes
        with phase.gemm:
            return arithmetic.multiply_groups(a, b, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice()
        arithmetic = ctx.arithmetic
        phase = ctx.phase
        (gradient,) = gradients
        source, ends, *turned = ctx.saved_tensors
        casting = cast_marker(arithmetic, phase)
        with casting:
            g = arithmetic.cast(gradient, Role.GRADIENT)
            b = stack_operands([Operand(*pair) for pair in zip(turned[::2], turned[1::2], strict=True)])
            g_turned = turn_parts(arithmetic, g, gradient, Role.GRADIENT, ctx.sizes)
            a_turned = turn_parts(arithmetic, Operand(source), source, Role.INPUT, ctx.sizes)
        with phase.gemm:
            input_gradient = arithmetic.multiply_groups(g, b, ends)
            weight_gradients = arithmetic.multiply_groups(g_turned, a_turned, ends)
        with casting:  # as in a linear product
            wide = weight_gradients.to(wide_dtype(arithmetic.carrier))
        return input_gradient, None, None, None, None, None, *wide.unbind()


def grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    sizes: Sequence[int],
    ends: Tensor,
    arithmetic: Arithmetic,
    phase: Phases,
    operands: Sequence[Both | None],
) -> Tensor:
    """x (T, I), its first sizes[0] rows times the first of the weights (O, I) transposed, and so on: (T, O).

    `ends` are the rows at which parts end, int32 on the device. Sides and parts must be multiples of what the
    arithmetic `groups` by. `operands` are operands of weights that were cast already.
    """
    return _GroupedProduct.apply(x.to(arithmetic.carrier), arithmetic, phase, sizes, ends, operands, *weights)  # type: ignore[no-untyped-call]


def cast_both_ways(arithmetic: Arithmetic, weight: Tensor, amax: Tensor | None = None) -> Both:
    operand, turned = arithmetic.cast_both(weight, Role.WEIGHT, amax)
    return operand, turned or arithmetic.turn(operand, weight, Role.WEIGHT)


def stack_operands(operands: Sequence[Operand]) -> Operand:
    scales = [operand.scale for operand in operands if operand.scale is not None]
    return Operand(torch.stack([operand.data for operand in operands]), torch.stack(scales) if scales else None)


def turn_parts(arithmetic: Arithmetic, operand: Operand, source: Tensor, role: Role, sizes: Sequence[int]) -> Operand:
    """Each part turned by itself and joined along the columns: (columns, rows of all parts), scales part after part."""
    if not arithmetic.keeps_source:
        return arithmetic.turn(operand, source, role)
    parts = [arithmetic.turn(operand, part, role) for part in torch.split_with_sizes(source, list(sizes))]
    scales = [part.scale for part in parts if part.scale is not None]
    data = torch.cat([part.data for part in parts], dim=1)
    return Operand(data, torch.cat(scales) if scales else None, role is Role.GRADIENT)
