"""What explains how one result differs from another: the order of a sum, its rounding, a layout, a scale.

The oracle is the float64 product of the operands' values. A sum of K products in any order, each step rounded to
p bits, lies within K * 2^-p of the sum of their magnitudes; an explanation has to hold for every element. Being within
that bound is not enough for a sum: rounded steps prefer no side, and their mean square grows with K alone, so that
sums that are kept in fewer bits are told apart long before they leave the bound.

In which precision a product was really computed is told by its numbers alone, too: a product in low
precision is nearest to the exact product of its operands as that precision rounds them, for what sums and the result's
rounding add is far less than what another rounding of the operands does. So of several guesses the one is taken whose
exact product lies nearest, and how far the others are says how sure that is.
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
# Roundings of a float32 sum beside its additions: of both operands' values, of their scales, of the result.
_BESIDE = 4
# Sums of fewer bits than these nobody builds.
_FEWEST_BITS = 8
# A bias that so many standard errors of chance explain is none; mean squares of one kind are alike up to this factor.
_CHANCE, _ALIKE = 6.0, 3.0
# A factor that is nearer to 1 is no scale, and neither is one that a result's own rounding makes.
_NO_SCALE = 2.0**-7
_BLOCKS = (128, 32, 16)
# Results for each factor that is fitted to them, and how often rows and columns take turns.
_EQUATIONS, _TURNS = 8, 30
# Values that share a scale, and how many such runs are looked at.
_RUN, _LOOKED_AT = 128, 32
# What float32 leaves of a value that is divided by its scale and multiplied with it.
_SLACK = 2.0**-18
_BITS = {2: torch.int16, 4: torch.int32}

Explained = tuple[Difference, str]


def differing(native: Tensor, emulated: Tensor) -> Tensor:
    """Where two results of one dtype differ in a bit; every NaN is the same one."""
    bits = _BITS[native.element_size()]
    same = native.contiguous().view(bits) == emulated.contiguous().view(bits)
    return ~(same | (native.isnan() & emulated.isnan()))


def steps_between(native: Tensor, emulated: Tensor) -> Tensor:
    """How many numbers of their dtype lie between two results; infinite where one alone is no number."""
    places = []
    for tensor in (native, emulated):
        bits = tensor.contiguous().view(_BITS[tensor.element_size()]).to(torch.int64)
        magnitude = bits & ((1 << (8 * tensor.element_size() - 1)) - 1)
        places.append(torch.where(bits < 0, -magnitude, magnitude))
    far = (places[0] - places[1]).abs().to(torch.float64)
    known = native.isfinite() & emulated.isfinite()
    return torch.where(known, far, torch.where(differing(native, emulated), math.inf, 0.0))


@dataclass(frozen=True)
class ConformitySums:
    """The exact product of a (M, K) and b (N, K), in float64, what a sum of `bits` may be off by, and its rounding."""

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
        """The same of the magnitude; short sums are those of an instruction, cut off."""
        length = self.a.shape[1]
        float32 = (length + _BESIDE) * 2.0**-FLOAT32_BITS
        return float32 if bits == FLOAT32_BITS else float32 + (math.ceil(length / INSTRUCTION) + 1) * 2.0 ** (1 - bits)

    def holds(self, found: Tensor, cut: bool = False) -> bool:
        """Whether every element is what a sum within the bound is rounded to: to nearest, or `cut` off toward 0."""
        rounded = self._cut if cut else self._nearest
        low, high = rounded(self.exact - self.bound), rounded(self.exact + self.bound)
        return bool(((found >= low) & (found <= high)).all())

    def near(self, found: Tensor, exact: Tensor, bound: Tensor) -> bool:
        """Whether every element is a neighbour of such a sum, however it was rounded."""
        return bool(((found - exact).abs() <= bound + self.step(exact.abs() + bound)).all())

    def step(self, values: Tensor) -> Tensor:
        """The distance of neighbouring numbers of the result's dtype there."""
        info = torch.finfo(self.dtype)
        return torch.exp2(values.abs().clamp(min=info.smallest_normal).log2().floor()) * info.eps

    def _nearest(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).to(torch.float64)

    def _cut(self, values: Tensor) -> Tensor:
        nearest = values.to(self.dtype)
        bits = _BITS[nearest.element_size()]
        below = (nearest.view(bits) - (nearest != 0).to(bits)).view(self.dtype)
        return torch.where(self._nearest(values).abs() > values.abs(), below, nearest).to(torch.float64)

    def is_unbiased(self, found: Tensor) -> bool:
        """Whether its errors are those of rounded steps: on no side more than chance and float32's own make them."""
        if self.bits < FLOAT32_BITS:  # short sums are cut off, and so they all lie on one side
            return True
        steady = 2.0**-self.bits * math.sqrt(self.a.shape[1])
        biased = abs(self.lost(found)) > steady + _CHANCE * math.sqrt(self.chance / found.numel())
        return not biased and self.spread(found) <= 4 * (steady**2 + self.chance)

    @cached_property
    def chance(self) -> float:
        """The mean square that rounding the result leaves, of the magnitude."""
        return float(((self.step(self.exact) / self.magnitude) ** 2).mean()) / 12

    def spread(self, found: Tensor) -> float:
        """The mean square of the errors, of the magnitude."""
        return float((((found - self.exact) / self.magnitude) ** 2).mean())

    def lost(self, found: Tensor) -> float:
        """By how much results are smaller than the exact ones, of the magnitude, on average."""
        return -float(((found - self.exact) / self.magnitude * self.exact.sign()).mean())


