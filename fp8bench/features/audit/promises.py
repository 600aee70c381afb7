"""Computes the expected results of a kernel, and finds the mistake that explains a wrong result.

A product passes if every element is the correctly rounded sum of the promised products, in any order of summation.
Otherwise the mistake that explains every element is named. A result that no mistake explains is compared with the
error of the emulation on the same data: a far larger error is wrong, and a far smaller one shows a wider precision.

A softmax has no result that is exact to the last bit, so attention is judged by its error. Scores and weights may
stay in float32 or be rounded, and the error must be that of one of these variants or between two of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fp8bench.features.audit.operands import RoundedOperand, find_value_range, iterate_rounding_mistakes, round_operand
from fp8bench.features.audit.readings import describe_outliers
from fp8bench.features.audit.values import AuditFinding, make_failure, make_remark
from fp8bench.formats.grids import E4M3, E5M2
from fp8bench.formats.recipes import HOPPER_SUM_BITS, Treatment
from fp8bench.model.promises import Difference
from fp8bench.numerics.conformity import (
    FLOAT32_BITS,
    ConformitySums,
    estimate_accumulator_bits,
    explain_product_difference,
    matches_hopper_units,
)
from fp8bench.numerics.norms import relative_frobenius

# The allowed error relative to that of the emulation. Correct casts that sometimes round differently (an approximate
# inverse, ties rounded the other way) stay inside this band: power-of-two scales change the FP8 error by less than a
# tenth, while truncating casts double it.
EXPECTED_ERROR_BAND = (0.8, 1.25)
# With fewer than _DECODING_ROWS rows, chance may make the errors of two stochastic casts differ by _FEW_ROWS_FACTOR.
_DECODING_ROWS, _FEW_ROWS_FACTOR = 32, 2.5
# A mistake is named if the kernel's result is this many times nearer to the mistake's result than to the expected one,
# by mean square distance. Products and attention have different factors.
_NEARER_FACTOR, _NEARER_FACTOR_IN_ATTENTION = 4.0, 16.0
# The tolerated relative difference of values whose float32 scales were computed differently. In attention, it also
# covers float32 exponentials and the order of summation.
_SCALE_ROUNDING_TOLERANCE = 2.0**-18
# If a scale was rounded differently, a value may be off by this many steps of the format's grid.
_GRID_STEPS = 2.0
# Rounding errors count as random: a sum may be off by this many standard errors.
_TOLERATED_STANDARD_ERRORS = 6.0
# With fewer results than this, no mistake is named and no error is judged.
_MIN_RESULT_COUNT = 64
# A mean gain (results too large or small on average) is reported above _MIN_GAIN and _GAIN_STANDARD_ERRORS standard
# errors. Ties also cause gains, so ties must leave at least _INDEPENDENT_SHARE of the variance unexplained.
_MIN_GAIN, _GAIN_STANDARD_ERRORS, _INDEPENDENT_SHARE = 1e-3, 6.0, 0.05
# The mean gain is checked only if the median sum has this many effective terms. If one term dominates, it has one.
_MIN_TERMS = 8.0
# How many bits a kernel's sums seem to keep. If the error of a result cannot be judged, fewer than _SHORT_SUM_BITS
# fail: Hopper's FP8 products have 14. With fewer than _MIN_SUM_BITS, it is not a sum of products of the operands.
_SHORT_SUM_BITS, _MIN_SUM_BITS = 13, 6
# At most this many terms of sums in Hopper's units are simulated, one by one, which takes about a second.
_MAX_SIMULATED_TERMS = 1 << 25
ROUNDING_REASON = "casts round differently: scales differ in their last bits, or ties are rounded the other way"
# Values above this share of the dtype's largest number may become infinite.
_SAFE_SHARE_OF_LARGEST_VALUE = 0.9
# Codes of failures that one input proves, and of figures that a second input must confirm: they may be chance.
CERTAIN_FINDING_CODES = ("shape", "dtype", "not-finite", "wrong-values", "unexplained")
FIGURE_FINDING_CODES = ("too-bad", "too-good", "gain")
# Errors of attention count as equal if the smaller one is at least this share of the larger one.
_EQUAL_RATIO = 0.999
_MISTAKE_CODE_BY_DIFFERENCE = {Difference.LAYOUT: "layout", Difference.SCALE: "factor", Difference.OVERFLOW: "overflow"}
_RESULT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Matrices = tuple[Tensor, ...]


class ExpectedResult(Protocol):
    """The values, format and scales that a result of the kernel should have."""

    def judge(self, result: Tensor, search_mistakes: bool = True) -> AuditFinding:
        """Returns the finding for one result. Without `search_mistakes`, names no mistake if the size of the error is
        acceptable."""


@dataclass(frozen=True)
class ResultSample:
    """The rows and columns that are judged in a result of this `shape`. For attention, they are heads and positions."""

    shape: tuple[int, ...]
    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class ExpectedProduct:
    """The expected product of a (M, K) and the transpose of b (N, K), both rounded by their recipe. `emulated_result`
    is set only if casts rotate operands or use random numbers. In this case, errors are compared, not values.
    `accepts_hopper_sums` also accepts the less precise sums of Hopper's FP8 units. With `sample`, a and b hold only
    some rows of the operands, and only the sampled part of the result is judged."""

    a: RoundedOperand
    b: RoundedOperand
    emulated_result: Tensor | None = None
    accepts_hopper_sums: bool = False
    sample: ResultSample | None = None

    def judge(self, result: Tensor, search_mistakes: bool = True) -> AuditFinding:
        sample = self.sample
        shape = (len(self.a.elements), len(self.b.elements))
        if failure := _find_unusable_result(result, shape if sample is None else sample.shape):
            return failure
        if sample is not None:
            result = result[sample.rows][:, sample.columns]
        result = result.float() if result.dtype is torch.float64 else result
        sums = self._make_conformity_sums(result.dtype)
        most_likely_result = sums.product.to(result.dtype) if self.emulated_result is None else self.emulated_result
        if not (most_likely_result.double().abs() < _SAFE_SHARE_OF_LARGEST_VALUE * torch.finfo(result.dtype).max).all():
            return self._judge_overflow(result, sums, most_likely_result)
        if failure := _find_nonfinite_result(result):
            return failure
        error = self._measure_error(result)
        expected_error = self._measure_error(most_likely_result)
        if self.emulated_result is None or (error is None and expected_error is None):
            finding = self._judge_product_sums(result, sums, search_mistakes, error, expected_error)
            return replace(finding, error=error, expected=expected_error)
        finding = judge_error(error, expected_error, slack=_FEW_ROWS_FACTOR if self._is_error_random(shape) else 1.0)
        return finding if finding.has_failed else AuditFinding(error=error, expected=expected_error)

    def _is_error_random(self, shape: tuple[int, int]) -> bool:
        """Returns whether chance affects the error of stochastic casts: few results are judged, or a side is short."""
        return self.sample is not None or min(*shape, self.a.elements.shape[1]) < _DECODING_ROWS

    def _judge_overflow(self, result: Tensor, sums: ConformitySums, likely_result: Tensor) -> AuditFinding:
        """Judges a result if some expected sums overflow its dtype. Such sums may become infinite or the largest
        number. All other sums must be correct (ties may round either way, and scales may differ in their last bits), or
        have the expected error."""
        float64_result = result.double()
        result_with_infinities = torch.where(
            float64_result.abs() >= torch.finfo(result.dtype).max, float64_result.sign() * math.inf, float64_result
        )

        def has_unreachable(mark_unreachable: Callable[[Tensor, ConformitySums], Tensor]) -> bool:
            is_unreachable = mark_unreachable(float64_result, sums) & mark_unreachable(result_with_infinities, sums)
            return bool((is_unreachable & ~sums.product.isnan()).any())

        if not has_unreachable(self._mark_wrong_beyond_ties):
            return AuditFinding()
        if has_unreachable(self._mark_outliers):
            return make_failure("too-bad", "some results overflow as expected, but the remaining results are wrong")
        is_finite = result.isfinite() & likely_result.isfinite()
        error, expected_error = (
            self._measure_error(torch.where(is_finite, numbers, 0), is_finite) for numbers in (result, likely_result)
        )
        return judge_error(error, expected_error)

    def _judge_product_sums(
        self, result: Tensor, sums: ConformitySums, search_mistakes: bool, error: float | None, expected: float | None
    ) -> AuditFinding:
        # 1. Accept results that equal a sum of the promised operands, in any order.
        float64_result = result.double()
        if sums.is_within_bound(float64_result):
            return AuditFinding()
        # 2. Report sums in 14 bits, as in Hopper's FP8 units, as a remark, not a failure.
        if self.accepts_hopper_sums and self._matches_hopper_units(result, sums):
            return make_remark("short-sums", "equal to the bit to what Hopper's FP8 units give, which sum in 14 bits")
        # 3. Accept small differences if operands halfway between two codes explain them.
        gain = self._describe_result_gain(float64_result, sums)
        if not gain and not self._mark_wrong_beyond_ties(float64_result, sums).any():
            return make_remark("other-rounding", ROUNDING_REASON)
        # 4. Report a mistake if one explains all results.
        outliers = self._mark_outliers(float64_result, sums)
        has_no_outliers = not outliers.any()
        has_few_result_elements = result.numel() < _MIN_RESULT_COUNT
        if has_no_outliers and has_few_result_elements:
            return make_remark("other-rounding", ROUNDING_REASON)
        reason = ""
        if search_mistakes and not has_few_result_elements:
            mistake_code, reason = self._explain_result_difference(float64_result, result, sums)
            if mistake_code:
                return make_failure(mistake_code, reason)
        # 5. Report results that the rounding of operands does not explain, or that are too large or small on average.
        if not self._is_lossless:
            if not has_no_outliers:
                places = [self.sample.rows, self.sample.columns] if self.sample else map(torch.arange, result.shape)
                return make_failure("wrong-values", describe_outliers(outliers, float64_result, sums.product, *places))
            if gain:
                return make_failure("gain", gain)
        # 6. Otherwise judge the error, and report in how many bits sums seem to be kept.
        is_gain = bool(gain) and has_no_outliers
        error_finding = judge_error(error, expected, reason or gain)
        if sum_bits := self._estimate_accumulator_bits(float64_result, sums):
            is_allowed = error_finding.is_remark or (error is None and sum_bits >= _SHORT_SUM_BITS)
            description = f"sums or operands seem to be kept in {sum_bits} bits"
            if self._is_lossless:
                description = "no cast changes this input, but sums seem to be kept in fewer bits than float32 has"
            return (make_remark if is_allowed and not is_gain else make_failure)("short-sums", description)
        return make_failure("gain", gain) if is_gain else error_finding

    def _matches_hopper_units(self, result: Tensor, sums: ConformitySums) -> bool:
        """Returns whether the result equals what Hopper's FP8 units give. It must agree bit by bit in as many rows as
        can be simulated, and approximately in all rows."""
        operands = (self.a, self.b)
        if any(side.treatment is None or side.treatment.fmt not in (E4M3, E5M2) for side in operands):
            return False
        if not sums.is_near_exact_values(
            result.double(), sums.product, sums.relative_bound(HOPPER_SUM_BITS - 1) * sums.magnitude
        ):
            return False
        elements_of_a, elements_of_b = (side.elements for side in operands)
        scales_of_a, scales_of_b = (side.element_scales.expand_as(side.elements) for side in operands)
        row_step = max(1, -(-result.numel() * elements_of_a.shape[1] // _MAX_SIMULATED_TERMS))
        codes_and_scales = (elements_of_a[::row_step], elements_of_b), (scales_of_a[::row_step], scales_of_b)
        return any(matches_hopper_units(result[::row_step], *codes_and_scales, promoted) for promoted in (True, False))

    @property
    def _is_lossless(self) -> bool:
        return all(
            x.unrounded_tensor is None or torch.equal(x.values, x.unrounded_tensor.float()) for x in (self.a, self.b)
        )

    @cached_property
    def _value_ranges(self) -> tuple[Matrices, Matrices]:
        return find_value_range(self.a), find_value_range(self.b)

    def _mark_wrong_beyond_ties(self, float64_result: Tensor, sums: ConformitySums) -> Tensor:
        """Marks results that are wrong even if ties may round either way and scales may differ in their last bits."""
        operand_slacks = map(_measure_slack, (self.a, self.b), self._value_ranges)
        return self._mark_unreachable_results(float64_result, sums, operand_slacks)

    def _mark_outliers(self, float64_result: Tensor, sums: ConformitySums) -> Tensor:
        """Marks results that random errors of `_GRID_STEPS` grid steps in each operand element do not explain."""
        operand_slacks = (_GRID_STEPS * _measure_grid_steps(operand) for operand in (self.a, self.b))
        return self._mark_unreachable_results(float64_result, sums, operand_slacks, at_random=True)

    def _mark_unreachable_results(
        self, float64_result: Tensor, sums: ConformitySums, slack: Iterable[Tensor], at_random: bool = False
    ) -> Tensor:
        """Marks results that are not a rounded sum of products, even if every operand element may be off by up to its
        `slack`. With `at_random`, these errors are random and partly cancel in a sum."""
        x, y, x_slack, y_slack = (tensor.double() for tensor in (self.a.values.abs(), self.b.values.abs(), *slack))
        operand_slack = ((x + x_slack) @ (y + y_slack).t() - sums.magnitude).clamp(min=0)
        if at_random:
            random_slack = _TOLERATED_STANDARD_ERRORS * (x_slack**2 @ (y**2).t() + x**2 @ (y_slack**2).t()).sqrt()
            operand_slack = torch.minimum(operand_slack, random_slack)
        low, high = ((sums.product + side * (sums.bound + operand_slack)).to(sums.dtype).double() for side in (-1, 1))
        return ~((float64_result >= low) & (float64_result <= high))

    def _estimate_accumulator_bits(self, float64_result: Tensor, sums: ConformitySums) -> int:
        """Estimates the bits of the kernel's accumulator; 0 if a short accumulator does not explain the result."""
        if (float64_result[sums.product == 0] != 0).any():
            return 0
        bits = estimate_accumulator_bits(float64_result, sums)
        differences = float64_result - sums.product
        if bits >= FLOAT32_BITS and self._is_lossless:
            relative_square = float(differences.square().mean() / sums.product.square().mean().clamp(min=1e-300))
            bits = round(-math.log2(12 * relative_square) / 2) if relative_square else FLOAT32_BITS
        sum_bits_difference_bound = 2.0 ** (3 - bits) * sums.magnitude + sums.spacing(sums.product)
        explains_all_differences = (differences.abs() <= sum_bits_difference_bound).all()
        return bits if explains_all_differences and _MIN_SUM_BITS <= bits < FLOAT32_BITS else 0

    def _describe_result_gain(self, float64_result: Tensor, sums: ConformitySums) -> str:
        """Returns a text such as 'results are 0.40% too small on average'. Returns '' if the average is not certainly
        wrong, or if ties explain its error."""
        a = self.a.values.double()
        b = self.b.values.double()
        effective_term_counts = sums.magnitude**2 / (a**2 @ (b**2).t()).clamp(min=torch.finfo(torch.float64).tiny)
        if float(effective_term_counts.median()) < _MIN_TERMS:  # rounding errors of few terms do not average to zero
            return ""
        regression_products = [sums.product]
        operand_values = (self.a.values, self.b.values)
        for place, ((low, high), values) in enumerate(zip(self._value_ranges, operand_values, strict=True)):
            is_value_ambiguous = (high - low) > _SCALE_ROUNDING_TOLERANCE * values.abs()
            if is_value_ambiguous.any():
                range_ends = (
                    torch.where(values < 0, tensor, opposite) for tensor, opposite in ((low, high), (high, low))
                )
                value_changes = (torch.where(is_value_ambiguous, end - values, 0.0).double() for end in range_ends)
                regression_products += [a @ tensor.t() if place else tensor @ b.t() for tensor in value_changes]
        regressors = torch.stack([(column / sums.magnitude).flatten() for column in regression_products], 1)
        differences = ((float64_result - sums.product.to(sums.dtype).double()) / sums.magnitude).flatten()
        gram_matrix = regressors.t() @ regressors
        gram_pseudo_inverse = torch.linalg.pinv(gram_matrix, hermitian=True, rtol=1e-10)
        regression_coefficients = gram_pseudo_inverse @ (regressors.t() @ differences)
        residual_mean_square = (differences - regressors @ regression_coefficients).square().mean()
        standard_error = math.sqrt(max(float(residual_mean_square * gram_pseudo_inverse[0, 0]), 0.0))
        mean_gain = float(regression_coefficients[0])
        variance_inflation = float(gram_pseudo_inverse[0, 0] * gram_matrix[0, 0])
        is_gain_certain = (
            len(differences) >= _MIN_RESULT_COUNT
            and variance_inflation <= 1 / _INDEPENDENT_SHARE
            and abs(mean_gain) > max(_MIN_GAIN, _GAIN_STANDARD_ERRORS * standard_error)
        )
        if not is_gain_certain:
            return ""
        return f"results are {abs(mean_gain):.2%} too {'large' if mean_gain > 0 else 'small'} on average"

    def _make_conformity_sums(self, dtype: torch.dtype) -> ConformitySums:
        return ConformitySums(self.a.values.double(), self.b.values.double(), dtype)

    def _measure_error(self, result: Tensor, mask: Tensor | bool = True) -> float | None:
        if self.a.unrounded_tensor is None or self.b.unrounded_tensor is None:
            return None
        exact_product = self.a.unrounded_tensor.double() @ self.b.unrounded_tensor.double().t()
        exact_product = exact_product * mask
        return relative_frobenius(result, exact_product) if exact_product.any() else None

    def _explain_result_difference(
        self, float64_result: Tensor, result: Tensor, sums: ConformitySums
    ) -> tuple[str, str]:
        """Returns the code and description of the first mistake that explains every element. Without one, describes how
        the elements differ, or names the nearest mistake if it is much nearer than the expected result."""
        nearest_mistake = (math.inf, "", "")
        for mistake_code, description, a, b in self._iterate_operands_with_mistakes():
            mistaken_sums = ConformitySums(a.double(), b.double(), result.dtype)
            if mistaken_sums.is_within_bound(float64_result):
                return mistake_code, description
            mean_square_distance = _mean_square_distance(float64_result, mistaken_sums.product)
            if mean_square_distance < nearest_mistake[0]:
                nearest_mistake = (mean_square_distance, mistake_code, description)
        difference, reason = explain_product_difference(result, sums)
        if difference in _MISTAKE_CODE_BY_DIFFERENCE:
            return _MISTAKE_CODE_BY_DIFFERENCE[difference], reason
        # A result of zeros is near to every mistake that shrinks numbers, so no mistake is named.
        mean_square_distance, mistake_code, description = nearest_mistake
        is_mistake_nearer = mean_square_distance * _NEARER_FACTOR < _mean_square_distance(float64_result, sums.product)
        if is_mistake_nearer and float64_result.any():
            return mistake_code, f"the nearest mistake is: {description}"
        return "", reason

    def _iterate_operands_with_mistakes(self) -> Iterator[tuple[str, str, Tensor, Tensor]]:
        first_operand_mistakes = list(iterate_rounding_mistakes(self.a))
        second_mistakes = list(iterate_rounding_mistakes(self.b))
        # A description may have several casts. Pair each one of the first operand with the first of the second operand.
        second_operands = {(mistake, description): values for mistake, description, values in reversed(second_mistakes)}
        for mistake, description, values in first_operand_mistakes:
            if (mistake, description) in second_operands:
                yield mistake, f"each operand is {description}", values, second_operands[mistake, description]
        for mistake, description, values in first_operand_mistakes:
            yield mistake, f"the first operand is {description}", values, self.b.values
        for mistake, description, values in second_mistakes:
            yield mistake, f"the second operand is {description}", self.a.values, values


