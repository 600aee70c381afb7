"""What torch wraps for its compiler, without the wrapping: the first call of each would import the compiler, 1.4 s of a
processor and 75 MB in every process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

_WRAPPED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


@cache
def eager(optimizer: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """One of torch's optimizers, to the bit, whose steps nobody compiles. It keeps its name, which traces show."""
    own: dict[str, Any] = {name: unwrap(getattr(optimizer, name)) for name in ("step", *_WRAPPED)}
    return type(optimizer.__name__, (optimizer,), {**own, "step": torch.no_grad()(own["step"])})


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            # Whose gradient is this one, to the bit; torch looks through a gradient that it is given, by sympy. So
            # parameters that `run` holds get theirs.
            (ctx.run(*inputs) * gradient.detach()).sum().backward()
        return None, *(leaf.grad for leaf in inputs)


def recomputed(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`run` of tensors, of which nothing is kept for backward but these: it is run again there.

    For references, which nobody times; steps that are timed take torch's own checkpoints. Nothing in `run` is random.
    """
    made: Tensor = _Recomputed.apply(run, *inputs)  # type: ignore[no-untyped-call]
    return made
