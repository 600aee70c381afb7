"""Random Hadamard transforms of 16 elements, which spread outliers over their neighbours before they are quantised.

Both operands of a product are rotated along its contraction by the same orthogonal matrix, which leaves the product as
it is. The rotation's sums are made in float64, whatever a device or a switch for TF32 would do to float32 ones, and
rounded once: the same on every device.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8bench.formats.quantise import check_input
from fp8bench.formats.random_bits import RANDOM_BITS, random_bits

SIZE = 16
_RUNS = 1 << 12
"""Runs of 16 that a processor works on at a time, so that their float64 copy stays in its cache."""


def rotated(x: Tensor, seed: int) -> Tensor:
    """`x` with every 16 elements of its last dimension rotated by the matrix of that seed, float32.

    The last dimension comes out as a multiple of 16: an end is filled with zeros first, and what is then there must
    stay for a product to be the same. Infinities and NaN make NaN of the 16 they are among.
    """
    check_input(x)
    if not x.dim():
        raise ValueError("a tensor without dimensions has none that could be rotated")
    return _times(pad(x.detach(), (0, -x.shape[-1] % SIZE)), _matrix(seed, x.device))


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    runs = x.reshape(x.numel() // SIZE, SIZE)
    result = torch.empty(runs.shape, dtype=torch.float32, device=x.device)
    piece = _RUNS if x.device.type == "cpu" else max(len(runs), 1)
    for source, target in zip(torch.split(runs, piece), torch.split(result, piece), strict=True):
        target.copy_(source.to(torch.float64) @ matrix)
    return result.view(x.shape)


@lru_cache(maxsize=1024)
def _matrix(seed: int, device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix of 16, a quarter of it so that it is orthogonal, its rows with random signs."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < SIZE:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    negative = random_bits((SIZE, 1), torch.tensor([seed])) >= 1 << (RANDOM_BITS - 1)
    return torch.where(negative, -matrix, matrix).div(SIZE**0.5).to(device)
