"""The processor, timed by the host's monotonic clock."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8bench.model import DeviceFacts
from fp8bench.profiler import quiet
from fp8bench.protocols import Device, MemoryMeter, Stamper
from fp8bench.registry import devices

if TYPE_CHECKING:
    import torch

# Where, and how many bytes; fewer than 0 where they are given back.
Change = tuple[int, int]
# The profiler's name for an allocation or a release, and ours for the place where a stretch begins.
_CHANGE = "[memory]"
_MARK = "fp8bench: mark"


class HostStamper(Stamper):
    """Stamps are integer nanoseconds."""

    def source(self) -> Callable[[], Any]:
        return time.perf_counter_ns

    def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
        return [later - earlier for earlier, later in pairwise(stamps)]


class ProfilerMeter(MemoryMeter):
    """Adds up what torch's allocator tells torch's profiler: each allocation and release, to the byte.

    The profiler hears the thread that started it and those on which autograd and torch's own operations work for it,
    not threads of Python's.
    """

    def __init__(self) -> None:
        self._profile: torch.autograd.profiler.profile | None = None

    def start(self) -> None:
        # Not torch.profiler's, which imports torch's compiler first: 1.4 s.
        from torch.autograd.profiler import profile

        one = profile(use_kineto=True, profile_memory=True)
        with quiet():
            one.__enter__()  # type: ignore[no-untyped-call]
        self._profile = one

    def mark(self) -> None:
        from torch.autograd.profiler import record_function

        with record_function(_MARK):
            pass

    def stop(self) -> int | None:
        one, self._profile = self._profile, None
        if one is None:
            return None
        one.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if one.kineto_results is None:
            return None
        told = [
            event for event in _flat(one.kineto_results.experimental_event_tree()) if event.name in (_CHANGE, _MARK)
        ]
        # Stable: what happened within one tick of the clock stays in the order in which it was told.
        told.sort(key=lambda event: event.start_time_ns)
        return highest([None if event.name == _MARK else _change(event.extra_fields) for event in told])


def _flat(tree: Sequence[Any]) -> Iterator[Any]:
    """The profiler's events, those within others after these."""
    waiting = list(reversed(tree))
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(reversed(event.children))


def _change(told: Any) -> Change:
    return told.ptr, told.alloc_size


def highest(changes: Sequence[Change | None]) -> int | None:
    """Most bytes held at once from the mark (None) on, what is held there included; None without a mark.

    Addresses tell what belongs together: a release of what was allocated before does not count, and where something is
    allocated at an address that is held, its release was not told.
    """
    held: dict[int, int] = {}
    now, peak = 0, None
    for change in changes:
        if change is not None:
            address, size = change
            now -= held.pop(address, 0)
            if size > 0:
                held[address] = size
                now += size
        if change is None or peak is not None:
            peak = max(now, peak or 0)
    return peak


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

    def memory_meter(self, index: int) -> MemoryMeter | None:
        from torch.profiler import kineto_available

        return ProfilerMeter() if kineto_available() else None

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