def explain_product(found: Tensor, sums: ConformitySums) -> Explained:
    """Why a product is not bit by bit another one of the same operands; `found` has the result's dtype."""
    wide = found.to(torch.float64)
    if not bool(sums.exact.isfinite().all()) or not bool(wide.any()):
        return Difference.UNEXPLAINED, "all results are 0" if sums.exact.isfinite().all() else "operands are no numbers"
    gone = ~wide.isfinite()
    if bool(gone.any()):
        beyond = sums.exact.abs() > torch.finfo(sums.dtype).max
        if bool((beyond | ~gone).all()):
            return Difference.OVERFLOW, "sums beyond the largest number"
        return Difference.UNEXPLAINED, f"{int(gone.sum())} results are no numbers"
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


def kept_bits(found: Tensor, sums: ConformitySums) -> int:
    """The bits that sums seem to be kept in; 24 where nothing says that it is fewer.

    What is cut off makes all of them smaller, and a model of 14 bits shows how much that is for these operands, and how
    far single results are off then.
    """
    model = short_product(sums.a, sums.b, Accumulator.SHORT).to(torch.float64)
    lost, expected = sums.lost(found), sums.lost(model)
    if lost <= 0 or expected <= 0:
        return FLOAT32_BITS
    more = lost / expected
    if sums.spread(found) > _ALIKE * (more**2 * sums.spread(model) + sums.chance):
        return FLOAT32_BITS
    return min(FLOAT32_BITS, round(HOPPER_BITS - math.log2(more)))


def _laid_otherwise(found: Tensor, sums: ConformitySums) -> Iterator[tuple[str, Tensor]]:
    a, b = sums.a, sums.b
    if a.shape[0] == b.shape[0]:
        yield "the result is transposed", sums.exact.t()
    if b.shape[0] == b.shape[1] == a.shape[1]:
        yield "the second operand is read transposed", a @ b
    if a.shape[0] == a.shape[1]:
        yield "the first operand is read transposed", a.t() @ b.t()
    if a.shape[1] % 2 == 0:
        exchanged = a.view(a.shape[0], -1, 2).flip(-1).reshape(a.shape)
        yield "every two neighbours of one operand are exchanged", exchanged @ b.t()
    yield from permutations(found, sums.exact)


