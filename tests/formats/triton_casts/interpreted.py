"""Runs Triton casts in its CPU interpreter and compares them with definitions.

A separate program, as TRITON_INTERPRET must be set before importing triton and must not affect test processes. The
interpreter's FP8 conversions are wrong in 3% of codes, so torch's replace them, saturating like NVIDIA's instructions.
`python -m tests.formats.triton_casts.interpreted NAME` compares a family of casts over matrices of many sizes and
strides, prints differences, and finally the number of casts that ran in Triton.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from triton.runtime import interpreter

from fp8bench.formats import native_codes, operators
from fp8bench.formats.compiling import Compiled, KernelDefinition
from fp8bench.formats.triton_casts import launch
from tests.formats.test_native_codes import same
from tests.formats.triton_casts.casts import BF16, F16, FAMILIES, matrices

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
    """Lets the interpreter's scalars (one-element arrays) be indices under NumPy 2.4 or later too."""
    _patch_tensors(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())


class Interpreted(operators.Kernels):
    """Has every cast by hand ready, in the interpreter; all others stay separate operations."""

    def get(self, kernel: KernelDefinition) -> Compiled | None:
        if not isinstance(kernel, launch.TritonKernels):
            return None
        self.fused[0] += 1
        definition = kernel.definition

        def run(*tensors: torch.Tensor) -> None:
            """Returns nothing to repeat: the interpreter has no compiled kernels."""
            launch.run_launch_plans(launch.plan_for_device(definition, tensors), tensors)

        return Compiled(run)


FEWER = {"delayed": slice(0, None, 3)}
"""Each of these matrices is cast eighteen times."""


def compare(name: str) -> tuple[int, int]:
    """Prints differences; returns the number of different casts and of casts that ran in Triton."""
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
    native_codes.uses_triton = lambda device: on


if __name__ == "__main__":
    interpreter._convert_float, interpreter._patch_lang_tensor = convert_exactly, patch_tensors
    operators.KERNELS = Interpreted()
    count, ran = compare(sys.argv[1])
    print(f"{count} casts differ; {ran} ran by hand")
    sys.exit(1 if count or not ran else 0)
