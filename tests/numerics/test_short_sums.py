"""Sums of few bits against one that adds number by number, exactly."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8bench.formats.grids import E4M3, E5M2, Format
from fp8bench.formats.quantise import round_to
from fp8bench.formats.recipes import HOPPER_BITS, Accumulator
from fp8bench.numerics.products import INSTRUCTION, PROMOTION, short_product


def cut(value: Fraction, bits: int) -> Fraction:
    """The leading bits of a number, the others cut off."""
    if not value:
        return value
    magnitude, exponent = abs(value), 0
    while magnitude >= 2**bits:
        magnitude, exponent = magnitude / 2, exponent + 1
    while magnitude < 2 ** (bits - 1):
        magnitude, exponent = magnitude * 2, exponent - 1
    return (1 if value > 0 else -1) * Fraction(int(magnitude)) * Fraction(2) ** exponent


def by_hand(row: list[float], column: list[float], accumulator: Accumulator, bits: int) -> np.float32:
    """One element of the product: exact sums of 32, cut off, and promoted every 128 or never."""
    total, kept = np.float32(0), Fraction(0)
    for start in range(0, len(row), INSTRUCTION):
        part = slice(start, start + INSTRUCTION)
        products = sum((Fraction(a) * Fraction(b) for a, b in zip(row[part], column[part], strict=True)), Fraction(0))
        kept = cut(kept + products, bits)
        if accumulator is Accumulator.PROMOTED and (start + INSTRUCTION) % PROMOTION == 0:
            total, kept = total + np.float32(float(kept)), Fraction(0)
    return total + np.float32(float(kept))


def operands(fmt: Format, k: int, spread: float) -> tuple[Tensor, Tensor]:
    """Values of a format whose magnitudes lie octaves apart, under scales that are powers of two."""
    generator = torch.Generator().manual_seed(k)
    a, b = (
        torch.randn(rows, k, generator=generator) * 2.0 ** (spread * torch.randn(rows, k, generator=generator))
        for rows in (3, 4)
    )
    return round_to(a, fmt) * 2.0**-5, round_to(b, fmt) * 2.0**7


LENGTHS = (1, 31, 32, 96, 128, 129, 500)


@pytest.mark.parametrize(
    ("accumulator", "bits", "k"),
    [
        *((one, HOPPER_BITS, k) for one in (Accumulator.SHORT, Accumulator.PROMOTED) for k in LENGTHS),
        *((Accumulator.SHORT, bits, 129) for bits in (2, 8, 23)),
    ],
)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_every_element_is_the_one_added_by_hand(accumulator: Accumulator, bits: int, fmt: Format, k: int) -> None:
    """Bit for bit, lengths that fill no instruction and no promotion among them."""
    for spread in (0.5, 4.0):
        a, b = operands(fmt, k, spread)
        found = short_product(a, b, accumulator, bits)
        wanted = [[by_hand(row, column, accumulator, bits) for column in b.tolist()] for row in a.tolist()]
        assert found.dtype == torch.float32
        assert np.array_equal(found.numpy(), np.array(wanted, np.float32))


def test_what_is_lost_is_what_was_published() -> None:
    """Of 4096 positive products about 0.3% without promotion, and no more than the 14 bits of 128 with it."""
    generator = torch.Generator().manual_seed(0)
    a, b = (round_to(torch.rand(16, 4096, generator=generator), E4M3) for _ in range(2))
    exact = a.double() @ b.double().t()
    lost = {
        one: float(((exact - short_product(a, b, one)) / exact).mean())
        for one in (Accumulator.SHORT, Accumulator.PROMOTED)
    }
    assert 2e-3 < lost[Accumulator.SHORT] < 4e-3
    assert 0 < lost[Accumulator.PROMOTED] < 3 * 2.0**-HOPPER_BITS


def test_nothing_and_what_is_not_finite() -> None:
    """A contraction of nothing is zero; infinities and NaN reach the result."""
    empty = torch.empty(2, 0)
    for accumulator in (Accumulator.SHORT, Accumulator.PROMOTED):
        assert torch.equal(short_product(empty, empty, accumulator), torch.zeros(2, 2))
        a = torch.tensor([[1.0, float("inf")], [1.0, float("nan")], [1.0, 2.0]])
        found = short_product(a, torch.ones(1, 2), accumulator).flatten().tolist()
        assert found[0] == float("inf") and np.isnan(found[1]) and found[2] == 3.0
