"""Decides whether casts run as hand-written Triton kernels, on NVIDIA's GPUs with FP8 hardware.

The kernels compute the same bits as code_kernels.py and tiled_codes.py, and move fewer bytes than kernels that torch
compiles. Without triton, which comes with torch's CUDA wheels, torch compiles the casts. This file imports neither
torch nor triton.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from fp8bench.formats.compiling import KernelDefinition

# The first compute capability with instructions that convert to FP8.
MIN_COMPUTE_CAPABILITY = (8, 9)
# The state is the same for all threads, because autograd casts in other threads. `failure` is the reason why a kernel
# did not compile, or ''.
_TRITON_STATE = SimpleNamespace(chosen=True, failure="")


def uses_triton(device: torch.device) -> bool:
    """Returns whether casts on a device run as Triton kernels now."""
    return (
        device.type == "cuda" and _TRITON_STATE.chosen and not _TRITON_STATE.failure and not explain_no_triton(device)
    )


def find_triton_kernels(definition: KernelDefinition, tensors: Sequence[torch.Tensor]) -> KernelDefinition | None:
    """Returns the Triton kernels for a cast. Returns None if this definition has no such kernels."""
    launch = importlib.import_module("fp8bench.formats.triton_casts.launch")
    triton_kernels: KernelDefinition | None = launch.make_triton_kernels(definition, tensors)
    return triton_kernels


def disable_triton(reason: str) -> None:
    """Makes torch compile all casts of this process from now on, because Triton failed."""
    _TRITON_STATE.failure = reason


@contextmanager
def choose_cast_compiler(allows_triton: bool) -> Iterator[None]:
    previous_choice, _TRITON_STATE.chosen = _TRITON_STATE.chosen, allows_triton
    try:
        yield
    finally:
        _TRITON_STATE.chosen = previous_choice


def describe(device: torch.device) -> str:
    """Returns a sentence on how casts are compiled for a CUDA device. If they are not Triton kernels, the
    sentence has the reason.
    """
    reason = _TRITON_STATE.failure or explain_no_triton(device)
    return f"casts are compiled by torch, because {reason}" if reason else "casts run as Triton kernels"


@cache
def explain_no_triton(device: torch.device) -> str:
    """Returns why casts on a device cannot be Triton kernels. Returns '' if they can."""
    import torch

    # ROCm's compiler converts to FP8 differently, and nobody has compared the bits.
    if torch.version.hip is not None:
        return "the Triton kernels are written for NVIDIA's conversions"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    device_capability = torch.cuda.get_device_capability(device)
    if device_capability < MIN_COMPUTE_CAPABILITY:
        return f"compute capability {device_capability[0]}.{device_capability[1]} has no conversion to FP8"
    return ""
