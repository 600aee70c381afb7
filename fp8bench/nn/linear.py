"""Products and regions that also mark phases in their backward pass, and the linear layer that uses them.

A linear layer computes three products in a chosen arithmetic, and marks casts and products as separate phases. Forward
contracts inputs and weights over the input features. The input gradient contracts gradients and weights over the
output features. The weight gradient contracts gradients and inputs over the tokens. Each operand is cast along the
dimension that its product contracts. The master weight stays fp32. It is cast in every forward pass, as under
autocast, unless the layer already has its operands.

A region is a phase around operators that torch differentiates itself. Each end of the region has an autograd Function
that changes nothing. In backward the Function at the end opens the phase, and the Function at the beginning closes it.
If an input needs no gradient, this Function might never run, so such inputs are refused.

A grouped product is one product for many weights, each with its own group of rows, for example for the experts of a
block. The operands of each weight are the same as in a separate product. Rows of inputs and gradients are cast in one
call. Weights and transposes are cast separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.nn.around import widen_dtype
from fp8bench.protocols import Arithmetic, Operand, Phases, Role

PhaseMarker = AbstractContextManager[None]


class _PhaseRegionBegin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marker: PhaseMarker, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.marker = marker
        marker.__enter__()
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.marker.__exit__(None, None, None)
        return (None, *gradients)


class _PhaseRegionEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marker: PhaseMarker, tensor: Tensor) -> Tensor:
        ctx.marker = marker
        marker.__exit__(None, None, None)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.marker.__enter__()
        return (None, *gradients)


def region(marker: PhaseMarker, function: Callable[..., Tensor], *tensors: Tensor, **options: Any) -> Tensor:
    """Returns function(*tensors, **options), with `marker` around its forward and its backward pass.

    A null context as `marker` marks nothing. While a graph is being compiled, the backward pass is not marked.
    """
    if torch.compiler.is_compiling() or isinstance(marker, nullcontext) or not torch.is_grad_enabled():
        with marker:
            return function(*tensors, **options)
    if not all(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "a phase region got a tensor that needs no gradient, so its backward marker would never run. Pass "
            "such tensors as options, or run the region under torch.no_grad()."
        )
    marked_tensors = _PhaseRegionBegin.apply(marker, *tensors)  # type: ignore[no-untyped-call]
    return _PhaseRegionEnd.apply(marker, function(*marked_tensors, **options))  # type: ignore[no-untyped-call]


# A function that returns the arithmetic of the layer with a given name.
ChooseArithmetic = Callable[[str], Arithmetic]

_NO_PHASE_MARKER: AbstractContextManager[None] = nullcontext()


def make_part_chooser(choose: ChooseArithmetic, part: str) -> ChooseArithmetic:
    """Returns a function that chooses the arithmetics of the layers inside a part of a model. It calls `choose` with
    names such as `part.layer`.
    """
    return lambda name: choose(f"{part}.{name}")


def number_layer_parts(choose: ChooseArithmetic, part: str, count: int) -> list[ChooseArithmetic]:
    """Returns one function for each of the equal parts `part.0`, `part.1` and so on. Each function chooses the
    arithmetics of the layers in its part, as that of `make_part_chooser` does.
    """
    return [make_part_chooser(choose, f"{part}.{number}") for number in range(count)]


def choose_cast_marker(arithmetic: Arithmetic, phase: Phases) -> AbstractContextManager[None]:
    return phase.cast if arithmetic.casts else _NO_PHASE_MARKER


def refuse_double_backward() -> None:
    """Raises UsageError if autograd records this backward pass, because a second derivative would silently miss these
    products.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UsageError(
            "a converted layer is differentiated twice (create_graph=True, as for a gradient penalty or forces), but "
            "its products have only a first derivative: exclude such layers with --skip"
        )


# A weight's two operands: one for the forward product, and a transposed one for the input gradient.
OperandPair = tuple[Operand, Operand]


