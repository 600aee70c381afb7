"""Families of casts that Triton does by hand, each with what it gives of a matrix, and matrices to cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fp8bench.formats import native_codes
from fp8bench.formats.grids import E4M3, E5M2, E8M0, FP16, Format
from fp8bench.formats.native_codes import (
    cast_codes_with_transpose,
    codes,
    compute_current_scale,
    delayed_scale,
    row_codes,
    transpose_codes,
)
from fp8bench.formats.recipes import Amax, DelayedScaling, ScaleRounding, Scaling
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.formats.tiled_codes import tiled_codes, tiled_codes_both
from tests.formats.test_operators import AWKWARD

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EXACT, POWER_OF_TWO = ScaleRounding.EXACT, ScaleRounding.POWER_OF_TWO
Cast = Callable[[Tensor], Sequence[Tensor]]


def tensor_cast(fmt: Format, rounding: ScaleRounding) -> Cast:
    def cast(x: Tensor) -> Sequence[Tensor]:
        if native_codes.casts_in_one_call(x):
            inverse, straight, turned = native_codes.current_codes(x, fmt, rounding, both=True)
            _, alone, _ = native_codes.current_codes(x, fmt, rounding, both=False)
        else:
            scale, inverse = compute_current_scale(largest_magnitude(x), fmt, rounding)
            straight, turned = cast_codes_with_transpose(x, fmt, scale)
            alone = straight
        return inverse, straight, turned, alone

    return cast


def plain_cast(fmt: Format, rounding: ScaleRounding) -> Cast:
    """Without a scale, with an external scale that saturates many elements, and bytes that are only moved."""

    def cast(x: Tensor) -> Sequence[Tensor]:
        both = cast_codes_with_transpose(x, fmt, torch.full((), 768.0, device=x.device))
        turned = transpose_codes(both[0]) if fmt.bits == 8 else both[1]
        return codes(x, fmt), *both, turned

    return cast


def delayed_cast(fmt: Format, rounding: ScaleRounding) -> Cast:
    """Casts with a history of four, and of more than a chunk, over growing and shrinking magnitudes.

    With their states.
    """
    delayed = [DelayedScaling(4, margin=2), DelayedScaling(3, Amax.MOST_RECENT, interval=2), DelayedScaling(1500)]

    def cast(x: Tensor) -> Sequence[Tensor]:
        result: list[Tensor] = []
        for how in delayed:
            history, scale = torch.zeros(how.history, device=x.device), torch.ones((), device=x.device)
            casts = torch.zeros((), dtype=torch.int32, device=x.device)
            for size in (1.0, 30.0, 0.0, 0.25, 1.0, 2.0):
                sized, state = x * size, (history, casts, scale)
                if native_codes.casts_in_one_call(x):
                    step = native_codes.delayed_codes(sized, *state, fmt, how, both=size > 1)
                    used, inverse, straight, turned = step
                else:
                    used, inverse = delayed_scale(largest_magnitude(sized), *state, fmt, how)
                    straight, turned = cast_codes_with_transpose(sized, fmt, used)
                result += [used, inverse, straight, *(tensor.clone() for tensor in state)]
                if size > 1:
                    result.append(turned)
        return result

    return cast


def row_cast(fmt: Format, rounding: ScaleRounding) -> Cast:
    def cast(x: Tensor) -> Sequence[Tensor]:
        pairs = row_codes(x, fmt, rounding), *native_codes.row_codes_both(x, fmt, rounding)
        return [tensor for pair in pairs for tensor in pair]

    return cast


def block_cast(fmt: Format, rounding: ScaleRounding) -> Cast:
    def cast(x: Tensor) -> Sequence[Tensor]:
        pairs = row_codes(x, fmt, rounding, 128), *native_codes.row_codes_both(x, fmt, rounding, 128)
        return [tensor.t() if number % 2 else tensor for pair in pairs for number, tensor in enumerate(pair)]

    return cast


def square_cast(fmt: Format, rounding: ScaleRounding) -> Cast:
    def cast(x: Tensor) -> Sequence[Tensor]:
        pairs = *native_codes.square_codes(x, fmt, rounding), *native_codes.square_codes(x, fmt, rounding, both=True)
        return [tensor.t() if number % 2 else tensor for pair in pairs for number, tensor in enumerate(pair)]

    return cast


def mx_cast(fmt: Format, rounding: ScaleRounding) -> Cast:
    scaling = Scaling(1, 32, E8M0, rounding)

    def cast(x: Tensor) -> Sequence[Tensor]:
        pairs = tiled_codes(x, fmt, scaling), *tiled_codes_both(x, x.t(), fmt, scaling)
        return [tensor.view(torch.uint8) for pair in pairs for tensor in pair]

    return cast


FLOATS = [(E4M3, EXACT, BF16), (E5M2, POWER_OF_TWO, F32), (E4M3, POWER_OF_TWO, F16)]
MX = [
    (E4M3, ScaleRounding.RCEIL, BF16),
    (E5M2, ScaleRounding.FLOOR, F32),
    (E4M3, ScaleRounding.EVEN, F16),
    (E5M2, ScaleRounding.CEIL, BF16),
]
FAMILIES = {
    "tensor": (tensor_cast, [*FLOATS, (FP16, EXACT, F32)]),
    "plain": (plain_cast, [*FLOATS, (FP16, EXACT, F32)]),
    "delayed": (delayed_cast, [(E4M3, EXACT, BF16), (E5M2, EXACT, F32)]),
    "rows": (row_cast, FLOATS),
    "blocks": (block_cast, FLOATS),
    "squares": (square_cast, FLOATS),
    "mx": (mx_cast, MX),
}


def every_bf16() -> Tensor:
    """Every bfloat16, ordered so that each block has numbers of similar size."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16).view(256, 256)


def matrices(source: torch.dtype) -> Iterator[Tensor]:
    """Multiples of 16 and not, transposed, slices, one row, one column, zeros, NaN, infinity, subnormals."""
    x, numbers = AWKWARD.to(source), every_bf16().to(source)
    finite = numbers.nan_to_num(0.0, 0.0, 0.0)
    yield from (
        x,
        x.t(),
        x[8:41, :250],
        x[8:41, :250].t(),
        x[:64:2, ::3],
        x[:1],
        x[:, :1],
        x.view(-1)[1:513].view(2, 256),
    )
    yield from (numbers, numbers.t(), finite, finite * 2.0**-100, torch.zeros(16, 32, dtype=source))
    yield torch.full((7, 5), float("nan"), dtype=source)
