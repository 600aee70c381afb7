"""What a product or a cast is if a known mistake was made: the values that its operands have then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.features.audit.data import Rounded, rounded
from fp8bench.formats.codes import DTYPES
from fp8bench.formats.grids import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ
from fp8bench.formats.quantise import quantised
from fp8bench.formats.random_bits import RANDOM_BITS
from fp8bench.formats.recipes import Recipe, Treatment
from fp8bench.formats.scale_layouts import TILE_COLUMNS, TILE_ROWS, swizzled
from fp8bench.formats.scalings import NVFP4, ROUNDINGS, ROW, Scaling
from fp8bench.registry import precisions

# Precisions that somebody may have taken for another one.
_OTHERS = ("fp8", "fp8-e4m3", "fp8-e5m2", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "fp16")
_FNUZ = {E4M3: E4M3FNUZ, E5M2: E5M2FNUZ}
_BYTE = 8
_TAILS = (16, 32, 64, 128)


class Mistake(NamedTuple):
    """Its code, in words, and the values of an operand that it makes."""

    code: str
    words: str
    values: Tensor


@dataclass(frozen=True)
class Source:
    """An operand as it came (None: it came as codes), and as it should be rounded."""

    given: Tensor | None
    kept: Rounded


def mistakes(source: Source) -> Iterator[Mistake]:
    """Of one operand, the likeliest first: what fits one by chance as well is called by the first name."""
    if source.given is not None:
        yield from _of_casts(source.given, source.kept)
    yield from _of_scales(source.kept)
    yield from _of_tails(source.kept)


def _of_casts(x: Tensor, kept: Rounded) -> Iterator[Mistake]:
    own = kept.treatment
    if own is None:
        return
    yield Mistake("not-cast", "as it came: it was not cast", x.to(torch.float32))
    scaling = own.scaling
    if scaling is not None:
        for rounding in ROUNDINGS[scaling.scale]:
            if rounding is not scaling.rounding:
                values = rounded(x, replace(own, scaling=replace(scaling, rounding=rounding))).values
                yield Mistake("scale-rounding", f"cast under scales that are rounded as {rounding.value}", values)
        if not scaling.turns:
            yield Mistake("blocks-turned", "scaled by blocks along the other dimension", _turned(x, own))
    for words, treatment in _other_treatments(own):
        yield Mistake("other-precision", f"cast as {words} does", rounded(x, treatment).values)
    if own.fmt.bits > _BYTE:
        return
    cut = quantised(x.to(torch.float32) / kept.spread, own.fmt, torch.full(x.shape, (1 << RANDOM_BITS) - 1))
    yield Mistake("cut", "cast toward 0 and not to nearest", cut * kept.spread)


def _turned(x: Tensor, treatment: Treatment) -> Tensor:
    return rounded(x.t().contiguous(), treatment).values.t()


def _other_treatments(own: Treatment) -> Iterator[tuple[str, Treatment]]:
    seen = [own]
    named = [(f"{own.fmt.name} without scales", replace(own, scaling=None))]
    if own.fmt in _FNUZ and (own.scaling is None or own.scaling.scale is None):
        named.append((_FNUZ[own.fmt].name, replace(own, fmt=_FNUZ[own.fmt])))
    for name in _OTHERS:
        recipe = getattr(precisions.get(name), "recipe", None)
        named += [(name, one) for one in recipe.treatments] if isinstance(recipe, Recipe) else []
    if own.scaling is not None and own.scaling.scale is None and own.scaling != ROW:
        named.append((f"{own.fmt.name} with a scale a row", replace(own, scaling=ROW)))
    if own.scaling == NVFP4:
        named.append(("blocks of 16 x 16", replace(own, scaling=Scaling(16, 16, NVFP4.scale, NVFP4.rounding))))
    for words, treatment in named:
        if treatment not in seen:
            seen.append(treatment)
            yield words, replace(treatment, stochastic=False)


def _of_scales(kept: Rounded) -> Iterator[Mistake]:
    """Right elements under wrong scales."""
    if kept.treatment is None or kept.treatment.scaling is None:
        return
    scales, elements = kept.scales, kept.elements
    laid = {"transposed": _relaid(scales.t(), scales), "in the order of a GPU's tiles": _tiled(scales)}
    laid |= {"moved on by one block": scales.roll(1, 1), "moved on by one row": scales.roll(1, 0)}
    laid["those of the first block"] = scales[:, :1].expand_as(scales)
    laid["one for all, the largest"] = scales.max().expand_as(scales)
    for words, other in laid.items():
        if other is not None and not torch.equal(other, scales):
            yield Mistake("scale-layout", f"under scales that are {words}", kept.scaled_by(other).values)
    if kept.treatment.fmt in _FNUZ and kept.treatment.fmt.name in DTYPES:
        yield Mistake("fnuz", f"its codes are read as {_FNUZ[kept.treatment.fmt].name}'s: half of it", kept.values / 2)
    yield Mistake("scale-missing", "without its scales", elements)
    if kept.tensor_scale != 1.0:
        yield Mistake("scale-missing", "without its tensor's scale", kept.values / kept.tensor_scale)
    yield Mistake("scale-inverse", "divided by its scales", elements / kept.spread)
    yield Mistake("scale-twice", "with its scales applied twice", kept.values * kept.spread)
    yield Mistake("factor", "twice as large", kept.values * 2)


def _relaid(other: Tensor, like: Tensor) -> Tensor | None:
    """The memory of one matrix read in the shape of another."""
    return other.contiguous().reshape(like.shape) if min(like.shape) > 1 else None


def _tiled(scales: Tensor) -> Tensor | None:
    if scales.shape[0] % TILE_ROWS or scales.shape[1] % TILE_COLUMNS:
        return None
    return swizzled(scales).reshape(scales.shape)


def _of_tails(kept: Rounded) -> Iterator[Mistake]:
    """Without the end of the contraction."""
    columns = kept.elements.shape[1]
    lost = {columns % size for size in _TAILS} | {size for size in _TAILS if size < columns}
    for count in sorted(lost - {0}):
        values = kept.values.clone()
        values[:, columns - count :] = 0
        yield Mistake("tail", f"without the last {count} of the contraction", values)
