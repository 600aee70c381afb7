"""Some numbers of what ranks send each other, held against what arrived: rounded by the definition, and not by the
programs that send them."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8bench.numerics.fp8_reduce import E4M3, largest_scale

# So many numbers of each tensor are looked at.
_SAMPLED = 64
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Of the sum of magnitudes, what additions in other orders may come to, for each rank.
_ROUNDING = {"fp32": 2.0**-20, "bf16": 2.0**-7}


def sampled(tensor: Tensor, turn: int) -> Tensor:
    """Its largest magnitude, and some of its numbers, others every turn."""
    own = tensor.detach().flatten().to(torch.float32)
    stride = max(1, len(own) // _SAMPLED)
    places = (torch.arange(_SAMPLED, device=own.device) * stride + turn) % len(own)
    return torch.cat((own.abs().amax().view(1), own[places]))


def alike(tensor: Tensor, other: Tensor) -> Tensor:
    return (tensor == other) | (tensor.isnan() & other.isnan())


def as_sent(numbers: Tensor, amax: Tensor, wire: str) -> Tensor:
    """Of tensors with these largest magnitudes."""
    if wire != "fp8":
        return numbers.to(_DTYPES[wire]).to(torch.float32)
    scale = largest_scale(amax)
    return E4M3().decode(E4M3().encode(numbers * scale)) / scale


def mean_as_sent(numbers: Tensor, amax: Tensor, wire: str) -> Tensor:
    """Of (ranks, ...) under one scale, added up in the order of ranks."""
    total = torch.zeros_like(numbers[0])
    for number in numbers:
        total += as_sent(number, amax, wire)
    return total / len(numbers)


def wrong_means(got: Tensor, numbers: Tensor, amax: Tensor, wire: str) -> Tensor:
    """Which are not that mean: in FP8 to the bit, else but for rounding."""
    mean = mean_as_sent(numbers, amax, wire)
    if wire == "fp8":
        return ~alike(got, mean)
    apart = (got - mean).abs()
    return apart.isfinite() & (apart > _ROUNDING[wire] * numbers.abs().sum(0))
