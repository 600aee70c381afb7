"""GPUs that torch reaches as 'cuda' (NVIDIA, and AMD through HIP), timed by events on the device."""

from __future__ import annotations

import gc
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8bench.model import DeviceFacts, MemoryCourse, MemoryRole, PhaseMemory
from fp8bench.profiler.allocations import AllocationStream, Begun, Event, Said, Sized, course
from fp8bench.protocols import CannotLimit, Device, MemoryMeter, Stamper
from fp8bench.registry import devices

if TYPE_CHECKING:
    import torch

_END = Begun("the end")
# Libraries and the driver ask for memory by themselves, and say in their own words that there is none.
_NO_MEMORY = re.compile(
    r"_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|(CUDA|HIP) error: out of memory|Triton Error \[\w+\]: out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|miopenStatusAllocFailed|DEVICE_ALLOCATION_FAILED"
    r"|NVML_SUCCESS == .*INTERNAL ASSERT FAILED.*CUDACachingAllocator"  # torch could not say whose memory it is
)
# What they say too if they cannot begin for another reason: a device with that much left was not out of memory.
_NOT_BEGUN = re.compile(r"(BLAS|DNN|SOLVER|SPARSE)_STATUS_NOT_INITIALIZED")
_LEFT = 1 << 30
# In a second, of any GPU: torch's sleep counts cycles, and at a lower clock it is a longer one.
_MOST_CYCLES = 3e9
_UNHEARD = "torch's profiler told of no single allocation"
_UNCOUNTED = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")


