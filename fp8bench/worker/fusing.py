"""torch's compilation in the worker: of quantisers before they are timed, and of nothing while operators are counted.

A quantiser of `fp8bench.formats.operators` runs as one compiled kernel once it has been compiled in this process, and
as many operations until then.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from fp8bench.formats.grids import E4M3
from fp8bench.formats.recipes import ScaleRounding
from fp8bench.formats.triton_casts import describe

_OPERATORS = "fp8bench.formats.operators"
_LONGEST_REASON = 200
_NONE = SimpleNamespace(wanted={}, refused={}, eager=0, fused={})


def _kernels() -> Any:
    """Returns the registry of compiled quantisers; an empty one if they were not imported, and so not called."""
    return getattr(sys.modules.get(_OPERATORS), "KERNELS", _NONE)


def forget_waiting() -> None:
    """Clears the list of quantisers to compile, so that only later calls add to it."""
    _kernels().wanted.clear()


def waiting() -> int:
    return len(_kernels().wanted)


def compile_waiting() -> None:
    """Compiles all waiting quantisers, one by one. If compiling fails the case still runs, and its record notes eager
    quantisers."""
    kernels = _kernels()
    for kernel in tuple(kernels.wanted):
        with contextlib.suppress(Exception):  # a compiler may fail in any way, and operators keep the reason
            kernels.compile(kernel)


def why_eager() -> str:
    for reason in _kernels().refused.values():
        lines = [line.strip() for line in reason.splitlines() if line.strip()]
        count = 2 if lines and lines[0].endswith(":") else 1  # the kind of an error may be alone on its line
        return f"compiling failed: {' '.join(lines[:count])[:_LONGEST_REASON].rstrip('.:')}"
    return ""


def calls() -> tuple[int, dict[int, int]]:
    """Returns how often quantisers ran in this process: eagerly, and as one kernel, by the bits of its vectors."""
    kernels = _kernels()
    return kernels.eager, dict(kernels.fused)


def calls_since(earlier: tuple[int, dict[int, int]]) -> tuple[int, dict[int, int]]:
    eager, fused = calls()
    return eager - earlier[0], {
        bits: added for bits, count in fused.items() if (added := count - earlier[1].get(bits, 0))
    }


def try_to_compile(device: str) -> str:
    """Compiles a small quantiser for a device (from torch's cache, if it has one), and describes the outcome."""
    import torch

    from fp8bench.formats.operators import values

    forget_waiting()
    values(torch.ones(64, device=device), E4M3)
    begun = time.perf_counter()
    compile_waiting()
    seconds = time.perf_counter() - begun
    if reason := why_eager():
        return reason
    earlier = calls()
    values(torch.ones(64, device=device), E4M3)
    bits = [str(number) for number in calls_since(earlier)[1] if number]
    words = f"a quantiser compiles in {seconds:.1f} s" + "".join(f", with vectors of {bit} bits" for bit in bits)
    place = torch.device(device)
    return f"{words}; {_try_triton(place)}" if place.type == "cuda" else words


def _try_triton(device: Any) -> str:
    """Casts a small matrix as recipes do, and returns whether Triton made the cast."""
    import torch

    from fp8bench.formats.native_codes import casts_in_one_call, current_codes

    x = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
    if casts_in_one_call(x):
        for _ in range(3):  # defined, launched by Triton, repeated
            current_codes(x, E4M3, ScaleRounding.EXACT, both=True)
            compile_waiting()
    return describe(device)


@contextlib.contextmanager
def without_compiling() -> Iterator[list[Any]]:
    """Runs compiled functions uncompiled; the list gets an entry for each that was called. In torch 2.13 a compiled
    function that is first called under a dispatch mode stays uncompiled permanently. torch's compiler is not imported
    for this."""
    called: list[Any] = []
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        yield called
        return
    import torch

    # torch asks this function what to do about a compiled function, in any stance.
    callback_from_stance: Callable[[Any], Any] = frames._callback_from_stance

    def note_call(callback: Any) -> Any:
        if callback not in (None, False):
            called.append(callback)
        return callback_from_stance(callback)

    frames._callback_from_stance = note_call  # type: ignore[attr-defined]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield called
    finally:
        frames._callback_from_stance = callback_from_stance  # type: ignore[attr-defined]
