"""The device 'cpu': the processor, timed by the host's monotonic clock."""

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

from fp8bench.model import DeviceFacts, MemoryCourse
from fp8bench.profiler.allocations import PhaseStart, StreamMeter, find_memory_course
from fp8bench.protocols import CannotLimit, Device, MemoryMeter, Stamper
from fp8bench.registry import devices

# RLIMIT_DATA also limits other data than tensors: workspaces of kernels and the memory meter's list of events. The
# factor allows for fragmentation of the heap, which has taken up to 40% of the bytes of tensors.
_NON_TENSOR_BYTES = 256 << 20
_HEAP_FRAGMENTATION_FACTOR = 2


class HostStamper(Stamper):
    """A clock whose stamps are integers, the nanoseconds of the host's performance counter."""

    def source(self) -> Callable[[], Any]:
        return time.perf_counter_ns

    def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
        return [later_stamp - earlier_stamp for earlier_stamp, later_stamp in pairwise(stamps)]


class ProfilerMeter(StreamMeter):
    """A memory meter that is exact to the byte. It adds up the allocations and releases that torch's allocator
    reports to torch's profiler.
    """

    def start(self, blocks: bool = True) -> None:
        """Starts counting. `blocks=False` saves nothing, because torch's profiler reports every allocation anyway."""
        self._stream.start()

    def enter(self, phase: str) -> None:
        self._stream.note(PhaseStart(phase))

    def stop(self) -> MemoryCourse | None:
        events = self._stream.stop()
        return None if events is None else find_memory_course(events)


@devices.register("cpu")
class Cpu(Device):
    """The processor of this machine. It is one device and always available."""

    kind = "cpu"

    def available(self) -> tuple[DeviceFacts, ...]:
        import torch

        size, shared = read_last_level_cache()
        return (
            DeviceFacts(
                "cpu",
                0,
                read_processor_name(),
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

        return ProfilerMeter("cpu") if kineto_available() else "torch was built without its profiler (kineto)"

    def is_out_of_memory(self, error: BaseException) -> bool:
        # The first message is torch's. The other two are errors of C++ libraries.
        messages = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc", "dnnl_out_of_memory")
        return isinstance(error, MemoryError) or any(message in str(error) for message in messages)

    @contextlib.contextmanager
    def memory_limited(self, index: int, limit: int) -> Iterator[None]:
        """Limits what the process may still allocate to twice `limit` plus 256 MiB (RLIMIT_DATA), so that the machine
        does not run out of memory. The kernel counts more than tensors, so a caller that needs an exact limit must
        count tensors.
        """
        if sys.platform != "linux":
            raise CannotLimit(f"{sys.platform} cannot limit the memory of a process, as Linux can (RLIMIT_DATA)")
        previous_data_limits = _limit_data_bytes(
            read_data_bytes() + limit * _HEAP_FRAGMENTATION_FACTOR + _NON_TENSOR_BYTES
        )
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, previous_data_limits)

    def free_bytes(self) -> int:
        return free_bytes()

    def end_where_memory_does(self, shared_by: int = 1) -> None:
        """Limits this process to the free memory, divided by the number `shared_by` of processes that share it.
        Without a limit the kernel would kill this process or another one.
        """
        # The limit is only a precaution, so go on without it if it cannot be set.
        with contextlib.suppress(CannotLimit, OSError, ValueError):
            if sys.platform == "linux" and (free := free_bytes()):
                _limit_data_bytes(read_data_bytes() + free // shared_by)


def _limit_data_bytes(allowed_bytes: int) -> tuple[int, int]:
    """Lowers RLIMIT_DATA to `allowed_bytes`, unless it is lower already. Returns the soft and the hard limit that it
    had before.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    # A soft limit above the hard limit would be an error.
    finite_data_byte_limits = [number for number in (soft_limit, hard_limit) if number != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([allowed_bytes, *finite_data_byte_limits]), hard_limit))
    return soft_limit, hard_limit


def read_data_bytes() -> int:
    """Returns the bytes of this process that the kernel counts against RLIMIT_DATA. Raises CannotLimit if they are
    unknown.
    """
    if (bytes_used := _read_bytes("/proc/self/status", "VmData:")) is None:
        raise CannotLimit("/proc/self/status has no line for this process's memory (VmData)")
    return bytes_used


def _read_bytes(file: str, name: str) -> int | None:
    """Reads a number of bytes from the line of a file that begins with `name`, such as 'VmData: 1644 kB'. Returns None
    if the number cannot be read.
    """
    try:
        lines = Path(file).read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def memory_bytes() -> int:
    """Returns the bytes of physical memory. If the container has a lower limit, returns that limit. Returns 0 if
    unknown.
    """
    try:
        physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
    return min([physical_bytes, *(limit for limit, _ in _read_container_memory() if limit)])


def _read_container_memory(root: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[int, int]]:
    """Yields the memory limit of this process's container and the bytes in use, once for cgroup 2 and once for cgroup
    1.
    """
    limit_and_usage_files = (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    )
    for limit_file, usage_file in limit_and_usage_files:
        with contextlib.suppress(OSError, ValueError):  # the file may be missing, or the limit may be the word 'max'
            yield int((root / limit_file).read_text()), int((root / usage_file).read_text())


def free_bytes() -> int:
    """Returns the bytes that can be allocated before the kernel kills a process for lack of memory. Returns 0 if
    unknown.
    """
    if (available_bytes := _read_bytes("/proc/meminfo", "MemAvailable:")) is None:
        return 0
    return min([available_bytes, *(max(0, limit - used_bytes) for limit, used_bytes in _read_container_memory())])


def read_last_level_cache(system: Path = Path("/sys/devices/system/cpu")) -> tuple[int, int]:
    """Returns the size in bytes of the last-level cache of a usable core, and how many cores share it. Returns 0, 0
    if unknown.
    """
    # Cores may have different caches, so use a core on which this process may run.
    usable_core_index = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    # The level, the bytes and the number of sharing cores of each cache.
    usable_caches = [(0, 0, 0)]
    for index in (system / f"cpu{usable_core_index}" / "cache").glob("index*"):
        try:
            level, size, shared_cpu_list = ((index / name).read_text() for name in ("level", "size", "shared_cpu_list"))
            sharing_core_count = 0
            for part in shared_cpu_list.split(","):
                first_core, _, last_core = part.partition("-")
                sharing_core_count += int(last_core or first_core) - int(first_core) + 1
            usable_caches.append((int(level), int(size.strip().removesuffix("K")) << 10, sharing_core_count))
        except (OSError, ValueError):
            continue
    _, cache_bytes, sharing_core_count = max(usable_caches)  # the last-level cache has the highest level
    return cache_bytes, sharing_core_count


def read_processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"
