"""Explains how one result of a product differs from another: by the order of its sums, by rounding, layout or scale.

Results are compared with the float64 product of the operands' values. A sum of K products in any order, with each
step rounded to p bits, is within K * 2^-p times the sum of the products' magnitudes. An explanation must hold for
every element. This bound alone would also accept sums in fewer bits. So the mean square of the errors is checked too,
which grows only with K, because rounding errors are unbiased.

The numbers also show the precision in which a product was computed. Operands are rounded to several precisions, and
their exact products are compared with the result. The nearest product shows the precision, because sums and the
rounding of the result add much smaller errors. This is more certain if the other precisions' products are far away.
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
from fp8bench.formats.recipes import HOPPER_SUM_BITS, Accumulator
from fp8bench.model.promises import Difference
from fp8bench.numerics.products import INSTRUCTION_SUM_LENGTH, PROMOTION_LENGTH, short_product, sum_like_hopper_units

FLOAT32_BITS = 24
# The roundings of a float32 sum besides its additions: of both operands' values, of their scales, and of the result.
_EXTRA_ROUNDING_COUNT = 4
# The fewest bits of a sum that are considered. No hardware is known to use fewer.
_MIN_SUM_BITS = 8
# A mean error of at most this many standard errors counts as chance.
_BIAS_ERRORS = 6.0
# The mean square errors of two results with the same kind of sum differ at most by this factor.
_MAX_MEAN_SQUARE_RATIO = 3.0
# The largest difference from 1 of a fitted factor that counts as rounding, not as a scale.
_SCALE_RATIO_TOLERANCE = 2.0**-7
_FITTED_FACTOR_PARTS = (
    ("the tensor", False, False),
    ("rows", True, False),
    ("columns", False, True),
    ("rows and columns", True, True),
)
_EXAMINED_BLOCK_SIZES = (128, 32, 16)
# A scale factor is fitted to at least this many results.
_MIN_RESULTS_PER_FACTOR = 8
# How many times the factors of rows and those of columns are fitted in alternation.
_FIT_ITERATIONS = 30
# Each run of _SCALE_RUN_LENGTH consecutive values may have its own scale. At most _MAX_EXAMINED_RUNS runs are examined.
_SCALE_RUN_LENGTH = 128
_MAX_EXAMINED_RUNS = 32
# The relative float32 error of a value that was divided by its scale and multiplied by it again.
_RESCALED_VALUE_TOLERANCE = 2.0**-18
_INTEGER_DTYPE_BY_BYTES = {2: torch.int16, 4: torch.int32}

DifferenceAndReason = tuple[Difference, str]


def have_different_bits(native_result: Tensor, emulated_result: Tensor) -> Tensor:
    bits = _INTEGER_DTYPE_BY_BYTES[native_result.element_size()]
    equal_bits_mask = native_result.contiguous().view(bits) == emulated_result.contiguous().view(bits)
    return ~(equal_bits_mask | (native_result.isnan() & emulated_result.isnan()))


def count_ulps_between(native_result: Tensor, emulated_result: Tensor) -> Tensor:
    """Returns for each element by how many steps of the dtype two results differ: infinity where they differ and one of
    them is not finite.
    """
    float_ordinals = []
    for tensor in (native_result, emulated_result):
        bits = tensor.contiguous().view(_INTEGER_DTYPE_BY_BYTES[tensor.element_size()]).to(torch.int64)
        magnitude = bits & ((1 << (8 * tensor.element_size() - 1)) - 1)
        float_ordinals.append(torch.where(bits < 0, -magnitude, magnitude))
    ordinal_distance = (float_ordinals[0] - float_ordinals[1]).abs().to(torch.float64)
    both_finite = native_result.isfinite() & emulated_result.isfinite()
    return torch.where(
        both_finite, ordinal_distance, torch.where(have_different_bits(native_result, emulated_result), math.inf, 0.0)
    )


@dataclass(frozen=True)
class ConformitySums:
    """The exact float64 product of the matrices a (M, K) and b (N, K), with b transposed, and the largest error that
    the product may have if its sums have `bits` significant bits.
    """

    a: Tensor
    b: Tensor
    dtype: torch.dtype
    bits: int = FLOAT32_BITS

    @cached_property
    def product(self) -> Tensor:
        return self.a @ self.b.t()

    @cached_property
    def magnitude(self) -> Tensor:
        return (self.a.abs() @ self.b.abs().t()).clamp(min=torch.finfo(torch.float64).tiny)

    @property
    def bound(self) -> Tensor:
        return self.relative_bound(self.bits) * self.magnitude

    def relative_bound(self, bits: int) -> float:
        """Returns the largest error of a sum with `bits` significant bits, relative to the sum of its terms'
        magnitudes. Sums of fewer bits than float32 are truncated once per instruction.
        """
        contraction_length = self.a.shape[1]
        float32_bound = (contraction_length + _EXTRA_ROUNDING_COUNT) * 2.0**-FLOAT32_BITS
        return (
            float32_bound
            if bits == FLOAT32_BITS
            else float32_bound + (math.ceil(contraction_length / INSTRUCTION_SUM_LENGTH) + 1) * 2.0 ** (1 - bits)
        )

    def is_within_bound(self, result: Tensor, toward_zero: bool = False) -> bool:
        """Returns whether every element could be the rounded value of a sum whose error is within `bound`. The sum is
        rounded to nearest, or toward 0 with `toward_zero`.
        """
        round_values = self._round_toward_zero if toward_zero else self._round_to_nearest
        smallest_valid_result = round_values(self.product - self.bound)
        largest_valid_result = round_values(self.product + self.bound)
        return bool(((result >= smallest_valid_result) & (result <= largest_valid_result)).all())

    def is_near_exact_values(self, result: Tensor, exact: Tensor, bound: Tensor) -> bool:
        """Returns whether each element of the result differs from `exact` by at most `bound` and one rounding step."""
        return bool(((result - exact).abs() <= bound + self.spacing(exact.abs() + bound)).all())

    def spacing(self, values: Tensor) -> Tensor:
        float_info = torch.finfo(self.dtype)
        return torch.exp2(values.abs().clamp(min=float_info.smallest_normal).log2().floor()) * float_info.eps

    def _round_to_nearest(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).to(torch.float64)

    def _round_toward_zero(self, values: Tensor) -> Tensor:
        nearest_values = values.to(self.dtype)
        bits = _INTEGER_DTYPE_BY_BYTES[nearest_values.element_size()]
        next_smaller_values = (nearest_values.view(bits) - (nearest_values != 0).to(bits)).view(self.dtype)
        return torch.where(self._round_to_nearest(values).abs() > values.abs(), next_smaller_values, nearest_values).to(
            torch.float64
        )

    def is_unbiased(self, result: Tensor) -> bool:
        """Returns whether errors are as small as those of rounding, and centred around 0 except for chance."""
        if self.bits < FLOAT32_BITS:  # sums in fewer bits are truncated, which biases all errors
            return True
        sum_step_error = 2.0**-self.bits * math.sqrt(self.a.shape[1])
        is_biased = abs(self.mean_magnitude_loss(result)) > sum_step_error + _BIAS_ERRORS * math.sqrt(
            self.rounding_variance / result.numel()
        )
        return not is_biased and self.mean_square_error(result) <= 4 * (sum_step_error**2 + self.rounding_variance)

    @cached_property
    def rounding_variance(self) -> float:
        return float(((self.spacing(self.product) / self.magnitude) ** 2).mean()) / 12

    def mean_square_error(self, result: Tensor) -> float:
        return float((((result - self.product) / self.magnitude) ** 2).mean())

    def mean_magnitude_loss(self, result: Tensor) -> float:
        """Returns by how much the results' magnitudes are too small on average, relative to sum(|products|): the mean
        of sign(exact) (exact - result) / sum(|products|).
        """
        return -float(((result - self.product) / self.magnitude * self.product.sign()).mean())


def explain_product_difference(result: Tensor, sums: ConformitySums) -> DifferenceAndReason:
    """Explains why a product differs in bits from another product of the same operands."""
    # 1. Treat NaN, infinity and results that are all 0 separately.
    float64_result = result.to(torch.float64)
    if not bool(sums.product.isfinite().all()) or not bool(float64_result.any()):
        return (
            Difference.UNEXPLAINED,
            "all results are 0" if sums.product.isfinite().all() else "operands have NaN or infinity",
        )
    are_elements_not_finite = ~float64_result.isfinite()
    if bool(are_elements_not_finite.any()):
        overflowed_sums = sums.product.abs() > torch.finfo(sums.dtype).max
        if bool((overflowed_sums | ~are_elements_not_finite).all()):
            return Difference.OVERFLOW, "sums beyond the largest number"
        return Difference.UNEXPLAINED, f"{int(are_elements_not_finite.sum())} results are NaN or infinite"
    # 2. Check for correct sums that are only ordered differently, and for truncated results.
    if sums.is_within_bound(float64_result) and sums.is_unbiased(float64_result):
        return Difference.ORDER, f"within {sums.relative_bound(sums.bits):.1e} of the sum of the products' magnitudes"
    if sums.is_within_bound(float64_result, toward_zero=True):
        return Difference.ROUNDING, "the result is truncated toward 0, not rounded to nearest"
    # 3. Check for a wrong layout or a wrong scale.
    for description, exact in _iterate_layouts(float64_result, sums):
        if exact.shape == float64_result.shape and sums.is_near_exact_values(
            float64_result, exact, sums.relative_bound(sums.bits) * sums.magnitude.max()
        ):
            return Difference.LAYOUT, description
    for fit in _iterate_scaled_fits(float64_result, sums):
        if sums.is_near_exact_values(
            float64_result,
            fit.scaled_product,
            (sums.relative_bound(sums.bits) + torch.finfo(sums.dtype).eps / 4) * fit.magnitude,
        ):
            return Difference.SCALE, fit.description
    # 4. Check for sums in fewer bits, then for results that are rounded to the wrong neighbour.
    bits = estimate_accumulator_bits(float64_result, sums)
    if _MIN_SUM_BITS <= bits < sums.bits and sums.is_near_exact_values(
        float64_result, sums.product, sums.relative_bound(bits - 1) * sums.magnitude
    ):
        return Difference.ACCUMULATION, f"sums seem to be kept in about {bits} bits, where {sums.bits} are expected"
    if sums.is_near_exact_values(float64_result, sums.product, sums.bound):
        return Difference.ROUNDING, "each result is a neighbour of the exact value, but not always the nearest"
    return Difference.UNEXPLAINED, ""


def matches_14_bit_sums(result: Tensor, sums: ConformitySums) -> bool:
    """Returns whether a result is as exact as sums of 14 bits: each error is within their bound, and the mean square
    error is not much larger. Hopper's units sum in 14 bits, and no unit is known to use fewer.
    """
    float64_result = result.to(torch.float64)
    emulated_short_product = short_product(sums.a, sums.b, Accumulator.SHORT).to(torch.float64)
    is_within_bound = sums.is_near_exact_values(
        float64_result, sums.product, sums.relative_bound(HOPPER_SUM_BITS) * sums.magnitude
    )
    return is_within_bound and sums.mean_square_error(float64_result) <= _MAX_MEAN_SQUARE_RATIO * (
        sums.mean_square_error(emulated_short_product) + sums.rounding_variance
    )


def estimate_accumulator_bits(result: Tensor, sums: ConformitySums) -> int:
    """Returns the number of significant bits in which sums seem to be computed, or 24 (float32) if nothing indicates
    fewer.

    Truncated sums are too small in magnitude. The deficit, and the errors of single results, are compared with those of
    the same product in sums of 14 bits.
    """
    emulated_short_product = short_product(sums.a, sums.b, Accumulator.SHORT).to(torch.float64)
    magnitude_loss = sums.mean_magnitude_loss(result)
    short_sum_magnitude_loss = sums.mean_magnitude_loss(emulated_short_product)
    # The loss is infinite or NaN if all products of a sum are 0 but the result is not.
    if not (0 < magnitude_loss < math.inf and short_sum_magnitude_loss > 0):
        return FLOAT32_BITS
    ratio = magnitude_loss / short_sum_magnitude_loss
    if sums.mean_square_error(result) > _MAX_MEAN_SQUARE_RATIO * (
        ratio**2 * sums.mean_square_error(emulated_short_product) + sums.rounding_variance
    ):
        return FLOAT32_BITS
    return min(FLOAT32_BITS, round(HOPPER_SUM_BITS - math.log2(ratio)))


def _iterate_layouts(result: Tensor, sums: ConformitySums) -> Iterator[tuple[str, Tensor]]:
    a = sums.a
    b = sums.b
    if a.shape[0] == b.shape[0]:
        yield "the result is transposed", sums.product.t()
    if b.shape[0] == b.shape[1] == a.shape[1]:
        yield "the second operand is read transposed", a @ b
    if a.shape[0] == a.shape[1]:
        yield "the first operand is read transposed", a.t() @ b.t()
    if a.shape[1] % 2 == 0:
        pair_swapped_operand = a.view(a.shape[0], -1, 2).flip(-1).reshape(a.shape)
        yield "neighbouring elements of one operand are exchanged in pairs", pair_swapped_operand @ b.t()
    yield from iterate_permuted_values(result, sums.product)


def iterate_permuted_values(result: Tensor, correct: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the correct values with permuted rows, then with permuted columns, in the order that fits the result best.
    Skips rows (or columns) that are in order already. Skips them too if two of them fit the same correct one best.
    """
    for line_name, lines, correct_lines in (("rows", result, correct), ("columns", result.t(), correct.t())):
        fitted_line_order = torch.cdist(lines, correct_lines).argmin(dim=1).tolist()
        if sorted(fitted_line_order) == list(range(len(fitted_line_order))) != fitted_line_order:
            permuted_correct_lines = correct_lines[fitted_line_order]
            yield (
                f"{line_name} are permuted",
                permuted_correct_lines if line_name == "rows" else permuted_correct_lines.t(),
            )


