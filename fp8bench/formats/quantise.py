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
    overflow = checked_overflow(fmt, overflow)
    if out is not None:
        check_output(out, x)
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


def checked_overflow(fmt: Format, overflow: Overflow) -> Overflow:
    """That way of overflowing, also by its word alone; raises where the format has no code for it."""
    if overflow not in fmt.overflows:
        known = ", ".join(fmt.overflows)
        raise UsageError(f"{fmt.name} has no {overflow!s} to overflow to. Give {known}.")
    return Overflow(overflow)


def check_output(out: Tensor, x: Tensor) -> None:
    """Raise where values would be cut to integers on the way out, or repeated to fill what is larger."""
    if not out.is_floating_point():
        raise TypeError(f"cannot round into {out.dtype}: give a tensor of a floating-point dtype.")
    if out.shape != x.shape:
        raise ValueError(f"cannot round {tuple(x.shape)} into {tuple(out.shape)}: give a tensor of the same shape.")
