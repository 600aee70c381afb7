"""What kernels are given: matrices in which one mistake or another shows. All drawn on the processor, from a seed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8bench.formats.codes import DTYPES, decode, unpack
from fp8bench.formats.grids import E2M1
from fp8bench.formats.recipes import Treatment
from fp8bench.formats.scaled import quantise

Draw = Callable[[int, int, torch.Generator], Tensor]


def _normal(rows: int, columns: int, random: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=random)


def _uniform(rows: int, columns: int, random: torch.Generator) -> Tensor:
    return torch.rand(rows, columns, generator=random) * 2 - 1


def _sizes(count: int, octaves: int, random: torch.Generator) -> Tensor:
    return torch.exp2(torch.randint(-octaves, octaves + 1, (count,), generator=random))


def _rows(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """So far apart that a scale shared by several rows loses the small ones, in a format with many exponents, too."""
    return _normal(rows, columns, random) * _sizes(rows, 8, random)[:, None]


def _blocks(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """No two blocks of the contraction have the same size."""
    across = -(-columns // 16)
    sizes = torch.exp2(torch.rand(rows, across, generator=random) * 8 - 4)
    return _normal(rows, columns, random) * sizes.repeat_interleave(16, 1)[:, :columns]


def _outliers_across(rows: int, columns: int, random: torch.Generator) -> Tensor:
    x = _normal(rows, columns, random)
    x[:, :: max(columns // 4, 1)] *= 64
    return x


def _outliers_along(rows: int, columns: int, random: torch.Generator) -> Tensor:
    x = _normal(rows, columns, random)
    x[:: max(rows // 4, 1)] *= 64
    return x


def _integers(rows: int, columns: int, random: torch.Generator) -> Tensor:
    return torch.randint(-6, 7, (rows, columns), generator=random).to(torch.float32)


def _one_hot(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """A single power of two in each row: products show the other operand's values."""
    x = torch.zeros(rows, columns)
    places = torch.randint(0, columns, (rows,), generator=random)
    x[torch.arange(rows), places] = _sizes(rows, 3, random)
    return x


def _many_octaves(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """Numbers that scaled elements have below their smallest normal one, too."""
    sizes = torch.exp2(torch.rand(rows, columns, generator=random) * -20)
    return sizes * (torch.randint(0, 2, (rows, columns), generator=random) * 2 - 1)


def _large(rows: int, columns: int, random: torch.Generator) -> Tensor:
    return _normal(rows, columns, random) * 2.0**10


def _small(rows: int, columns: int, random: torch.Generator) -> Tensor:
    return _normal(rows, columns, random) * 2.0**-10


DATA: dict[str, Draw] = {
    "normal": _normal,
    "uniform": _uniform,
    "rows of different sizes": _rows,
    "blocks of different sizes": _blocks,
    "outliers across the contraction": _outliers_across,
    "outliers along the contraction": _outliers_along,
    "integers": _integers,
    "one-hot rows": _one_hot,
    "many octaves": _many_octaves,
    "large": _large,
    "small": _small,
}

# What calls are timed on: these take the same time in an honest kernel, up to what a device's power limit makes of it.
TIMED: dict[str, Draw] = {
    "zeros": lambda rows, columns, _: torch.zeros(rows, columns),
    "ones": lambda rows, columns, _: torch.ones(rows, columns),
    "integers": _integers,
    "uniform": _uniform,
    "normal": _normal,
}


def drawn(data: str, operand: int, rows: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    """A matrix of that data; of one-hot data the first operand alone is so."""
    draw = _normal if data == "one-hot rows" and operand else (DATA | TIMED)[data]
    name = f"{data} {operand} {rows}x{columns}"
    random = torch.Generator("cpu").manual_seed(seed + zlib.crc32(name.encode()))
    return draw(rows, columns, random).to(dtype)


@dataclass(frozen=True)
class Rounded:
    """Elements (rows, columns) float32, and scales (down, across) float32: a value is an element times its scale.

    `tensor_scale` is NVFP4's second one. Without scaling scales are one 1.
    """

    elements: Tensor
    scales: Tensor
    treatment: Treatment | None
    tensor_scale: float = 1.0

    @property
    def values(self) -> Tensor:
        return self.elements * self.spread

    @property
    def spread(self) -> Tensor:
        """The scale of every element."""
        return spread(self.scales, self.elements) * self.tensor_scale

    def scaled_by(self, scales: Tensor) -> Rounded:
        """The same elements under other scales."""
        return replace(self, scales=scales)

    @property
    def codes(self) -> Tensor:
        """The elements as a kernel takes them: in the float8 dtype, or two four-bit codes a byte."""
        assert self.treatment is not None
        fmt = self.treatment.fmt
        if fmt is E2M1:
            return quantise(self.elements, fmt, None).codes
        return self.elements.to(DTYPES[fmt.name])


def rounded(x: Tensor, treatment: Treatment | None) -> Rounded:
    """As the recipe rounds it to nearest, its contraction last; None leaves it as it is."""
    if treatment is None:
        return Rounded(x.to(torch.float32), torch.ones(1, 1), None)
    fmt, scaling = treatment.fmt, treatment.scaling
    stored = quantise(x, fmt, scaling, checked=False)
    elements = decode(unpack(stored.codes, fmt, x.shape[-1]), fmt, checked=False)
    scales = stored.scales
    if scales is None:
        scales = torch.ones(1, 1)
    elif scaling is not None and scaling.scale is not None:
        scales = decode(scales, scaling.scale, checked=False)
    tensor_scale = 1.0 if stored.tensor_scale is None else float(stored.tensor_scale)
    return Rounded(elements, scales.to(torch.float32).reshape(*_grid(scales)), treatment, tensor_scale)


def _grid(scales: Tensor) -> tuple[int, int]:
    return (scales.shape[0], scales.shape[1]) if scales.dim() == 2 else (max(scales.numel(), 1), 1)


def spread(scales: Tensor, like: Tensor) -> Tensor:
    """A scale for each element of a matrix: one of each block, whose sizes follow from how many there are.

    ValueError where so many scales do not cover the matrix in equal blocks.
    """
    down, across = scales.shape
    rows, columns = like.shape
    high, wide = -(-rows // max(down, 1)), -(-columns // max(across, 1))
    high, wide = (_block(high) if down > 1 else rows), (_block(wide) if across > 1 else columns)
    if -(-rows // high) != down or -(-columns // wide) != across:
        raise ValueError(f"{down} x {across} scales do not cover {rows} x {columns} elements in equal blocks")
    return scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]


# Sides of blocks that there are: where a matrix does not divide, the next one above is meant.
_SIDES = (1, 16, 32, 64, 128)


def _block(side: int) -> int:
    return next((one for one in _SIDES if one >= side), side)


def decoded(codes: Tensor, columns: int) -> Tensor:
    """Elements, from the codes that somebody gave: float8, or four-bit ones two a byte, or values as they are."""
    if codes.dtype == torch.uint8 or "float4" in str(codes.dtype):
        return decode(unpack(codes.view(torch.uint8), E2M1, columns), E2M1, checked=False)
    return codes.to(torch.float32)


def scale_matrix(scale: Tensor) -> Tensor:
    """Scales that somebody gave, float32 (down, across); bytes are e8m0 ones, as torch's own dtype of that name."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    found = scale.detach().to(torch.float32).cpu()
    return found.reshape(*_grid(found))
