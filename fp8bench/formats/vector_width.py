"""Chooses the vector width of each CPU kernel by measuring, once on each machine, and stores the choice.

No rule predicts the better width. If the compiler vectorises all loops of the e4m3 kernel, 512 bits take half the
time of 256 bits. If it does not, a kernel takes 7 to 20 times as long. Which kernels these are depends on the
compiler and on the processor that it tunes for (reports/quantisers_cpu_202611).
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fp8bench.errors import StoreError
from fp8bench.files import (
    add_checksum,
    format_compact_json,
    lock_folder,
    parse_json,
    read_file,
    remove_checksum,
    write_whole,
)
from fp8bench.protocols import limit_to_one_thread

NARROW_BITS, WIDE_BITS = 256, 512
_TIMED_CALL_COUNT = 7
# Wider vectors must save at least this fraction of the time. Otherwise, noise would choose between nearly equal times.
_LEAST_TIME_SAVING = 0.1


def vector_widths(device: str) -> tuple[int, ...]:
    """Returns the vector widths in bits to choose from, the narrow one first. Returns () if torch has only one width,
    or no vectors.
    """
    has_two_vector_widths = device == "cpu" and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return (NARROW_BITS, WIDE_BITS) if has_two_vector_widths else ()


def inductor_options(bits: int) -> dict[str, object]:
    """Returns Inductor's options for a kernel with this vector width.

    For many Intel processors gcc prefers vectors of 256 bits. torch's loops over 16 numbers then become 16
    instructions: e4m3 took 39 ms instead of 3.7 ms.
    """
    return {
        "cpp.simdlen": bits,
        **({"cpp.march": f"native -mprefer-vector-width={WIDE_BITS}"} if bits == WIDE_BITS else {}),
    }


def measure_fastest(
    kernels: Mapping[int, Callable[..., object]], arguments: Sequence[Tensor]
) -> tuple[int, dict[int, float]]:
    """Returns the width to use, and for each width the CPU seconds of its fastest call."""
    call_seconds: dict[int, list[float]] = {bits: [] for bits in kernels}
    # thread_time counts a single thread. Unlike wall time, it excludes other processes.
    with limit_to_one_thread():
        for turn in range(1 + _TIMED_CALL_COUNT):
            for bits, kernel in kernels.items():
                start = time.thread_time()
                kernel(*arguments)
                if turn:  # the first call takes longer, so do not count it
                    call_seconds[bits].append(time.thread_time() - start)
    fastest_seconds = {bits: min(seconds) for bits, seconds in call_seconds.items()}
    return choose_vector_width(fastest_seconds), fastest_seconds


def choose_vector_width(seconds: Mapping[int, float]) -> int:
    narrow_bits, fastest_bits = min(seconds), min(seconds, key=lambda bits: seconds[bits])
    return fastest_bits if seconds[fastest_bits] < (1 - _LEAST_TIME_SAVING) * seconds[narrow_bits] else narrow_bits


class StoredWidthChoice:
    """The vector width that was chosen for one kernel on this machine, in a file next to torch's compiled kernels.
    `made_of` is the text of the kernel's graph. Each compiler, version of torch and processor has separate choices.
    """

    def __init__(self, made_of: str) -> None:
        from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        parts = (made_of, torch.__version__, get_compiler_version_info(get_cpp_compiler()), describe_processor())
        name = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        self._path = Path(cache_dir()) / "fp8bench" / f"{name}.json"

    def read(self) -> int | None:
        try:
            bits = remove_checksum(parse_json(read_file(self._path)))["bits"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return bits if bits in (NARROW_BITS, WIDE_BITS) else None

    def store(self, bits: int, **facts: object) -> int:
        """Stores the chosen vector width and returns it. If an earlier process has stored a different width, returns
        that width, so that all processes use the same kernel.

        If nothing can be written, the next process measures again.
        """
        with contextlib.suppress(OSError, StoreError), lock_folder(self._path.parent):
            # Another process may have measured at the same time and stored its choice first.
            stored_bits = self.read()
            if stored_bits is not None:
                return stored_bits
            # No sync: if a power failure loses the choice, the next process measures again.
            write_whole(self._path, format_compact_json(add_checksum({"bits": bits, **facts})), sync=False)
        return bits


def describe_processor() -> str:
    """Returns a description of the processor, for which a compiler tunes its code. On Linux the description comes from
    /proc/cpuinfo, and elsewhere from Python.
    """
    with contextlib.suppress(OSError):
        first_processor = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        return "\n".join(
            re.findall(
                r"^(?:vendor_id|cpu family|model|model name|stepping|flags)\s*:.*", first_processor, re.MULTILINE
            )
        )
    return platform.processor()
