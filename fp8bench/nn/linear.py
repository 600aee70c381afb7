"""Products and phase regions that mark their own backward, and the linear layer made of them.

A linear layer's three products run in a chosen arithmetic, its casts and products under their phases. Forward contracts
inputs and weights over the input features, the input gradient contracts gradients and weights over the output features,
the weight gradient contracts gradients and inputs over the tokens. Each operand is cast along the dimension of its
product. The master weight stays fp32. It is cast in every forward, as autocast does, unless its layer has been given
operands of it.

A region is a phase around operators that torch differentiates itself. Identity Functions stand before and after it: the
one after it fires first in backward and opens the phase, the one before it closes it. If no input needs a gradient the
closing one would never fire, so that is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.protocols import Arithmetic, Operand, Phases, Role

Marker = AbstractContextManager[None]


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marker: Marker, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.marker = marker
        marker.__enter__()
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.marker.__exit__(None, None, None)
        return (None, *gradients)


class _After(torch.autograd.Function):
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
    """function(*tensors, **options) under `marker`, its backward included.

    A null context marks nothing; in a graph that is being compiled no marker reaches the backward pass.
    """
    if torch.compiler.is_compiling() or isinstance(marker, nullcontext) or not torch.is_grad_enabled():
        with marker:
            return function(*tensors, **options)
    if not all(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "a phase region was given a tensor that needs no gradient: its backward marker would never fire. Pass "
            "such tensors as options, or run the region under torch.no_grad()."
        )
    inside = _Before.apply(marker, *tensors)  # type: ignore[no-untyped-call]
    result: Tensor = _After.apply(marker, function(*inside, **options))  # type: ignore[no-untyped-call]
    return result


# Gives each layer of a model its arithmetic, by its name.
Choose = Callable[[str], Arithmetic]

_NOTHING: AbstractContextManager[None] = nullcontext()


def within(choose: Choose, part: str) -> Choose:
    """The same for the layers of a part, which know their names within it."""
    return lambda name: choose(f"{part}.{name}")


def casting_of(arithmetic: Arithmetic, phase: Phases) -> AbstractContextManager[None]:
    """The CAST marker, or nothing where a cast changes nothing."""
    return phase.cast if arithmetic.casts else _NOTHING


# A weight's operands in both orientations.
Both = tuple[Operand, Operand]


class _Product(torch.autograd.Function):
    """x (T, I) times w (O, I) transposed, marking its own backward: autograd may run it on another thread.

    For backward one orientation of each operand is kept: the turned one where it was made with the other, else the
    one of forward, with its source where the arithmetic has to cast that again. What no gradient needs is not kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, arithmetic: Arithmetic, phase: Phases, training: bool, given: Both | None
    ) -> Tensor:
        for_x, for_weight = (training and needed for needed in ctx.needs_input_grad[:2])
        with casting_of(arithmetic, phase):
            a, a_turned = _operands(arithmetic, x, Role.INPUT, for_weight)
            b, b_turned = given or _operands(arithmetic, weight, Role.WEIGHT, for_x)
        ctx.save_for_backward(
            *_kept(arithmetic, a, a_turned, x, for_weight), *_kept(arithmetic, b, b_turned, weight, for_x)
        )
        ctx.input_is_turned, ctx.weight_is_turned = a_turned is not None, b_turned is not None
        ctx.arithmetic, ctx.phase = arithmetic, phase
        with phase.gemm:
            return arithmetic.product(a, b, arithmetic.carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0]
        arithmetic, phase = ctx.arithmetic, ctx.phase
        a_data, a_scale, x, b_data, b_scale, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad[:2]
        with casting_of(arithmetic, phase):
            g, g_turned = _operands(arithmetic, gradient, Role.GRADIENT, for_weight)
            b, a = Operand(b_data, b_scale), Operand(a_data, a_scale)
            if for_x and not ctx.weight_is_turned:
                b = arithmetic.turn(b, weight, Role.WEIGHT)
            if for_weight and g_turned is None:
                g_turned = arithmetic.turn(g, gradient, Role.GRADIENT)
            if for_weight and not ctx.input_is_turned:
                a = arithmetic.turn(a, x, Role.INPUT)
        input_gradient = weight_gradient = None
        if for_x:
            with phase.gemm:
                input_gradient = arithmetic.product(g, b, arithmetic.carrier)
        if for_weight:
            assert g_turned is not None
            with phase.gemm:
                weight_gradient = arithmetic.product(g_turned, a, arithmetic.carrier)
            with casting_of(arithmetic, phase):  # the master weight is fp32, and autograd would convert outside phases
                weight_gradient = weight_gradient.to(torch.promote_types(arithmetic.carrier, torch.float32))
        return input_gradient, weight_gradient, None, None, None, None


def _operands(arithmetic: Arithmetic, tensor: Tensor, role: Role, both: bool) -> tuple[Operand, Operand | None]:
    return arithmetic.cast_both(tensor, role) if both else (arithmetic.cast(tensor, role), None)


def _kept(
    arithmetic: Arithmetic, operand: Operand, turned: Operand | None, source: Tensor, needed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """An operand's data and scale and its source, as far as backward needs them."""
    if not needed:
        return None, None, None
    if turned is not None:
        return turned.data, turned.scale, None
    return operand.data, operand.scale, source if arithmetic.keeps_source else None


def linear(x: Tensor, weight: Tensor, arithmetic: Arithmetic, phase: Phases, operands: Both | None = None) -> Tensor:
    """x (..., I) times w (O, I) transposed: (..., O) in the arithmetic's carrier, with gradients.

    `operands` are the weight's, if it was cast already.
    """
    flat = x.reshape(-1, x.shape[-1]).to(arithmetic.carrier)
    training = torch.is_grad_enabled()  # inside a Function nobody knows: weights need gradients under no_grad, too
    y: Tensor = _Product.apply(flat, weight, arithmetic, phase, training, operands)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


# What a layer multiplies by. A convolution has an arithmetic alone.
_OF_A_LAYER = ("arithmetic", "operands", "_whole")


class Linear(nn.Module):
    """y = x W^T without bias, in an arithmetic; by `operands` of W while there are some."""

    def __init__(self, inputs: int, outputs: int, arithmetic: Arithmetic, gain: float = 1.0) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.operands: Both | None = None
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        nn.init.normal_(self.weight, std=gain / math.sqrt(inputs))
        self._whole = arithmetic.whole(self.weight)

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        if self._whole is not None:  # its casts are within, where no phase can be opened for them
            return region(phase.gemm, self._whole, x.to(self.arithmetic.carrier))
        return linear(x, self.weight, self.arithmetic, phase, self.operands)


@contextmanager
def multiplied_by(model: nn.Module, arithmetics: Mapping[str, Arithmetic]) -> Iterator[None]:
    """Have layers of a model, by their path in it, multiply in other arithmetics; each casts its own weight."""
    layers = [model.get_submodule(name) for name in arithmetics]
    before = [{name: vars(layer)[name] for name in _OF_A_LAYER if name in vars(layer)} for layer in layers]
    try:
        for layer, own, arithmetic in zip(layers, before, arithmetics.values(), strict=True):
            vars(layer).update(dict.fromkeys(own), arithmetic=arithmetic)
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            vars(layer).update(own)