def permutations(found: Tensor, wanted: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What was wanted with its rows, or columns, as near to what was found as any; none where it is no permutation."""
    for words, own, theirs in (("rows", found, wanted), ("columns", found.t(), wanted.t())):
        order = torch.cdist(own, theirs).argmin(dim=1).tolist()
        if sorted(order) == list(range(len(order))) != order:
            moved = theirs[order]
            yield f"{words} are permuted", moved if words == "rows" else moved.t()


def of_units(found: Tensor, codes: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor], promoted: bool) -> bool:
    """Whether every element is what Hopper's FP8 units make of codes (M, K) and (N, K), each with a scale an element.

    Their sums are known to the bit; the scales, and what is promoted, come to them in float32 in an order that is not.
    """
    length = PROMOTION if promoted else codes[0].shape[1]
    total = magnitude = torch.zeros((), dtype=torch.float64)
    for start in range(0, codes[0].shape[1], length):
        part = slice(start, start + length)
        down, across = (scale[:, part].to(torch.float64) for scale in scales)
        if not all(bool((tensor == tensor[:, :1]).all()) for tensor in (down, across)):
            return False
        scaled = unit_sums(*(code[:, part] for code in codes)) * down[:, :1] * across[:, :1].t()
        total, magnitude = total + scaled, magnitude + scaled.abs()
    bound = (codes[0].shape[1] // length + _BESIDE) * 2.0**-FLOAT32_BITS * magnitude
    low, high = ((total + side * bound).to(found.dtype) for side in (-1, 1))
    return bool(((found >= low) & (found <= high)).all())


class _Fit(NamedTuple):
    """A product with other factors, in words, and the magnitude of what was scaled."""

    words: str
    scaled: Tensor
    magnitude: Tensor


def _scaled_otherwise(found: Tensor, sums: ConformitySums) -> Iterator[_Fit]:
    """With factors of the tensor, of rows and columns, or of blocks along the contraction, that are not all 1."""
    no_scale = max(_NO_SCALE, 4 * torch.finfo(sums.dtype).eps)
    fits = (*_scaled_lines(found, sums), *_scaled_blocks(found, sums))
    for words, factors, scaled, magnitude in fits:
        least, most = float(factors.min()), float(factors.max())
        if max(abs(least - 1), abs(most - 1)) > no_scale:
            several = f" to {most:.3g}" if most - least > no_scale else ""
            yield _Fit(f"{words} scaled by {least:.3g}{several}", scaled, magnitude)


def _scaled_lines(found: Tensor, sums: ConformitySums) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    for words, rows, columns in (("the tensor", 0, 0), ("rows", 1, 0), ("columns", 0, 1), ("rows and columns", 1, 1)):
        down, across = _factors(found, sums.exact, bool(rows), bool(columns))
        yield words, down * across, down * across * sums.exact, (down * across).abs() * sums.magnitude


def _scaled_blocks(found: Tensor, sums: ConformitySums) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    for size in _BLOCKS:
        count = sums.a.shape[1] // size
        if sums.a.shape[1] % size or not 1 < count <= min(found.shape) // _EQUATIONS:
            continue
        a, b = (tensor.reshape(len(tensor), count, size) for tensor in (sums.a, sums.b))
        parts = torch.einsum("mcs,ncs->mnc", a, b)
        for operand, own, pieces in (("first", found, parts), ("second", found.t(), parts.transpose(0, 1))):
            factors = torch.linalg.lstsq(pieces, own[:, :, None]).solution
            scaled, magnitude = (pieces @ factors)[:, :, 0], (pieces.abs() @ factors.abs())[:, :, 0]
            if operand == "second":
                scaled, magnitude = scaled.t(), magnitude.t()
            yield f"blocks of {size} of the {operand} operand", factors, scaled, magnitude


def _factors(found: Tensor, exact: Tensor, by_row: bool, by_column: bool) -> tuple[Tensor, Tensor]:
    down = ((found * exact).sum() / (exact**2).sum()).expand(found.shape[0], 1)
    across = exact.new_ones(1, found.shape[1])
    for _ in range(_TURNS if by_row and by_column else 1):
        if by_row:
            down = _ratios(found, exact * across, 1)
        if by_column:
            down = down if by_row else torch.ones_like(down)
            across = _ratios(found, exact * down, 0)
    return down, across


def _ratios(found: Tensor, exact: Tensor, dimension: int) -> Tensor:
    squares = (exact**2).sum(dimension, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return (found * exact).sum(dimension, keepdim=True) / squares


def explain_cast(found: Tensor, wanted: Tensor, source: Tensor, fmt: Format) -> Explained:
    """Why the values of a cast of `source` are not bit by bit those that were wanted; float32, of two dimensions."""
    differ, top = differing(found, wanted), wanted.abs().nan_to_num(0.0, 0.0, 0.0).max()
    beyond = ~found.isfinite() | ~wanted.isfinite() | ((wanted.abs() == top) & (source.abs() > top))
    if bool((beyond | ~differ).all()):
        first = tuple(int(place) for place in differ.nonzero()[0])
        became = f"{float(found[first]):g}, not {float(wanted[first]):g}"
        return Difference.OVERFLOW, f"what lies beyond the largest becomes {became}"
    if not bool(found.any()):
        return Difference.UNEXPLAINED, "all values are 0"
    own, theirs, given = (tensor.to(torch.float64).nan_to_num(0.0, 0.0, 0.0) for tensor in (found, wanted, source))
    moved = [("the values are transposed", theirs.t())] if theirs.shape[0] == theirs.shape[1] else []
    for words, other in (*moved, *permutations(own, theirs)):
        if torch.equal(other, own):
            return Difference.LAYOUT, words
    for words, ratio in _cast_ratios(own, theirs):
        if bool(((own - ratio * theirs).abs() <= _SLACK * own.abs()).all()):
            return Difference.SCALE, f"{words} scaled by {float(ratio.min()):.8g} to {float(ratio.max()):.8g}"
    bits = mantissa_bits(found)
    if bits < min(fmt.mantissa_bits, mantissa_bits(wanted)):
        return Difference.UNEXPLAINED, f"values of {bits} bits of mantissa, where {fmt.name} has {fmt.mantissa_bits}"
    # A neighbour on the grid, on the other side of the value that was cast: what is nearer lies on no grid.
    steps = most_steps(torch.maximum(own.abs(), theirs.abs()), fmt, float(top))
    apart = (own - theirs).abs() / steps
    least = torch.where(steps > steps.min(), 0.5 - _SLACK, 0.0)
    around = ((own - given) * (theirs - given) <= 0) & (apart > least) & (apart < 1 + _SLACK)
    if not bool((around | ~differ).all()):
        return Difference.UNEXPLAINED, ""
    cut = bool((own.abs() <= given.abs())[differ].all())
    return Difference.ROUNDING, "cut off toward 0" if cut else "to a neighbour that is not the nearest"


def _cast_ratios(found: Tensor, wanted: Tensor) -> Iterator[tuple[str, Tensor]]:
    """By how much more was found, if that is the same all over the tensor, or its rows, columns or blocks."""
    ratio = torch.where(wanted != 0, found / wanted, torch.nan)
    yield "the tensor", ratio.nanmedian().nan_to_num(1.0)
    yield "rows", ratio.nanmedian(dim=1, keepdim=True).values.nan_to_num(1.0)
    yield "columns", ratio.nanmedian(dim=0, keepdim=True).values.nan_to_num(1.0)
    for size in _BLOCKS:
        if found.shape[1] % size == 0:
            blocks = ratio.view(len(ratio), -1, size).nanmedian(dim=2).values.nan_to_num(1.0)
            yield f"blocks of {size}", blocks.repeat_interleave(size, 1)


def mantissa_bits(values: Tensor) -> int:
    """How many bits of mantissa values have, by their numbers within an octave, whatever the scale of each run of 128.

    Too few where there are not enough values to meet all numbers of an octave.
    """
    length = _RUN if values.shape[-1] % _RUN == 0 else values.shape[-1]
    runs, most = values.detach().abs().reshape(-1, length), 1
    for run in runs[:: max(1, len(runs) // _LOOKED_AT)]:
        kinds = torch.tensor(sorted({size for size in run.tolist() if 0 < size < math.inf}), dtype=torch.float64)
        if len(kinds):
            beyond = torch.searchsorted(kinds, kinds * (2 - _SLACK))
            most = max(most, int((beyond - torch.arange(len(kinds))).max()))
    return math.ceil(math.log2(most))


def most_steps(values: Tensor, fmt: Format, top: float) -> Tensor:
    """The most that neighbours of a format may be apart about each value, whatever its scale.

    `top` is what the format's largest stands for where that is most.
    """
    return (values.abs() * 2.0**-fmt.mantissa_bits).clamp(min=fmt.smallest_subnormal * top / fmt.largest)


# The values of both operands, by what they would be called if the product were computed of them.
Guesses = Mapping[str, tuple[Tensor, Tensor]]
# A mean square that is so many times smaller is another precision's. Sums in few bits and a library's own way to round
# make no such difference; a bfloat16 result of bfloat16 copies of FP8 values has three times the error of its rounding.
_NEARER = 2.0


def looks_like(product: Tensor, promised: str, guesses: Guesses) -> str:
    """The guess that a product (M, N) of operands (M, K) and (N, K) looks like, clearly more than what was promised;
    '' where it kept the promise."""
    if not bool(product.isfinite().all()):
        return ""
    found = product.detach().to(torch.float64)
    errors = {
        name: ConformitySums(a.detach().to(torch.float64), b.detach().to(torch.float64), product.dtype).spread(found)
        for name, (a, b) in guesses.items()
    }
    nearest = min(errors, key=lambda name: errors[name])
    return nearest if errors[nearest] * _NEARER < errors[promised] else ""
