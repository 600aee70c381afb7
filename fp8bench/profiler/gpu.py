"""The clock and the memory meter of GPUs. The clock uses events in the GPU's stream, and the meter uses the counters
of torch's allocator.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from fp8bench.model import DeviceFacts, MemoryCourse, MemoryRole, PhaseMemory
from fp8bench.model.consumed import HeldBlock
from fp8bench.profiler.allocations import (
    Event,
    LiveAllocationAddresses,
    MemoryChange,
    PhaseStart,
    StreamMeter,
    find_memory_course,
)
from fp8bench.protocols import Device, Stamper

if TYPE_CHECKING:
    import torch


def find_record_method(event_type: Any) -> Callable[[Any, Any], None]:
    """Returns the C++ method that records an event of this class. Without one, returns the method of the class
    itself.

    torch wraps the C++ method in Python, and the wrapper takes longer than the recording: with the wrapper a stamp
    takes 0.86 us instead of 0.34 us.
    """
    base_record_methods = (
        vars(base_class)["record"] for base_class in event_type.__mro__[1:] if "record" in vars(base_class)
    )
    record: Callable[[Any, Any], None] = next(base_record_methods, event_type.record)
    return record


class DeviceEventStamper(Stamper):
    """A clock whose stamps are events of `backend` (torch.cuda, torch.xpu). Events are used again, because making an
    event costs more than recording it.

    The method `source` returns the function that takes a stamp. This function records all events on the stream that
    was current when `source` was called, also in autograd's threads. Asking for the current stream at each stamp would
    cost more than everything else.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._free: list[Any] = []
        self._used: list[Any] = []

    def source(self) -> Callable[[], Any]:
        event_type = self._backend.Event
        reusable_events = self._free
        append_used_event = self._used.append
        stream = self._backend.current_stream()
        record = find_record_method(event_type)

        def stamp() -> Any:
            event = reusable_events.pop() if reusable_events else event_type(enable_timing=True)
            record(event, stream)
            append_used_event(event)
            return event

        return stamp

    def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
        # When the last event has happened, so have all events before it.
        if stamps:
            stamps[-1].synchronize()
        # Subtract each event from the next, not all from the first: elapsed_time returns milliseconds as a float32.
        return [round(earlier.elapsed_time(later) * 1e6) for earlier, later in pairwise(stamps)]

    def recycle(self) -> None:
        self._free.extend(self._used)
        self._used.clear()


class CapturedStamper(DeviceEventStamper):
    """A clock whose stamps become nodes of the CUDA graph that is being captured. They are recorded on the capture's
    stream and are never used again.
    """

    def source(self) -> Callable[[], Any]:
        def stamp() -> Any:
            event = self._backend.Event(enable_timing=True, external=True)
            event.record()
            return event

        return stamp


# Marks the end of a step in the list of its events. No phase has this name.
_STEP_END_MARK = PhaseStart("the end")
_NO_ALLOCATIONS = "torch's profiler reported no allocation"


