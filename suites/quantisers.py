"""Compares fused quantisers with torch's copy_: CPU time of one thread, as ratios of neighbouring runs in one process.

Each figure is the least of many runs on both sides, taken in turns. `python -m suites.quantisers` prints each one's
share of the speed of a copy, with vectors of each width and with the width that fp8bench chooses.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING
from unittest import mock

from fp8bench.formats.grids import E2M1, E4M3, E5M2, Format
from fp8bench.formats.recipes import MX, NVFP4, TENSOR, Scaling
from suites.trials import least_seconds, say

if TYPE_CHECKING:
    from torch import Tensor

SIDE = 4096
_TURNS = 15
_REPEATS = 5
# Elements, scaling, and the dtype of input and output. 'given': with a scale from before.
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


def ready(name: str, side: int = SIDE) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns a compiled cast of a square matrix into given memory, and the copy to compare it with."""
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
    """Returns a cast's shares of the speed of copy_, sorted, and its vectors' bits: those given, or chosen."""
    from fp8bench.formats import operators, vector_width

    forced = {"return_value": (bits,)} if bits else {"side_effect": vector_width.widths}
    with (
        mock.patch.object(operators, "KERNELS", operators.Kernels()) as kernels,
        mock.patch.object(vector_width, "widths", **forced),
    ):
        calls = ready(name)
        return sorted(1 / _ratio(*calls) for _ in range(_REPEATS)), next(iter(kernels.fused))


def over_copy(name: str, side: int = SIDE, turns: int = _TURNS) -> float:
    """Returns the CPU time of a cast over that of copy_ between the same tensors; 1 is the speed of memory."""
    return _ratio(*ready(name, side), turns)


def linear_over_product(side: int = 1024, turns: int = 40) -> float:
    """Returns the CPU time of an emulated mxfp8 linear layer of side^3, forward, over its product's in fp32."""
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


def _ratio(call: Callable[[], object], other: Callable[[], object], turns: int = _TURNS) -> float:
    seconds, other_seconds = least_seconds(turns, call, other)
    return seconds / other_seconds


if __name__ == "__main__":
    for _name in CASTS:
        for _bits in (256, 512, 0):
            _shares, _taken = shares(_name, _bits)
            _words = f"{_bits or f'chosen: {_taken}'!s:<12} {_shares[_REPEATS // 2]:6.1%} of copy_"
            say(f"{_name:<18} {_words} ({_shares[0]:.1%} to {_shares[-1]:.1%}), load {os.getloadavg()[0]:.1f}")
