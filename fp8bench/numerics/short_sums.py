"""Products summed as Hopper's FP8 units sum them: as they come, or promoted to float32 now and then.

A model, exact by its own definition and tested against one that adds number by number. An instruction contracts 32
elements: their products and the sum so far are added exactly, and of the result so many significant bits are kept (14
there), the rest is cut off. The order within an instruction and what its alignment loses are not modelled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8bench.formats.recipes import HOPPER_BITS, Accumulator

INSTRUCTION = 32
PROMOTION = 128

_DOUBLE_BITS = 53


def short_product(a: Tensor, b: Tensor, accumulator: Accumulator, bits: int = HOPPER_BITS) -> Tensor:
    """Values a (M, K) times b (N, K) transposed, in float32.

    SHORT sums all of K so. PROMOTED adds the sum of every 128 elements of K to a float32 one and begins again at 0.
    Inside an instruction float64 takes the place of exact sums: of FP8 values they have no more than 53 bits.
    """
    found: Tensor = _summed(a, b, accumulator is Accumulator.PROMOTED, bits)
    return found


# An operator, so that a compiled graph need not unroll what is a loop over all of K.
@torch.library.custom_op("fp8bench::short_product", mutates_args=())
def _summed(a: Tensor, b: Tensor, promoted: bool, bits: int) -> Tensor:
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    length = PROMOTION if promoted else max(a.shape[1], 1)
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], length):
        stretch = slice(start, start + length)
        total += _short_sum(wide_a[:, stretch], wide_b[:, stretch], bits)
    return total


@_summed.register_fake
def _like(a: Tensor, b: Tensor, promoted: bool, bits: int) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.float32)


def _short_sum(a: Tensor, b: Tensor, bits: int) -> Tensor:
    """The product of a stretch of K in float64, cut off after every instruction. Infinities and NaN stay."""
    kept = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    for start in range(0, a.shape[1], INSTRUCTION):
        part = slice(start, start + INSTRUCTION)
        kept.addmm_(a[:, part], b[:, part].t())
        kept.view(torch.int64).bitwise_and_(-(1 << (_DOUBLE_BITS - bits)))
    return kept
