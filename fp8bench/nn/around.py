"""Applies precisions to the layers around a model's products: embeddings, norms, logits and the residual stream.

A precision that is one of torch's dtypes converts weights and inputs, and torch computes in that dtype. Any other
precision rounds weights and inputs by its cast, computes in float32, and rounds the gradients that leave the layer.
These casts have no separate phase: their time counts in the phase that they run in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.protocols import Arithmetic, Role


class _RoundedTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, arithmetic: Arithmetic, role: Role) -> Tensor:
        ctx.arithmetic = arithmetic
        return round_values(x, arithmetic, role)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return round_values(gradients[0], ctx.arithmetic, Role.GRADIENT), None, None


def round_values(x: Tensor, arithmetic: Arithmetic, role: Role) -> Tensor:
    """Rounds a tensor by an arithmetic's cast and returns the rounded values in the tensor's dtype."""
    rows = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    y = arithmetic.restore(arithmetic.cast(rows, role), x.dtype).view(x.shape)
    return y if x.is_contiguous() else torch.empty_like(x).copy_(y)  # keep the strides of channels-last images


def widen_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype, or float32 if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def cast_to(x: Tensor, arithmetic: Arithmetic | None, role: Role = Role.INPUT) -> Tensor:
    """Converts `x` to a plain arithmetic's dtype. Another arithmetic rounds `x` and keeps its dtype; None changes
    nothing.
    """
    if arithmetic is None:
        return x
    if arithmetic.plain:
        return x.to(arithmetic.carrier)
    return _RoundedTensor.apply(x, arithmetic, role)  # type: ignore[no-untyped-call]


def start_stream(x: Tensor, carrier: torch.dtype, residual: Arithmetic | None) -> Tensor:
    """Returns `x` as the start of a residual stream: in the dtype `carrier`, or rounded by the arithmetic `residual` if
    there is one.
    """
    return x.to(carrier) if residual is None else cast_to(x.to(residual.carrier), residual)


@torch.no_grad()
def set_surrounding_arithmetics(model: Any, arithmetics: Mapping[str, Arithmetic]) -> None:
    """Sets the arithmetics of layers without products: norms, embeddings, logits and the residual stream. `arithmetics`
    maps a layer's name to its arithmetic. The name is the path of a norm, or a key in the `around` dictionary of one of
    the model's modules.
    """
    for name, arithmetic in arithmetics.items():
        modules = [part for part in model.modules() if name in getattr(part, "around", ())]
        for part in modules:
            part.around = {**part.around, name: arithmetic}
        for part in model.modules() if name == "residual" else ():
            if hasattr(part, "residual_arithmetic"):
                part.residual_arithmetic = arithmetic
        if modules:
            continue
        norm: Any = model.get_submodule(name)
        norm.arithmetic = arithmetic
        for buffer_name, statistic in norm.named_buffers():  # the buffers of a batch norm are its running statistics
            setattr(norm, buffer_name, cast_to(statistic, arithmetic))


def make_rounded_forward(module: nn.Module, arithmetic: Arithmetic) -> Callable[..., Any]:
    """Returns a forward pass for an embedding or a norm that computes in an arithmetic. Its result has the input's
    dtype, or the parameters' dtype if the input is not floating-point.
    """
    # The copy shares the module's tensors, and keeps the module's original forward pass when that is replaced.
    module_copy = copy.copy(module)

    def forward(x: Tensor, *more_inputs: Any, **named: Any) -> Any:
        module_copy.training = module.training  # it may have changed since the copy
        # Parameters are cast in every pass, because an optimizer may have changed them.
        cast_tensors = {
            tensor_name: cast_to(parameter, arithmetic, Role.WEIGHT)
            for tensor_name, parameter in module.named_parameters(recurse=False)
        }
        statistics = {
            tensor_name: tensor
            for tensor_name, tensor in module.named_buffers(recurse=False)
            if tensor.is_floating_point()
        }
        # Clone the statistics, because norms write them in place.
        cast_tensors |= {tensor_name: cast_to(tensor, arithmetic).clone() for tensor_name, tensor in statistics.items()}
        inputs = cast_to(x, arithmetic) if x.is_floating_point() else x
        y = torch.func.functional_call(module_copy, cast_tensors, (inputs, *more_inputs), named)
        # Copy the new statistics back into the module, rounded like the stored ones.
        with torch.no_grad():
            for tensor_name, statistic in statistics.items() if module_copy.training else ():
                statistic.copy_(cast_to(cast_tensors[tensor_name], arithmetic))
        dtype = x.dtype if x.is_floating_point() else next(module.parameters()).dtype
        return y.to(dtype) if isinstance(y, Tensor) else y

    return forward


def make_rounded_head_forward(module: nn.Module, arithmetic: Arithmetic) -> Callable[..., Any]:
    original_forward = module.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        y = original_forward(*inputs, **named)
        return cast_to(y, arithmetic).to(y.dtype)

    return forward
