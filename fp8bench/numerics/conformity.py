"""Explains how one result differs from another: the order of a sum, its rounding, a layout, a scale.

The oracle is the float64 product of the operands' values. A sum of K products in any order, each step rounded to p
bits, is within K * 2^-p of the sum of their magnitudes; an explanation must hold for every element. That bound alone is
too wide for sums: rounding steps are unbiased, and their mean square grows only with K, so sums in fewer bits are
recognised long before they exceed the bound.

The numbers also show in which precision a product was really computed: it is nearest to the exact product of operands
rounded as that precision rounds them, because sums and the result's rounding add far less than another rounding of the
operands. So of several guesses the nearest is taken, and the distance of the others shows how certain that is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.formats.grids import Format
from fp8bench.formats.recipes import HOPPER_BITS, Accumulator
from fp8bench.model.promises import Difference
from fp8bench.numerics.products import INSTRUCTION, PROMOTION, short_product, unit_sums

FLOAT32_BITS = 24
# Roundings of a float32 sum in addition to its additions: of both operands' values, their scales, and the result.
_OTHER_ROUNDINGS = 4
# No hardware sums in fewer bits.
_FEWEST_BITS = 8
# A bias within this many standard errors is chance; mean squares of one kind agree within the factor.
_CHANCE = 6.0
_SAME_SPREAD = 3.0
# A factor nearer to 1 is not a scale, nor is one within a result's own rounding.
_NO_SCALE = 2.0**-7
_LINES = (
    ("the tensor", False, False),
    ("rows", True, False),
    ("columns", False, True),
    ("rows and columns", True, True),
)
_BLOCKS = (128, 32, 16)
# Results for each fitted factor, and the number of turns between rows and columns.
_EQUATIONS = 8
_TURNS = 30
# The length of runs that share a scale, and the number of runs that are examined.
_RUN = 128
_LOOKED_AT = 32
# The float32 error of a value that is divided by its scale and multiplied by it again.
_SLACK = 2.0**-18
_BITS = {2: torch.int16, 4: torch.int32}

Explained = tuple[Difference, str]


def differing_bits(native: Tensor, emulated: Tensor) -> Tensor:
    bits = _BITS[native.element_size()]
    same = native.contiguous().view(bits) == emulated.contiguous().view(bits)
    return ~(same | (native.isnan() & emulated.isnan()))


def steps_between(native: Tensor, emulated: Tensor) -> Tensor:
    """Returns how many numbers of the dtype are between two results; infinite if they differ and one is not finite."""
    places = []
    for tensor in (native, emulated):
        bits = tensor.contiguous().view(_BITS[tensor.element_size()]).to(torch.int64)
        magnitude = bits & ((1 << (8 * tensor.element_size() - 1)) - 1)
        places.append(torch.where(bits < 0, -magnitude, magnitude))
    distance = (places[0] - places[1]).abs().to(torch.float64)
    finite = native.isfinite() & emulated.isfinite()
    return torch.where(finite, distance, torch.where(differing_bits(native, emulated), math.inf, 0.0))


@dataclass(frozen=True)
class ConformitySums:
    """The exact product of a (M, K) and b (N, K) in float64, and the error that sums of `bits` may have."""

    a: Tensor
    b: Tensor
    dtype: torch.dtype
    bits: int = FLOAT32_BITS

    @cached_property
    def exact(self) -> Tensor:
        return self.a @ self.b.t()

    @cached_property
    def magnitude(self) -> Tensor:
        return (self.a.abs() @ self.b.abs().t()).clamp(min=torch.finfo(torch.float64).tiny)

    @property
    def bound(self) -> Tensor:
        return self.reach(self.bits) * self.magnitude

    def reach(self, bits: int) -> float:
        """Returns `bound` relative to the magnitude. Short sums are truncated once per instruction."""
        length = self.a.shape[1]
        float32 = (length + _OTHER_ROUNDINGS) * 2.0**-FLOAT32_BITS
        return float32 if bits == FLOAT32_BITS else float32 + (math.ceil(length / INSTRUCTION) + 1) * 2.0 ** (1 - bits)

    def holds(self, result: Tensor, cut: bool = False) -> bool:
        """Whether every element is a sum within the bound, rounded to nearest or (`cut`) toward 0."""
        rounded = self._round_toward_zero if cut else self._nearest
        low = rounded(self.exact - self.bound)
        high = rounded(self.exact + self.bound)
        return bool(((result >= low) & (result <= high)).all())

    def near(self, result: Tensor, exact: Tensor, bound: Tensor) -> bool:
        """Whether every element is a neighbour of a sum within the bound, however it was rounded."""
        return bool(((result - exact).abs() <= bound + self.step(exact.abs() + bound)).all())

    def step(self, values: Tensor) -> Tensor:
        info = torch.finfo(self.dtype)
        return torch.exp2(values.abs().clamp(min=info.smallest_normal).log2().floor()) * info.eps

    def _nearest(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).to(torch.float64)

    def _round_toward_zero(self, values: Tensor) -> Tensor:
        nearest = values.to(self.dtype)
        bits = _BITS[nearest.element_size()]
        below = (nearest.view(bits) - (nearest != 0).to(bits)).view(self.dtype)
        return torch.where(self._nearest(values).abs() > values.abs(), below, nearest).to(torch.float64)

    def is_unbiased(self, result: Tensor) -> bool:
        """Whether the errors look like rounded steps: no more on one side than chance allows."""
        if self.bits < FLOAT32_BITS:  # short sums are truncated, so all errors are on one side
            return True
        steady = 2.0**-self.bits * math.sqrt(self.a.shape[1])
        biased = abs(self.lost(result)) > steady + _CHANCE * math.sqrt(self.chance / result.numel())
        return not biased and self.spread(result) <= 4 * (steady**2 + self.chance)

    @cached_property
    def chance(self) -> float:
        return float(((self.step(self.exact) / self.magnitude) ** 2).mean()) / 12

    def spread(self, result: Tensor) -> float:
        return float((((result - self.exact) / self.magnitude) ** 2).mean())

    def lost(self, result: Tensor) -> float:
        """Returns by how much results are smaller than exact ones on average, relative to the magnitude."""
        return -float(((result - self.exact) / self.magnitude * self.exact.sign()).mean())


def explain_product(result: Tensor, sums: ConformitySums) -> Explained:
    """Explains why a product, in the result's dtype, differs in bits from another of the same operands."""
    wide = result.to(torch.float64)
    if not bool(sums.exact.isfinite().all()) or not bool(wide.any()):
        return Difference.UNEXPLAINED, "all results are 0" if sums.exact.isfinite().all() else "operands are no numbers"
    infinite = ~wide.isfinite()
    if bool(infinite.any()):
        beyond = sums.exact.abs() > torch.finfo(sums.dtype).max
        if bool((beyond | ~infinite).all()):
            return Difference.OVERFLOW, "sums beyond the largest number"
        return Difference.UNEXPLAINED, f"{int(infinite.sum())} results are no numbers"
    if sums.holds(wide) and sums.is_unbiased(wide):
        return Difference.ORDER, f"within {sums.reach(sums.bits):.1e} of the sum of the products' magnitudes"
    if sums.holds(wide, cut=True):
        return Difference.ROUNDING, "the result is cut off toward 0, not rounded to nearest"
    for words, exact in _laid_otherwise(wide, sums):
        if exact.shape == wide.shape and sums.near(wide, exact, sums.reach(sums.bits) * sums.magnitude.max()):
            return Difference.LAYOUT, words
    for fit in _scaled_otherwise(wide, sums):
        if sums.near(wide, fit.scaled, (sums.reach(sums.bits) + torch.finfo(sums.dtype).eps / 4) * fit.magnitude):
            return Difference.SCALE, fit.words
    bits = kept_bits(wide, sums)
    if _FEWEST_BITS <= bits < sums.bits and sums.near(wide, sums.exact, sums.reach(bits - 1) * sums.magnitude):
        return Difference.ACCUMULATION, f"sums as if kept in about {bits} bits, where {sums.bits} are expected"
    if sums.near(wide, sums.exact, sums.bound):
        return Difference.ROUNDING, "each result is a neighbour of the exact one, and not always the nearest"
    return Difference.UNEXPLAINED, ""