@dataclass(frozen=True)
class ExpectedAttention:
    """The expected result of attention. `uncast_operands` are the queries, keys and values before their cast."""

    uncast_operands: Matrices
    treatment: Treatment | None
    causal: bool
    sample: ResultSample | None = None

    def judge(self, result: Tensor, search_mistakes: bool = True) -> AuditFinding:
        sample = self.sample
        shape = tuple(self.uncast_operands[0].shape) if sample is None else sample.shape
        if failure := _find_unusable_result(result, shape) or _find_nonfinite_result(result):
            return failure
        if sample is not None:
            result = result.flatten(0, 1)[sample.rows][None][:, :, sample.columns]
        exact_result = self._compute_exact_result()
        promised_result = self._compute_attention()
        error = relative_frobenius(result, exact_result)
        attention_variants = (
            promised_result,
            self._compute_attention(casts_weights=True),
            self._compute_attention(casts_weights=True, stores_scores=True),
        )
        expected_errors = [relative_frobenius(variant.to(result.dtype), exact_result) for variant in attention_variants]
        has_low_bit_cast = self.treatment is not None and self.treatment.fmt.bits <= 8
        low = _EQUAL_RATIO * min(expected_errors) * has_low_bit_cast
        high = max(*expected_errors, _SCALE_ROUNDING_TOLERANCE) / _EQUAL_RATIO
        # 1. Accept an error in the range of those that the variants of a correct kernel have.
        if low <= error <= high:
            return AuditFinding(error=error, expected=high)
        if sample is None:
            # 2. Otherwise name the nearest mistake, if the result is much nearer to it.
            squared_distance, mistake_code, description = min(
                (_mean_square_distance(result, mistaken), mistake_code, description)
                for mistake_code, description, mistaken in self._iterate_mistaken_results()
            )
            if squared_distance * _NEARER_FACTOR_IN_ATTENTION < _mean_square_distance(result, promised_result):
                return make_failure(mistake_code, description, error, high)
        return judge_error(error, high if error > high else low)

    def _compute_exact_result(self) -> Tensor:
        q, k, v = (tensor.double() for tensor in self.uncast_operands)
        return self._softmax(_compute_attention_scores(self._sample_queries(q), k)) @ v

    def _compute_attention(self, casts_weights: bool = False, stores_scores: bool = False) -> Tensor:
        """Returns the expected result. `casts_weights` casts the weights of the softmax, and `stores_scores` rounds the
        scores to the dtype of the inputs, as unfused operators do. Other intermediate values are in float64."""
        q, k, v = self._cast_operands
        input_dtype = self.uncast_operands[0].dtype
        scores = _compute_attention_scores(q, k)
        if stores_scores:  # round the scores before and after scaling them
            head_size_root = math.sqrt(q.shape[-1])
            scores = ((scores * head_size_root).to(input_dtype).double() / head_size_root).to(input_dtype).double()
        attention_weights = self._softmax(scores)
        if casts_weights:
            attention_weights = _cast_last_dimension(attention_weights.to(input_dtype), self.treatment)
        return attention_weights @ v

    @cached_property
    def _cast_operands(self) -> Matrices:
        """Returns queries, keys and values, each cast along the dimension over which its product sums. Values are
        cast along positions."""
        q, k, v = self.uncast_operands
        q, k, transposed_v = (_cast_last_dimension(tensor, self.treatment) for tensor in (q, k, v.mT))
        return self._sample_queries(q), k, transposed_v.mT

    def _sample_queries(self, q: Tensor) -> Tensor:
        return q if self.sample is None else q[:, :, self.sample.columns]

    def _softmax(self, scores: Tensor) -> Tensor:
        return _softmax(scores, self.causal, rows=None if self.sample is None else self.sample.columns)

    def _iterate_mistaken_results(self) -> Iterator[tuple[str, str, Tensor]]:
        q, k, v = self._cast_operands
        scores = _compute_attention_scores(q, k)
        head_size_root = math.sqrt(q.shape[-1])
        if self.treatment is not None:
            yield "not-cast", "queries, keys and values are not cast", self._compute_exact_result()
            values_not_cast = self._softmax(scores) @ self.uncast_operands[2].double()
            yield "not-cast", "queries and keys are cast, but values are not", values_not_cast
        unscaled_result = self._softmax(scores * head_size_root) @ v
        yield "scale", "its scores are not divided by the square root of the size", unscaled_result
        yield "scale", "its scores are divided by the size", self._softmax(scores / head_size_root) @ v
        yield "mask", f"it is {'not ' * self.causal}causal", _softmax(scores, not self.causal) @ v


