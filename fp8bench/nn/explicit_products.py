"""Products that are more than their operands' values: rotated operands, and sums kept in few bits.

Random Hadamard transforms of 16 elements spread outliers over their neighbours before they are quantised. Both operands
of a product are rotated along its contraction by the same orthogonal matrix, which leaves the product as it is. The
rotation's sums are made in float64, whatever a device or a switch for TF32 would do to float32 ones, and rounded once:
the same on every device.

Short products are summed as Hopper's FP8 units sum them: as they come, or promoted to float32 now and then. A model,
exact by its own definition and tested against one that adds number by number. An instruction contracts 32 elements:
their products and the sum so far are added exactly, and of the result 14 significant bits are kept, the rest is cut
off. The order within an instruction and what its alignment loses are not modelled.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8bench.formats.quantise import check_input
from fp8bench.formats.random_bits import RANDOM_BITS, random_bits
from fp8bench.formats.recipes import Accumulator

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


INSTRUCTION = 32
PROMOTION = 128
SIGNIFICANT_BITS = 14

_DOUBLE_BITS = 53
_KEPT = -(1 << (_DOUBLE_BITS - SIGNIFICANT_BITS))


def short_product(a: Tensor, b: Tensor, accumulator: Accumulator) -> Tensor:
    """Values a (M, K) times b (N, K) transposed, in float32.

    SHORT sums all of K so. PROMOTED adds the sum of every 128 elements of K to a float32 one and begins again at 0.
    Inside an instruction float64 takes the place of exact sums: of FP8 values they have no more than 53 bits.
    """
    found: Tensor = _summed(a, b, accumulator is Accumulator.PROMOTED)
    return found


# An operator, so that a compiled graph need not unroll what is a loop over all of K.
@torch.library.custom_op("fp8bench::short_product", mutates_args=())
def _summed(a: Tensor, b: Tensor, promoted: bool) -> Tensor:
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    length = PROMOTION if promoted else max(a.shape[1], 1)
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], length):
        stretch = slice(start, start + length)
        total += _short_sum(wide_a[:, stretch], wide_b[:, stretch])
    return total


@_summed.register_fake
def _like(a: Tensor, b: Tensor, promoted: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.float32)


def _short_sum(a: Tensor, b: Tensor) -> Tensor:
    """The product of a stretch of K in float64, cut off after every instruction. Infinities and NaN stay."""
    kept = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    for start in range(0, a.shape[1], INSTRUCTION):
        part = slice(start, start + INSTRUCTION)
        kept.addmm_(a[:, part], b[:, part].t())
        kept.view(torch.int64).bitwise_and_(_KEPT)
    return kept