def matches_hopper_units(
    result: Tensor, codes: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor], promoted: bool
) -> bool:
    """Returns whether every element is what Hopper's FP8 units compute from codes (M, K) and (N, K). `scales` have the
    shapes of the codes.

    The sums of these units are known to the bit. It is unknown in which order they apply scales and add up in float32,
    so results may differ by the rounding of these operations.
    """
    piece_length = PROMOTION_LENGTH if promoted else codes[0].shape[1]
    product_sum = magnitude = torch.zeros((), dtype=torch.float64)
    for start in range(0, codes[0].shape[1], piece_length):
        contraction_slice = slice(start, start + piece_length)
        row_scales, column_scales = (scale[:, contraction_slice].to(torch.float64) for scale in scales)
        if not all(bool((tensor == tensor[:, :1]).all()) for tensor in (row_scales, column_scales)):
            return False
        scaled_product = (
            sum_like_hopper_units(*(code[:, contraction_slice] for code in codes))
            * row_scales[:, :1]
            * column_scales[:, :1].t()
        )
        product_sum = product_sum + scaled_product
        magnitude = magnitude + scaled_product.abs()
    bound = (codes[0].shape[1] // piece_length + _EXTRA_ROUNDING_COUNT) * 2.0**-FLOAT32_BITS * magnitude
    lowest_result, highest_result = ((product_sum + side * bound).to(result.dtype) for side in (-1, 1))
    return bool(((result >= lowest_result) & (result <= highest_result)).all())


class _FittedProduct(NamedTuple):
    """A product whose scale was fitted to a result. `description` names the fitted factors, `scaled_product` is the
    product with these factors, and `magnitude` the sum of the magnitudes of its terms.
    """

    description: str
    scaled_product: Tensor
    magnitude: Tensor


def _iterate_scaled_fits(result: Tensor, sums: ConformitySums) -> Iterator[_FittedProduct]:
    """Fits scale factors to the result: one for the tensor, one for each row or column, or one for each block along the
    contraction. Yields each scaled product, unless all its factors are near 1.
    """
    tolerance = max(_SCALE_RATIO_TOLERANCE, 4 * torch.finfo(sums.dtype).eps)
    fits = []
    for part_name, by_row, by_column in _FITTED_FACTOR_PARTS:
        row_factors, column_factors = _fit_row_column_factors(result, sums.product, by_row, by_column)
        result_factors = row_factors * column_factors
        fits.append((part_name, result_factors, result_factors * sums.product, result_factors.abs() * sums.magnitude))
    fits += _fit_block_scales(result, sums)
    for part_name, fitted_factors, scaled_product, magnitude in fits:
        smallest_scale_factor = float(fitted_factors.min())
        largest_scale_factor = float(fitted_factors.max())
        if max(abs(smallest_scale_factor - 1), abs(largest_scale_factor - 1)) > tolerance:
            factor_range_text = (
                f" to {largest_scale_factor:.3g}" if largest_scale_factor - smallest_scale_factor > tolerance else ""
            )
            yield _FittedProduct(
                f"{part_name} scaled by {smallest_scale_factor:.3g}{factor_range_text}", scaled_product, magnitude
            )


def _fit_block_scales(result: Tensor, sums: ConformitySums) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    for size in _EXAMINED_BLOCK_SIZES:
        count = sums.a.shape[1] // size
        # With too many factors for the results, a fit would explain any result.
        if sums.a.shape[1] % size or not 1 < count <= min(result.shape) // _MIN_RESULTS_PER_FACTOR:
            continue
        a, b = (tensor.reshape(len(tensor), count, size) for tensor in (sums.a, sums.b))
        block_products = torch.einsum("mcs,ncs->mnc", a, b)
        for operand, target, partial_products in (
            ("first", result, block_products),
            ("second", result.t(), block_products.transpose(0, 1)),
        ):
            fitted_factors = torch.linalg.lstsq(partial_products, target[:, :, None]).solution
            scaled_product = (partial_products @ fitted_factors)[:, :, 0]
            magnitude = (partial_products.abs() @ fitted_factors.abs())[:, :, 0]
            if operand == "second":
                scaled_product = scaled_product.t()
                magnitude = magnitude.t()
            yield f"blocks of {size} of the {operand} operand", fitted_factors, scaled_product, magnitude


def _fit_row_column_factors(
    result: Tensor, exact_product: Tensor, by_row: bool, by_column: bool
) -> tuple[Tensor, Tensor]:
    row_factors = ((result * exact_product).sum() / (exact_product**2).sum()).expand(result.shape[0], 1)
    column_factors = exact_product.new_ones(1, result.shape[1])
    for _ in range(_FIT_ITERATIONS if by_row and by_column else 1):
        if by_row:
            row_factors = _fit_line_factors(result, exact_product * column_factors, 1)
        if by_column:
            row_factors = row_factors if by_row else torch.ones_like(row_factors)
            column_factors = _fit_line_factors(result, exact_product * row_factors, 0)
    return row_factors, column_factors


def _fit_line_factors(result: Tensor, exact_product: Tensor, dimension: int) -> Tensor:
    sum_of_squares = (exact_product**2).sum(dimension, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return (result * exact_product).sum(dimension, keepdim=True) / sum_of_squares


def explain_cast_difference(result: Tensor, correct: Tensor, source: Tensor, fmt: Format) -> DifferenceAndReason:
    """Explains why a cast of `source` differs in bits from the correct cast. All tensors are float32 matrices."""
    # 1. Check values beyond the largest number of the format.
    has_different_bits = have_different_bits(result, correct)
    largest_value = correct.abs().nan_to_num(0.0, 0.0, 0.0).max()
    is_overflow = (
        ~result.isfinite() | ~correct.isfinite() | ((correct.abs() == largest_value) & (source.abs() > largest_value))
    )
    if bool((is_overflow | ~has_different_bits).all()):
        first_different_index = tuple(int(index) for index in has_different_bits.nonzero()[0])
        first_difference_text = (
            f"{float(result[first_different_index]):g}, not {float(correct[first_different_index]):g}"
        )
        return Difference.OVERFLOW, f"a value above the format's largest becomes {first_difference_text}"
    if not bool(result.any()):
        return Difference.UNEXPLAINED, "all values are 0"
    # 2. Check whether the values are correct, but in a different order or multiplied by a scale.
    float64_tensors = [tensor.to(torch.float64).nan_to_num(0.0, 0.0, 0.0) for tensor in (result, correct, source)]
    values, expected_values, source_values = float64_tensors
    arranged_variants = list(iterate_permuted_values(values, expected_values))
    if expected_values.shape[0] == expected_values.shape[1]:
        arranged_variants.insert(0, ("the values are transposed", expected_values.t()))
    for description, arranged_values in arranged_variants:
        if torch.equal(arranged_values, values):
            return Difference.LAYOUT, description
    for description, ratio in _iterate_cast_ratios(values, expected_values):
        if bool(((values - ratio * expected_values).abs() <= _RESCALED_VALUE_TOLERANCE * values.abs()).all()):
            return Difference.SCALE, f"{description} scaled by {float(ratio.min()):.8g} to {float(ratio.max()):.8g}"
    bits = estimate_mantissa_bits(result)
    if bits < min(fmt.mantissa_bits, estimate_mantissa_bits(correct)):
        return Difference.UNEXPLAINED, f"values have {bits} mantissa bits, where {fmt.name} has {fmt.mantissa_bits}"
    # 3. Check whether values were rounded to the wrong neighbour on the grid. Then the result and the correct value
    # differ by one grid step, and the source value is between them. `steps` are the largest possible grid steps. Except
    # for subnormals, a grid step is at least half as large.
    steps = find_largest_grid_steps(torch.maximum(values.abs(), expected_values.abs()), fmt, float(largest_value))
    distance_in_steps = (values - expected_values).abs() / steps
    min_distance = torch.where(steps > steps.min(), 0.5 - _RESCALED_VALUE_TOLERANCE, 0.0)
    is_neighbouring_grid_value = (
        ((values - source_values) * (expected_values - source_values) <= 0)
        & (distance_in_steps > min_distance)
        & (distance_in_steps < 1 + _RESCALED_VALUE_TOLERANCE)
    )
    if not bool((is_neighbouring_grid_value | ~has_different_bits).all()):
        return Difference.UNEXPLAINED, ""
    is_truncated_toward_zero = bool((values.abs() <= source_values.abs())[has_different_bits].all())
    return (
        Difference.ROUNDING,
        "truncated toward 0" if is_truncated_toward_zero else "to a neighbour that is not the nearest",
    )


def _iterate_cast_ratios(result: Tensor, correct: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the median ratio of the result to the correct values: over the tensor, then over each row, each column and
    each block.
    """
    ratio = torch.where(correct != 0, result / correct, torch.nan)
    yield "the tensor", ratio.nanmedian().nan_to_num(1.0)
    yield "rows", ratio.nanmedian(dim=1, keepdim=True).values.nan_to_num(1.0)
    yield "columns", ratio.nanmedian(dim=0, keepdim=True).values.nan_to_num(1.0)
    for size in _EXAMINED_BLOCK_SIZES:
        if result.shape[1] % size == 0:
            blocks = ratio.view(len(ratio), -1, size).nanmedian(dim=2).values.nan_to_num(1.0)
            yield f"blocks of {size}", blocks.repeat_interleave(size, 1)


def estimate_mantissa_bits(values: Tensor) -> int:
    """Estimates the number of mantissa bits of values from the largest number of distinct magnitudes within a factor of
    two. Each run of 128 values may have its own scale, so runs are examined separately. The estimate is too small if
    few values of a run are that close.
    """
    scale_run_length = _SCALE_RUN_LENGTH if values.shape[-1] % _SCALE_RUN_LENGTH == 0 else values.shape[-1]
    runs = values.detach().abs().reshape(-1, scale_run_length)
    values_per_octave = 1
    for run in runs[:: max(1, len(runs) // _MAX_EXAMINED_RUNS)]:
        magnitudes = torch.tensor(sorted({size for size in run.tolist() if 0 < size < math.inf}), dtype=torch.float64)
        if len(magnitudes):
            octave_end_indices = torch.searchsorted(magnitudes, magnitudes * (2 - _RESCALED_VALUE_TOLERANCE))
            values_per_octave = max(values_per_octave, int((octave_end_indices - torch.arange(len(magnitudes))).max()))
    return math.ceil(math.log2(values_per_octave))


def find_largest_grid_steps(values: Tensor, fmt: Format, largest_value: float) -> Tensor:
    """Returns for each value the largest possible distance between neighbouring numbers of a format whose scale is
    unknown. `largest_value` is the format's largest value times the largest scale.
    """
    return (values.abs() * 2.0**-fmt.mantissa_bits).clamp(min=fmt.smallest_subnormal * largest_value / fmt.largest)


# Maps the name of each precision to the two operands of a product, rounded to this precision.
OperandsByPrecision = Mapping[str, tuple[Tensor, Tensor]]
# A product seems computed in a different precision than promised if its mean square error is smaller there by more than
# this factor. Sums in few bits and a library's rounding change the error by less. A bfloat16 product of operands
# rounded to bfloat16 has three times the error of rounding its result.
_NEARER_PRECISION_RATIO = 2.0


def find_nearest_precision(product: Tensor, promised_precision: str, operands_by_precision: OperandsByPrecision) -> str:
    """Returns the precision in which a product (M, N) of operands (M, K) and (N, K) seems to be computed. Returns ''
    if no precision explains the product clearly better than the promised one.
    """
    if not bool(product.isfinite().all()):
        return ""
    result = product.detach().to(torch.float64)
    mean_square_errors = {
        name: ConformitySums(
            a.detach().to(torch.float64), b.detach().to(torch.float64), product.dtype
        ).mean_square_error(result)
        for name, (a, b) in operands_by_precision.items()
    }
    nearest_precision = min(mean_square_errors, key=lambda name: mean_square_errors[name])
    return (
        nearest_precision
        if mean_square_errors[nearest_precision] * _NEARER_PRECISION_RATIO < mean_square_errors[promised_precision]
        else ""
    )
