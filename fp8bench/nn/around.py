"""Precisions for the layers around a model's products: embeddings, norms, logits, the residual stream.

A precision that is one of torch's dtypes converts weights and inputs, and torch computes in it: a norm in fp16 is
torch's own layer of fp16. Any other rounds weights and inputs by its cast, as operands of products are, and computes in
float32; gradients that leave are rounded as gradients. These casts have no separate phase: their time counts to the
phase that they run in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.protocols import Arithmetic, Role


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, arithmetic: Arithmetic, role: Role) -> Tensor:
        ctx.arithmetic = arithmetic
        return round_values(x, arithmetic, role)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return round_values(gradients[0], ctx.arithmetic, Role.GRADIENT), None, None


def round_values(x: Tensor, arithmetic: Arithmetic, role: Role) -> Tensor:
    """The values that a cast leaves of a tensor, in the tensor's dtype."""
    flat = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    y = arithmetic.restore(arithmetic.cast(flat, role), x.dtype).view(x.shape)
    return y if x.is_contiguous() else torch.empty_like(x).copy_(y)  # an image keeps its strides


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or fp32 where that is wider."""
    return torch.promote_types(dtype, torch.float32)


def cast_to(x: Tensor, arithmetic: Arithmetic | None, role: Role = Role.INPUT) -> Tensor:
    """`x` as the arithmetic represents it: in its dtype, or rounded in x's own; unchanged without an arithmetic."""
    if arithmetic is None:
        return x
    if arithmetic.plain:
        return x.to(arithmetic.carrier)
    return _Rounded.apply(x, arithmetic, role)  # type: ignore[no-untyped-call]


def start_stream(x: Tensor, carrier: torch.dtype, residual: Arithmetic | None) -> Tensor:
    """Starts a residual stream: in the model's carrier, or rounded to the stream's own arithmetic."""
    return x.to(carrier) if residual is None else cast_to(x.to(residual.carrier), residual)


@torch.no_grad()
def set_around(model: Any, chosen: Mapping[str, Arithmetic]) -> None:
    """Sets arithmetics of parts of a model, by name: the path of a norm, or a key in the `around` of some module."""
    for name, arithmetic in chosen.items():
        holders = [part for part in model.modules() if name in getattr(part, "around", ())]
        for part in holders:
            part.around = {**part.around, name: arithmetic}
        for part in model.modules() if name == "residual" else ():
            if hasattr(part, "residual"):
                part.residual = arithmetic
        if holders:
            continue
        norm: Any = model.get_submodule(name)
        norm.arithmetic = arithmetic
        for word, statistic in norm.named_buffers():  # a batch norm's
            setattr(norm, word, cast_to(statistic, arithmetic))


def rounded_forward(module: nn.Module, arithmetic: Arithmetic) -> Callable[..., Any]:
    """A forward pass for any embedding or norm that computes in an arithmetic and returns the usual dtype."""
    shared = copy.copy(module)  # shares the tensors, and keeps its forward pass when the module's is replaced

    def forward(x: Tensor, *more_inputs: Any, **named: Any) -> Any:
        shared.training = module.training
        # The parameters are cast on every pass, because an optimizer may have changed them.
        tensors = {
            word: cast_to(parameter, arithmetic, Role.WEIGHT)
            for word, parameter in module.named_parameters(recurse=False)
        }
        statistics = {
            word: tensor for word, tensor in module.named_buffers(recurse=False) if tensor.is_floating_point()
        }
        # Clones, because norms write their running statistics in place.
        tensors |= {word: cast_to(tensor, arithmetic).clone() for word, tensor in statistics.items()}
        inputs = cast_to(x, arithmetic) if x.is_floating_point() else x
        y = torch.func.functional_call(shared, tensors, (inputs, *more_inputs), named)
        # Statistics that the pass wrote go back into the module, rounded like the stored ones.
        with torch.no_grad():
            for word, statistic in statistics.items() if shared.training else ():
                statistic.copy_(cast_to(tensors[word], arithmetic))
        dtype = x.dtype if x.is_floating_point() else next(module.parameters()).dtype
        return y.to(dtype) if isinstance(y, Tensor) else y

    return forward


def rounded_head(module: nn.Module, arithmetic: Arithmetic) -> Callable[..., Any]:
    usual_forward = module.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        y = usual_forward(*inputs, **named)
        return cast_to(y, arithmetic).to(y.dtype)

    return forward
