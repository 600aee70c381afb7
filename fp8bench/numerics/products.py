"""Reference products: exact ones for chosen rows, those of emulated precisions, and sums in few bits.

All take b as (N, K), contraction last, like the weights of linear layers. They show the error of a product in low
precision, and how much of that the kernel added to the casts.

Short sums are those of Hopper's FP8 units, plain or promoted to float32 periodically. `unit_sums` equals an H200 to the
bit (in all of 143,360 sums of 16 to 2,048 products): an instruction contracts 32 elements; their products and the
previous sum are truncated 13 bits below the largest exponent among them, where a product's exponent is the sum of its
factors', and so is their sum. `short_product` emulates this at the cost of a matrix product: an instruction's numbers
are added exactly, and the result keeps that many significant bits (14 on Hopper).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8bench.formats.recipes import HOPPER_BITS, Accumulator
from fp8bench.numerics.norms import relative_frobenius

# About half a second of one CPU core in fp64.
FLOPS_CAP = 4e9
_CHUNK_COLUMNS = 1024


def rows_within(m: int, n: int, k: int, flops_cap: float = FLOPS_CAP) -> tuple[int, ...]:
    """Returns rows of an (m, k) by (n, k) product, evenly spread, at least one, that together cost at most `flops_cap`.
    They depend only on the sizes, so that errors of different runs compare."""
    if m == 0:
        return ()
    affordable = int(flops_cap // max(2 * n * k, 1))
    count = min(max(affordable, 1), m)
    return tuple((2 * i + 1) * m // (2 * count) for i in range(count))


def exact_product(a: Tensor, b: Tensor, rows: Sequence[int]) -> Tensor:
    """Returns the chosen rows of a (M, K) times b (N, K) transposed, in fp64: (len(rows), N). `b` is widened in chunks,
    because a float64 copy of a large weight would take four times its memory."""
    index = torch.tensor(rows, dtype=torch.int64, device=a.device)
    wide_a = a.detach().index_select(0, index).to(torch.float64)
    result = wide_a.new_empty((len(rows), b.shape[0]))
    for start in range(0, b.shape[0], _CHUNK_COLUMNS):
        chunk = slice(start, start + _CHUNK_COLUMNS)
        result[:, chunk] = wide_a @ b.detach()[chunk].to(torch.float64).t()
    return result


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the tensor in that dtype, untouched if it has it: in torch 2.11's compiled graphs gradients are zero
    behind a Function that ends in a `.to` that converts nothing."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def values_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return in_dtype(a.to(torch.float32) @ b.to(torch.float32).t(), dtype)


def product_errors(
    product: Tensor, operands: tuple[Tensor, Tensor], cast: tuple[Tensor, Tensor], rows: Sequence[int]
) -> tuple[float, float]:
    """Returns relative Frobenius errors of some rows of a (M, K) times b (N, K) transposed: the total, and the
    kernel's.

    The first is against the fp64 product of the original `operands`, the second against that of `cast`, their values
    after the casts: what summing and rounding the result add. If errors are independent their squares add up, and the
    casts' own error is sqrt(total^2 - kernel^2).
    """
    picked = product[list(rows)]
    first, second = (relative_frobenius(picked, exact_product(*pair, rows)) for pair in (operands, cast))
    return first, second


INSTRUCTION = 32
PROMOTION = 128

_DOUBLE_BITS = 53


def short_product(a: Tensor, b: Tensor, accumulator: Accumulator, bits: int = HOPPER_BITS) -> Tensor:
    """Returns values a (M, K) times b (N, K) transposed, in float32, with short sums.

    SHORT sums all of K like this. PROMOTED adds the short sum of every 128 elements to a float32 sum. Inside an
    instruction float64 replaces exact sums: those of FP8 values have no more than 53 bits.
    """
    return _sum_pieces(a, b, accumulator is Accumulator.PROMOTED, bits)


def unit_sums(a: Tensor, b: Tensor) -> Tensor:
    """Returns a (M, K) times b (N, K) transposed, for FP8 values without scales, exactly as Hopper's FP8 units sum;
    float64. A step takes M * N * 32 numbers, so this is for small products."""
    wide = (a.to(torch.float64), b.to(torch.float64))
    total = a.new_zeros(len(a), len(b), dtype=torch.float64)
    for start in range(0, a.shape[1], INSTRUCTION):
        first, second = (tensor[:, start : start + INSTRUCTION] for tensor in wide)
        terms = torch.cat([first[:, None] * second[None], total[:, :, None]], 2)
        added = _exponents(first)[:, None] + _exponents(second)[None]
        exponents = torch.cat([added, _exponents(total)[:, :, None]], 2).where(terms != 0, _NOTHING)
        total = _cut_off(_cut_off(terms, exponents.amax(2, keepdim=True)).sum(2), None)
    return total


_NOTHING = -1000


def _exponents(values: Tensor) -> Tensor:
    return torch.frexp(values).exponent - 1


def _cut_off(values: Tensor, exponents: Tensor | None) -> Tensor:
    """Truncates values HOPPER_BITS - 1 bits below an exponent, by default each value's exponent."""
    exponent = _exponents(values) if exponents is None else exponents
    last = torch.exp2((exponent - (HOPPER_BITS - 1)).to(torch.float64))
    return (values / last).trunc() * last


# An operator, so that a compiled graph does not unroll its loop over K.
@torch.library.custom_op("fp8bench::short_product", mutates_args=())
def _sum_pieces(a: Tensor, b: Tensor, promoted: bool, bits: int) -> Tensor:
    wide_a = a.to(torch.float64)
    wide_b = b.to(torch.float64)
    length = PROMOTION if promoted else max(a.shape[1], 1)
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], length):
        short_sum = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
        for first in range(start, min(start + length, a.shape[1]), INSTRUCTION):
            part = slice(first, min(first + INSTRUCTION, start + length))
            short_sum.addmm_(wide_a[:, part], wide_b[:, part].t())
            # Truncate after every instruction. Infinities and NaN stay.
            short_sum.view(torch.int64).bitwise_and_(-(1 << (_DOUBLE_BITS - bits)))
        total += short_sum
    return total


@_sum_pieces.register_fake
def _like(a: Tensor, b: Tensor, promoted: bool, bits: int) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.float32)
