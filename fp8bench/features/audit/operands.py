"""Draws matrices for kernels, rounds them by a recipe, and lists the mistakes that a kernel may make in rounding.
Matrices are drawn on the CPU from a seed. Each kind of data reveals a different kind of mistake.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from fp8bench.formats.codes import CODE_DTYPES, decode, unpack_codes
from fp8bench.formats.grids import E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, FORMATS, Format
from fp8bench.formats.operators import values
from fp8bench.formats.quantise import ROUNDING_RANDOM_BITS, round_values
from fp8bench.formats.recipe_support import recipe_on_device
from fp8bench.formats.recipes import NVFP4, ROW, SCALE_ROUNDINGS_BY_FORMAT, Recipe, ScaleRounding, Scaling, Treatment
from fp8bench.formats.scale_layouts import TILE_COLUMNS, TILE_ROWS, swizzle
from fp8bench.formats.scaled import quantise
from fp8bench.model import DeviceFacts
from fp8bench.registry import precisions

DrawFunction = Callable[[int, int, torch.Generator], Tensor]


def _draw_normal(rows: int, columns: int, random: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=random)


def _draw_powers_of_two(count: int, octaves: int, random: torch.Generator) -> Tensor:
    return torch.exp2(torch.randint(-octaves, octaves + 1, (count,), generator=random))


def _draw_blocks(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """Returns normal numbers with a different magnitude for every 16 columns of each row."""
    block_count = -(-columns // 16)
    drawn_block_magnitudes = torch.exp2(torch.rand(rows, block_count, generator=random) * 8 - 4)
    return _draw_normal(rows, columns, random) * drawn_block_magnitudes.repeat_interleave(16, 1)[:, :columns]


def _draw_tile_scaled_matrix(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """Returns normal numbers with a different magnitude for every tile of 128 x 128. Such numbers reveal scales in a
    wrong order.
    """
    tile_row_count = -(-rows // 128)
    tile_column_count = -(-columns // 128)
    tile_magnitudes = torch.exp2(torch.randint(-3, 4, (tile_row_count, tile_column_count), generator=random))
    x = _draw_normal(rows, columns, random)
    for place, sizes_of_row in enumerate(tile_magnitudes.repeat_interleave(128, 1)[:, :columns]):
        x[place * 128 : (place + 1) * 128] *= sizes_of_row
    return x


def _make_outlier_rows(x: Tensor) -> Tensor:
    x[:: max(len(x) // 4, 1)] *= 64
    return x


def _draw_one_hot(rows: int, columns: int, random: torch.Generator) -> Tensor:
    x = torch.zeros(rows, columns)
    hot_columns = torch.randint(0, columns, (rows,), generator=random)
    x[torch.arange(rows), hot_columns] = _draw_powers_of_two(rows, 3, random)
    return x


def _draw_wide_range_matrix(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """Returns numbers whose magnitudes span 20 powers of two. After scaling, the smallest ones are subnormal."""
    magnitudes = torch.exp2(torch.rand(rows, columns, generator=random) * -20)
    return magnitudes * (torch.randint(0, 2, (rows, columns), generator=random) * 2 - 1)


# Functions that draw each kind of data. In a pair, the first function draws the first operand, and the second one all
# others.
DRAW_FUNCTIONS_BY_DATA_KIND: dict[str, DrawFunction | tuple[DrawFunction, DrawFunction]] = {
    "normal": _draw_normal,
    "uniform": lambda rows, columns, random: torch.rand(rows, columns, generator=random) * 2 - 1,
    # The magnitudes of rows differ so much that a scale shared by several rows loses the small ones, even in a format
    # with a large exponent range.
    "rows of different sizes": lambda m, k, random: (
        _draw_normal(m, k, random) * _draw_powers_of_two(m, 8, random)[:, None]
    ),
    "blocks of different sizes": _draw_blocks,
    "outliers across the contraction": lambda rows, columns, random: _make_outlier_rows(
        _draw_normal(rows, columns, random).t()
    ).t(),
    "outliers along the contraction": lambda rows, columns, random: _make_outlier_rows(
        _draw_normal(rows, columns, random)
    ),
    "integers": lambda m, k, random: torch.randint(-6, 7, (m, k), generator=random).float(),
    "one-hot rows": (_draw_one_hot, _draw_normal),
    "many octaves": _draw_wide_range_matrix,
    "many octaves, one at a time": (_draw_wide_range_matrix, _draw_one_hot),
    "one at a time of many octaves": (_draw_one_hot, _draw_wide_range_matrix),
    # Every cast keeps +1 and -1 exactly, and their sums are large integers, so any difference comes from the summation.
    "ones and 10% minus ones": lambda m, k, random: torch.where(torch.rand(m, k, generator=random) < 0.1, -1.0, 1.0),
    "large": lambda rows, columns, random: _draw_normal(rows, columns, random) * 2.0**10,
    "small": lambda rows, columns, random: _draw_normal(rows, columns, random) * 2.0**-10,
    "tiles of different sizes": _draw_tile_scaled_matrix,
}

# Kinds of data for timed calls. An honest kernel takes the same time for all of them, apart from a device's power
# limit.
TIMED_DATA_KINDS: dict[str, DrawFunction | tuple[DrawFunction, DrawFunction]] = {
    "zeros": lambda rows, columns, _: torch.zeros(rows, columns),
    "ones": lambda rows, columns, _: torch.ones(rows, columns),
    **{name: DRAW_FUNCTIONS_BY_DATA_KIND[name] for name in ("integers", "uniform", "normal")},
}
# Timed data on which a kernel saves time if it skips blocks of zeros, as block-sparse kernels do.
HALF_ZEROS_DATA = "half zeros"


def _draw_half_zeros(rows: int, columns: int, random: torch.Generator) -> Tensor:
    x = _draw_normal(rows, columns, random)
    x[: rows // 2] = 0
    x[:, : columns // 2] = 0
    return x


def draw_matrix(data: str, operand: int, rows: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    draw_functions = (DRAW_FUNCTIONS_BY_DATA_KIND | TIMED_DATA_KINDS | {HALF_ZEROS_DATA: _draw_half_zeros})[data]
    draw_operand_function = draw_functions[operand > 0] if isinstance(draw_functions, tuple) else draw_functions
    seed_text = f"{data} {operand} {rows}x{columns}"
    # crc32 gives the same seed in every process, unlike hash() of a text.
    generator = torch.Generator("cpu").manual_seed(seed + zlib.crc32(seed_text.encode()))
    return draw_operand_function(rows, columns, generator).to(dtype)


@dataclass(frozen=True)
class RoundedOperand:
    """A rounded operand. Each value is an element times its scale. Elements have the shape (rows, columns), and scales
    (blocks down, blocks across); both are float32. `tensor_scale` is the second scale of NVFP4. Without scaling, there
    is a single scale of 1. `unrounded_tensor` is the tensor before rounding; None if the kernel gets the operand as
    codes.
    """

    elements: Tensor
    scales: Tensor
    treatment: Treatment | None
    tensor_scale: float | None = None
    unrounded_tensor: Tensor | None = None

    @property
    def values(self) -> Tensor:
        return self.elements * self.element_scales

    @property
    def element_scales(self) -> Tensor:
        scales = expand_scales(self.scales, self.elements)
        return scales if self.tensor_scale is None else scales * self.tensor_scale

    @property
    def codes(self) -> Tensor:
        """Returns the elements as a kernel takes them: in a float8 dtype, or as two four-bit codes per byte."""
        assert self.treatment is not None
        fmt = self.treatment.fmt
        if fmt is E2M1:
            return quantise(self.elements, fmt, None).codes
        return self.elements.to(CODE_DTYPES[fmt.name])


def round_operand(x: Tensor, treatment: Treatment | None) -> RoundedOperand:
    """Rounds a matrix to nearest, to the format and with the scales of a treatment, with blocks along the last
    dimension. Without a treatment, the values stay unchanged.
    """
    if treatment is None:
        return RoundedOperand(x.float(), torch.ones(1, 1), None, unrounded_tensor=x)
    fmt = treatment.fmt
    scaling = treatment.scaling
    quantised = quantise(x, fmt, scaling)
    elements = decode(unpack_codes(quantised.codes, fmt, x.shape[-1]), fmt)
    scales = torch.ones(1, 1) if quantised.scales is None else quantised.scales
    if quantised.scales is not None and scaling is not None and scaling.scale is not None:
        scales = decode(scales, scaling.scale)
    tensor_scale = None if quantised.tensor_scale is None else float(quantised.tensor_scale)
    scales = scales.float() if scales.dim() == 2 else scales.float().reshape(-1, 1)
    return RoundedOperand(elements, scales, treatment, tensor_scale, x)


def choose_audited_row_indices(x: Tensor, treatment: Treatment | None, count: int, rng: Random) -> Tensor:
    """Returns the indices of about `count` rows: the first, the last and random ones. Rows that share scales are
    chosen together. The row with the largest number is always chosen, so that a scale of the whole matrix does not
    change.
    """
    rows_per_block = 1 if treatment is None or treatment.scaling is None else max(treatment.scaling.rows, 1)
    block_count = -(-len(x) // rows_per_block)
    largest_value_block = int(x.abs().amax(1).argmax()) // rows_per_block
    random_block_indices = rng.sample(range(block_count), min(block_count, max(count // rows_per_block, 1)))
    chosen_block_indices = sorted({0, largest_value_block, block_count - 1, *random_block_indices})
    return torch.cat(
        [
            torch.arange(block * rows_per_block, min((block + 1) * rows_per_block, len(x)))
            for block in chosen_block_indices
        ]
    )


# How far a scale may be off, as a share, if it was computed with a reciprocal or an approximate division.
_MAX_SCALE_ERROR = 2.0**-20


def find_value_range(operand: RoundedOperand) -> tuple[Tensor, Tensor]:
    """Returns the smallest and the largest value to which a correct cast may round each number. Scales may differ in
    their last bits, and ties may round either way."""
    source = operand.unrounded_tensor
    treatment = operand.treatment
    low = high = operand.values
    if source is None or treatment is None:
        return low, high
    float_values = source.float()
    # A correct scale or quotient may be slightly smaller or larger, so round all combinations.
    error_factors = (1 - _MAX_SCALE_ERROR, 1 + _MAX_SCALE_ERROR)
    for scale_error_factor in error_factors:
        element_scales = round_operand(float_values * scale_error_factor, treatment).element_scales
        for quotient_error_factor in error_factors:
            rounded_values = (
                values(float_values / element_scales * quotient_error_factor, treatment.fmt) * element_scales
            )
            low = torch.minimum(low, rounded_values)
            high = torch.maximum(high, rounded_values)
    return low, high


# The usual side lengths of blocks that share a scale. The smallest one with which the scales cover the matrix is
# assumed.
_BLOCK_SIDES = (1, 16, 32, 64, 128)


def expand_scales(scales: Tensor, like: Tensor) -> Tensor:
    """Expands the scales of blocks to one scale per element of `like`. The block size follows from the number of
    scales."""
    down, across = scales.shape
    rows, columns = like.shape
    rows_per_block = _find_block_side(rows, down)
    columns_per_block = _find_block_side(columns, across)
    return scales.repeat_interleave(rows_per_block, 0)[:rows].repeat_interleave(columns_per_block, 1)[:, :columns]


def _find_block_side(length: int, count: int) -> int:
    min_block_side = -(-length // count)
    return (
        next((number for number in _BLOCK_SIDES if number >= min_block_side), min_block_side) if count > 1 else length
    )


@dataclass(frozen=True)
class PromisedCasts:
    """How a precision casts inputs, weights and gradients. None means that it does not cast them. Also has the
    precision's recipe, if there is one.
    """

    treatments: tuple[Treatment | None, Treatment | None, Treatment | None]
    recipe: Recipe | None
    carrier: torch.dtype


def find_promised_casts(name: str, facts: DeviceFacts) -> PromisedCasts:
    precision = precisions.get(name)
    product_carrier_dtype = precision.arithmetic(facts).carrier
    recipe = getattr(precision, "recipe", None)
    if isinstance(recipe, Recipe):
        recipe = recipe_on_device(recipe, facts)
        return PromisedCasts(recipe.treatments, recipe, product_carrier_dtype)
    unscaled_treatment = Treatment(FORMATS[precision.name]) if precision.name in FORMATS else None
    return PromisedCasts((unscaled_treatment, unscaled_treatment, unscaled_treatment), None, product_carrier_dtype)


# Precisions that a kernel may use by mistake instead of the promised one.
_MISTAKEN_PRECISIONS = (
    "fp8",
    "fp8-e4m3",
    "fp8-e5m2",
    "fp8-rowwise",
    "fp8-block",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "nvfp4",
    "fp16",
)
_FNUZ_FORMATS = {E4M3: E4M3FNUZ, E5M2: E5M2FNUZ}
_MAX_BITS_FOR_TRUNCATION = 8
_TESTED_TAIL_LENGTHS = (8, 16, 32, 64, 128)


# A mistake: its code, its description, and the operand values that it produces.
OperandMistake = tuple[str, str, Tensor]


def iterate_rounding_mistakes(operand: RoundedOperand) -> Iterator[OperandMistake]:
    """Yields common mistakes in rounding one operand, the likeliest first. The audit names the first one that
    explains a result.
    """
    if operand.unrounded_tensor is not None and operand.treatment is not None:
        yield from _iterate_cast_mistakes(operand.unrounded_tensor, operand, operand.treatment)
    yield from _iterate_scale_mistakes(operand)
    yield from _iterate_ignored_tails(operand)


def _iterate_cast_mistakes(
    x: Tensor, operand: RoundedOperand, promised_treatment: Treatment
) -> Iterator[OperandMistake]:
    # Each mistake is yielded with the operand that it produces. The kernel's result is then compared with products of
    # that operand.
    yield "not-cast", "unchanged (not cast)", x.float()
    scaling = promised_treatment.scaling
    if scaling is not None:
        for rounding in SCALE_ROUNDINGS_BY_FORMAT[scaling.scale]:
            if rounding is not scaling.rounding:
                treatment = replace(promised_treatment, scaling=replace(scaling, rounding=rounding))
                description = f"cast with scales that are rounded as {rounding.value}"
                yield "scale-rounding", description, round_operand(x, treatment).values
    # Square blocks stay the same when they are transposed.
    if scaling is not None and not scaling.turns:
        transposed_cast_values = round_operand(x.t().contiguous(), promised_treatment).values.t()
        yield "blocks-turned", "scaled in blocks along the wrong dimension", transposed_cast_values
    for description, treatment in _iterate_unpromised_treatments(promised_treatment):
        yield "other-precision", description, round_operand(x, treatment).values
    # Formats with more than eight bits round too finely for truncation to show.
    if promised_treatment.fmt.bits <= _MAX_BITS_FOR_TRUNCATION:
        zero_rounded_values = (
            _truncate_to_format(x / operand.element_scales, promised_treatment.fmt) * operand.element_scales
        )
        yield "cut", "rounded toward 0 instead of to nearest", zero_rounded_values


def _truncate_to_format(x: Tensor, fmt: Format) -> Tensor:
    """Rounds toward zero, as stochastic rounding does with the largest random number."""
    return round_values(x.float(), fmt, torch.full(x.shape, (1 << ROUNDING_RANDOM_BITS) - 1, dtype=torch.int32))


def _iterate_unpromised_treatments(promised_treatment: Treatment) -> Iterator[tuple[str, Treatment]]:
    # 1. Add casts to the same format without scales, and to the fnuz variant of the format.
    described_treatments = [
        (f"cast as in {promised_treatment.fmt.name} without scales", replace(promised_treatment, scaling=None))
    ]
    scaling = promised_treatment.scaling
    if promised_treatment.fmt in _FNUZ_FORMATS and (scaling is None or scaling.scale is None):
        fnuz_format = _FNUZ_FORMATS[promised_treatment.fmt]
        description = f"cast as in {fnuz_format.name}"
        if fnuz_format.largest != promised_treatment.fmt.largest:
            description = (
                f"scaled to {fnuz_format.largest:g} instead of {promised_treatment.fmt.largest:g}, "
                f"as in {fnuz_format.name}"
            )
        described_treatments.append((description, replace(promised_treatment, fmt=fnuz_format)))
    # 2. Add the casts of other precisions.
    for name in _MISTAKEN_PRECISIONS:
        recipe = getattr(precisions.get(name), "recipe", None)
        precision_treatments = recipe.treatments if isinstance(recipe, Recipe) else ()
        described_treatments += [(f"cast as in {name}", cast) for cast in precision_treatments]
    # 3. Add casts with finer scales than promised.
    if scaling is not None and scaling.scale is None and scaling != ROW:
        finer_scalings = {f"{side} numbers": Scaling(1, side, None, ScaleRounding.EXACT) for side in (64, 32, 16)}
        for name, finer_scaling in {"row": ROW, **finer_scalings}.items():
            description = f"cast as in {promised_treatment.fmt.name} with a scale per {name}"
            described_treatments.append((description, replace(promised_treatment, scaling=finer_scaling)))
    if scaling == NVFP4:
        square_block_scaling = Scaling(16, 16, NVFP4.scale, NVFP4.rounding)
        described_treatments.append(
            ("cast as in blocks of 16 x 16", replace(promised_treatment, scaling=square_block_scaling))
        )
    # 4. Skip duplicates and the promised cast.
    yielded_treatments = [promised_treatment]
    for description, treatment in described_treatments:
        if treatment not in yielded_treatments:
            yielded_treatments.append(treatment)
            yield description, replace(treatment, stochastic=False)


def _iterate_scale_mistakes(operand: RoundedOperand) -> Iterator[OperandMistake]:
    if operand.treatment is None or operand.treatment.scaling is None:
        return
    scales = operand.scales
    elements = operand.elements
    fmt = operand.treatment.fmt
    # 1. Multiply by the right scales in a wrong order. The order of a GPU only exists for complete tiles.
    scales_fill_tiles = scales.shape[0] % TILE_ROWS == scales.shape[1] % TILE_COLUMNS == 0
    scale_layouts = {
        "transposed": scales.t().contiguous().reshape(scales.shape) if min(scales.shape) > 1 else None,
        "in the order of a GPU's tiles": swizzle(scales).reshape(scales.shape) if scales_fill_tiles else None,
        "moved on by one block": scales.roll(1, 1),
        "moved on by one row": scales.roll(1, 0),
        "those of each row's first block": scales[:, :1].expand_as(scales),
    }
    for description, misplaced_scales in scale_layouts.items():
        # Scales that stay equal in this order would give the right values.
        if misplaced_scales is not None and not torch.equal(misplaced_scales, scales):
            operand_with_wrong_scales = replace(operand, scales=misplaced_scales)
            yield "scale-layout", f"multiplied by scales that are {description}", operand_with_wrong_scales.values
    # 2. Decode the codes as a different format, or omit a scale.
    if fmt in _FNUZ_FORMATS and fmt.name in CODE_DTYPES:
        yield "fnuz", f"decoded as {_FNUZ_FORMATS[fmt].name}, which gives half its values", operand.values / 2
    yield "scale-missing", "not multiplied by its scales", elements
    if operand.tensor_scale is not None:
        yield "scale-missing", "not multiplied by its tensor's scale", operand.values / operand.tensor_scale


def _iterate_ignored_tails(operand: RoundedOperand) -> Iterator[OperandMistake]:
    columns = operand.elements.shape[1]
    tail_column_counts = {columns % size for size in _TESTED_TAIL_LENGTHS} | {
        size for size in _TESTED_TAIL_LENGTHS if size < columns
    }
    for tail in sorted(tail_column_counts - {0, columns}):
        values_with_zeroed_tail = operand.values.clone()
        values_with_zeroed_tail[:, columns - tail :] = 0
        yield "tail", f"cut off: the last {tail} of K={columns} columns are not added", values_with_zeroed_tail
