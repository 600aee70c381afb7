"""What stands around a model's products, in a precision of its own: embeddings, norms, logits, the residual stream.

In a precision that is a dtype of torch's, weights and inputs are converted and torch computes in it: a norm in fp16 is
torch's own layer of fp16. In any other one, weights and inputs are rounded by its cast, as operands of products are,
and what is computed of them is computed in float32; gradients that leave are rounded as gradients. Nobody marks these
casts: they count as what they stand in.
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
        return restored(x, arithmetic, role)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return restored(gradients[0], ctx.arithmetic, Role.GRADIENT), None, None


def restored(x: Tensor, arithmetic: Arithmetic, role: Role) -> Tensor:
    """The values that a cast leaves of a tensor, in its own dtype."""
    flat = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    y = arithmetic.restore(arithmetic.cast(flat, role), x.dtype).view(x.shape)
    return y if x.is_contiguous() else torch.empty_like(x).copy_(y)  # an image goes on as it lay


def held(x: Tensor, arithmetic: Arithmetic | None, role: Role = Role.INPUT) -> Tensor:
    """A tensor as that arithmetic has it: in its dtype, or rounded in the tensor's own; without one as it is."""
    if arithmetic is None:
        return x
    if arithmetic.plain:
        return x.to(arithmetic.carrier)
    rounded: Tensor = _Rounded.apply(x, arithmetic, role)  # type: ignore[no-untyped-call]
    return rounded


def streamed(x: Tensor, carrier: torch.dtype, residual: Arithmetic | None) -> Tensor:
    """The beginning of a residual stream: in the model's carrier, or as the stream's own arithmetic has it."""
    return x.to(carrier) if residual is None else held(x.to(residual.carrier), residual)


@torch.no_grad()
def take_around(model: Any, chosen: Mapping[str, Arithmetic]) -> None:
    """Have parts of a model in arithmetics, by name: norms by their path, and what the model, and models in it, have
    in their `around`."""
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
            setattr(norm, word, held(statistic, arithmetic))


def stood_around(module: nn.Module, arithmetic: Arithmetic) -> Callable[..., Any]:
    """The forward pass of an embedding or a norm of anybody's, in an arithmetic; it gives what it gave before."""
    own = copy.copy(module)  # with the same tensors, and its own forward pass, whatever takes the place of the other's

    def forward(x: Tensor, *more: Any, **named: Any) -> Any:
        own.training = module.training
        kept = {
            word: held(parameter, arithmetic, Role.WEIGHT) for word, parameter in module.named_parameters(recurse=False)
        }
        statistics = {
            word: tensor for word, tensor in module.named_buffers(recurse=False) if tensor.is_floating_point()
        }
        kept |= {word: held(tensor, arithmetic).clone() for word, tensor in statistics.items()}
        given = held(x, arithmetic) if x.is_floating_point() else x
        y = torch.func.functional_call(own, kept, (given, *more), named)
        with torch.no_grad():
            for word, statistic in statistics.items() if own.training else ():
                statistic.copy_(held(kept[word], arithmetic))
        dtype = x.dtype if x.is_floating_point() else next(module.parameters()).dtype
        return y.to(dtype) if isinstance(y, Tensor) else y

    return forward


def rounded_behind(module: nn.Module, arithmetic: Arithmetic) -> Callable[..., Any]:
    """The forward pass of a head as it is by now, whose logits are rounded."""
    before = module.forward

    def forward(*given: Any, **named: Any) -> Any:
        y = before(*given, **named)
        return held(y, arithmetic).to(y.dtype)

    return forward