def _compute_attention_scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def _softmax(scores: Tensor, causal: bool, rows: Tensor | None = None) -> Tensor:
    """Returns the softmax over all positions or, if causal, over each position and earlier ones."""
    if causal:
        visible_positions = torch.ones(scores.shape[-1], scores.shape[-1], dtype=torch.bool).tril()
        visible_positions = visible_positions if rows is None else visible_positions[rows]
        scores = scores.masked_fill(~visible_positions, -math.inf)
    return scores.softmax(-1)


def _cast_last_dimension(x: Tensor, treatment: Treatment | None) -> Tensor:
    if treatment is None:
        return x.double()
    heads = x.reshape(-1, *x.shape[-2:])
    cast_heads = torch.stack([round_operand(head_values.contiguous(), treatment).values for head_values in heads])
    return cast_heads.view(x.shape).double()


def _measure_slack(operand: RoundedOperand, value_range: Matrices) -> Tensor:
    low, high = value_range
    return torch.maximum(high - operand.values, operand.values - low) + _SCALE_ROUNDING_TOLERANCE * operand.values.abs()


def _measure_grid_steps(operand: RoundedOperand) -> Tensor:
    """Returns the distance from each value to the next value of its format; 0 for an operand that is not cast."""
    if operand.treatment is None or operand.unrounded_tensor is None:
        return torch.zeros_like(operand.elements)
    fmt = operand.treatment.fmt
    element_magnitudes = operand.elements.abs().clamp(min=fmt.smallest_normal)
    return torch.exp2(element_magnitudes.log2().floor() - fmt.mantissa_bits) * operand.element_scales