class AutogradFlush:
    """Waits until autograd's thread of a device has finished its earlier work, by a backward pass of one element. Only
    the first pass allocates memory.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._graph: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self) -> None:
        import torch

        if self._graph is None:
            leaf_tensor = torch.zeros(1, device=self._device, requires_grad=True)
            self._graph = leaf_tensor.view_as(leaf_tensor), torch.zeros(1, device=self._device)
        root, gradient = self._graph
        torch.autograd.backward(root, gradient, retain_graph=True)


class AllocatorMeter(StreamMeter):
    """Counts the memory that torch's allocator has given out on one GPU, and the memory that it reserves. `stop`
    returns a MemoryCourse: the peaks of the step and of its phases, and what was held at the step's peak.

    The allocator rounds sizes up to multiples of 512 bytes. If splitting a large block is not worth it, the block may
    be up to 1 MiB larger. Host memory does not count, pinned or not. Memory that libraries take directly from the
    driver does not count either. The allocator runs on the host, ahead of the work on the device. So the peaks of
    phases are exact without waiting for the device.

    Peaks come from counters of the allocator. StreamMeter's `_stream` also records each allocation, unless `start` is
    called with blocks=False. Then `listening` of the stream is False, and `stop` of the stream returns None.
    """

    def __init__(self, backend: Any, key: str, index: int, end_workspaces: Callable[[], None]) -> None:
        """Takes the device's key, its index in `backend` (torch.cuda, torch.xpu), and a function that frees the
        workspaces of libraries.
        """
        self._backend = backend
        self._index = index
        self._end_workspaces = end_workspaces
        super().__init__(key)
        self._backward = AutogradFlush(key)
        self._bytes_at_start = 0
        self._phase = ""
        self._phases: dict[str, PhaseMemory] = {}

    def start(self, blocks: bool = True) -> None:
        gc.collect()  # a later garbage collection would lower the number of allocated bytes
        self._backend.synchronize(self._index)
        if blocks:  # `enter` will run this pass again, so allocate its memory before counting starts
            self._backward.run()
        # cuBLAS keeps the workspace of its first product, which has tens of MiB. Free the workspace, so that it
        # counts for every case and not only for the first case of a process.
        self._end_workspaces()
        self._bytes_at_start = self._backend.memory_allocated(self._index)
        self._phase = ""
        self._phases = {}
        if blocks:
            # Leave backward passes in autograd's thread (`alone=False`) until `enter` has waited for that thread.
            self._stream.start(alone=False)

    def enter(self, phase: str) -> None:
        if not self._phase:
            self._backend.synchronize(self._index)
        if not self._phase and self._stream.listening:
            # Autograd's thread may release memory late and without events. After one more backward pass, it has
            # released everything.
            self._backward.run()
            # The list of live addresses includes the cuBLAS workspace of autograd's thread, which counts as memory.
            self._stream.note(LiveAllocationAddresses(self._list_live_block_addresses()))
            # From now on, backward passes run in the thread that calls them, so that `_stream` records all releases.
            self._stream.keep_backward_in_thread()
        self._store_phase_peaks()
        self._backend.reset_peak_memory_stats(self._index)
        self._phase = phase
        self._stream.note(PhaseStart(phase))

    def stop(self) -> MemoryCourse | None:
        try:
            # If a step never entered a phase, there is nothing to report.
            if self._phase:
                self._backend.synchronize(self._index)
                self._store_phase_peaks()
                self._stream.note(_STEP_END_MARK)
                self._end_workspaces()  # `_find_memory_at_peak` recognises workspaces by their release after the mark
        finally:
            self._phase = ""
            events = self._stream.stop()
        phases = tuple(self._phases.values())
        if not phases:
            return None
        memory_at_peak = _find_memory_at_peak(events or [])
        # Without the allocator's events the peaks are still right. Only what was held at them is unknown.
        reserved_bytes = max(phase.reserved or 0 for phase in phases)
        peaks = MemoryCourse(peak=max(phase.allocated for phase in phases), phases=phases, reserved=reserved_bytes)
        if memory_at_peak is None:
            return replace(peaks, why=_NO_ALLOCATIONS)
        return replace(
            peaks, held=memory_at_peak.held, on_device=memory_at_peak.on_device, forward=memory_at_peak.forward
        )

    def _list_live_block_addresses(self) -> frozenset[int]:
        segments = self._backend.memory_snapshot()
        blocks = chain.from_iterable(segment["blocks"] for segment in segments if segment["device"] == self._index)
        return frozenset(block["address"] for block in blocks if block["state"] == "active_allocated")

    def _store_phase_peaks(self) -> None:
        """Stores the peak since the last change of phase as a peak of the phase that ends now."""
        if not self._phase:
            return
        # If a phase occurs several times in a step, keep its highest peak. The peak is at least 0, although memory from
        # before `start` may have been released.
        allocated_bytes = max(0, self._backend.max_memory_allocated(self._index) - self._bytes_at_start)
        reserved_bytes = self._backend.max_memory_reserved(self._index)
        previous_phase_memory = self._phases.get(self._phase, PhaseMemory(self._phase, 0, 0))
        self._phases[self._phase] = PhaseMemory(
            self._phase,
            max(allocated_bytes, previous_phase_memory.allocated),
            max(reserved_bytes, previous_phase_memory.reserved or 0),
        )


def _find_memory_at_peak(events: Sequence[Event]) -> MemoryCourse | None:
    """Returns the allocations at the peak of memory. A block that is released after the mark at the end of the step is
    a workspace, because `AllocatorMeter.stop` then only frees the workspaces of libraries.
    """
    step_end_index = events.index(_STEP_END_MARK) if _STEP_END_MARK in events else len(events)
    memory_at_peak = find_memory_course(events[:step_end_index])
    # Each change of memory after the mark is a release.
    workspace_addresses = {event.address for event in events[step_end_index:] if isinstance(event, MemoryChange)}
    if memory_at_peak is None:
        return None

    def mark_workspace(block: HeldBlock) -> HeldBlock:
        # A lasting block still existed at the mark.
        if block.lasting and block.address in workspace_addresses:
            return replace(block, said=(MemoryRole.WORKSPACE,))  # the roles of the block
        return block

    return replace(
        memory_at_peak,
        held=tuple(map(mark_workspace, memory_at_peak.held)),
        forward=tuple(map(mark_workspace, memory_at_peak.forward)),
    )


@contextmanager
def limit_allocator(backend: Any, index: int, limit: int) -> Iterator[None]:
    """Limits torch's allocator inside the context: it can then reserve `limit` more bytes than now."""
    previous_memory_fraction = backend.get_per_process_memory_fraction(index)
    max_reserved_bytes = backend.memory_reserved(index) + limit
    device_total_bytes = backend.get_device_properties(index).total_memory
    # Keep an earlier limit if it is lower.
    backend.set_per_process_memory_fraction(
        min(previous_memory_fraction, max_reserved_bytes / device_total_bytes), index
    )
    try:
        yield
    finally:
        backend.set_per_process_memory_fraction(previous_memory_fraction, index)


class Gpu(Device):
    """A kind of GPU, such as cuda or xpu. `backend` is torch's module for it, such as torch.cuda."""

    @property
    def backend(self) -> Any:
        import torch

        return getattr(torch, self.kind, None)

    @abstractmethod
    def facts(self, index: int) -> DeviceFacts: ...
    def available(self) -> tuple[DeviceFacts, ...]:
        if self.backend is None or not self.backend.is_available():
            return ()
        return tuple(self.facts(index) for index in range(self.backend.device_count()))

    def stamper(self, index: int) -> Stamper:
        return DeviceEventStamper(self.backend)

    def synchronise(self, index: int) -> None:
        self.backend.synchronize(index)

    def select(self, index: int) -> None:
        self.backend.set_device(index)

    def empty_cache(self) -> None:
        if self.backend.is_available():
            self.backend.empty_cache()
