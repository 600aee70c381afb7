"""In which precision a product was really computed, told by its numbers alone.

A product in low precision is nearest to the exact product of its operands as that precision rounds them: what sums and
the result's rounding add is far less than what another rounding of the operands does. So of several guesses the one is
taken whose exact product lies nearest, and how far the others are says how sure that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8bench.numerics.conformity import FLOAT32_BITS, Sums, kept_bits

# The values of both operands, by what they would be called if the product were computed of them.
Guesses = Mapping[str, tuple[Tensor, Tensor]]
# A mean square that is so many times smaller is another precision's. Sums in few bits and a library's own way to round
# make no such difference; a bfloat16 result of bfloat16 copies of FP8 values has three times the error of its rounding.
_NEARER = 2.0
# What is left of a float32 by results of so many significant bits.
_SIGNIFICANT = ((8, 16), (11, 13))


@dataclass(frozen=True)
class Fingerprint:
    """The guess that is nearest, how many bits its sums seem to be kept in, and the significant bits of the results.

    `errors` are mean squares, of the sum of the products' magnitudes, by guess.
    """

    operands: str
    errors: Mapping[str, float]
    sum_bits: int
    result_bits: int


def fingerprint(product: Tensor, guesses: Guesses) -> Fingerprint:
    """Of a product (M, N) of operands (M, K) and (N, K), and at least one guess of what they were."""
    sums = _sums_of(product, guesses)
    errors = _errors(product, sums)
    nearest = min(errors, key=lambda name: errors[name])
    found = product.detach().to(torch.float64)
    bits = FLOAT32_BITS if sums[nearest].is_unbiased(found) else kept_bits(found, sums[nearest])
    return Fingerprint(nearest, errors, bits, _result_bits(product))


def looks_like(product: Tensor, promised: str, guesses: Guesses) -> str:
    """The guess that a product looks like, clearly more than what was promised; '' where it kept the promise."""
    if not bool(product.isfinite().all()):
        return ""
    errors = _errors(product, _sums_of(product, guesses))
    nearest = min(errors, key=lambda name: errors[name])
    return nearest if errors[nearest] * _NEARER < errors[promised] else ""


def _sums_of(product: Tensor, guesses: Guesses) -> dict[str, Sums]:
    return {
        name: Sums(a.detach().to(torch.float64), b.detach().to(torch.float64), product.dtype)
        for name, (a, b) in guesses.items()
    }


def _errors(product: Tensor, sums: Mapping[str, Sums]) -> dict[str, float]:
    found = product.detach().to(torch.float64)
    return {name: one.spread(found) for name, one in sums.items()}


def _result_bits(product: Tensor) -> int:
    bits = product.detach().to(torch.float32).contiguous().view(torch.int32)
    return next((kept for kept, zeros in _SIGNIFICANT if not bool((bits & ((1 << zeros) - 1)).any())), 24)
