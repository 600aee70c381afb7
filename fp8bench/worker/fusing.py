"""The worker's side of compiling quantisers: which wait for it, what becomes of them, and how often they ran how.

Asks fp8bench.formats.operators, where a quantiser is one operator that runs compiled as soon as it has been compiled in
this process, and as many operations until then.
"""

from __future__ import annotations

import contextlib
import sys
import time
from types import SimpleNamespace
from typing import Any

from fp8bench.formats.grids import E4M3

_OPERATORS = "fp8bench.formats.operators"
_LONGEST_REASON = 200
_NONE = SimpleNamespace(wanted={}, refused={}, eager=0, fused={})


def forget_waiting() -> None:
    """What was asked for by now waits no longer: only what runs from here on says what it needs."""
    _kernels().wanted.clear()


def waiting() -> int:
    """How many quantisers were asked for, are not compiled, and may yet be."""
    return len(_kernels().wanted)


def compile_waiting() -> None:
    """Compile all that waits, one by one.

    Whatever goes wrong is no fault of the case: it runs, and says that its quantisers were eager.
    """
    kernels = _kernels()
    for kernel in tuple(kernels.wanted):
        with contextlib.suppress(Exception):  # a compiler may fail in any way, and operators keep the reason
            kernels.compile(kernel)


def why_eager() -> str:
    if reasons := tuple(_kernels().refused.values()):
        return f"compiling failed: {_one_line(reasons[0])}"
    return ""


def calls() -> tuple[int, dict[int, int]]:
    """How often quantisers have run in this process: as many operations, and as one kernel, by its vectors' bits."""
    kernels = _kernels()
    return kernels.eager, dict(kernels.fused)


def since(before: tuple[int, dict[int, int]]) -> tuple[int, dict[int, int]]:
    eager, fused = calls()
    return eager - before[0], {bits: more for bits, count in fused.items() if (more := count - before[1].get(bits, 0))}


def tried(device: str) -> str:
    """Whether a quantiser compiles for a device, in words: a small one is, from torch's cache if it was before."""
    import torch

    from fp8bench.formats.operators import values

    forget_waiting()
    values(torch.ones(64, device=device), E4M3)
    begun = time.perf_counter()
    compile_waiting()
    seconds = time.perf_counter() - begun
    if reason := why_eager():
        return reason
    before = calls()
    values(torch.ones(64, device=device), E4M3)
    bits = [str(number) for number in since(before)[1] if number]
    return f"a quantiser compiles in {seconds:.1f} s" + "".join(f", with vectors of {bit} bits" for bit in bits)


def _kernels() -> Any:
    """Those of the module, if anybody here has imported it: who has not, has called none of its operators."""
    return getattr(sys.modules.get(_OPERATORS), "KERNELS", _NONE)


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    count = 2 if lines and lines[0].endswith(":") else 1  # the kind of an error may stand alone in its line
    return " ".join(lines[:count])[:_LONGEST_REASON].rstrip(".:")
