"""The width of vectors in a CPU's kernel: measured once a machine for every kernel, and kept.

No rule predicts it. With 512 bits the kernel of e4m3 takes half the time that it takes with 256, if the compiler
vectorises all its loops; otherwise a kernel takes 7 to 20 times as long, and which kernels that are depends on the
compiler and on the processor that it tunes for (reports/quantisers_cpu_202611).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fp8bench.errors import StoreError
from fp8bench.files import compact, lock_folder, read_file, seal, unseal, write_whole
from fp8bench.protocols import one_thread

NARROW, WIDE = 256, 512
_TURNS = 7
# The share that wider vectors have to save: a tie would be decided differently each time.
_LEAST_GAIN = 0.1


def widths(device: str) -> tuple[int, ...]:
    """The widths to choose from, narrow first; none where torch knows one width, or no vectors at all."""
    both = device == "cpu" and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return (NARROW, WIDE) if both else ()


def options(bits: int) -> dict[str, object]:
    """Inductor's options for a kernel of that width.

    For many of Intel's processors gcc prefers vectors of 256 bits. torch's loops over 16 numbers then become 16
    instructions: e4m3 took 39 ms instead of 3.7 ms.
    """
    return {"cpp.simdlen": bits, **({"cpp.march": f"native -mprefer-vector-width={WIDE}"} if bits == WIDE else {})}


def fastest(kernels: Mapping[int, Callable[..., object]], arguments: Sequence[Tensor]) -> tuple[int, dict[int, float]]:
    """The width to take, and the least CPU seconds of a call with each."""
    taken: dict[int, list[float]] = {bits: [] for bits in kernels}
    with one_thread():
        for turn in range(1 + _TURNS):
            for bits, kernel in kernels.items():
                begun = time.thread_time()
                kernel(*arguments)
                if turn:  # the first call takes longer
                    taken[bits].append(time.thread_time() - begun)
    least = {bits: min(seconds) for bits, seconds in taken.items()}
    return choice(least), least


def choice(seconds: Mapping[int, float]) -> int:
    narrow, fast = min(seconds), min(seconds, key=lambda bits: seconds[bits])
    return fast if seconds[fast] < (1 - _LEAST_GAIN) * seconds[narrow] else narrow


class Kept:
    """The choice for one kernel on this machine: a file next to torch's compiled kernels. `made_of` is the kernel's
    graph. Choices are separate for each compiler, torch and processor."""

    def __init__(self, made_of: str) -> None:
        from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        parts = (made_of, torch.__version__, get_compiler_version_info(get_cpp_compiler()), _processor())
        name = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        self._path = Path(cache_dir()) / "fp8bench" / f"{name}.json"

    def read(self) -> int | None:
        try:
            bits = unseal(json.loads(read_file(self._path)))["bits"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return bits if bits in (NARROW, WIDE) else None

    def keep(self, bits: int, **facts: object) -> int:
        """Stores a choice and returns it; returns the choice of an earlier process if there is one, so that all use the
        same.

        Where nothing can be written, the next process measures again.
        """
        with contextlib.suppress(OSError, StoreError), lock_folder(self._path.parent):
            # A concurrent process may have measured first: all must run the same kernel.
            first = self.read()
            if first is not None:
                return first
            write_whole(self._path, compact(seal({"bits": bits, **facts})), sync=False)
        return bits


def _processor() -> str:
    """The processor as Linux describes it, which a compiler tunes for; elsewhere what Python knows of it."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        return "\n".join(
            re.findall(r"^(?:vendor_id|cpu family|model|model name|stepping|flags)\s*:.*", first, re.MULTILINE)
        )
    return platform.processor()
