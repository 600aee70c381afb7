"""What operands are made of, by the axis of every suite that draws its own: the one place that draws them.

What multipliers are fed with changes how many of their wires switch: a GPU at its power limit keeps a higher clock on
constants than on random numbers. No torch at the top: plans read this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fp8bench.model import Scalar
from fp8bench.protocols.axes import VALUES

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Integers that every format has, FP4's elements too.
_LARGEST_INTEGER = 4
_CONSTANT = ("ones", "zeros")


def drawn(
    params: Mapping[str, Scalar], shape: Sequence[int], generator: torch.Generator | None = None, device: str = ""
) -> Tensor:
    """float32 values of a case's kind; without a generator from torch's own random state, on its default device."""
    import torch

    kind, empty = VALUES.of(params), torch.empty(tuple(shape), device=device or None, dtype=torch.float32)
    if kind == "normal":
        return empty.normal_(generator=generator)
    if kind == "uniform":
        return empty.uniform_(-1, 1, generator=generator)
    if kind == "integers":
        return empty.random_(-_LARGEST_INTEGER, _LARGEST_INTEGER + 1, generator=generator)
    return empty.fill_(float(kind == "ones"))


def refill(layer: nn.Module, params: Mapping[str, Scalar]) -> None:
    """A layer's weights made of a case's kind of values, as large as they were; what are no matrices stay."""
    import torch

    if VALUES.of(params) == "normal":
        return
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.dim() > 1:
                size = weight.square().mean().sqrt()
                weight.copy_(drawn(params, weight.shape) * size)


def why_no_errors(params: Mapping[str, Scalar]) -> str:
    """Why a case has no numerical errors: of zeros every ratio is 0 over 0, and ones are on every grid."""
    kind = VALUES.of(params)
    return f"values={kind} are constant, so that a relative error would say nothing" if kind in _CONSTANT else ""
