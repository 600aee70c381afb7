"""Rounding the elements of a tensor onto a format's grid, exactly, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8bench.errors import UsageError
from fp8bench.formats.grids import Format, Overflow
from fp8bench.formats.random_bits import random_bits
from fp8bench.formats.rounding import nearest, stochastic

INPUTS = (torch.float32, torch.bfloat16, torch.float16)


def round_to(
    x: Tensor,
    fmt: Format,
    out: Tensor | None = None,
    *,
    overflow: Overflow = Overflow.SATURATE,
    seed: Tensor | None = None,
) -> Tensor:
    """`x` rounded onto the grid of `fmt`, as float32 or into `out`: to nearest even, or stochastically with a seed.

    Subnormals, NaN and the sign of zero (where the format has it) are kept; what is too large becomes the largest
    value unless `overflow` says otherwise. e8m0 has neither sign nor zero: both become NaN, its ties go up.
    float32, bfloat16 and float16 input of any shape; no gradient flows. `seed` is an int64 tensor of one element on
    the device of `x`: the same one gives the same values on every device.
    torch's own casts are not used because their overflow differs between torch versions and between formats.
    """
    check_input(x)
    check_overflow(fmt, overflow)
    values = x.detach().to(torch.float32)
    if seed is None:
        rounded = nearest(values, fmt, overflow)
    else:
        rounded = stochastic(values, fmt, random_bits(values.shape, seed), overflow)
    return rounded if out is None else out.copy_(rounded)


def check_input(x: Tensor) -> None:
    """Raise where a tensor holds no numbers that could be quantised."""
    if x.dtype not in INPUTS:
        raise TypeError(f"cannot quantise {x.dtype}: give a tensor of float32, bfloat16 or float16.")


def check_overflow(fmt: Format, overflow: Overflow) -> None:
    """Raise where a format has no code for that way of overflowing."""
    if overflow not in fmt.overflows:
        known = ", ".join(fmt.overflows)
        raise UsageError(f"{fmt.name} has no {overflow!s} to overflow to. Give {known}.")
