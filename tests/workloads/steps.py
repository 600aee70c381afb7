"""Sets up a case of a workload as the worker does, and records the phases that its steps mark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from fp8bench.devices.cpu import HostStamper
from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Case, DeviceFacts, Scalar
from fp8bench.protocols import Setup, Workload
from fp8bench.registry import precisions
from fp8bench.worker.clock import PhaseStampClock

CPU = DeviceFacts("cpu", 0, "a processor", 16 << 30, "2.13.0")
H200 = DeviceFacts("cuda", 0, "H200", 140 << 30, "2.13.0", (9, 0), "13.0")
MI300 = DeviceFacts("cuda", 0, "MI300X", 192 << 30, "2.13.0", (9, 4), None, "7.0", "gfx942")
# The parameters of small cases.
SMALL: dict[str, dict[str, Scalar]] = {
    "accumulate": {"micro_batches": 3, "tensors": 2, "width": 48, "gradients": "fp32"},
    "attention": {
        "part": "layer", "sequence": 32, "batch": 2, "heads": 4, "key_heads": 2, "head_width": 16, "causal": "yes",
        "pass": "training", "scores": "high", "spread": 1,
    },
    "cast": {"rows": 40, "columns": 72, "source": "fp32", "direction": "to", "scaling": "on", "role": "input"},
    "conv": {"batch": 4, "channels": 16, "image": 6, "pass": "training"},
    "data": {"kind": "reading", "batch": 4, "record": 512},
    "diffusion": {
        "denoiser": "dit", "batch": 2, "image": 4, "width": 128, "layers": 2, "pass": "sampling", "steps": 4,
        "guidance": "none", "high_steps": "0+0", "time": "fp32",
    },
    "early_exit": {
        "tokens": 48, "width": 32, "hidden": 64, "depth": 4, "classes": 16, "leaving": 25, "exits": "held",
    },
    "gemm": {"m": 24, "n": 40, "k": 64, "product": "forward", "operands": "cast"},
    "decode": {"size": "nano-llama", "batch": 2, "context": 40, "kv": "own", "weights": "own"},
    "prefill": {"size": "nano", "batch": 2, "context": 24, "kv": "own", "weights": "own"},
    "mlp": {"tokens": 24, "width": 16, "hidden": 48, "gated": "no", "pass": "training"},
    "moe": {
        "tokens": 24, "width": 32, "hidden": 48, "experts": 4, "top_k": 2, "layers": 1, "load": "zipf:1",
        "dispatch": "carrier", "combine": "carrier", "router": "fp32", "pass": "training",
    },
    "norm_act": {"operation": "gelu", "tokens": 24, "width": 32, "pass": "training"},
    "vision": {
        "model": "resnet", "batch": 4, "image": 16, "patch": 4, "width": 32, "layers": 2, "text": 8,
        "layout": "channels_last", "pass": "training",
    },
    "optimizer": {"fused": "no", "second_moment": "scaled-fp16", "tensors": 3, "width": 64},
}  # fmt: skip


def setup_of(
    workload: str, params: Mapping[str, Scalar], precision: str, seed: int = 0, corpus: str | None = None
) -> Setup:
    mode = precisions.get(precision)
    high = precisions.get(mode.carried_by or precision).arithmetic(CPU)
    case = Case(workload, tuple(params.items()), precision, "cpu")
    return Setup(case, CPU, seed, mode.arithmetic(CPU), high, {}, mode.loss_scale, corpus)


def small(workload: str, precision: str, seed: int = 0, **changes: Scalar) -> Setup:
    return setup_of(workload, SMALL[workload] | changes, precision, seed)


def marks(workload: Workload, state: object, steps: int = 1) -> list[str]:
    """The phases of the last of some steps, in order."""
    clock = PhaseStampClock(HostStamper())
    for _ in range(steps):
        clock.begin()
        workload.step(state, clock)
        codes, _ = clock.end()
    return [CELL_PHASES[code] for code in codes]


def phases(workload: Workload, setup: Setup, steps: int = 1) -> list[str]:
    """The phases of a new state's step, without the time between them."""
    return [name for name in marks(workload, workload.prepare(setup), steps) if name != UNATTRIBUTED]


class Operations(TorchDispatchMode):
    """Records the names of the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def kept_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes new states cache the weights that they have cast."""
    for module in ("linear", "convolution", "diffusion"):
        monkeypatch.setattr(f"fp8bench.nn.{module}.free_weight", lambda weight: None)


def cast_again(layers: Iterable[Any]) -> int:
    """Makes each layer cast its weight in each step; returns how many did not."""
    cast = [layer for layer in layers if getattr(layer, "operands", None) is not None]
    for layer in cast:
        layer.operands = None
    return len(cast)


def weight_bytes(layers: Iterable[Any]) -> int:
    """Bytes of weights that were cast in advance."""
    cast = (layer for layer in layers if getattr(layer, "operands", None) is not None)
    return sum(layer.weight.untyped_storage().nbytes() for layer in cast)
