"""Reads and restores switches of torch that its public functions do not report or restore. Also reads facts of
torch's build.
"""

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


def read_setting(read: Callable[[], Any]) -> Any:
    """Returns the result of `read`, or "mixed" if torch raises because its new settings per backend contradict an old
    setting.
    """
    try:
        return read()
    except RuntimeError:
        return "mixed"


def set_flags_frozen(frozen: bool) -> None:
    backends: Any = torch.backends
    setattr(backends.m, "__allow_nonbracketed_mutation_flag", not frozen)


def list_function_modes() -> list[Any]:
    return list(map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack())))


def count_function_modes() -> int:
    """Returns how many modes intercept torch's functions, not counting the mode of a default device."""
    return len(list_function_modes()) - (get_default_device() is not None)


def get_default_device() -> Any:
    """Returns the default device that was set, or None. A default device, even the CPU, intercepts every call of
    torch.
    """
    return next((mode.device for mode in list_function_modes() if isinstance(mode, DeviceContext)), None)


def get_saved_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def restore_saved_hooks(old: Any) -> None:
    while (top := get_saved_hooks()) is not None and top != old:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def list_disabled_operators() -> tuple[tuple[str, str], ...]:
    """Lists what is disabled among torch's operators that are written in Python. Each entry is a kind of filter
    ('language', 'operator' or 'device') and the name that this filter disables.
    """
    python_native_backend: Any = torch.backends.python_native
    state = python_native_backend._get_filter_state()
    names_by_kind = {"language": state._dsl_names, "operator": state._op_symbols, "device": state._dispatch_keys}
    disabled_operators: list[tuple[str, str]] = []
    for kind, names in names_by_kind.items():
        disabled_operators += [(kind, name) for name in sorted(names)]
    return tuple(disabled_operators)


def restore_disabled_operators(old: tuple[tuple[str, str], ...]) -> None:
    python_native_backend = torch.backends.python_native
    method_names = {"operator": "operations", "device": "dispatch_keys"}
    disabled_operators = list_disabled_operators()
    # Set only changed switches, because setting one may load a library.
    for action, differences in (
        ("enable", set(disabled_operators) - set(old)),
        ("disable", set(old) - set(disabled_operators)),
    ):
        for kind, name in differences:
            if kind == "language":
                getattr(python_native_backend, name).enabled = action == "enable"
            else:
                getattr(python_native_backend, f"{action}_{method_names[kind]}")(name)


def set_flash_attention(implementation: str | None) -> None:
    if implementation is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(implementation)


def get_compiler_stance() -> Any:
    """Returns the compiler's stance; None if it is the default, or if the compiler was not imported. Importing the
    compiler takes seconds.
    """
    eval_frame_module = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame_module is None or eval_frame_module._stance == eval_frame_module.DynamoStance():
        return None
    return eval_frame_module._stance


def set_stance(old: Any) -> None:
    eval_frame_module = sys.modules["torch._dynamo.eval_frame"]
    eval_frame_module._set_stance(eval_frame_module.DynamoStance() if old is None else old)


def get_default_compiler() -> Any:
    backend_registry: Any = sys.modules.get("torch._dynamo.backends.registry")
    return backend_registry.get_default_backend() if hasattr(backend_registry, "get_default_backend") else "inductor"


def set_default_compiler(old: Any) -> None:
    sys.modules["torch._dynamo.backends.registry"].set_default_backend(old)


def set_cuda_stream(handle: int) -> None:
    cuda: Any = torch.cuda
    # 0 is the handle of the default stream, which an ExternalStream cannot wrap.
    cuda.set_stream(cuda.ExternalStream(handle) if handle else cuda.default_stream())


def read_if_gpu_active(read: Callable[[], Any], default: Any) -> Any:
    """Calls `read` if the GPU is in use. Else returns `default`, because reading would initialise the GPU."""
    cuda: Any = torch.cuda
    return read() if cuda.is_initialized() else default


def get_attention_order() -> list[int]:
    """Returns the order of torch's attention kernels, after torch has chosen a kernel for the first time.

    When torch first chooses a kernel on a GPU, it may move cuDNN's kernel to the front of the order, once per process.
    If this happened in a case, the case would seem to have changed the order, and later cases would run with the order
    restored.
    """
    _choose_attention()
    return torch._C._get_sdp_priority_order()


@cache
def _choose_attention() -> None:
    # Choose a kernel for small inputs that all attention kernels accept.
    query_tensor = torch.zeros(1, 1, 8, 64, dtype=torch.float16, device="cuda")
    torch._fused_sdp_choice(query_tensor, query_tensor, query_tensor)


def has_memory_pool() -> bool:
    is_caching_allocator_enabled = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)
    # torch 2.11 cannot report whether it pools memory; by default it does
    return is_caching_allocator_enabled is None or bool(is_caching_allocator_enabled())


_MAPS_FILE = Path("/proc/self/maps")


def read_cublaslt_version() -> int | None:
    """Returns the version number of cuBLASLt (130100 is 13.1.0); None if torch has not loaded it or it is unknown."""
    try:
        lines = _MAPS_FILE.read_text().splitlines()
        # Find the library that is loaded, and not the one that a search path would find.
        path = next(line[line.index("/") :] for line in lines if "/libcublasLt.so" in line)
        version = ctypes.CDLL(path).cublasLtGetVersion
    except (OSError, StopIteration, AttributeError):
        return None
    version.restype = ctypes.c_size_t  # by default ctypes would read an int
    return int(version())


def describe_torch_build() -> dict[str, Scalar | None]:
    cudnn = torch.backends.cudnn
    # Casts to FP8 use other kernels if Triton is installed, so record which kernels they use.
    cast_kernel_facts = {"casts": describe(torch.device("cuda"))} if torch.cuda.is_available() else {}
    return {
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "torch_config": torch.__config__.show().strip(),
        "cudnn": cudnn.version() if torch.cuda.is_available() else None,  # type: ignore[no-untyped-call]
        "cublaslt": read_cublaslt_version(),
        **cast_kernel_facts,
    }
