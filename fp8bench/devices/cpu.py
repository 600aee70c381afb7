"""The processor, timed by the host's monotonic clock."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fp8bench.model import DeviceFacts, MemoryCourse, MemoryRole
from fp8bench.model.consumed import DeviceNote
from fp8bench.profiler.allocations import AllocationStream, Begun, Said, course
from fp8bench.protocols import CannotLimit, Device, MemoryMeter, Stamper
from fp8bench.registry import devices

# Memory besides tensors: workspaces of kernels and the meter's own list; and holes in the heap, which have taken 40% of
# what tensors take.
_BESIDE_BYTES = 256 << 20
_HOLES = 2


class HostStamper(Stamper):
    """Stamps are integer nanoseconds."""

    def source(self) -> Callable[[], Any]:
        return time.perf_counter_ns

    def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
        return [later - earlier for earlier, later in pairwise(stamps)]


class ProfilerMeter(MemoryMeter):
    """Sums each allocation and release that torch's allocator reports to torch's profiler, to the byte."""

    def __init__(self) -> None:
        self._stream = AllocationStream("cpu")

    def start(self, blocks: bool = True) -> None:
        self._stream.start()

    def enter(self, phase: str) -> None:
        self._stream.note(Begun(phase))

    def say(self, addresses: Sequence[int], role: MemoryRole) -> None:
        self._stream.note(Said(tuple(addresses), role))

    @property
    def listening(self) -> bool:
        return self._stream.listening

    def note(self, note: DeviceNote) -> None:
        self._stream.note(note)

    def stop(self) -> MemoryCourse | None:
        events = self._stream.stop()
        return None if events is None else course(events)


@devices.register("cpu")
class Cpu(Device):
    """The processor of this machine; always there, always one."""

    kind = "cpu"

    def available(self) -> tuple[DeviceFacts, ...]:
        import torch

        size, shared = last_cache()
        return (
            DeviceFacts(
                "cpu",
                0,
                processor_name(),
                memory_bytes(),
                str(torch.__version__),
                arch=platform.machine(),
                cache_bytes=size,
                cache_shared=shared,
            ),
        )

    def stamper(self, index: int) -> Stamper:
        return HostStamper()

    def synchronise(self, index: int) -> None:
        return None

    def memory_meter(self, index: int) -> MemoryMeter | str:
        from torch.profiler import kineto_available

        return ProfilerMeter() if kineto_available() else "torch was built without its profiler (kineto)"

    def is_out_of_memory(self, error: BaseException) -> bool:
        # The first are torch's own words, the others those of libraries in which C++ finds no memory.
        words = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc", "dnnl_out_of_memory")
        return isinstance(error, MemoryError) or any(word in str(error) for word in words)

    @contextlib.contextmanager
    def memory_limited(self, index: int, limit: int) -> Iterator[None]:
        """Sets RLIMIT_DATA to twice the limit and 256 MiB more, because the kernel counts all private writable memory.
        This keeps the machine from running full; for an exact limit the caller must count tensors."""
        if sys.platform != "linux":
            raise CannotLimit(f"no limit on a process's memory is kept on {sys.platform}; on Linux it is (RLIMIT_DATA)")
        soft, most = resource.getrlimit(resource.RLIMIT_DATA)
        bytes_allowed = data_bytes() + limit * _HOLES + _BESIDE_BYTES
        bounds = [number for number in (soft, most) if number != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([bytes_allowed, *bounds]), most))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, most))

    def end_where_memory_does(self, shared_by: int = 1) -> None:
        """Limits memory to what is free, or the kernel would end this process, or another one."""
        with contextlib.suppress(CannotLimit, OSError, ValueError):
            if sys.platform == "linux" and (free := free_bytes()):
                soft, most = resource.getrlimit(resource.RLIMIT_DATA)
                bounds = [number for number in (soft, most) if number != resource.RLIM_INFINITY]
                resource.setrlimit(resource.RLIMIT_DATA, (min([data_bytes() + free // shared_by, *bounds]), most))


def data_bytes() -> int:
    """Returns what the kernel counts against RLIMIT_DATA for this process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    except (OSError, ValueError, IndexError, StopIteration):
        raise CannotLimit("/proc/self/status has no line for this process's memory (VmData)") from None


def memory_bytes() -> int:
    """Returns physical memory, or a container's limit; 0 if unknown."""
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
    return min([physical, *(limit for limit, _ in _container_memory() if limit)])


def _container_memory(root: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[int, int]]:
    """Yields the limit of this process's container on memory, and what is used of it."""
    names = ("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    for limit, taken in names:
        with contextlib.suppress(OSError, ValueError):  # none, or the word max
            yield int((root / limit).read_text()), int((root / taken).read_text())


def free_bytes() -> int:
    """Returns what may still be taken without any process being ended for it; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
    return min([free, *(max(0, limit - taken) for limit, taken in _container_memory())])


def last_cache(system: Path = Path("/sys/devices/system/cpu")) -> tuple[int, int]:
    """Returns the bytes of the last cache of a processor that may be used here, and how many share it; 0, 0 if
    unknown."""
    first = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    caches = [(0, 0, 0)]
    for index in (system / f"cpu{first}" / "cache").glob("index*"):
        try:
            level, size, shared = ((index / name).read_text() for name in ("level", "size", "shared_cpu_list"))
            sharing = 0
            for part in shared.split(","):
                first_core, _, last_core = part.partition("-")
                sharing += int(last_core or first_core) - int(first_core) + 1
            caches.append((int(level), int(size.strip().removesuffix("K")) << 10, sharing))
        except (OSError, ValueError):
            continue
    return max(caches)[1:]


def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"
