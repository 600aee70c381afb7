"""A phase around operators that torch differentiates itself, in forward and in backward.

Identity Functions stand before and after the region: the one after it fires first in backward and opens the phase,
the one before it closes it. If no input needs a gradient the closing one would never fire, so that is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

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
    """function(*tensors, **options) under `marker`, its backward included; a null context marks nothing."""
    if isinstance(marker, nullcontext) or not torch.is_grad_enabled():
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