def are_short_sums(result: Tensor, sums: ConformitySums) -> bool:
    """Whether results are no further from the exact ones than sums of 14 bits: each of them, and in the mean square.

    No units are known to have shorter sums than these, which are Hopper's.
    """
    wide = result.to(torch.float64)
    model = short_product(sums.a, sums.b, Accumulator.SHORT).to(torch.float64)
    within = sums.near(wide, sums.exact, sums.reach(HOPPER_BITS) * sums.magnitude)
    return within and sums.spread(wide) <= _SAME_SPREAD * (sums.spread(model) + sums.chance)


def kept_bits(result: Tensor, sums: ConformitySums) -> int:
    """Returns the bits that sums seem to have; 24 if nothing indicates fewer.

    Truncation makes all results smaller. A model of 14 bits shows by how much for these operands, and how far single
    results are off.
    """
    model = short_product(sums.a, sums.b, Accumulator.SHORT).to(torch.float64)
    lost = sums.lost(result)
    expected = sums.lost(model)
    if not (0 < lost < math.inf and expected > 0):  # NaN or infinite, if a result is not 0 although its products are
        return FLOAT32_BITS
    ratio = lost / expected
    if sums.spread(result) > _SAME_SPREAD * (ratio**2 * sums.spread(model) + sums.chance):
        return FLOAT32_BITS
    return min(FLOAT32_BITS, round(HOPPER_BITS - math.log2(ratio)))


