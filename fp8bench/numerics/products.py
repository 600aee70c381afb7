"""Matrix products to compare with: exact ones of chosen rows, and those of emulated precisions.

All take b as (N, K), contraction last, as linear layers keep their weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# About half a second of one CPU core in fp64.
FLOPS_CAP = 4e9
_CHUNK_COLUMNS = 1024


def rows_within(m: int, n: int, k: int, flops_cap: float = FLOPS_CAP) -> tuple[int, ...]:
    """Rows of an (m, k) by (n, k) product, evenly spread, at least one, that together cost at most `flops_cap`.

    Always the same for the same numbers, so that errors of different runs compare.
    """
    if m == 0:
        return ()
    affordable = int(flops_cap // max(2 * n * k, 1))
    count = min(max(affordable, 1), m)
    return tuple((2 * i + 1) * m // (2 * count) for i in range(count))


def exact_product(a: Tensor, b: Tensor, rows: Sequence[int]) -> Tensor:
    """The chosen rows of a (M, K) times b (N, K) transposed, in fp64: (len(rows), N).

    `b` is widened in chunks: a float64 copy of a large weight would take four times its memory.
    """
    index = torch.tensor(rows, dtype=torch.int64, device=a.device)
    left = a.detach().index_select(0, index).to(torch.float64)
    result = left.new_empty((len(rows), b.shape[0]))
    for start in range(0, b.shape[0], _CHUNK_COLUMNS):
        chunk = slice(start, start + _CHUNK_COLUMNS)
        result[:, chunk] = left @ b.detach()[chunk].to(torch.float64).t()
    return result


def values_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The emulated product: values a (M, K) times b (N, K) transposed, summed in float32, rounded once to `dtype`."""
    return (a.to(torch.float32) @ b.to(torch.float32).t()).to(dtype)
