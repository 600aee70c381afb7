"""Casts by hand in Triton's interpreter, on a processor, held against their definitions: run as a program.

TRITON_INTERPRET must be set before triton is imported, and no process of the tests' own may have it. The interpreter's
conversions to FP8 are wrong in 3% of codes; torch's stand in for them here, saturating as NVIDIA's instructions do.

`python -m tests.formats.triton_casts.interpreted NAME` compares a family of casts over matrices of many sizes and
strides, prints each that differs, and last how many casts ran by hand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from fp8bench.formats import native_codes, operators
from fp8bench.formats.compiling import Compiled, Definition
from fp8bench.formats.grids import E4M3, E5M2, E8M0, FP16, Format
from fp8bench.formats.native_codes import codes, codes_both, codes_turned, current_scale, delayed_scale, row_codes
from fp8bench.formats.recipes import Amax, Delayed, ScaleRounding, Scaling
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.formats.tiled_codes import tiled_codes, tiled_codes_both
from fp8bench.formats.triton_casts import launch
from tests.formats.test_native_codes import same
from tests.formats.test_operators import AWKWARD

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EXACT, POWER_OF_TWO = ScaleRounding.EXACT, ScaleRounding.POWER_OF_TWO
_KINDS = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "bf16": BF16, "fp16": F16}
_convert, _patch_tensors = interpreter._convert_float, interpreter._patch_lang_tensor


def convert_exactly(values: np.ndarray, source: object, target: object, rounding: object) -> np.ndarray:
    if target.name == "fp32" and source.name in ("bf16", "fp16"):  # the interpreter loses bfloat16's subnormals
        halves = torch.from_numpy(np.ascontiguousarray(values.view(np.int16))).view(_KINDS[source.name])
        return halves.float().numpy().view(np.uint32)
    if source.name != "fp32" or target.name not in _KINDS:
        return _convert(values, source, target, rounding)
    floats, kind = torch.from_numpy(np.ascontiguousarray(values.view(np.float32))), _KINDS[target.name]
    if kind.itemsize == 1:
        floats = floats.clamp(-torch.finfo(kind).max, torch.finfo(kind).max)  # which keeps NaN
        return floats.to(kind).view(torch.uint8).numpy()
    return floats.to(kind).view(torch.int16).numpy().view(np.uint16)


def patch_tensors(tensor: object, scope: object) -> None:
    """Lets the interpreter's scalars, which are arrays of one element, be indices with NumPy from 2.4 on, too."""
    _patch_tensors(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())


class Interpreted(operators.Kernels):
    """Has every cast by hand ready, in the interpreter; all others stay separate operations."""

    def get(self, kernel: Definition) -> Compiled | None:
        if not isinstance(kernel, launch.ByHand):
            return None
        self.fused[0] += 1
        definition = kernel.definition
        return Compiled(lambda *tensors: launch.run_plans(launch.plan_by_hand(definition, tensors), tensors))

    def keep(self, *launches: object) -> None:
        """Keeps nothing: the interpreter has no compiled kernels."""


Cast = Callable[[Tensor], Sequence[Tensor]]


def tensor_cast(fmt: Format, rounding: ScaleRounding) -> Cast:
    def cast(x: Tensor) -> Sequence[Tensor]:
        if native_codes.casts_in_one_call(x):
            inverse, straight, turned = native_codes.current_codes(x, fmt, rounding, both=True)
            _, alone, _ = native_codes.current_codes(x, fmt, rounding, both=False)
        else:
            scale, inverse = current_scale(largest_magnitude(x), fmt, rounding)
            straight, turned = codes_both(x, fmt, scale)
            alone = straight
        return inverse, straight, turned, alone

    return cast


def plain_cast(fmt: Format, rounding: ScaleRounding) -> Cast:
    """Without a scale, under a scale from elsewhere, in which many elements saturate, and bytes that are only moved."""

    def cast(x: Tensor) -> Sequence[Tensor]:
        both = codes_both(x, fmt, torch.tensor(768.0))
        turned = codes_turned(both[0]) if fmt.bits == 8 else both[1]
        return codes(x, fmt), *both, turned

    return cast


def delayed_cast(fmt: Format, rounding: ScaleRounding) -> Cast:
    """Casts that a history of four, and one of more than a chunk, sees come and go, and what they leave."""
    delayed = [Delayed(4, margin=2), Delayed(3, Amax.MOST_RECENT, interval=2), Delayed(1500)]

    def cast(x: Tensor) -> Sequence[Tensor]:
        found: list[Tensor] = []
        for how in delayed:
            history, casts, scale = torch.zeros(how.history), torch.zeros((), dtype=torch.int32), torch.ones(())
            for size in (1.0, 30.0, 0.0, 0.25, 1.0, 2.0):
                sized, state = x * size, (history, casts, scale)
                if native_codes.casts_in_one_call(x):
                    step = native_codes.delayed_codes(sized, *state, fmt, how, both=size > 1)
                    used, inverse, straight, turned = step
                else:
                    used, inverse = delayed_scale(largest_magnitude(sized), *state, fmt, how)
                    straight, turned = codes_both(sized, fmt, used)
                found += [used, inverse, straight, *(tensor.clone() for tensor in state)]
                if size > 1:
                    found.append(turned)
        return found

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
    """Every bfloat16, in an order that gives each block its numbers of a like size."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16).view(256, 256)


def matrices(source: torch.dtype) -> Iterator[Tensor]:
    """Multiples of 16 and not, turned, parts of others, one row, one column, zeros, NaN, infinity, subnormals."""
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


FEWER = {"delayed": slice(0, None, 3)}
"""Each of these matrices is cast eighteen times."""


def compare(name: str) -> tuple[int, int]:
    """Prints what differs; returns how many casts did, and how many ran by hand."""
    family, casts = FAMILIES[name]
    differences = 0
    for fmt, rounding, source in casts:
        cast = family(fmt, rounding)
        for x in [*matrices(source)][FEWER.get(name, slice(None))]:
            switch_by_hand(False)
            expected = cast(x)
            switch_by_hand(True)
            result = cast(x)
            wrong = [number for number, pair in enumerate(zip(result, expected, strict=True)) if not same(*pair)]
            if wrong:
                print(name, fmt.name, rounding, source, tuple(x.shape), x.stride(), "differs in", wrong)
                differences += 1
    kernels = operators.KERNELS
    return differences, kernels.fused[0]


def switch_by_hand(on: bool) -> None:
    native_codes.use_by_hand = lambda device: on


if __name__ == "__main__":
    interpreter._convert_float, interpreter._patch_lang_tensor = convert_exactly, patch_tensors
    operators.KERNELS = Interpreted()
    count, ran = compare(sys.argv[1])
    print(f"{count} casts differ; {ran} ran by hand")
    sys.exit(1 if count or not ran else 0)