def _laid_otherwise(result: Tensor, sums: ConformitySums) -> Iterator[tuple[str, Tensor]]:
    a = sums.a
    b = sums.b
    if a.shape[0] == b.shape[0]:
        yield "the result is transposed", sums.exact.t()
    if b.shape[0] == b.shape[1] == a.shape[1]:
        yield "the second operand is read transposed", a @ b
    if a.shape[0] == a.shape[1]:
        yield "the first operand is read transposed", a.t() @ b.t()
    if a.shape[1] % 2 == 0:
        exchanged = a.view(a.shape[0], -1, 2).flip(-1).reshape(a.shape)
        yield "every two neighbours of one operand are exchanged", exchanged @ b.t()
    yield from permutations(result, sums.exact)


def permutations(result: Tensor, correct: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the correct values with rows, or columns, in the order nearest to the result, if that is a permutation."""
    for words, lines, correct_lines in (("rows", result, correct), ("columns", result.t(), correct.t())):
        order = torch.cdist(lines, correct_lines).argmin(dim=1).tolist()
        if sorted(order) == list(range(len(order))) != order:
            moved = correct_lines[order]
            yield f"{words} are permuted", moved if words == "rows" else moved.t()


def match_units(result: Tensor, codes: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor], promoted: bool) -> bool:
    """Whether every element is what Hopper's FP8 units compute from codes (M, K) and (N, K), with a scale per element.

    Their sums are known to the bit; scales and promotions enter in float32 in an unknown order.
    """
    length = PROMOTION if promoted else codes[0].shape[1]
    total = magnitude = torch.zeros((), dtype=torch.float64)
    for start in range(0, codes[0].shape[1], length):
        part = slice(start, start + length)
        down, across = (scale[:, part].to(torch.float64) for scale in scales)
        if not all(bool((tensor == tensor[:, :1]).all()) for tensor in (down, across)):
            return False
        scaled = unit_sums(*(code[:, part] for code in codes)) * down[:, :1] * across[:, :1].t()
        total = total + scaled
        magnitude = magnitude + scaled.abs()
    bound = (codes[0].shape[1] // length + _OTHER_ROUNDINGS) * 2.0**-FLOAT32_BITS * magnitude
    low, high = ((total + side * bound).to(result.dtype) for side in (-1, 1))
    return bool(((result >= low) & (result <= high)).all())


class _Fit(NamedTuple):
    """A product with other factors, described in words, and its magnitude."""

    words: str
    scaled: Tensor
    magnitude: Tensor


def _scaled_otherwise(result: Tensor, sums: ConformitySums) -> Iterator[_Fit]:
    """Yields fits with factors other than 1 for the tensor, for rows and columns, or for blocks along the
    contraction."""
    no_scale = max(_NO_SCALE, 4 * torch.finfo(sums.dtype).eps)
    fits = []
    for words, by_row, by_column in _LINES:
        down, across = _factors(result, sums.exact, by_row, by_column)
        factor = down * across
        fits.append((words, factor, factor * sums.exact, factor.abs() * sums.magnitude))
    fits += _scaled_blocks(result, sums)
    for words, factors, scaled, magnitude in fits:
        least = float(factors.min())
        most = float(factors.max())
        if max(abs(least - 1), abs(most - 1)) > no_scale:
            several = f" to {most:.3g}" if most - least > no_scale else ""
            yield _Fit(f"{words} scaled by {least:.3g}{several}", scaled, magnitude)


def _scaled_blocks(result: Tensor, sums: ConformitySums) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    for size in _BLOCKS:
        count = sums.a.shape[1] // size
        if sums.a.shape[1] % size or not 1 < count <= min(result.shape) // _EQUATIONS:
            continue
        a, b = (tensor.reshape(len(tensor), count, size) for tensor in (sums.a, sums.b))
        parts = torch.einsum("mcs,ncs->mnc", a, b)
        for operand, target, pieces in (("first", result, parts), ("second", result.t(), parts.transpose(0, 1))):
            factors = torch.linalg.lstsq(pieces, target[:, :, None]).solution
            scaled = (pieces @ factors)[:, :, 0]
            magnitude = (pieces.abs() @ factors.abs())[:, :, 0]
            if operand == "second":
                scaled = scaled.t()
                magnitude = magnitude.t()
            yield f"blocks of {size} of the {operand} operand", factors, scaled, magnitude


def _factors(result: Tensor, exact: Tensor, by_row: bool, by_column: bool) -> tuple[Tensor, Tensor]:
    down = ((result * exact).sum() / (exact**2).sum()).expand(result.shape[0], 1)
    across = exact.new_ones(1, result.shape[1])
    for _ in range(_TURNS if by_row and by_column else 1):
        if by_row:
            down = _ratios(result, exact * across, 1)
        if by_column:
            down = down if by_row else torch.ones_like(down)
            across = _ratios(result, exact * down, 0)
    return down, across


def _ratios(result: Tensor, exact: Tensor, dimension: int) -> Tensor:
    squares = (exact**2).sum(dimension, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return (result * exact).sum(dimension, keepdim=True) / squares


def explain_cast(result: Tensor, correct: Tensor, source: Tensor, fmt: Format) -> Explained:
    """Explains why the values of a cast of `source` differ in bits from the correct ones; all are float32 matrices."""
    # 1. Values beyond the largest number of the format.
    differ = differing_bits(result, correct)
    top = correct.abs().nan_to_num(0.0, 0.0, 0.0).max()
    beyond = ~result.isfinite() | ~correct.isfinite() | ((correct.abs() == top) & (source.abs() > top))
    if bool((beyond | ~differ).all()):
        first = tuple(int(place) for place in differ.nonzero()[0])
        became = f"{float(result[first]):g}, not {float(correct[first]):g}"
        return Difference.OVERFLOW, f"what lies beyond the largest becomes {became}"
    if not bool(result.any()):
        return Difference.UNEXPLAINED, "all values are 0"
    # 2. The same values in a different order, or times a scale.
    wide = [tensor.to(torch.float64).nan_to_num(0.0, 0.0, 0.0) for tensor in (result, correct, source)]
    values, expected, original = wide
    layouts = list(permutations(values, expected))
    if expected.shape[0] == expected.shape[1]:
        layouts.insert(0, ("the values are transposed", expected.t()))
    for words, arranged in layouts:
        if torch.equal(arranged, values):
            return Difference.LAYOUT, words
    for words, ratio in _cast_ratios(values, expected):
        if bool(((values - ratio * expected).abs() <= _SLACK * values.abs()).all()):
            return Difference.SCALE, f"{words} scaled by {float(ratio.min()):.8g} to {float(ratio.max()):.8g}"
    bits = mantissa_bits(result)
    if bits < min(fmt.mantissa_bits, mantissa_bits(correct)):
        return Difference.UNEXPLAINED, f"values of {bits} bits of mantissa, where {fmt.name} has {fmt.mantissa_bits}"
    # 3. A neighbour on the grid, beyond the value that was cast: anything nearer is on no grid.
    steps = most_steps(torch.maximum(values.abs(), expected.abs()), fmt, float(top))
    distance = (values - expected).abs() / steps
    least = torch.where(steps > steps.min(), 0.5 - _SLACK, 0.0)
    around = ((values - original) * (expected - original) <= 0) & (distance > least) & (distance < 1 + _SLACK)
    if not bool((around | ~differ).all()):
        return Difference.UNEXPLAINED, ""
    cut = bool((values.abs() <= original.abs())[differ].all())
    return Difference.ROUNDING, "cut off toward 0" if cut else "to a neighbour that is not the nearest"


def _cast_ratios(result: Tensor, correct: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the result over the correct values, as the median over the tensor, its rows, columns and blocks."""
    ratio = torch.where(correct != 0, result / correct, torch.nan)
    yield "the tensor", ratio.nanmedian().nan_to_num(1.0)
    yield "rows", ratio.nanmedian(dim=1, keepdim=True).values.nan_to_num(1.0)
    yield "columns", ratio.nanmedian(dim=0, keepdim=True).values.nan_to_num(1.0)
    for size in _BLOCKS:
        if result.shape[1] % size == 0:
            blocks = ratio.view(len(ratio), -1, size).nanmedian(dim=2).values.nan_to_num(1.0)
            yield f"blocks of {size}", blocks.repeat_interleave(size, 1)


def mantissa_bits(values: Tensor) -> int:
    """Returns the mantissa bits of values, from their number within an octave, whatever the scale of each run of 128.

    The result is too small if there are not enough values to cover an octave.
    """
    length = _RUN if values.shape[-1] % _RUN == 0 else values.shape[-1]
    runs = values.detach().abs().reshape(-1, length)
    most = 1
    for run in runs[:: max(1, len(runs) // _LOOKED_AT)]:
        kinds = torch.tensor(sorted({size for size in run.tolist() if 0 < size < math.inf}), dtype=torch.float64)
        if len(kinds):
            beyond = torch.searchsorted(kinds, kinds * (2 - _SLACK))
            most = max(most, int((beyond - torch.arange(len(kinds))).max()))
    return math.ceil(math.log2(most))


def most_steps(values: Tensor, fmt: Format, top: float) -> Tensor:
    """Returns the largest distance between a format's neighbours about each value, whatever its scale. `top` is the
    format's largest value times the largest scale."""
    return (values.abs() * 2.0**-fmt.mantissa_bits).clamp(min=fmt.smallest_subnormal * top / fmt.largest)


# Both operands' values, by the name of the precision that they would indicate.
Guesses = Mapping[str, tuple[Tensor, Tensor]]
# A mean square this many times smaller indicates another precision. Sums in few bits and a library's own rounding make
# less of a difference; a bfloat16 result of bfloat16 copies of FP8 values has three times the error of its rounding.
_NEARER = 2.0


def looks_like(product: Tensor, promised: str, guesses: Guesses) -> str:
    """Returns the guess that a product (M, N) of operands (M, K) and (N, K) clearly fits better than the promise; '' if
    none does."""
    if not bool(product.isfinite().all()):
        return ""
    result = product.detach().to(torch.float64)
    errors = {
        name: ConformitySums(a.detach().to(torch.float64), b.detach().to(torch.float64), product.dtype).spread(result)
        for name, (a, b) in guesses.items()
    }
    nearest = min(errors, key=lambda name: errors[name])
    return nearest if errors[nearest] * _NEARER < errors[promised] else ""