class EventStamper(Stamper):
    """Stamps are CUDA events from a pool: making one costs more than recording it.

    Every event is recorded on the stream that was current when `source` was called, from autograd's threads too. To ask
    for the current stream at each stamp costs more than all the rest of it.
    """

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []
        self._used: list[torch.cuda.Event] = []

    def source(self) -> Callable[[], Any]:
        import torch

        event_type, free, keep = torch.cuda.Event, self._free, self._used.append
        stream = torch.cuda.current_stream()

        def stamp() -> torch.cuda.Event:
            event = free.pop() if free else event_type(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(stream)
            keep(event)
            return event

        return stamp

    def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
        if stamps:
            stamps[-1].synchronize()
        # Neighbours, not differences from the first: elapsed_time is a float32 of milliseconds.
        return [round(earlier.elapsed_time(later) * 1e6) for earlier, later in pairwise(stamps)]

    def recycle(self) -> None:
        self._free.extend(self._used)
        self._used.clear()


class AllocatorMeter(MemoryMeter):
    """torch's own count of what its allocator has handed out on one GPU, and of what it keeps from the driver for that.

    It is rounded up: to 512 bytes, and by up to 1 MiB where a large block is not worth splitting. Host memory, pinned
    or not, does not count, nor what libraries ask the driver for behind torch's back. Memory is handed out on the host,
    ahead of the work that uses it: highest points of phases are exact without waiting for the device.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._stream = AllocationStream(f"cuda:{index}")
        self._before = 0
        self._phase = ""
        self._phases: dict[str, PhaseMemory] = {}

    def start(self, blocks: bool = True) -> None:
        import torch

        gc.collect()  # what goes later would be taken from what is counted
        torch.cuda.synchronize(self._index)
        # cuBLAS keeps the workspace of its first product, tens of MiB: every case shall have one counted, not only the
        # first of a process.
        torch._C._cuda_clearCublasWorkspaces()
        self._before = torch.cuda.memory_allocated(self._index)
        self._phase, self._phases = "", {}
        if blocks:
            self._stream.start()

    def enter(self, phase: str) -> None:
        import torch

        if not self._phase:
            torch.cuda.synchronize(self._index)
        self._leave()
        torch.cuda.reset_peak_memory_stats(self._index)
        self._phase = phase
        self._stream.note(Begun(phase))

    def say(self, addresses: Sequence[int], role: MemoryRole) -> None:
        self._stream.note(Said(tuple(addresses), role))

    def stop(self) -> MemoryCourse | None:
        import torch

        try:
            if self._phase:
                torch.cuda.synchronize(self._index)
                self._leave()
                self._stream.note(_END)
                torch._C._cuda_clearCublasWorkspaces()  # what goes now was theirs
        finally:
            self._phase = ""
            events = self._stream.stop()
        phases = tuple(self._phases.values())
        if not phases:
            return None
        seen = None if events is None else _seen(events)
        reserved = max(one.reserved or 0 for one in phases)
        most = MemoryCourse(max(one.allocated for one in phases), (), phases, reserved)
        return replace(most, why=_UNHEARD) if seen is None else replace(most, held=seen.held)

    def _leave(self) -> None:
        """The highest point since the last turn belongs to the phase that ends."""
        import torch

        if not self._phase:
            return
        allocated = max(0, torch.cuda.max_memory_allocated(self._index) - self._before)
        reserved = torch.cuda.max_memory_reserved(self._index)
        known = self._phases.get(self._phase, PhaseMemory(self._phase, 0, 0))
        self._phases[self._phase] = PhaseMemory(
            self._phase, max(allocated, known.allocated), max(reserved, known.reserved or 0)
        )


def _seen(events: Sequence[Event]) -> MemoryCourse | None:
    """What is held at the highest point; what goes after the end has been the workspace of products."""
    end = events.index(_END) if _END in events else len(events)
    found = course(events[:end])
    gone = {event.address for event in events[end:] if isinstance(event, Sized)}
    if found is None:
        return None
    workspace = (MemoryRole.WORKSPACE,)
    held = [replace(one, said=workspace) if one.lasting and one.address in gone else one for one in found.held]
    return replace(found, held=tuple(held))


def pci_address(properties: object) -> str:
    """Domain, bus and device in hexadecimal, as the driver writes them; '' where torch is too old to say."""
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    known = [part for part in parts if isinstance(part, int)]
    return "{:08X}:{:02X}:{:02X}".format(*known) if len(known) == len(parts) else ""


def why_no_kernels(arch: str, built: Sequence[str]) -> str:
    """Why a build of torch for these architectures has no kernels for another; '' where it has, or nobody knows.

    Machine code of NVIDIA's (sm_90) runs on its own major capability, from its minor one on; with an 'a' on that one
    alone. What it is translated from (compute_90) runs on all later ones. AMD's runs on what it was made for.
    """
    have = _architecture(arch)
    known = [one for one in map(_architecture, built) if one is not None]
    fits = any(name.partition(":")[0] == arch.partition(":")[0] or "generic" in name for name in built)
    if not built or fits or (have is not None and any(_runs(have, one) for one in known)):
        return ""
    return (
        f"this torch has no kernels for {arch}: it was built for {', '.join(built)}. Install a build of torch that has "
        "them"
    )


def _bytes_left() -> float:
    """Of the current device's memory, which everybody's counts in; none is missing where it does not answer."""
    import torch

    try:
        return float(torch.cuda.mem_get_info()[0])
    except Exception:  # noqa: BLE001 - whatever a broken device says
        return math.inf


class _Architecture(NamedTuple):
    translated: bool
    major: int
    minor: int
    suffix: str


def _architecture(name: str) -> _Architecture | None:
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
    return _Architecture(parts[1] == "sm", int(parts[2]), int(parts[3]), parts[4]) if parts else None


def _runs(have: _Architecture, built: _Architecture) -> bool:
    if built.suffix == "a":
        return (have.major, have.minor) == (built.major, built.minor)
    later = (have.major, have.minor) >= (built.major, built.minor)
    return later and (have.major == built.major or not (built.translated or built.suffix))


@devices.register("cuda")
class Cuda(Device):
    """One GPU each; the index is torch's, which CUDA_VISIBLE_DEVICES may have renumbered."""

    kind = "cuda"

    def available(self) -> tuple[DeviceFacts, ...]:
        import torch

        if not torch.cuda.is_available():
            return ()
        return tuple(self._facts(index) for index in range(torch.cuda.device_count()))

    def _facts(self, index: int) -> DeviceFacts:
        import torch

        properties = torch.cuda.get_device_properties(index)
        arch = f"sm_{properties.major}{properties.minor}"
        if torch.version.hip:  # builds for CUDA have this name too, and give the device's there
            arch = getattr(properties, "gcnArchName", arch)
        unusable = why_no_kernels(arch, torch.cuda.get_arch_list())
        return DeviceFacts(
            "cuda", index, properties.name, properties.total_memory, str(torch.__version__),
            capability=(properties.major, properties.minor), cuda=torch.version.cuda, hip=torch.version.hip,
            arch=arch, uuid=str(getattr(properties, "uuid", "")), pci=pci_address(properties), unusable=unusable,
        )  # fmt: skip

    def stamper(self, index: int) -> Stamper:
        return EventStamper()

    def synchronise(self, index: int) -> None:
        import torch

        torch.cuda.synchronize(index)

    def is_out_of_memory(self, error: BaseException) -> bool:
        import torch

        if isinstance(error, torch.cuda.OutOfMemoryError) or _NO_MEMORY.search(str(error)):
            return True
        return bool(_NOT_BEGUN.search(str(error))) and _bytes_left() < _LEFT

    def memory_meter(self, index: int) -> MemoryMeter | str:
        # With its caching switched off torch counts nothing, and would say 0.
        off = [name for name in _UNCOUNTED if name in os.environ]
        return f"torch's allocator counts nothing under {off[0]}" if off else AllocatorMeter(index)

    @contextmanager
    def memory_limited(self, index: int, limit: int) -> Iterator[None]:
        """By torch's allocator, which counts what it has reserved, by this process alone."""
        import torch

        if any(name in os.environ for name in _UNCOUNTED):
            raise CannotLimit("with its caching switched off torch's allocator keeps no limit")
        before = torch.cuda.get_per_process_memory_fraction(index)
        wanted = torch.cuda.memory_reserved(index) + limit
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(before, wanted / total), index)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, index)

    def select(self, index: int) -> None:
        import torch

        torch.cuda.set_device(index)

    def occupy(self, index: int, seconds: float) -> None:
        import torch

        torch.cuda._sleep(round(seconds * _MOST_CYCLES))  # type: ignore[no-untyped-call]

    def empty_cache(self) -> None:
        import torch

        torch.cuda.empty_cache()
