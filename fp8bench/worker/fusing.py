"""Compiles quantisers in the worker before they are timed, and turns compilation off while operators are counted.

A quantiser of `fp8bench.formats.operators` runs as a dozen eager operations until it has been compiled in this
process. After that, it runs as one compiled kernel.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from fp8bench.formats.grids import E4M3
from fp8bench.formats.recipes import ScaleRounding
from fp8bench.formats.triton_casts import describe

_OPERATORS_MODULE = "fp8bench.formats.operators"
_MAX_REASON_LENGTH = 200
_EMPTY_QUANTISER_REGISTRY = SimpleNamespace(wanted={}, refused={}, eager=0, fused={})


def _find_kernel_registry() -> Any:
    """Returns the registry of compiled quantisers, or an empty one if the module of quantisers was never imported."""
    return getattr(sys.modules.get(_OPERATORS_MODULE), "KERNELS", _EMPTY_QUANTISER_REGISTRY)


def forget_waiting_quantisers() -> None:
    """Clears the list of quantisers (emulated casts) that wait for compilation, so that only later calls add to it."""
    _find_kernel_registry().wanted.clear()


def count_waiting_quantisers() -> int:
    return len(_find_kernel_registry().wanted)


def compile_waiting_quantisers() -> None:
    """Compiles all waiting quantisers (emulated casts), one after the other. If compiling fails, the case still runs,
    and its record has the reason.
    """
    kernel_registry = _find_kernel_registry()
    for kernel in tuple(kernel_registry.wanted):
        with contextlib.suppress(Exception):  # a compiler may raise any error; operators.py stores the reason
            kernel_registry.compile(kernel)


def explain_eager_quantisers() -> str:
    for reason in _find_kernel_registry().refused.values():
        nonempty_reason_lines = [line.strip() for line in reason.splitlines() if line.strip()]
        # if the first line contains only the kind of the error, add the second line
        line_count = 2 if nonempty_reason_lines and nonempty_reason_lines[0].endswith(":") else 1
        return f"compiling failed: {' '.join(nonempty_reason_lines[:line_count])[:_MAX_REASON_LENGTH].rstrip('.:')}"
    return ""


# The number of quantisers (emulated casts) that ran eagerly. For each vector width in bits, the number that ran as one
# compiled kernel.
QuantiserCallCounts = tuple[int, Counter[int]]


def count_calls() -> QuantiserCallCounts:
    kernel_registry = _find_kernel_registry()
    return kernel_registry.eager, Counter(kernel_registry.fused)


def count_calls_since(earlier: QuantiserCallCounts) -> QuantiserCallCounts:
    eager, fused = count_calls()
    return eager - earlier[0], fused - earlier[1]


def try_to_compile(device: str) -> str:
    """Compiles a small quantiser for a device, and describes the outcome. The kernel may come from torch's cache."""
    import torch

    from fp8bench.formats.operators import values

    forget_waiting_quantisers()
    # If the quantiser is not compiled yet, this call runs it eagerly and adds it to the waiting list.
    values(torch.ones(64, device=device), E4M3)
    start = time.perf_counter()
    compile_waiting_quantisers()
    seconds = time.perf_counter() - start
    if reason := explain_eager_quantisers():
        return reason
    earlier_quantiser_calls = count_calls()
    values(torch.ones(64, device=device), E4M3)
    description = f"a quantiser compiles in {seconds:.1f} s"
    for bits in filter(None, count_calls_since(earlier_quantiser_calls)[1]):
        description += f", with vectors of {bits} bits"
    torch_device = torch.device(device)
    return f"{description}; {_try_triton(torch_device)}" if torch_device.type == "cuda" else description


def _try_triton(device: Any) -> str:
    """Casts a small matrix in the way recipes do, and describes whether Triton made the cast."""
    import torch

    from fp8bench.formats.native_codes import casts_in_one_call, current_codes

    test_matrix = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
    if casts_in_one_call(test_matrix):
        # the first call defines the kernel, the second call launches it by Triton, and the third call repeats the
        # launch
        for _ in range(3):
            current_codes(test_matrix, E4M3, ScaleRounding.EXACT, both=True)
            compile_waiting_quantisers()
    return describe(device)


@contextlib.contextmanager
def disable_compiling() -> Iterator[list[Any]]:
    """Runs compiled functions uncompiled within the `with` block. Yields a list that gets an entry for each call of a
    compiled function.

    Without this, torch 2.13 would never compile a function whose first call is under a dispatch mode. Does not import
    torch's compiler.
    """
    called: list[Any] = []
    eval_frame_module = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame_module is None:
        yield called
        return
    import torch

    # torch calls this function whenever a compiled function is called.
    callback_from_stance: Callable[[Any], Any] = eval_frame_module._callback_from_stance

    def note_call(callback: Any) -> Any:
        if callback not in (None, False):
            called.append(callback)
        return callback_from_stance(callback)

    eval_frame_module._callback_from_stance = note_call  # type: ignore[attr-defined]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield called
    finally:
        eval_frame_module._callback_from_stance = callback_from_stance  # type: ignore[attr-defined]
