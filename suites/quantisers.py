"""How fast the fused quantisers are, as ratios of neighbouring runs in one process: CPU time of one thread.

For suites/harness.py. Every figure is the least of many on both sides, taken in turns. `python -m suites.quantisers`
prints what each has of the speed of a copy, with vectors of each width and with the width that fp8bench chooses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING
from unittest import mock

from fp8bench.formats.grids import E2M1, E4M3, E5M2, Format
from fp8bench.formats.recipes import MX, NVFP4, TENSOR, Scaling
from suites.trials import least_seconds, ran, say, scratch

if TYPE_CHECKING:
    from torch import Tensor

SIDE = 4096
_TURNS = 15
_REPEATS = 5
# Name: elements, scaling, dtype of what is quantised and of what comes out. 'given': with a scale from before.
CASTS: dict[str, tuple[Format, Scaling | None, str]] = {
    "e4m3 fp32": (E4M3, None, "float32"),
    "e5m2 fp32": (E5M2, None, "float32"),
    "e4m3 given fp32": (E4M3, TENSOR, "float32"),
    "e4m3 tensor fp32": (E4M3, TENSOR, "float32"),
    "mxfp8 fp32": (E4M3, MX, "float32"),
    "mxfp4 fp32": (E2M1, MX, "float32"),
    "nvfp4 fp32": (E2M1, NVFP4, "float32"),
    "e4m3 bf16": (E4M3, None, "bfloat16"),
    "mxfp8 bf16": (E4M3, MX, "bfloat16"),
    "mxfp4 bf16": (E2M1, MX, "bfloat16"),
    "nvfp4 bf16": (E2M1, NVFP4, "bfloat16"),
}
OTHERS = {"mxfp8": E4M3, "mxfp4": E2M1}

_COLD = """
import sys, time
from suites.quantisers import ready
start = time.process_time()
ready(sys.argv[1], int(sys.argv[2]))
print(time.process_time() - start)
"""


def ready(name: str, side: int = SIDE) -> tuple[Callable[[], object], Callable[[], object]]:
    """A cast of a square matrix into memory that is there, compiled, and the copy it is held against."""
    import torch

    from fp8bench.formats.operators import KERNELS, values

    fmt, scaling, dtype = CASTS[name]
    torch.set_num_threads(1)
    x = torch.randn(side, side, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    out = torch.empty_like(x)
    scale = torch.tensor(0.75) if "given" in name else None

    def cast() -> Tensor:
        return values(x, fmt, scaling, scale=scale, out=out)

    cast()
    KERNELS.compile(*KERNELS.wanted)
    before = KERNELS.eager
    cast()
    if KERNELS.eager != before:
        raise RuntimeError(f"the quantiser {name} does not run as one kernel")
    return cast, lambda: out.copy_(x)


def shares(name: str, bits: int = 0) -> tuple[list[float], int]:
    """What a cast has of the speed of copy_, several times, in order, and its vectors' bits: those given, or chosen."""
    from fp8bench.formats import operators, vector_width

    forced = {"return_value": (bits,)} if bits else {"side_effect": vector_width.widths}
    with (
        mock.patch.object(operators, "KERNELS", operators.Kernels()) as kernels,
        mock.patch.object(vector_width, "widths", **forced),
    ):
        calls = ready(name)
        return sorted(1 / _ratio(*calls) for _ in range(_REPEATS)), next(iter(kernels.fused))


def over_copy(name: str, side: int = SIDE, turns: int = _TURNS) -> float:
    """CPU time of a cast over that of torch's copy_ between the same tensors: as many bytes, so 1 is memory's speed."""
    return _ratio(*ready(name, side), turns)


def over_torchao(name: str, side: int = SIDE, turns: int = 3) -> float:
    """CPU time of a cast to MX values over that of torchao's way there and back."""
    import torch
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    cast, _ = ready(f"{name} fp32", side)
    element = torch.float8_e4m3fn if OTHERS[name] is E4M3 else torch.float4_e2m1fn_x2
    x = torch.randn(side, side, generator=torch.Generator().manual_seed(0))

    return _ratio(cast, lambda: MXTensor.to_mx(x, element, 32).dequantize(torch.float32), turns)


def linear_over_product(side: int = 1024, turns: int = 40) -> float:
    """CPU time of an emulated mxfp8 linear layer of side^3, forward, over that of its product in fp32."""
    import torch

    from fp8bench.formats.operators import KERNELS
    from fp8bench.protocols import Role
    from fp8bench.registry import devices, precisions

    torch.set_num_threads(1)
    arithmetic = precisions.get("mxfp8").arithmetic(devices.get("cpu").available()[0])
    x, weight = torch.randn(side, side), torch.randn(side, side)

    def linear() -> Tensor:
        return arithmetic.product(arithmetic.cast(x, Role.INPUT), arithmetic.cast(weight, Role.WEIGHT), torch.float32)

    linear()
    KERNELS.compile(*KERNELS.wanted)
    return _ratio(linear, lambda: x @ weight.t(), turns)


def cold_compile(name: str, side: int = SIDE) -> float:
    """CPU seconds until a quantiser runs as one kernel, in a process and with a cache that have seen none."""
    with scratch() as cache:
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache)}
        return float(ran((sys.executable, "-c", _COLD, name, str(side)), more=caches).stdout)


def _ratio(one: Callable[[], object], other: Callable[[], object], turns: int = _TURNS) -> float:
    """The least CPU time of one over the least of the other."""
    first, second = least_seconds(turns, one, other)
    return first / second


if __name__ == "__main__":
    for _name in CASTS:
        for _bits in (256, 512, 0):
            _shares, _taken = shares(_name, _bits)
            _words = f"{_bits or f'chosen: {_taken}'!s:<12} {_shares[_REPEATS // 2]:6.1%} of copy_"
            say(f"{_name:<18} {_words} ({_shares[0]:.1%} to {_shares[-1]:.1%}), load {os.getloadavg()[0]:.1f}")