def _mean_square_distance(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).square().mean())


def _find_unusable_result(result: Tensor, shape: tuple[int, ...]) -> AuditFinding | None:
    if tuple(result.shape) != shape:
        result_text, shape_text = ("x".join(map(str, sides)) or "[] (one number)" for sides in (result.shape, shape))
        return make_failure("shape", f"the result has the shape {result_text}; expected {shape_text}")
    if result.dtype not in _RESULT_DTYPES:
        return make_failure("dtype", f"the result is {result.dtype}; expected float32, bfloat16 or float16")
    return None


def _find_nonfinite_result(result: Tensor) -> AuditFinding | None:
    nonfinite_count = int((~result.isfinite()).sum())
    if not nonfinite_count:
        return None
    return make_failure("not-finite", f"{nonfinite_count} of {result.numel()} results are NaN or infinite")


def judge_error(error: float | None, expected: float | None, reason: str = "", slack: float = 1.0) -> AuditFinding:
    """Judges a result by its error alone. `reason` explains a known difference. `slack` widens the allowed range."""
    explanation = reason or "no known mistake explains it"
    if error is None or expected is None:
        return make_failure("unexplained", explanation)
    low, high = EXPECTED_ERROR_BAND
    if error > expected * high * slack:
        explanation += f"; its error is {error:.3g}, expected {expected:.3g}"
        return make_failure("too-bad", explanation, error, expected)
    if error < expected * low / slack:
        reason = f"its error is {error:.3g}, but this precision has {expected:.3g}: scales are finer, or the precision"
        return make_failure("too-good", f"{reason} is wider", error, expected)
    same_error_text = "values differ from the promised ones but have their error"
    return make_remark("other-rounding", reason or same_error_text, error, expected)
