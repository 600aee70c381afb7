"""Reads and writes the switches and build of torch where its public functions do not report or restore them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import attention
from torch.utils._device import DeviceContext

from fp8bench.formats.triton_casts import describe
from fp8bench.model import Scalar


def read_unmixed(read: Callable[[], Any]) -> Any:
    """Returns "mixed" if torch refuses to answer because newer settings by backend contradict an older one."""
    try:
        return read()
    except RuntimeError:
        return "mixed"


def freeze(frozen: bool) -> None:
    backends: Any = torch.backends
    setattr(backends.m, "__allow_nonbracketed_mutation_flag", not frozen)


def function_modes() -> list[Any]:
    if not torch._C._len_torch_function_stack():
        return []
    return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]


def default_device() -> Any:
    """Returns the default device that was set, None if none was: a set one intercepts every call, even the CPU."""
    if not function_modes():
        return None
    return next((mode.device for mode in function_modes() if isinstance(mode, DeviceContext)), None)


def saved_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def put_back_saved_hooks(old: Any) -> None:
    while (top := saved_hooks()) is not None and top != old:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def native_off() -> tuple[tuple[str, str], ...]:
    """Returns which of torch's operators written in Python are turned off: languages, operators, kinds of devices."""
    native: Any = torch.backends.python_native
    state = native._get_filter_state()
    if not (state._dsl_names or state._op_symbols or state._dispatch_keys):
        return ()
    kinds = (("language", state._dsl_names), ("operator", state._op_symbols), ("device", state._dispatch_keys))
    turned_off: list[tuple[str, str]] = []
    for kind, names in kinds:
        turned_off += [(kind, name) for name in sorted(names)]
    return tuple(turned_off)


def put_back_native(old: tuple[tuple[str, str], ...]) -> None:
    native = torch.backends.python_native
    words = {"operator": "operations", "device": "dispatch_keys"}
    now = native_off()
    # Only what differs is set, because turning a switch may load a library.
    for turn, changed in (("enable", set(now) - set(old)), ("disable", set(old) - set(now))):
        for kind, name in changed:
            if kind == "language":
                getattr(native, name).enabled = turn == "enable"
            else:
                getattr(native, f"{turn}_{words[kind]}")(name)


def activate(implementation: str | None) -> None:
    if implementation is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(implementation)


def stance() -> Any:
    """Returns the compiler's stance; None until the compiler was imported, which takes seconds."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return None if frames is None or frames._stance == frames.DynamoStance() else frames._stance


def set_stance(old: Any) -> None:
    frames = sys.modules["torch._dynamo.eval_frame"]
    frames._set_stance(frames.DynamoStance() if old is None else old)


def default_compiler() -> Any:
    registry: Any = sys.modules.get("torch._dynamo.backends.registry")
    return registry.get_default_backend() if hasattr(registry, "get_default_backend") else "inductor"


def set_default_compiler(old: Any) -> None:
    sys.modules["torch._dynamo.backends.registry"].set_default_backend(old)


def set_stream(handle: int) -> None:
    cuda: Any = torch.cuda
    # 0 is the handle of the default stream, which no ExternalStream may wrap.
    cuda.set_stream(cuda.ExternalStream(handle) if handle else cuda.default_stream())


def read_if_used(read: Callable[[], Any], default: Any) -> Any:
    """Reads a value if the GPU is in use, else returns `default`, because reading would initialize the GPU."""
    cuda: Any = torch.cuda
    return read() if cuda.is_initialized() else default


def attention_order() -> list[int]:
    """Returns the order of attention's kernels, after torch has chosen one. torch moves cuDNN's kernel to the front
    when a GPU's attention is first chosen, if it prefers that: once per process, so that the first case would seem to
    have changed it, and later ones would run without."""
    _choose_attention()
    return torch._C._get_sdp_priority_order()


@cache
def _choose_attention() -> None:
    # The smallest attention that every kernel accepts.
    query = torch.zeros(1, 1, 8, 64, dtype=torch.float16, device="cuda")
    torch._fused_sdp_choice(query, query, query)


def pools_memory() -> bool:
    asks = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)
    return asks is None or bool(asks())  # torch 2.11 sets it without reporting it; no torch starts without it


_MAPS = Path("/proc/self/maps")


def cublaslt_version() -> int | None:
    """Returns cuBLASLt's version number (130100 is 13.1.0); None if torch has not loaded it, or it is unknown."""
    try:
        lines = _MAPS.read_text().splitlines()
        # The library that is mapped, not one that a search path would find.
        path = next(line[line.index("/") :] for line in lines if "/libcublasLt.so" in line)
        version = ctypes.CDLL(path).cublasLtGetVersion
    except (OSError, StopIteration, AttributeError):
        return None
    version.restype = ctypes.c_size_t
    return int(version())


def torch_build() -> dict[str, Scalar | None]:
    cudnn = torch.backends.cudnn
    # Casts to FP8 come from different kernels with and without triton, so times depend on it.
    casts = {"casts": describe(torch.device("cuda"))} if torch.cuda.is_available() else {}
    return {
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "torch_config": torch.__config__.show().strip(),
        "cudnn": cudnn.version() if torch.cuda.is_available() else None,  # type: ignore[no-untyped-call]
        "cublaslt": cublaslt_version(),
        **casts,
    }