class _LinearProduct(torch.autograd.Function):
    """Returns x (T, I) times the transposed weight (O, I). Its backward also marks the phases of casts and products,
    and autograd may run it on another thread.

    For backward it saves one orientation of each operand that a gradient needs: the transposed operand if forward has
    cast both orientations, and otherwise the operand of forward. If the arithmetic must cast the tensor again for its
    transpose, the tensor is saved as well.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        arithmetic: Arithmetic,
        phase: Phases,
        training: bool,
        operands: OperandPair | None,
    ) -> Tensor:
        # Cast transposes only for gradients that will be computed.
        needs_x_gradient, needs_weight_gradient = (training and needed for needed in ctx.needs_input_grad[:2])
        with choose_cast_marker(arithmetic, phase):
            a, a_transposed = _cast_operands(arithmetic, x, Role.INPUT, needs_weight_gradient)
            b, b_transposed = operands or _cast_operands(arithmetic, weight, Role.WEIGHT, needs_x_gradient)
        # Saved tensors count as memory of the step. So save low-precision codes, and the original tensors only if
        # backward must cast them again.
        ctx.save_for_backward(
            *_select_saved_tensors(arithmetic, a, a_transposed, x, needs_weight_gradient),
            *_select_saved_tensors(arithmetic, b, b_transposed, weight, needs_x_gradient),
        )
        ctx.input_is_transposed = a_transposed is not None
        ctx.weight_is_transposed = b_transposed is not None
        ctx.arithmetic = arithmetic
        ctx.phase = phase
        with phase.gemm:
            return arithmetic.product(a, b, arithmetic.carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        gradient = gradients[0]
        arithmetic = ctx.arithmetic
        phase = ctx.phase
        a_data, a_scale, x, b_data, b_scale, weight = ctx.saved_tensors
        needs_x_gradient, needs_weight_gradient = ctx.needs_input_grad[:2]
        # 1. Cast the gradient, and transpose the operands that forward has not transposed.
        with choose_cast_marker(arithmetic, phase):
            g, transposed_gradient = _cast_operands(arithmetic, gradient, Role.GRADIENT, needs_weight_gradient)
            b = Operand(b_data, b_scale)
            a = Operand(a_data, a_scale)
            if needs_x_gradient and not ctx.weight_is_transposed:
                b = arithmetic.turn(b, weight, Role.WEIGHT)
            if needs_weight_gradient and transposed_gradient is None:
                transposed_gradient = arithmetic.turn(g, gradient, Role.GRADIENT)
            if needs_weight_gradient and not ctx.input_is_transposed:
                a = arithmetic.turn(a, x, Role.INPUT)
        input_gradient = weight_gradient = None
        # 2. Compute each gradient that autograd asks for.
        if needs_x_gradient:
            with phase.gemm:
                input_gradient = arithmetic.product(g, b, arithmetic.carrier)
        if needs_weight_gradient:
            assert transposed_gradient is not None
            with phase.gemm:
                weight_gradient = arithmetic.product(transposed_gradient, a, arithmetic.carrier)
            # The master weight is fp32. Without this conversion autograd would convert the gradient outside of any
            # phase.
            with choose_cast_marker(arithmetic, phase):
                weight_gradient = weight_gradient.to(widen_dtype(arithmetic.carrier))
        return input_gradient, weight_gradient, None, None, None, None


def _cast_operands(arithmetic: Arithmetic, tensor: Tensor, role: Role, both: bool) -> tuple[Operand, Operand | None]:
    return arithmetic.cast_both(tensor, role) if both else (arithmetic.cast(tensor, role), None)


def _select_saved_tensors(
    arithmetic: Arithmetic, operand: Operand, transposed: Operand | None, source: Tensor, needed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if not needed:
        return None, None, None
    if transposed is not None:
        return transposed.data, transposed.scale, None
    return operand.data, operand.scale, source if arithmetic.keeps_source else None


def linear(
    x: Tensor, weight: Tensor, arithmetic: Arithmetic, phase: Phases, operands: OperandPair | None = None
) -> Tensor:
    """Returns x (..., I) times the transposed weight (O, I), as (..., O) in the arithmetic's carrier. If the weight was
    already cast, `operands` are the results of this cast.
    """
    rows = x.reshape(-1, x.shape[-1]).to(arithmetic.carrier)
    # Tell the Function whether gradients are recorded. It cannot see this itself, because weights require gradients
    # under no_grad too.
    records_gradients = torch.is_grad_enabled()
    y: Tensor = _LinearProduct.apply(rows, weight, arithmetic, phase, records_gradients, operands)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


# The attributes of a layer that determine how it multiplies. Convolutions lack `_library_forward`.
_MULTIPLIER_ATTRIBUTES = ("arithmetic", "operands", "_library_forward")


class Linear(nn.Module):
    """Computes y = x W^T without bias. If the layer has `operands`, they are used in place of W. Unit scaling
    (`unit_scaling`) casts W times `weight_factor`.

    If several layers share a `weight`, it keeps the values that the first layer has drawn.
    """

    unit_scaling: Callable[[Linear, Tensor, Phases], Tensor] | None = None
    weight_factor: float = 1.0

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
        self.operands: OperandPair | None = None
        if weight is None:
            weight = nn.Parameter(torch.empty(outputs, inputs))
            nn.init.normal_(weight, std=gain / math.sqrt(inputs))
        self.weight = weight
        self._library_forward = arithmetic.whole(self.weight)

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        if self._library_forward is not None:  # the library's layer contains its casts, so they count as `gemm`
            return region(phase.gemm, self._library_forward, x.to(self.arithmetic.carrier))
        if self.unit_scaling is not None:
            return self.unit_scaling(self, x, phase)
        return linear(x, self.weight, self.arithmetic, phase, self.operands)


def cast_once(model: nn.Module) -> None:
    """Casts the weights once for all later forward passes and frees the originals, as in serving."""
    for layer in model.modules():
        if (
            isinstance(layer, Linear)
            and layer.arithmetic.casts
            and layer._library_forward is None
            and layer.unit_scaling is None
        ):
            operand = layer.arithmetic.cast(layer.weight.detach(), Role.WEIGHT)
            layer.operands = operand, operand  # without gradients no product needs a transpose
            free_weight(layer.weight)


def free_weight(weight: nn.Parameter) -> None:
    """Frees a weight's memory but keeps its shape and dtype."""
    weight.data = weight.new_zeros(()).expand(weight.shape)  # all elements share one number


