"""Compares fused quantisers with torch's copy_, by the CPU time of one thread, as a ratio.

Each figure is the ratio of the shortest of many times on both sides, which are run in turns in one process. `python
-m suites.harness` prints the figures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fp8bench.formats.grids import E2M1, E4M3, E5M2, Format
from fp8bench.formats.recipes import MX, NVFP4, TENSOR, Scaling
from suites.trials import least_seconds

if TYPE_CHECKING:
    from torch import Tensor

# The casts by name: the format of the elements, the scaling, and the dtype of input and output. A name with 'given'
# has a precomputed scale.
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


def _ready(name: str, side: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns a compiled cast of a square matrix into existing memory, and the copy to compare it with."""
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
    eager_calls = KERNELS.eager
    cast()
    if KERNELS.eager != eager_calls:
        raise RuntimeError(f"the quantiser {name} does not run as one kernel")
    return cast, lambda: out.copy_(x)


def over_copy(name: str, side: int, turns: int) -> float:
    """Returns the CPU time of a cast over that of copy_ between the same tensors; 1 means that the cast is as fast as
    memory.
    """
    return _ratio(*_ready(name, side), turns)


def linear_over_product(side: int, turns: int) -> float:
    """Returns the CPU time of an emulated mxfp8 linear layer (forward, side^3) over that of its product in fp32."""
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


def _ratio(call: Callable[[], object], other: Callable[[], object], turns: int) -> float:
    seconds, other_seconds = least_seconds(turns, call, other)
    return seconds / other_seconds
