"""Switches of the process that one case could leave to the next: torch's, the interpreter's and the system's.

All cases of a group share a process. One that sets the default dtype and goes would have the others measured under it.
The random states are not among these: a step may draw. A precision's own switches are set around the watch, not within
it: their being put back would hide that a step had changed them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import time
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
    found = list(zip(_switches(), before, after, strict=True))
    for switch, old, _ in found:  # each is read again: one of torch's older switches writes several of the newer ones
        if switch.write is not None and switch.read() != old:
            # The folder may be gone, a signal's handler may be C's, and torch refuses mixed settings of products.
            with contextlib.suppress(OSError, ValueError, TypeError, RuntimeError):
                switch.write(old)
    return [f"{switch.name} at {new!s:.200} (it was {old!s:.200})" for switch, old, new in found if old != new]


@functools.cache
def _switches() -> tuple[Switch, ...]:
    return (*_of_torch(), *_of_products(), *_of_the_process())


def _of_torch() -> Iterator[Switch]:
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    cuda, mkldnn = torch.backends.cuda, torch.backends.mkldnn
    yield from (
        # First: while it holds, gradients are off too.
        Switch("inference mode", torch.is_inference_mode_enabled, None),
        Switch("gradients", torch.is_grad_enabled, torch.set_grad_enabled),
        Switch("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
        # None if none was set: one that was, be it the processor, stands in the way of every call.
        Switch(
            "the default device",
            lambda: torch.get_default_device() if torch._C._len_torch_function_stack() else None,
            torch.set_default_device,
        ),
        Switch("the number of threads", torch.get_num_threads, torch.set_num_threads),
        Switch(
            "float32 products", lambda: _unmixed(torch.get_float32_matmul_precision),
            torch.set_float32_matmul_precision,
        ),
        Switch("cuDNN's TF32", lambda: _unmixed(lambda: cudnn.allow_tf32), lambda on: setattr(cudnn, "allow_tf32", on)),
        _attribute("cuDNN's benchmark", cudnn, "benchmark"),
        _attribute("cuDNN's deterministic algorithms", cudnn, "deterministic"),
        _attribute("oneDNN", mkldnn, "enabled"),
        _attribute("oneDNN's deterministic algorithms", mkldnn, "deterministic"),
        Switch("flash attention", cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        Switch("memory-efficient attention", cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        Switch("attention in plain products", cuda.math_sdp_enabled, cuda.enable_math_sdp),
        Switch("cuDNN's attention", cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        _attribute("cuDNN", cudnn, "enabled"),
        Switch("deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        _attribute("bf16's reduced-precision sums", matmul, "allow_bf16_reduced_precision_reduction"),
        _attribute("fp16's reduced-precision sums", matmul, "allow_fp16_reduced_precision_reduction"),
        *(
            Switch(
                f"autocast on {kind}", partial(torch.is_autocast_enabled, kind),
                partial(torch.set_autocast_enabled, kind),
            )
            for kind in ("cpu", "cuda")
        ),
        Switch("anomaly detection", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        # torch does not say; the processor's unit is the same.
        Switch("denormals as zero", lambda: _SMALLEST * 1.0 == 0.0, torch.set_flush_denormal),
    )  # fmt: skip


def _of_products() -> Iterator[Switch]:
    """How float32 is multiplied, backend by backend. After the switches of older days, which write these too."""
    import torch

    backends = torch.backends
    for name, place in (
        ("float32 of all backends", backends), ("CUDA's float32 products", backends.cuda.matmul),
        ("cuDNN's float32 convolutions", getattr(backends.cudnn, "conv", None)),
        ("cuDNN's float32 recurrences", getattr(backends.cudnn, "rnn", None)),
        ("oneDNN's float32 products", getattr(backends.mkldnn, "matmul", None)),
        ("oneDNN's float32 convolutions", getattr(backends.mkldnn, "conv", None)),
        ("oneDNN's float32 recurrences", getattr(backends.mkldnn, "rnn", None)),
    ):  # fmt: skip
        if hasattr(place, "fp32_precision"):
            yield _attribute(name, place, "fp32_precision")


# What torch and the libraries below it read while they run. Others are written by themselves: inductor names its cache
# there, CUDA how it loads.
_READ_BY_TORCH = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES", "OMP_DYNAMIC", "MKL_NUM_THREADS",
    "MKL_DYNAMIC", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip
_BINDS = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
_CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "process_time", "thread_time", "sleep")
_HANDLED = tuple(signal.Signals[f"SIG{name}"] for name in ("INT", "TERM", "HUP", "ALRM", "USR1", "USR2"))
_TIMERS = {"real": signal.ITIMER_REAL, "virtual": signal.ITIMER_VIRTUAL, "profiling": signal.ITIMER_PROF}


def _of_the_process() -> Iterator[Switch]:
    yield Switch("the working directory", _folder, os.chdir)
    yield Switch("garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable())
    bound = _BINDS & os.environ.keys()  # OpenMP binds the thread itself, at its first loop
    if hasattr(os, "sched_getaffinity") and not bound:
        yield Switch("the processors", partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0))
    yield Switch("niceness", partial(os.getpriority, os.PRIO_PROCESS, 0), partial(os.setpriority, os.PRIO_PROCESS, 0))
    yield Switch("the environment", _environment, _set_environment)
    for name in _CLOCKS:
        yield _attribute(f"time.{name}", time, name)
    for number in _HANDLED:
        yield Switch(f"the handler of {number.name}", partial(signal.getsignal, number), partial(signal.signal, number))
    for kind, timer in _TIMERS.items():  # one that was left running is stopped; one that ended cannot be wound up again
        yield Switch(f"the {kind} timer", partial(_runs, timer), partial(_stop, timer))


def _runs(timer: int) -> bool:
    return any(signal.getitimer(timer))


def _stop(timer: int, ran: bool) -> object:
    return ran or signal.setitimer(timer, 0)


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _READ_BY_TORCH if name in os.environ}


def _set_environment(old: dict[str, str]) -> None:
    for name in _environment().keys() - old.keys():
        del os.environ[name]
    os.environ.update(old)


def _unmixed(read: Callable[[], Any]) -> Any:
    """torch refuses to say what newer settings, backend by backend, have made of an older one."""
    try:
        return read()
    except RuntimeError:
        return "mixed"


def _attribute(name: str, module: Any, attribute: str) -> Switch:
    return Switch(name, lambda: getattr(module, attribute), lambda value: setattr(module, attribute, value))


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a quarter of the time, and it is read around every slot
    except OSError:
        return "a folder that is no more"
