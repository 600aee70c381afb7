"""Casts written by hand in Triton, for GPUs of NVIDIA's with units for FP8: whether they are used.

They compute what code_kernels.py and tiled_codes.py define, bit for bit, and move fewer bytes than what torch compiles.
Without triton, which comes with torch's CUDA wheels, torch's compiler makes the casts. This file imports neither.
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

    from fp8bench.formats.compiling import Definition

FIRST_CAPABILITY = (8, 9)
"""The first with instructions that convert to FP8."""
# Process-wide, because autograd casts in other threads. `failure` is why a kernel did not compile, '' if none.
_STATE = SimpleNamespace(chosen=True, failure="")


def use_by_hand(device: torch.device) -> bool:
    """Whether casts on a device run as Triton kernels now."""
    return device.type == "cuda" and _STATE.chosen and not _STATE.failure and not why_not(device)


def find_by_hand(definition: Definition, tensors: Sequence[torch.Tensor]) -> Definition | None:
    """The same cast by Triton kernels; None where none is written for it."""
    launch = importlib.import_module("fp8bench.formats.triton_casts.launch")
    by_triton: Definition | None = launch.by_hand(definition, tensors)
    return by_triton


def give_up(reason: str) -> None:
    """Leaves all casts of this process to torch's compiler."""
    _STATE.failure = reason


@contextmanager
def choose_casts(by_hand: bool) -> Iterator[None]:
    previous, _STATE.chosen = _STATE.chosen, by_hand
    try:
        yield
    finally:
        _STATE.chosen = previous


def describe(device: torch.device) -> str:
    """Says who makes the casts on a CUDA device, and why it is not Triton where it is not."""
    reason = _STATE.failure or why_not(device)
    return f"casts are compiled by torch, because {reason}" if reason else "casts run as Triton kernels"


@cache
def why_not(device: torch.device) -> str:
    import torch

    # ROCm's compiler has other conversions, whose bits were not compared.
    if torch.version.hip is not None:
        return "the Triton kernels are written for NVIDIA's conversions"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} has no conversion to FP8"
    return ""
