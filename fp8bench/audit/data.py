"""What kernels are given: matrices in which one mistake or another shows. All drawn on the processor, from a seed."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

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
