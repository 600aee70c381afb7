"""One product for many weights, each with rows of its own: that of a block's experts, with its gradients.

Operands are those that each weight would have by itself, cast as `linear` casts them: rows of inputs and gradients in
one call, since each has a scale of its own or none has one; weights, and what is turned, one by one. For the weight
gradient codes of all parts lie beside each other along the contraction, which ends with each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8bench.nn.linear import Both, casting_of
from fp8bench.protocols import Arithmetic, Operand, Phases, Role


class _Product(torch.autograd.Function):
    """Parts of x (T, I) times their weights (O, I) transposed, marking its own backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, arithmetic: Arithmetic, phase: Phases, sizes: Sequence[int], ends: Tensor,
        given: Sequence[Both | None], *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        with casting_of(arithmetic, phase):
            a = arithmetic.cast(x, Role.INPUT)
            both = [one or _both(arithmetic, weight) for one, weight in zip(given, weights, strict=True)]
            b = beside([operand for operand, _ in both])
        turned = [operand for _, operand in both]
        kept = x if arithmetic.keeps_source else a.data
        ctx.save_for_backward(kept, ends, *(part for one in turned for part in (one.data, one.scale)))
        ctx.arithmetic, ctx.phase, ctx.sizes = arithmetic, phase, sizes
        with phase.gemm:
            return arithmetic.grouped(a, b, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        arithmetic, phase, (gradient,) = ctx.arithmetic, ctx.phase, gradients
        kept, ends, *turned = ctx.saved_tensors
        casting = casting_of(arithmetic, phase)
        with casting:
            g = arithmetic.cast(gradient, Role.GRADIENT)
            b = beside([Operand(*pair) for pair in zip(turned[::2], turned[1::2], strict=True)])
            g_turned = turned_parts(arithmetic, g, gradient, Role.GRADIENT, ctx.sizes)
            a_turned = turned_parts(arithmetic, Operand(kept), kept, Role.INPUT, ctx.sizes)
        with phase.gemm:
            input_gradient = arithmetic.grouped(g, b, ends)
            weight_gradients = arithmetic.grouped(g_turned, a_turned, ends)
        with casting:  # master weights are fp32, and autograd would convert outside phases
            wide = weight_gradients.to(torch.promote_types(arithmetic.carrier, torch.float32))
        return input_gradient, None, None, None, None, None, *wide.unbind()


def grouped_linear(
    x: Tensor, weights: Sequence[Tensor], sizes: Sequence[int], ends: Tensor, arithmetic: Arithmetic, phase: Phases,
    given: Sequence[Both | None],
) -> Tensor:  # fmt: skip
    """x (T, I), its first sizes[0] rows times the first of the weights (O, I) transposed, and so on: (T, O).

    `ends` are the rows at which parts end, int32 on the device; sides and parts come in multiples of what the
    arithmetic `groups` by. `given` are operands of weights that were cast already.
    """
    found: Tensor = _Product.apply(x.to(arithmetic.carrier), arithmetic, phase, sizes, ends, given, *weights)  # type: ignore[no-untyped-call]
    return found


def _both(arithmetic: Arithmetic, weight: Tensor) -> Both:
    operand, turned = arithmetic.cast_both(weight, Role.WEIGHT)
    return operand, turned or arithmetic.turn(operand, weight, Role.WEIGHT)


def beside(operands: Sequence[Operand]) -> Operand:
    """Those of all weights as one: (weights, rows, columns), with as many scales."""
    scales = [one.scale for one in operands if one.scale is not None]
    return Operand(torch.stack([one.data for one in operands]), torch.stack(scales) if scales else None)


def turned_parts(arithmetic: Arithmetic, operand: Operand, source: Tensor, role: Role, sizes: Sequence[int]) -> Operand:
    """Every part turned by itself, along each other: (columns, rows of all parts), the scales part after part."""
    if not arithmetic.keeps_source:
        return arithmetic.turn(operand, source, role)
    parts = [arithmetic.turn(operand, part, role) for part in torch.split_with_sizes(source, list(sizes))]
    scales = [one.scale for one in parts if one.scale is not None]
    data = torch.cat([one.data for one in parts], dim=1)
    return Operand(data, torch.cat(scales) if scales else None, role is Role.GRADIENT)
