"""Switches of the process that one case could leave to the next: torch's, and the working directory.

All cases of a group share a process. One that sets the default dtype and goes would have the others measured under it.
The random states are not among these: a step may draw.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

_SMALLEST = 5e-324


class SwitchesChanged(RuntimeError):
    """A workload left a switch of the process otherwise than it found it."""


@dataclass(frozen=True)
class Switch:
    """One of them; `write` is None for what ends with the object that holds it."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Put back what the body leaves changed; raises if it was that, and nothing else, that went wrong."""
    before = _now()
    try:
        yield
    except BaseException:
        _put_back(before)
        raise
    changed = _put_back(before)
    if changed:
        raise SwitchesChanged(
            f"it left {', '.join(changed)}: other cases run in the same process. Put switches back, in a finally."
        )


@contextlib.contextmanager
def collected_by_hand() -> Iterator[None]:
    """No garbage is collected in the body unless it asks for it: when tensors in cycles go shall not be chance."""
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc_was_on:
            gc.enable()


def _now() -> tuple[Any, ...]:
    return tuple(switch.read() for switch in _switches())


def _put_back(before: tuple[Any, ...]) -> list[str]:
    """What had changed, in words."""
    after = _now()
    if after == before:
        return []
    changed = []
    for switch, old, new in zip(_switches(), before, after, strict=True):
        if old != new:
            changed.append(f"{switch.name} at {new} (it was {old})")
            if switch.write is not None:
                with contextlib.suppress(OSError):  # the folder may be gone
                    switch.write(old)
    return changed


@functools.cache
def _switches() -> tuple[Switch, ...]:
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        # First: while it holds, gradients are off too.
        Switch("inference mode", torch.is_inference_mode_enabled, None),
        Switch("gradients", torch.is_grad_enabled, torch.set_grad_enabled),
        Switch("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
        Switch("the default device", _default_device, torch.set_default_device),
        Switch("the number of threads", torch.get_num_threads, torch.set_num_threads),
        Switch("float32 products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        _attribute("cuDNN's TF32", cudnn, "allow_tf32"),
        _attribute("cuDNN's benchmark", cudnn, "benchmark"),
        _attribute("cuDNN", cudnn, "enabled"),
        Switch("deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        _attribute("bf16's reduced-precision sums", matmul, "allow_bf16_reduced_precision_reduction"),
        _attribute("fp16's reduced-precision sums", matmul, "allow_fp16_reduced_precision_reduction"),
        *(
            Switch(
                f"autocast on {kind}",
                partial(torch.is_autocast_enabled, kind),
                partial(torch.set_autocast_enabled, kind),
            )
            for kind in ("cpu", "cuda")
        ),
        Switch("anomaly detection", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        # torch does not say; the processor's unit is the same.
        Switch("denormals as zero", lambda: _SMALLEST * 1.0 == 0.0, torch.set_flush_denormal),
        Switch("the working directory", _folder, os.chdir),
    )


def _attribute(name: str, module: Any, attribute: str) -> Switch:
    return Switch(name, lambda: getattr(module, attribute), lambda value: setattr(module, attribute, value))


def _default_device() -> Any:
    """None if none was set: one that was, be it the processor, stands in the way of every call."""
    import torch

    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a quarter of the time, and it is read around every slot
    except OSError:
        return "a folder that is no more"
