"""What a result should be, and what is wrong with one that is not so.

A promise is kept where each element is what a sum of the promised products, in some order, is rounded to. One that is
not may be explained by a mistake, by which something else holds for every element. What nothing explains is held
against the error that the emulation has on the same data: far above it is wrong, far below it is a wider precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fp8bench.features.audit.mistakes import Source, mistakes
from fp8bench.model.promises import Difference
from fp8bench.numerics.conformity import Sums, explain_cast, explain_product
from fp8bench.numerics.norms import relative_frobenius

# An honest kernel whose casts round otherwise in places (an inverse in fewer bits, ties the other way) stays in it:
# powers of two as scales move the error of FP8 by less than a tenth, casts that cut off double it.
BAND = (0.8, 1.25)
# A guess is taken whose mean square of errors is so many times smaller than the promise's.
_NEARER = 4.0
# Of an element and a scale, both float32, that are multiplied: and of another way to the same scale.
_LAST_BITS = 2.0**-18
# A cast may round as many elements otherwise where their scales differ in the last bit.
_TIES = 0.01
# A neighbour under a scale that differs in its last bits, or that is rounded elsewhere.
_STEP = 1.01
# What explains a product otherwise, by what an audit calls it.
_CODES = {Difference.LAYOUT: "layout", Difference.SCALE: "factor", Difference.OVERFLOW: "overflow"}


class Judged(NamedTuple):
    """What became of a promise: '' and no words where it was kept. A remark is something that is said of a kept one."""

    code: str = ""
    why: str = ""
    remark: bool = False
    error: float | None = None
    expected: float | None = None

    @property
    def failed(self) -> bool:
        return bool(self.code) and not self.remark


@dataclass(frozen=True)
class ProductPromise:
    """a (M, K) times b (N, K) transposed, as their recipe rounds them.

    `emulated` is there where casts rotate operands or draw random numbers: then only the error can be told, and is
    that of this result.
    """

    a: Source
    b: Source
    emulated: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.a.kept.elements.shape[0], self.b.kept.elements.shape[0]

    def judge(self, found: Tensor, search: bool = True) -> Judged:
        """Not to `search`: what lies in the band is let be without looking for mistakes."""
        if wrong := unusable(found, self.shape):
            return wrong
        sums = self._sums(found.dtype)
        likely = sums.exact.to(found.dtype) if self.emulated is None else self.emulated
        beyond = ~likely.isfinite()
        if bool(beyond.any()):
            return _overflown(found, beyond, sums)
        if wrong := not_finite(found):
            return wrong
        wide = found.to(torch.float64)
        error, expected = self._error(found), self._error(likely)
        if self.emulated is not None:
            band = in_band(error, expected, "")
            return band if band.failed else Judged(error=error, expected=expected)
        if sums.holds(wide):
            return Judged(error=error, expected=expected)
        band = in_band(error, expected, "")
        if band.remark and not search:
            return band
        code, why = self._explained(wide, found, sums)
        if code:
            return Judged(code, why, False, error, expected)
        return in_band(error, expected, why)

    def agrees(self, one: Tensor, other: Tensor) -> bool:
        """Whether two results may both be the promised one, summed in two orders."""
        sums = self._sums(one.dtype)
        return sums.near(one.to(torch.float64), other.to(torch.float64), 2 * sums.bound)

    def _sums(self, dtype: torch.dtype) -> Sums:
        return Sums(self.a.kept.values.to(torch.float64), self.b.kept.values.to(torch.float64), dtype)

    def _error(self, found: Tensor) -> float | None:
        """Relative, of the exact product of what came in; None where that is not known, or zero."""
        if self.a.given is None or self.b.given is None:
            return None
        exact = self.a.given.to(torch.float64) @ self.b.given.to(torch.float64).t()
        return relative_frobenius(found, exact) if bool(exact.any()) else None

    def _explained(self, wide: Tensor, found: Tensor, sums: Sums) -> tuple[str, str]:
        """The first mistake that explains every element; else what differs; else the one that comes much nearer."""
        own, nearest = float((wide - sums.exact).square().sum()), (math.inf, "", "")
        for code, words, a, b in self._guesses():
            guess = Sums(a.to(torch.float64), b.to(torch.float64), found.dtype)
            if guess.exact.isfinite().all():
                if guess.holds(wide):
                    return code, words
                nearest = min(nearest, (float((wide - guess.exact).square().sum()), code, words))
        difference, why = explain_product(found, sums)
        if difference not in _CODES and nearest[0] * _NEARER < own:
            return nearest[1], f"nearest to this: {nearest[2]}"
        return _CODES.get(difference, ""), why

    def _guesses(self) -> Iterator[tuple[str, str, Tensor, Tensor]]:
        """Both operands under the same mistake, then one of them alone."""
        a, b = self.a.kept.values, self.b.kept.values
        first, second = list(mistakes(self.a)), list(mistakes(self.b))
        alike = {(one.code, one.words): one.values for one in second}
        for one in first:
            if (one.code, one.words) in alike:
                yield one.code, f"each operand is {one.words}", one.values, alike[one.code, one.words]
        for one in first:
            yield one.code, f"the first operand is {one.words}", one.values, b
        for one in second:
            yield one.code, f"the second operand is {one.words}", a, one.values


@dataclass(frozen=True)
class CastPromise:
    """The values that a recipe leaves of a matrix."""

    source: Source

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.source.kept.elements.shape
        return rows, columns

    def judge(self, found: Tensor, search: bool = True) -> Judged:
        """Not to `search`: what lies in the band is let be without looking for mistakes."""
        if wrong := unusable(found, self.shape) or not_finite(found):
            return wrong
        given, kept, treatment = self.source.given, self.source.kept, self.source.kept.treatment
        assert given is not None and treatment is not None
        values, wanted = found.to(torch.float32), kept.values
        error, expected = (relative_frobenius(one, given) if bool(given.any()) else None for one in (values, wanted))
        off = (values - wanted).abs() > _LAST_BITS * wanted.abs()
        if not bool(off.any()):
            return Judged(error=error, expected=expected)
        band = in_band(error, expected, "")
        if band.remark and not search:
            return band
        for one in mistakes(self.source):
            if bool(((values - one.values).abs() <= _LAST_BITS * one.values.abs()).all()):
                return Judged(one.code, f"the matrix is {one.words}", False, error, expected)
        if not self._neighbours(values):
            why = f"{int(off.sum())} of {off.numel()} elements are wrong, some by more than a step of the grid"
            return Judged("wrong-values", why, False, error, expected)
        if float(off.float().mean()) <= _TIES:
            return in_band(error, expected, f"{int(off.sum())} of {off.numel()} elements are rounded otherwise")
        difference, why = explain_cast(values, wanted, given.to(torch.float32), treatment.fmt)
        if difference in _CODES:
            return Judged(_CODES[difference], why, False, error, expected)
        return in_band(error, expected, why or "other values, of the same error")

    def _neighbours(self, values: Tensor) -> bool:
        """Whether every element is the promised one or beside it on its grid."""
        kept = self.source.kept
        if kept.treatment is None:
            return False
        fmt = kept.treatment.fmt
        elements = values / kept.spread
        largest = torch.maximum(elements.abs(), kept.elements.abs()).clamp(min=fmt.smallest_normal)
        steps = torch.exp2(largest.log2().floor() - fmt.mantissa_bits)
        return bool(((elements - kept.elements).abs() <= _STEP * steps).all())

    def agrees(self, one: Tensor, other: Tensor) -> bool:
        """Whether two results are the same values, up to the last bits of their scales."""
        return torch.equal(one, other) or bool(((one - other).abs() <= _LAST_BITS * other.abs()).all())


class Promise(Protocol):
    """What a result should be."""

    def judge(self, found: Tensor, search: bool = True) -> Judged:
        """What became of it. Not to `search`: what has the right error is let be without looking for mistakes."""

    def agrees(self, one: Tensor, other: Tensor) -> bool:
        """Whether two results may be the same one."""


def unusable(found: Tensor, shape: tuple[int, ...]) -> Judged | None:
    """What is wrong with a result whatever was promised."""
    if tuple(found.shape) != shape:
        return Judged("shape", f"gives {_sizes(tuple(found.shape))}, and {_sizes(shape)} were expected")
    if not found.is_floating_point():
        return Judged("dtype", f"gives {found.dtype}, and floating-point numbers were expected")
    return None


def _overflown(found: Tensor, beyond: Tensor, sums: Sums) -> Judged:
    """Where the promised sum is too large for its dtype nobody can say what is right; the others are what they are."""
    apart = (found.to(torch.float64) - sums.exact).abs()
    right = apart <= sums.bound + sums.step(sums.exact.abs())
    if bool((right | beyond).all()):
        return Judged()
    return Judged("too-bad", f"{int((~right & ~beyond).sum())} results beside those that overflow are wrong")


def not_finite(found: Tensor) -> Judged | None:
    """The same of results that all should be numbers."""
    gone = int((~found.isfinite()).sum())
    return Judged("not-finite", f"{gone} of {found.numel()} results are no numbers") if gone else None


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"


def in_band(error: float | None, expected: float | None, why: str) -> Judged:
    """What the error alone says."""
    why = why or "no known mistake explains it"
    if error is None or expected is None:
        return Judged("unexplained", why, False, error, expected)
    low, high = (expected * one for one in BAND)
    if error > high:
        words = f"{why}; its error is {error:.3g}, and {expected:.3g} was expected"
        return Judged("too-bad", words, False, error, expected)
    if error < low:
        words = f"its error is {error:.3g}, and this precision has {expected:.3g}: a wider one ran"
        return Judged("too-good", words, False, error, expected)
    return Judged("other-rounding", why, True, error, expected)
