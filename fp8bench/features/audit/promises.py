"""Computes what a result should be, and finds the mistake that explains one that differs.

A kernel passes if every element equals the rounded sum of the promised products for some summation order. Otherwise the
mistake that explains every element is named. An unexplained result is compared with the emulation's error on the same
data: far above it is wrong, far below it is a wider precision.

A softmax has no result that is exact to the last bit, so attention is judged by its error: scores and weights may stay
in float32 or be rounded on the way, and a result must have the error of one of these variants, or one between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from fp8bench.features.audit.operands import Rounded, mistakes, nearest, round_operand, span
from fp8bench.features.audit.values import AuditFinding, fail, remark
from fp8bench.formats.grids import E4M3, E5M2
from fp8bench.formats.recipes import HOPPER_BITS, Treatment
from fp8bench.model.promises import Difference
from fp8bench.numerics.conformity import (
    FLOAT32_BITS,
    ConformitySums,
    explain_product,
    kept_bits,
    match_units,
)
from fp8bench.numerics.norms import relative_frobenius

# The allowed error relative to the emulation's. Honest casts that occasionally round differently (an inverse with fewer
# bits, ties the other way) stay within: power-of-two scales change FP8's error by less than a tenth, truncating casts
# double it.
BAND = (0.8, 1.25)
# With fewer rows than this, errors of two stochastic casts may differ by chance by this factor.
_FEW_ROWS, _FEW_DRAWS = 32, 2.5
# A mistake is named if it is this many times nearer than the promise, in mean squares; for products, and for attention.
_NEARER, _NEARER_IN_ATTENTION = 4.0, 16.0
# The relative error of an element times a scale in float32, if the scale was computed differently. Also the error that
# a float32 exponential, and sums in any order, may add to attention.
_LAST_BITS = 2.0**-18
# The most grid steps by which a value may differ under a different scale.
_STEPS = 2.0
# Rounding errors are treated as random: a sum of many may be off by this many standard errors.
_DRAWN = 6.0
# With fewer results no mistake is named, and no error judged.
_ENOUGH = 64
# The smallest mean gain that is reported; the number of standard errors that it must exceed; the share of it that ties
# must leave unexplained.
_GAIN, _SURE, _APART = 1e-3, 6.0, 0.05
# A mean gain is only checked in sums of at least this many terms.
_TERMS = 8.0
# Sums in fewer bits than the first number are reported: Hopper's FP8 products have 14. Below the second they are not
# sums.
_SHORT, _LEAST_BITS = 13, 6
# Hopper's units are simulated term by term: this many terms take about a second.
_MOST_TERMS = 1 << 25
TIES = "casts round elsewhere, as a scale that differs in its last bits, or ties to the other side, make them"
# A kernel may round values above this share of the largest number to infinity.
_NEAR_LARGEST = 0.9
# Codes that a single input proves; and codes of figures, which a second input must confirm because they may be chance.
CERTAIN = ("shape", "dtype", "not-finite", "wrong-values", "unexplained")
FIGURES = ("too-bad", "too-good", "gain")
# Two errors of attention count as equal if their ratio is above this.
_JUST = 0.999
# The audit's codes for differences that `numerics/conformity.py` explains.
_CODES = {Difference.LAYOUT: "layout", Difference.SCALE: "factor", Difference.OVERFLOW: "overflow"}
# Precisions that results are compared with to describe what was computed, the usual ones first.
READINGS = (
    "fp8",
    "fp8:scale=pow2",
    "fp8-rowwise",
    "fp8-rowwise:scale=exact",
    "fp8-block",
    "fp8-block:scale=exact",
    "mxfp8",
    "mxfp8:scale=floor",
    "mxfp6",
    "mxfp4",
    "mxfp4:scale=floor",
    "nvfp4",
    "nvfp4:weights=1d",
    "fp8-e5m2",
    "fp8-unit",
)
OTHER_READINGS = (
    "fp8-e4m3",
    "mxfp8:scale=even",
    "mxfp8:scale=ceil",
    "mxfp4:scale=even",
    "mxfp4:scale=ceil",
    "mxfp6:formats=e2m3",
    "nvfp4:scale=up",
    "custom:format=e4m3fnuz",
    "custom:format=e4m3fnuz:scaling=row",
    "bf16",
    "fp16",
    "fp32",
)
_RESULTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Matrices = tuple[Tensor, ...]


class Promise(Protocol):
    """The expected result."""

    def judge(self, result: Tensor, search: bool = True) -> AuditFinding:
        """Judges one result. Without `search`, no mistakes are searched in a result with the right error."""


@dataclass(frozen=True)
class SampledPlaces:
    """The `rows` and `columns` of a result of that shape to judge; for attention, the heads and positions."""

    shape: tuple[int, ...]
    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class ProductPromise:
    """The expected product of a (M, K) and transposed b (N, K), rounded by their recipe. `emulated` is the emulation's
    result if casts rotate operands or draw random numbers: then only its error is compared. On `hopper` FP8 may be
    summed in few bits. With `places`, a and b are some rows of the operands, and only these parts of the result are
    judged."""

    a: Rounded
    b: Rounded
    emulated: Tensor | None = None
    hopper: bool = False
    places: SampledPlaces | None = None

    def judge(self, result: Tensor, search: bool = True) -> AuditFinding:
        places, shape = self.places, (len(self.a.elements), len(self.b.elements))
        if wrong := unusable(result, shape if places is None else places.shape, finite=False):
            return wrong
        if places is not None:
            result = result[places.rows][:, places.columns]
        result = result.to(torch.float32) if result.dtype is torch.float64 else result
        sums = self._sums(result.dtype)
        likely = sums.exact.to(result.dtype) if self.emulated is None else self.emulated
        if not bool((likely.to(torch.float64).abs() < _NEAR_LARGEST * torch.finfo(result.dtype).max).all()):
            return self._judge_overflow(result, sums, likely)
        if wrong := unusable(result, shape):
            return wrong
        error, expected = self._error(result), self._error(likely)
        if self.emulated is None or (error is None and expected is None):
            return replace(self._compare_sums(result, sums, search), error=error, expected=expected)
        band = in_band(error, expected, slack=_FEW_DRAWS if self._draws_little(shape) else 1.0)
        return band if band.failed else AuditFinding(error=error, expected=expected)

    def _draws_little(self, shape: tuple[int, int]) -> bool:
        """Whether chance affects the error of stochastic casts: few results are judged, or few numbers are cast."""
        return self.places is not None or min(*shape, self.a.elements.shape[1]) < _FEW_ROWS

    def _judge_overflow(self, result: Tensor, sums: ConformitySums, likely: Tensor) -> AuditFinding:
        """Judges results if some promised sums overflow their dtype. These may become infinite or the largest number;
        the others may differ by ties and last bits, or have the expected error."""
        wide = result.to(torch.float64)
        unbounded = torch.where(wide.abs() >= torch.finfo(result.dtype).max, wide.sign() * math.inf, wide)

        def lost(slack: Sequence[Tensor], errors: float) -> bool:
            beyond = [self._beyond(numbers, sums, slack, errors) for numbers in (wide, unbounded)]
            return bool((beyond[0] & beyond[1] & ~sums.exact.isnan()).any())

        if not lost([_slack(side, span(side)) for side in (self.a, self.b)], math.inf):
            return AuditFinding()
        if lost([_STEPS * _steps_of(side) for side in (self.a, self.b)], _DRAWN):
            return fail("too-bad", "results next to some that overflow are wrong")
        finite = result.isfinite() & likely.isfinite()
        error, expected = (self._error(torch.where(finite, numbers, 0), finite) for numbers in (result, likely))
        return in_band(error, expected)

    def _compare_sums(self, result: Tensor, sums: ConformitySums, search: bool) -> AuditFinding:
        # 1. Accept results that some sum of promised operands gives.
        wide = result.to(torch.float64)
        if sums.holds(wide):
            return AuditFinding()
        # 2. Known hardware behaviour is a remark, not a failure.
        if self.hopper and self._of_units(result, sums):
            return remark("short-sums", "to the bit what Hopper's FP8 units sum in 14 bits")
        # 3. Accept near misses that operands on the edge between two codes explain.
        spans = span(self.a), span(self.b)
        gain = self._gain(wide, sums, spans)
        if not gain and not bool(self._beyond(wide, sums, map(_slack, (self.a, self.b), spans)).any()):
            return remark("other-rounding", TIES)
        steps = (_STEPS * _steps_of(operand) for operand in (self.a, self.b))
        # 4. Report a named mistake, if one explains all results.
        outliers = self._beyond(wide, sums, steps, _DRAWN)
        is_near = not bool(outliers.any())
        if is_near and result.numel() < _ENOUGH:
            return remark("other-rounding", TIES)
        code, reason = self._explain(wide, result, sums) if search and result.numel() >= _ENOUGH else ("", "")
        if code or (gain and is_near):
            return fail(code, reason) if code else fail("gain", gain)
        # 5. Report where results differ that no rounding of operands explains.
        if not is_near and not self._lossless:
            row, column = (int(place) for place in outliers.nonzero()[0])
            if self.places is not None:
                row, column = int(self.places.rows[row]), int(self.places.columns[column])
            where = f"{int(outliers.sum())} of {outliers.numel()} results, the first in row {row}, column {column}"
            return fail("wrong-values", f"{where}, are further off than operands that round otherwise")
        # 6. Otherwise judge the error alone, and how many bits sums seem to have.
        band = in_band(self._error(result), self._error(sums.exact.to(result.dtype)), reason or gain)
        if short := self._short(wide, sums):
            make_finding = remark if band.remark or (band.error is None and short >= _SHORT) else fail
            return make_finding("short-sums", f"sums, or operands, as if kept in {short} bits")
        return band

    def _of_units(self, result: Tensor, sums: ConformitySums) -> bool:
        """Whether it matches Hopper's units: bit by bit in as many rows as can be simulated, and nearly in all."""
        a, b = self.a, self.b
        if any(side.treatment is None or side.treatment.fmt not in (E4M3, E5M2) for side in (a, b)):
            return False
        every = -(-result.numel() * a.elements.shape[1] // _MOST_TERMS)
        rows = slice(None, None, max(1, every))
        if not sums.near(result.to(torch.float64), sums.exact, sums.reach(HOPPER_BITS - 1) * sums.magnitude):
            return False
        spread = (side.spread.expand_as(side.elements) for side in (a, b))
        codes, scales = (a.elements[rows], b.elements), (next(spread)[rows], next(spread))
        return any(match_units(result[rows], codes, scales, promoted) for promoted in (True, False))

    @property
    def _lossless(self) -> bool:
        return all(side.given is None or torch.equal(side.values, side.given.float()) for side in (self.a, self.b))

    def _beyond(self, wide: Tensor, sums: ConformitySums, slack: Iterable[Tensor], errors: float = math.inf) -> Tensor:
        """Marks results that no sum of operands that are off by at most `slack` is rounded to. With `errors`, rounding
        errors are treated as random, and that many standard errors are allowed."""
        x, y, a, b = (tensor.double() for tensor in (self.a.values.abs(), self.b.values.abs(), *slack))
        extra = ((x + a) @ (y + b).t() - sums.magnitude).clamp(min=0)
        if errors < math.inf:
            extra = torch.minimum(extra, errors * (a**2 @ (y**2).t() + x**2 @ (b**2).t()).sqrt())
        low, high = ((sums.exact + side * (sums.bound + extra)).to(sums.dtype).to(torch.float64) for side in (-1, 1))
        return ~((wide >= low) & (wide <= high))

    def _short(self, wide: Tensor, sums: ConformitySums) -> int:
        """Returns the number of bits in which sums seem to be kept, if only short sums explain the result; else 0."""
        if bool((wide[sums.exact == 0] != 0).any()):
            return 0
        bits = kept_bits(wide, sums)
        if bits >= FLOAT32_BITS and self._lossless:
            apart = float((wide - sums.exact).square().mean() / sums.exact.square().mean().clamp(min=1e-300))
            bits = round(-math.log2(12 * apart) / 2) if apart else FLOAT32_BITS
        fits = bool(((wide - sums.exact).abs() <= 2.0 ** (3 - bits) * sums.magnitude + sums.step(sums.exact)).all())
        return bits if fits and _LEAST_BITS <= bits < FLOAT32_BITS else 0

    def _gain(self, wide: Tensor, sums: ConformitySums, spans: Sequence[Matrices]) -> str:
        """Describes by how much results are too large on average, beyond what rounding of ties explains; else ''."""
        a, b = self.a.values.double(), self.b.values.double()
        terms = sums.magnitude**2 / (a**2 @ (b**2).t()).clamp(min=torch.finfo(torch.float64).tiny)
        if float(terms.median()) < _TERMS:  # the rounding of few numbers has a mean different from zero
            return ""
        columns = [sums.exact]
        for place, ((low, high), values) in enumerate(zip(spans, (self.a.values, self.b.values), strict=True)):
            open_ = (high - low) > _LAST_BITS * values.abs()
            if bool(open_.any()):
                ends = (torch.where(values < 0, tensor, opposite) for tensor, opposite in ((low, high), (high, low)))
                moved = (torch.where(open_, end - values, 0.0).double() for end in ends)
                columns += [a @ tensor.t() if place else tensor @ b.t() for tensor in moved]
        regressors = torch.stack([(column / sums.magnitude).flatten() for column in columns], 1)
        off = ((wide - sums.exact.to(sums.dtype).to(torch.float64)) / sums.magnitude).flatten()
        gram = regressors.t() @ regressors
        inverse = torch.linalg.pinv(gram, hermitian=True, rtol=1e-10)
        shares = inverse @ (regressors.t() @ off)
        error = math.sqrt(max(float((off - regressors @ shares).square().mean() * inverse[0, 0]), 0.0))
        gain, apart = float(shares[0]), float(inverse[0, 0] * gram[0, 0])
        sure = len(off) >= _ENOUGH and apart <= 1 / _APART and abs(gain) > max(_GAIN, _SURE * error)
        return f"results are {abs(gain):.2%} too {'large' if gain > 0 else 'small'} in the mean" if sure else ""

    def _sums(self, dtype: torch.dtype) -> ConformitySums:
        return ConformitySums(self.a.values.to(torch.float64), self.b.values.to(torch.float64), dtype)

    def _error(self, result: Tensor, where: Tensor | bool = True) -> float | None:
        if self.a.given is None or self.b.given is None:
            return None
        exact = self.a.given.to(torch.float64) @ self.b.given.to(torch.float64).t()
        exact = exact * where
        return relative_frobenius(result, exact) if bool(exact.any()) else None

    def _explain(self, wide: Tensor, result: Tensor, sums: ConformitySums) -> tuple[str, str]:
        """Returns code and description of the first mistake that explains every element; or else of the kind of
        difference; or else of the mistake that is much nearer."""
        distance, nearest = float((wide - sums.exact).square().sum()), (math.inf, "", "")
        for code, words, a, b in self._guesses():
            guess = ConformitySums(a.to(torch.float64), b.to(torch.float64), result.dtype)
            if guess.exact.isfinite().all():
                if guess.holds(wide):
                    return code, words
                nearest = min(nearest, (float((wide - guess.exact).square().sum()), code, words))
        difference, reason = explain_product(result, sums)
        # A result of zeros is near to any mistake that shrinks numbers.
        if difference not in _CODES and nearest[0] * _NEARER < distance and bool(wide.any()):
            return nearest[1], f"nearest to this: {nearest[2]}"
        return _CODES.get(difference, ""), reason

    def _guesses(self) -> Iterator[tuple[str, str, Tensor, Tensor]]:
        a, b = self.a.values, self.b.values
        first, second = list(mistakes(self.a)), list(mistakes(self.b))
        second_by_words = {(code, words): values for code, words, values in second}
        for code, words, values in first:
            if (code, words) in second_by_words:
                yield code, f"each operand is {words}", values, second_by_words[code, words]
        for code, words, values in first:
            yield code, f"the first operand is {words}", values, b
        for code, words, values in second:
            yield code, f"the second operand is {words}", a, values


@dataclass(frozen=True)
class AttentionPromise:
    """The expected attention of queries, keys and values, unchanged in `given`, all cast by one treatment."""

    given: Matrices
    treatment: Treatment | None
    causal: bool
    places: SampledPlaces | None = None

    def judge(self, result: Tensor, search: bool = True) -> AuditFinding:
        places = self.places
        if wrong := unusable(result, tuple(self.given[0].shape) if places is None else places.shape):
            return wrong
        if places is not None:
            result = result.flatten(0, 1)[places.rows][None][:, :, places.columns]
        exact, promised = self._exact(), self._expected_result()
        error = relative_frobenius(result, exact)
        variants = promised, self._expected_result(weights=True), self._expected_result(weights=True, scores=True)
        expected = [relative_frobenius(variant.to(result.dtype), exact) for variant in variants]
        lossy = self.treatment is not None and self.treatment.fmt.bits <= 8
        low, high = _JUST * min(expected) * lossy, max(*expected, _LAST_BITS) / _JUST
        if low <= error <= high:
            return AuditFinding(error=error, expected=high)
        distance = partial(_distance, result)
        mistakes = self._mistakes() if places is None else ()
        if mistake := nearest(mistakes, distance, distance(promised) / _NEARER_IN_ATTENTION):
            return fail(*mistake, error, high)
        return in_band(error, high if error > high else low)

    def _exact(self) -> Tensor:
        q, k, v = (tensor.to(torch.float64) for tensor in self.given)
        return self._softmax(_scores(self._queries(q), k)) @ v

    def _expected_result(self, weights: bool = False, scores: bool = False) -> Tensor:
        """Returns the promised result with intermediate values in float64, or rounded as unfused operators do:
        `weights` cast from the carrier, `scores` stored in it."""
        q, k, v = self._cast
        carrier = self.given[0].dtype
        between = _scores(q, k)
        if scores:  # before they are scaled, and afterwards
            size = math.sqrt(q.shape[-1])
            between = ((between * size).to(carrier).to(q.dtype) / size).to(carrier).to(q.dtype)
        shares = self._softmax(between)
        return (_along_last(shares.to(carrier), self.treatment) if weights else shares) @ v

    @cached_property
    def _cast(self) -> Matrices:
        """Returns all three, each cast along the contraction of its product: values along their positions."""
        q, k, turned = (
            _along_last(tensor, self.treatment) for tensor in (*self.given[:2], self.given[2].transpose(-1, -2))
        )
        return self._queries(q), k, turned.transpose(-1, -2)

    def _queries(self, q: Tensor) -> Tensor:
        return q if self.places is None else q[:, :, self.places.columns]

    def _softmax(self, scores: Tensor) -> Tensor:
        return _softmax(scores, self.causal, rows=None if self.places is None else self.places.columns)

    def _mistakes(self) -> Iterator[tuple[str, str, Tensor]]:
        q, k, v = self._cast
        size = math.sqrt(q.shape[-1])
        if self.treatment is not None:
            yield "not-cast", "queries, keys and values as they came: nothing was cast", self._exact()
            wide = self.given[2].to(torch.float64)
            yield "not-cast", "scores of what was cast, and values as they came", _weights(q, k, self.causal) @ wide
        wrong = _weights(q * size, k, self.causal) @ v
        yield "scale", "its scores are not divided by the square root of the size", wrong
        yield "scale", "its scores are divided by the size", _weights(q / size, k, self.causal) @ v
        yield "mask", f"it is {'not ' * self.causal}causal", _weights(q, k, not self.causal) @ v


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def _weights(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    return _softmax(_scores(q, k), causal)


def _softmax(scores: Tensor, causal: bool, rows: Tensor | None = None) -> Tensor:
    """Returns the softmax over all positions or, if causal, over each position and earlier ones."""
    if causal:
        visible = torch.ones(scores.shape[-1], scores.shape[-1], dtype=torch.bool).tril()
        visible = visible if rows is None else visible[rows]
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(-1)


def _along_last(x: Tensor, treatment: Treatment | None) -> Tensor:
    if treatment is None:
        return x.to(torch.float64)
    heads = x.reshape(-1, *x.shape[-2:])
    cast = torch.stack([round_operand(head.contiguous(), treatment).values for head in heads])
    return cast.view(x.shape).to(torch.float64)


def _slack(operand: Rounded, ends: Matrices) -> Tensor:
    low, high = ends
    return torch.maximum(high - operand.values, operand.values - low) + _LAST_BITS * operand.values.abs()


def _steps_of(operand: Rounded) -> Tensor:
    """Returns the distance of each value to its neighbour on the grid; 0 if it is not cast."""
    if operand.treatment is None or operand.given is None:
        return torch.zeros_like(operand.elements)
    fmt = operand.treatment.fmt
    sizes = operand.elements.abs().clamp(min=fmt.smallest_normal)
    return torch.exp2(sizes.log2().floor() - fmt.mantissa_bits) * operand.spread


def _distance(result: Tensor, expected: Tensor) -> float:
    return float((result.to(torch.float64) - expected).square().mean())


def unusable(result: Tensor, shape: tuple[int, ...], finite: bool = True) -> AuditFinding | None:
    if tuple(result.shape) != shape:
        gives, expected = ("x".join(map(str, sides)) or "one number" for sides in (result.shape, shape))
        return fail("shape", f"gives {gives}, and {expected} were expected")
    if result.dtype not in _RESULTS:
        return fail("dtype", f"gives {result.dtype}, and float32, bfloat16 or float16 were expected")
    lost = int((~result.isfinite()).sum()) if finite else 0
    return fail("not-finite", f"{lost} of {result.numel()} results are not finite") if lost else None


def in_band(error: float | None, expected: float | None, reason: str = "", slack: float = 1.0) -> AuditFinding:
    """Judges by error alone; `reason` describes what is already known, `slack` widens the band."""
    unknown = reason or "no known mistake explains it"
    if error is None or expected is None:
        return fail("unexplained", unknown, error, expected)
    low, high = BAND[0] / slack, BAND[1] * slack
    if error > expected * high:
        return fail("too-bad", f"{unknown}; its error is {error:.3g}, and {expected:.3g} was expected", error, expected)
    if error < expected * low:
        return fail(
            "too-good",
            f"its error is {error:.3g}, and this precision has {expected:.3g}: finer scales, or a wider one",
            error,
            expected,
        )
    return remark("other-rounding", reason or "not the promised values, and with their error", error, expected)
