"""What a product in low precision has cost: all of it, and what the kernel added to what the casts had lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fp8bench.numerics.errors import relative_frobenius
from fp8bench.numerics.products import exact_product


@dataclass(frozen=True)
class ProductError:
    """Relative Frobenius errors of some rows of a product.

    `total` is against the fp64 product of the operands as they were; `kernel` against the fp64 product of the operands
    as the casts left them: what summing and rounding the result add, and nothing else. Where errors are independent
    their squares add up, and the casts' own is sqrt(total^2 - kernel^2).
    """

    total: float
    kernel: float


def product_error(
    product: Tensor, operands: tuple[Tensor, Tensor], cast: tuple[Tensor, Tensor], rows: Sequence[int]
) -> ProductError:
    """Of a (M, K) times b (N, K) transposed: `operands` as they were, `cast` their values after the casts."""
    found = product[list(rows)]
    return ProductError(
        relative_frobenius(found, exact_product(*operands, rows)), relative_frobenius(found, exact_product(*cast, rows))
    )