@contextmanager
def use_arithmetics(model: nn.Module, arithmetics: Mapping[str, Arithmetic]) -> Iterator[None]:
    """Makes the layers at the paths in `arithmetics` multiply in these arithmetics during the `with` block. Each of
    these layers then casts its own weight, also if the weight was cast once before.
    """
    original_attributes: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for path, arithmetic in arithmetics.items():
            layer = model.get_submodule(path)
            # Save and restore only the layer's own attributes, not those of its class.
            multiplier_attributes = {name: vars(layer)[name] for name in _MULTIPLIER_ATTRIBUTES if name in vars(layer)}
            original_attributes.append((layer, multiplier_attributes))
            # Without `operands`, the layer casts its weight again.
            vars(layer).update(dict.fromkeys(multiplier_attributes), arithmetic=arithmetic)
        yield
    finally:
        for layer, multiplier_attributes in original_attributes:
            vars(layer).update(multiplier_attributes)


class _GroupedProduct(torch.autograd.Function):
    """Multiplies each group of rows of x (T, I) by its transposed weight (O, I). Its backward also marks the phases of
    casts and products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        arithmetic: Arithmetic,
        phase: Phases,
        sizes: Sequence[int],
        ends: Tensor,
        operands: Sequence[OperandPair | None],
        *weights: Tensor,
    ) -> Tensor:
        with choose_cast_marker(arithmetic, phase):
            # All experts' weights form one stacked operand, but each weight has its own scales.
            a = arithmetic.cast(x, Role.INPUT)
            operand_pairs = [
                pair or cast_weight_both_ways(arithmetic, weight)
                for pair, weight in zip(operands, weights, strict=True)
            ]
            b = stack_operands([operand for operand, _ in operand_pairs])
        # Transpose now, because the weights may change before the backward pass.
        transposed_tensors: list[Tensor | None] = []
        for _, operand in operand_pairs:
            transposed_tensors += (operand.data, operand.scale)
        source = x if arithmetic.keeps_source else a.data
        ctx.save_for_backward(source, ends, *transposed_tensors)
        ctx.arithmetic = arithmetic
        ctx.phase = phase
        ctx.sizes = sizes
        with phase.gemm:
            return arithmetic.multiply_groups(a, b, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        arithmetic = ctx.arithmetic
        phase = ctx.phase
        (gradient,) = gradients
        source, ends, *transposed = ctx.saved_tensors
        cast_phase_marker = choose_cast_marker(arithmetic, phase)
        with cast_phase_marker:
            g = arithmetic.cast(gradient, Role.GRADIENT)
            b = stack_operands([Operand(*pair) for pair in zip(transposed[::2], transposed[1::2], strict=True)])
            transposed_gradient = transpose_row_groups(arithmetic, g, gradient, Role.GRADIENT, ctx.sizes)
            transposed_input = transpose_row_groups(arithmetic, Operand(source), source, Role.INPUT, ctx.sizes)
        with phase.gemm:
            input_gradient = arithmetic.multiply_groups(g, b, ends)
            weight_gradients = arithmetic.multiply_groups(transposed_gradient, transposed_input, ends)
        with cast_phase_marker:  # otherwise autograd would convert the gradients to fp32 outside of any phase
            widened_weight_gradients = weight_gradients.to(widen_dtype(arithmetic.carrier))
        return input_gradient, None, None, None, None, None, *widened_weight_gradients.unbind()


def grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    sizes: Sequence[int],
    ends: Tensor,
    arithmetic: Arithmetic,
    phase: Phases,
    operands: Sequence[OperandPair | None],
) -> Tensor:
    """Multiplies groups of rows of x (T, I) by transposed weights (O, I), which gives (T, O). The first sizes[0] rows
    are multiplied by the first weight, and so on.

    `ends` (int32 on the device) has the row at which each group ends. I and O must be multiples of `arithmetic.groups`,
    and the rows of each group a multiple of `arithmetic.part_rows` (for plain products, of `arithmetic.groups`).
    `operands[i]` are the operands of weight i if it was already cast, otherwise None.
    """
    return _GroupedProduct.apply(x.to(arithmetic.carrier), arithmetic, phase, sizes, ends, operands, *weights)  # type: ignore[no-untyped-call]


def cast_weight_both_ways(arithmetic: Arithmetic, weight: Tensor, amax: Tensor | None = None) -> OperandPair:
    operand, transposed = arithmetic.cast_both(weight, Role.WEIGHT, amax)
    return operand, transposed or arithmetic.turn(operand, weight, Role.WEIGHT)


def stack_operands(operands: Sequence[Operand]) -> Operand:
    scales = [operand.scale for operand in operands if operand.scale is not None]
    return Operand(torch.stack([operand.data for operand in operands]), torch.stack(scales) if scales else None)


def transpose_row_groups(
    arithmetic: Arithmetic, operand: Operand, source: Tensor, role: Role, sizes: Sequence[int]
) -> Operand:
    """Transposes each group of rows separately, and joins the results to a matrix (columns, rows of all groups). The
    scales of all groups are concatenated.
    """
    if not arithmetic.keeps_source:
        return arithmetic.turn(operand, source, role)
    transposed_parts = [arithmetic.turn(operand, part, role) for part in torch.split_with_sizes(source, list(sizes))]
    scales = [part.scale for part in transposed_parts if part.scale is not None]
    joined_codes = torch.cat([part.data for part in transposed_parts], dim=1)
    return Operand(joined_codes, torch.cat(scales) if scales else None, role is Role.GRADIENT)
