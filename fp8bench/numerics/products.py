"""Reference products: exact ones for chosen rows, products of emulated precisions, and sums in few bits.

All functions take b as (N, K), with the contraction last, like the weight of a linear layer. The products show the
error of a product in low precision. They also show how much of this error the kernel adds to the errors of the casts.

Short sums are the sums of Hopper's FP8 units, either plain or promoted to float32 periodically.
`sum_like_hopper_units` gives the same bits as an H200 in all of 143,360 sums of 16 to 2,048 products. An instruction
contracts 32 elements. It truncates their products and the previous sum 13 bits below the largest exponent among them.
The exponent of a product is the sum of its factors' exponents. The new sum is truncated in the same way.
`short_product` emulates this at the cost of a matrix product: it adds the numbers of an instruction exactly and keeps
14 significant bits of the result, as on Hopper.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8bench.formats.recipes import HOPPER_SUM_BITS, Accumulator
from fp8bench.numerics.norms import relative_frobenius

# By default, rows of a product are computed exactly for at most this many FLOPs, about half a second of one CPU core.
FLOPS_CAP = 4e9
_COLUMNS_PER_CHUNK = 1024


def choose_product_error_rows(m: int, n: int, k: int, flops_cap: float = FLOPS_CAP) -> tuple[int, ...]:
    """Returns evenly spaced rows of an (m, k) by (n, k) product: at least one row, and otherwise as many as
    `flops_cap` FLOPs allow.

    The rows depend only on the sizes, so that errors of different runs are comparable.
    """
    if m == 0:
        return ()
    affordable_row_count = int(flops_cap // max(2 * n * k, 1))
    row_count = min(max(affordable_row_count, 1), m)
    # Divide the rows into equal parts, and choose the middle row of each part.
    return tuple((2 * i + 1) * m // (2 * row_count) for i in range(row_count))


def exact_product(a: Tensor, b: Tensor, rows: Sequence[int]) -> Tensor:
    """Returns the chosen rows of a (M, K) times b (N, K) transposed in fp64, with shape (len(rows), N).

    `b` is converted in chunks, because a float64 copy of a large weight would take four times its memory.
    """
    index = torch.tensor(rows, dtype=torch.int64, device=a.device)
    float64_a = a.detach().index_select(0, index).to(torch.float64)
    result = float64_a.new_empty((len(rows), b.shape[0]))
    for start in range(0, b.shape[0], _COLUMNS_PER_CHUNK):
        column_slice = slice(start, start + _COLUMNS_PER_CHUNK)
        result[:, column_slice] = float64_a @ b.detach()[column_slice].to(torch.float64).t()
    return result


def to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the tensor in the dtype. A tensor that already has the dtype is returned unchanged.

    In compiled graphs of torch 2.11, a Function that ends in a `.to` without effect gets zero gradients.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def multiply_in_float32(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return to_dtype(a.to(torch.float32) @ b.to(torch.float32).t(), dtype)


def measure_product_errors(
    product: Tensor, operands: tuple[Tensor, Tensor], cast: tuple[Tensor, Tensor], rows: Sequence[int]
) -> tuple[float, float]:
    """Returns two relative Frobenius errors of some rows of a (M, K) times b (N, K) transposed: the total error and
    the kernel's error.

    The total error is relative to the fp64 product of the original `operands`. The kernel's error is relative to the
    fp64 product of `cast`, the values after casting. It comes from summing and from rounding the result. If errors
    are independent, their squares add up, and the error of the casts is sqrt(total^2 - kernel^2).
    """
    chosen_rows = product[list(rows)]
    total_error, kernel_error = (
        relative_frobenius(chosen_rows, exact_product(*pair, rows)) for pair in (operands, cast)
    )
    return total_error, kernel_error


INSTRUCTION_SUM_LENGTH = 32
PROMOTION_LENGTH = 128

_FLOAT64_SIGNIFICAND_BITS = 53


def short_product(a: Tensor, b: Tensor, accumulator: Accumulator, bits: int = HOPPER_SUM_BITS) -> Tensor:
    """Returns a (M, K) times b (N, K) transposed in float32, computed with short sums.

    With SHORT, all of K is summed in few bits. With PROMOTED, the short sum of every 128 elements is added to a
    float32 sum. Within an instruction, float64 sums of FP8 values are exact, because they need at most 53 bits.
    """
    return _sum_products_in_pieces(a, b, accumulator is Accumulator.PROMOTED, bits)


def sum_like_hopper_units(a: Tensor, b: Tensor) -> Tensor:
    """Returns a (M, K) times b (N, K) transposed for unscaled FP8 values, exactly as Hopper's FP8 units sum, in
    float64.

    Each step takes M * N * 32 numbers, so this is only for small products.
    """
    float64_operands = (a.to(torch.float64), b.to(torch.float64))
    running_sum = a.new_zeros(len(a), len(b), dtype=torch.float64)
    for start in range(0, a.shape[1], INSTRUCTION_SUM_LENGTH):
        a_slice, b_slice = (tensor[:, start : start + INSTRUCTION_SUM_LENGTH] for tensor in float64_operands)
        products_and_running_sum = torch.cat([a_slice[:, None] * b_slice[None], running_sum[:, :, None]], 2)
        product_exponents = _get_exponents(a_slice)[:, None] + _get_exponents(b_slice)[None]
        exponents = torch.cat([product_exponents, _get_exponents(running_sum)[:, :, None]], 2).where(
            products_and_running_sum != 0, _EXPONENT_OF_ZERO
        )
        running_sum = _truncate_to_hopper_bits(
            _truncate_to_hopper_bits(products_and_running_sum, exponents.amax(2, keepdim=True)).sum(2), None
        )
    return running_sum


# Below the exponent of every product, so that a zero never determines the largest exponent.
_EXPONENT_OF_ZERO = -1000


def _get_exponents(values: Tensor) -> Tensor:
    return torch.frexp(values).exponent - 1


def _truncate_to_hopper_bits(values: Tensor, exponents: Tensor | None) -> Tensor:
    """Truncates each value to a multiple of 2^(exponent - (HOPPER_SUM_BITS - 1)). Without `exponents`, the exponent is
    that of the value itself.
    """
    exponent = _get_exponents(values) if exponents is None else exponents
    last_bit_value = torch.exp2((exponent - (HOPPER_SUM_BITS - 1)).to(torch.float64))
    return (values / last_bit_value).trunc() * last_bit_value


# A custom operator, so that a compiled graph does not unroll the loop over K.
@torch.library.custom_op("fp8bench::short_product", mutates_args=())
def _sum_products_in_pieces(a: Tensor, b: Tensor, promoted: bool, bits: int) -> Tensor:
    float64_a = a.to(torch.float64)
    float64_b = b.to(torch.float64)
    piece_length = PROMOTION_LENGTH if promoted else max(a.shape[1], 1)
    float32_sum = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], piece_length):
        few_bit_sum = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
        for instruction_start in range(start, min(start + piece_length, a.shape[1]), INSTRUCTION_SUM_LENGTH):
            instruction_slice = slice(
                instruction_start, min(instruction_start + INSTRUCTION_SUM_LENGTH, start + piece_length)
            )
            few_bit_sum.addmm_(float64_a[:, instruction_slice], float64_b[:, instruction_slice].t())
            # Truncate the sum after every instruction. This does not change infinities and NaN.
            few_bit_sum.view(torch.int64).bitwise_and_(-(1 << (_FLOAT64_SIGNIFICAND_BITS - bits)))
        float32_sum += few_bit_sum
    return float32_sum


@_sum_products_in_pieces.register_fake
def _make_fake_result(a: Tensor, b: Tensor, promoted: bool, bits: int) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.float32)
