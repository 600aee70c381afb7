"""The matrices that kernels get, how a recipe rounds them, and how a kernel may have rounded them by mistake.

Matrices are drawn on the CPU from a seed; each kind of data reveals a kind of mistake.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from fp8bench.formats.codes import DTYPES, decode, unpack
from fp8bench.formats.grids import E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, FORMATS, Format
from fp8bench.formats.operators import values
from fp8bench.formats.quantise import RANDOM_BITS, round_values
from fp8bench.formats.recipe_support import on_device
from fp8bench.formats.recipes import NVFP4, ROUNDINGS, ROW, Recipe, ScaleRounding, Scaling, Treatment
from fp8bench.formats.scale_layouts import TILE_COLUMNS, TILE_ROWS, swizzle
from fp8bench.formats.scaled import quantise
from fp8bench.model import DeviceFacts
from fp8bench.registry import precisions

Draw = Callable[[int, int, torch.Generator], Tensor]


def _normal(rows: int, columns: int, random: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=random)


def _sizes(count: int, octaves: int, random: torch.Generator) -> Tensor:
    return torch.exp2(torch.randint(-octaves, octaves + 1, (count,), generator=random))


def _blocks(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """Gives every 16 columns of each row another magnitude."""
    across = -(-columns // 16)
    sizes = torch.exp2(torch.rand(rows, across, generator=random) * 8 - 4)
    return _normal(rows, columns, random) * sizes.repeat_interleave(16, 1)[:, :columns]


def _tiles(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """Gives every tile of 128 x 128 another magnitude, which reveals scales in a wrong order."""
    down, across = -(-rows // 128), -(-columns // 128)
    sizes = torch.exp2(torch.randint(-3, 4, (down, across), generator=random))
    x = _normal(rows, columns, random)
    for place, sizes_of_row in enumerate(sizes.repeat_interleave(128, 1)[:, :columns]):
        x[place * 128 : (place + 1) * 128] *= sizes_of_row
    return x


def _outliers(x: Tensor) -> Tensor:
    x[:: max(len(x) // 4, 1)] *= 64
    return x


def _one_hot(rows: int, columns: int, random: torch.Generator) -> Tensor:
    x = torch.zeros(rows, columns)
    places = torch.randint(0, columns, (rows,), generator=random)
    x[torch.arange(rows), places] = _sizes(rows, 3, random)
    return x


def _many_octaves(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """Includes numbers below the smallest normal one of scaled elements."""
    sizes = torch.exp2(torch.rand(rows, columns, generator=random) * -20)
    return sizes * (torch.randint(0, 2, (rows, columns), generator=random) * 2 - 1)


# Generators by kind of data, or a pair for the first operand and the others.
DATA: dict[str, Draw | tuple[Draw, Draw]] = {
    "normal": _normal,
    "uniform": lambda rows, columns, random: torch.rand(rows, columns, generator=random) * 2 - 1,
    # The sizes differ so much that a scale shared by several rows loses the small ones, even in a format with many
    # exponents.
    "rows of different sizes": lambda m, k, random: _normal(m, k, random) * _sizes(m, 8, random)[:, None],
    "blocks of different sizes": _blocks,
    "outliers across the contraction": lambda rows, columns, random: _outliers(_normal(rows, columns, random).t()).t(),
    "outliers along the contraction": lambda rows, columns, random: _outliers(_normal(rows, columns, random)),
    "integers": lambda m, k, random: torch.randint(-6, 7, (m, k), generator=random).to(torch.float32),
    "one-hot rows": (_one_hot, _normal),
    "many octaves": _many_octaves,
    "many octaves, one at a time": (_many_octaves, _one_hot),
    "one at a time of many octaves": (_one_hot, _many_octaves),
    # Every cast keeps ones, and their sums are large integers, so a difference comes from the summation.
    "signs that lean": lambda m, k, random: torch.where(torch.rand(m, k, generator=random) < 0.1, -1.0, 1.0),
    "large": lambda rows, columns, random: _normal(rows, columns, random) * 2.0**10,
    "small": lambda rows, columns, random: _normal(rows, columns, random) * 2.0**-10,
    "tiles of different sizes": _tiles,
}

# Data for timed calls: an honest kernel takes the same time for all, apart from a device's power limit.
TIMED: dict[str, Draw | tuple[Draw, Draw]] = {
    "zeros": lambda rows, columns, _: torch.zeros(rows, columns),
    "ones": lambda rows, columns, _: torch.ones(rows, columns),
    **{name: DATA[name] for name in ("integers", "uniform", "normal")},
}
# A kernel that skips blocks of zeros, as block-sparse ones do, is also faster on these.
HALF_ZEROS = "half zeros"


def _half_zeros(rows: int, columns: int, random: torch.Generator) -> Tensor:
    x = _normal(rows, columns, random)
    x[: rows // 2] = 0
    x[:, : columns // 2] = 0
    return x


def draw_matrix(data: str, operand: int, rows: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    draws = (DATA | TIMED | {HALF_ZEROS: _half_zeros})[data]
    draw = draws[operand > 0] if isinstance(draws, tuple) else draws
    name = f"{data} {operand} {rows}x{columns}"
    random = torch.Generator("cpu").manual_seed(seed + zlib.crc32(name.encode()))
    return draw(rows, columns, random).to(dtype)


@dataclass(frozen=True)
class Rounded:
    """Elements (rows, columns) and scales (down, across), both float32: a value is an element times its scale.
    `tensor_scale` is NVFP4's second scale. Without scaling there is a single scale of 1. `given` is what was rounded,
    None if the operand is passed as codes."""

    elements: Tensor
    scales: Tensor
    treatment: Treatment | None
    tensor_scale: float | None = None
    given: Tensor | None = None

    @property
    def values(self) -> Tensor:
        return self.elements * self.spread

    @property
    def spread(self) -> Tensor:
        scales = spread(self.scales, self.elements)
        return scales if self.tensor_scale is None else scales * self.tensor_scale

    @property
    def codes(self) -> Tensor:
        """Returns the elements as a kernel takes them: in the float8 dtype, or as two four-bit codes per byte."""
        assert self.treatment is not None
        fmt = self.treatment.fmt
        if fmt is E2M1:
            return quantise(self.elements, fmt, None).codes
        return self.elements.to(DTYPES[fmt.name])


def round_operand(x: Tensor, treatment: Treatment | None) -> Rounded:
    """Rounds to nearest as the recipe does, along the last dimension; unchanged without a treatment."""
    if treatment is None:
        return Rounded(x.to(torch.float32), torch.ones(1, 1), None, given=x)
    fmt, scaling = treatment.fmt, treatment.scaling
    stored = quantise(x, fmt, scaling, checked=False)
    elements = decode(unpack(stored.codes, fmt, x.shape[-1]), fmt, checked=False)
    scales = torch.ones(1, 1) if stored.scales is None else stored.scales
    if stored.scales is not None and scaling is not None and scaling.scale is not None:
        scales = decode(scales, scaling.scale, checked=False)
    tensor_scale = None if stored.tensor_scale is None else float(stored.tensor_scale)
    return Rounded(
        elements,
        scales.to(torch.float32).reshape(
            *((scales.shape[0], scales.shape[1]) if scales.dim() == 2 else (scales.numel(), 1))
        ),
        treatment,
        tensor_scale,
        x,
    )


def sampled_rows(x: Tensor, treatment: Treatment | None, count: int, chance: Random) -> Tensor:
    """Returns about `count` rows: the first, the last and random ones, in whole blocks that share scales. The row with
    the largest number is included, so that a scale for the whole matrix stays the same."""
    height = 1 if treatment is None or treatment.scaling is None else max(treatment.scaling.rows, 1)
    blocks = -(-len(x) // height)
    largest = int(x.abs().amax(1).argmax()) // height
    drawn_blocks = chance.sample(range(blocks), min(blocks, max(count // height, 1)))
    chosen = sorted({0, largest, blocks - 1, *drawn_blocks})
    return torch.cat([torch.arange(block * height, min((block + 1) * height, len(x))) for block in chosen])


# The relative error of scales that come from a reciprocal or an approximate division.
_ULPS = 2.0**-20


def span(operand: Rounded) -> tuple[Tensor, Tensor]:
    """Returns the smallest and the largest value to which honest casts may round each number. Scales may differ in
    their last bits, and ties may round either way."""
    source, treatment = operand.given, operand.treatment
    low = high = operand.values
    if source is None or treatment is None:
        return low, high
    wide = source.to(torch.float32)
    for spread_ in (round_operand(wide * off, treatment).spread for off in (1 - _ULPS, 1 + _ULPS)):
        for off in (1 - _ULPS, 1 + _ULPS):
            candidate = values(wide / spread_ * off, treatment.fmt) * spread_
            low, high = torch.minimum(low, candidate), torch.maximum(high, candidate)
    return low, high


# The sides of blocks in use; if blocks do not divide a matrix, the next larger side is assumed.
_SIDES = (1, 16, 32, 64, 128)


def spread(scales: Tensor, like: Tensor) -> Tensor:
    """Expands scales to one per element; their number determines the size of their blocks."""
    down, across = scales.shape
    rows, columns = like.shape
    high, wide = _block(rows, down), _block(columns, across)
    return scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]


def _block(length: int, count: int) -> int:
    side = -(-length // count)
    return next((number for number in _SIDES if number >= side), side) if count > 1 else length


@dataclass(frozen=True)
class Promised:
    """How a precision treats inputs, weights and gradients (None: unchanged), and its recipe, if it is one."""

    treatments: tuple[Treatment | None, Treatment | None, Treatment | None]
    recipe: Recipe | None
    carrier: torch.dtype


def promise_of(name: str, facts: DeviceFacts) -> Promised:
    precision = precisions.get(name)
    carrier = precision.arithmetic(facts).carrier
    recipe = getattr(precision, "recipe", None)
    if isinstance(recipe, Recipe):
        recipe = on_device(recipe, facts)
        return Promised(recipe.treatments, recipe, carrier)
    plain = Treatment(FORMATS[precision.name]) if precision.name in FORMATS else None
    return Promised((plain, plain, plain), None, carrier)


# Precisions that are tried as mistakes.
_OTHERS = ("fp8", "fp8-e4m3", "fp8-e5m2", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "fp16")
_FNUZ = {E4M3: E4M3FNUZ, E5M2: E5M2FNUZ}
_BYTE = 8
_TAILS = (16, 32, 64, 128)


# A mistake: its code, its description, and the values to which it turns an operand.
Mistake = tuple[str, str, Tensor]


def mistakes(operand: Rounded) -> Iterator[Mistake]:
    """Yields the mistakes of one operand, the likeliest first: the first that explains a result is named."""
    if operand.given is not None and operand.treatment is not None:
        yield from _cast_mistakes(operand.given, operand, operand.treatment)
    yield from _scale_mistakes(operand)
    yield from _tail_mistakes(operand)


def nearest(rows: Iterable[Mistake], distance: Callable[[Tensor], float], below: float) -> tuple[str, str] | None:
    """Returns code and description of the mistake whose result is nearest, if its distance is less than `below`."""
    least, name = below, None
    for code, words, tensor in rows:
        apart = distance(tensor)
        least, name = (apart, (code, words)) if apart < least else (least, name)
    return name


def _cast_mistakes(x: Tensor, operand: Rounded, treatment_promised: Treatment) -> Iterator[Mistake]:
    # A mistake is the operand that it produces; results are then compared with products of that.
    yield "not-cast", "as it came: it was not cast", x.to(torch.float32)
    if treatment_promised.scaling is not None:
        for rounding in ROUNDINGS[treatment_promised.scaling.scale]:
            if rounding is not treatment_promised.scaling.rounding:
                treatment = replace(treatment_promised, scaling=replace(treatment_promised.scaling, rounding=rounding))
                words = f"cast under scales that are rounded as {rounding.value}"
                yield "scale-rounding", words, round_operand(x, treatment).values
    # Transposed square blocks are the same blocks.
    if treatment_promised.scaling is not None and not treatment_promised.scaling.turns:
        yield (
            "blocks-turned",
            "scaled by blocks along the other dimension",
            round_operand(x.t().contiguous(), treatment_promised).values.t(),
        )
    for words, treatment in _other_treatments(treatment_promised):
        yield "other-precision", f"cast as {words} does", round_operand(x, treatment).values
    # Wider formats round too finely to show truncation.
    if treatment_promised.fmt.bits <= _BYTE:
        yield (
            "cut",
            "cast toward 0 and not to nearest",
            _truncate(x / operand.spread, treatment_promised.fmt) * operand.spread,
        )


def _truncate(x: Tensor, fmt: Format) -> Tensor:
    """Rounds toward zero."""
    return round_values(x.to(torch.float32), fmt, torch.full(x.shape, (1 << RANDOM_BITS) - 1, dtype=torch.int32))


def _other_treatments(promised: Treatment) -> Iterator[tuple[str, Treatment]]:
    # 1. The same format without scales, or the fnuz format with its name.
    named = [(f"{promised.fmt.name} without scales", replace(promised, scaling=None))]
    if promised.fmt in _FNUZ and (promised.scaling is None or promised.scaling.scale is None):
        named.append((_FNUZ[promised.fmt].name, replace(promised, fmt=_FNUZ[promised.fmt])))
    # 2. The treatments of other precisions.
    for name in _OTHERS:
        recipe = getattr(precisions.get(name), "recipe", None)
        named += [(name, treatment) for treatment in recipe.treatments] if isinstance(recipe, Recipe) else []
    # 3. Finer scales than promised.
    if promised.scaling is not None and promised.scaling.scale is None and promised.scaling != ROW:
        named.append((f"{promised.fmt.name} with a scale a row", replace(promised, scaling=ROW)))
        for side in (64, 32, 16):
            scaling = Scaling(1, side, None, ScaleRounding.EXACT)
            named.append(
                (f"{promised.fmt.name} with a scale for each {side} of a row", replace(promised, scaling=scaling))
            )
    if promised.scaling == NVFP4:
        named.append(("blocks of 16 x 16", replace(promised, scaling=Scaling(16, 16, NVFP4.scale, NVFP4.rounding))))
    # 4. Yield each once, and never the promised one.
    yielded = [promised]
    for words, treatment in named:
        if treatment not in yielded:
            yielded.append(treatment)
            yield words, replace(treatment, stochastic=False)


def _scale_mistakes(operand: Rounded) -> Iterator[Mistake]:
    if operand.treatment is None or operand.treatment.scaling is None:
        return
    scales, elements, fmt = operand.scales, operand.elements, operand.treatment.fmt
    whole_tiles = scales.shape[0] % TILE_ROWS == scales.shape[1] % TILE_COLUMNS == 0
    laid = {
        "transposed": scales.t().contiguous().reshape(scales.shape) if min(scales.shape) > 1 else None,
        "in the order of a GPU's tiles": swizzle(scales).reshape(scales.shape) if whole_tiles else None,
        "moved on by one block": scales.roll(1, 1),
        "moved on by one row": scales.roll(1, 0),
    }
    for words, moved_scales in laid.items():
        if moved_scales is not None and not torch.equal(moved_scales, scales):
            yield "scale-layout", f"under scales that are {words}", replace(operand, scales=moved_scales).values
    if fmt in _FNUZ and fmt.name in DTYPES:
        yield "fnuz", f"its codes are read as {_FNUZ[fmt].name}'s: half of it", operand.values / 2
    yield "scale-missing", "without its scales", elements
    if operand.tensor_scale is not None:
        yield "scale-missing", "without its tensor's scale", operand.values / operand.tensor_scale


def _tail_mistakes(operand: Rounded) -> Iterator[Mistake]:
    columns = operand.elements.shape[1]
    tails = {columns % size for size in _TAILS} | {size for size in _TAILS if size < columns}
    for tail in sorted(tails - {0, columns}):
        values = operand.values.clone()
        values[:, columns - tail :] = 0
        yield "tail", f"without the last {tail} of the contraction", values
