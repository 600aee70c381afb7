"""The processor, timed by the host's monotonic clock."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fp8bench.model import DeviceFacts
from fp8bench.protocols import Device, Stamper
from fp8bench.registry import devices


class HostStamper(Stamper):
    """Stamps are integer nanoseconds."""

    def source(self) -> Callable[[], Any]:
        return time.perf_counter_ns

    def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
        return [later - earlier for earlier, later in pairwise(stamps)]


@devices.register("cpu")
class Cpu(Device):
    """The processor of this machine; always there, always one."""

    kind = "cpu"

    def available(self) -> tuple[DeviceFacts, ...]:
        import torch

        return (
            DeviceFacts("cpu", 0, processor_name(), memory_bytes(), str(torch.__version__), arch=platform.machine()),
        )

    def stamper(self, index: int) -> Stamper:
        return HostStamper()

    def synchronise(self, index: int) -> None:
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def memory_bytes() -> int:
    """Physical memory; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def processor_name() -> str:
    """The processor as the system names it, 'unknown processor' if it does not."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"
