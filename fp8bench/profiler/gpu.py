"""Clock and memory of a GPU: events that it records among its work, and the counts of torch's allocator."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from fp8bench.model import DeviceFacts, MemoryCourse, MemoryRole, PhaseMemory
from fp8bench.model.consumed import DeviceNote, HeldBlock
from fp8bench.profiler.allocations import AllocationStream, Begun, Event, Live, Said, Sized, course
from fp8bench.protocols import Device, MemoryMeter, Stamper

if TYPE_CHECKING:
    import torch


def inner_record(event_type: Any) -> Callable[[Any, Any], None]:
    """Returns the method in C++ by which events of a class are recorded, else the class's own.

    torch's classes wrap it in a Python method that takes longer than it does: 0.86 us a stamp against 0.34, as much as
    the runtime's cudaEventRecord called through ctypes.
    """
    methods = (vars(base)["record"] for base in event_type.__mro__[1:] if "record" in vars(base))
    record: Callable[[Any, Any], None] = next(methods, event_type.record)
    return record


class EventStamper(Stamper):
    """Stamps are events of `backend` (torch.cuda, torch.xpu), reused because making one costs more than recording it.
    Every event is recorded on the stream that was current when `source` was called, also from autograd's threads:
    asking for the current stream at each stamp would cost more than all the rest."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._free: list[Any] = []
        self._used: list[Any] = []

    def source(self) -> Callable[[], Any]:
        event_type, free, keep = self._backend.Event, self._free, self._used.append
        stream, record = self._backend.current_stream(), inner_record(self._backend.Event)

        def stamp() -> Any:
            event = free.pop() if free else event_type(enable_timing=True)
            record(event, stream)
            keep(event)
            return event

        return stamp

    def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
        if stamps:
            stamps[-1].synchronize()
        # Between neighbours, not from the first: elapsed_time is a float32 of milliseconds.
        return [round(earlier.elapsed_time(later) * 1e6) for earlier, later in pairwise(stamps)]

    def recycle(self) -> None:
        self._free.extend(self._used)
        self._used.clear()


class CapturedStamper(EventStamper):
    """Stamps that become nodes of the graph that is being captured: on the stream of the capture, and never reused."""

    def source(self) -> Callable[[], Any]:
        def stamp() -> Any:
            event = self._backend.Event(enable_timing=True, external=True)
            event.record()
            return event

        return stamp


_END = Begun("the end")
_UNHEARD = "torch's profiler reported no allocation"


class Backward:
    """A backward pass on autograd's own thread for a device; it allocates nothing after the first time."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self) -> None:
        """Waits until that thread is done with what it had to do before."""
        import torch

        if self._made is None:
            leaf = torch.zeros(1, device=self._device, requires_grad=True)
            self._made = leaf.view_as(leaf), torch.zeros(1, device=self._device)
        root, gradient = self._made
        torch.autograd.backward(root, gradient, retain_graph=True)


class AllocatorMeter(MemoryMeter):
    """Counts what torch's allocator has handed out on one GPU, and what it reserves for that.

    Sizes are rounded up: to 512 bytes, and by up to 1 MiB where a large block is not worth splitting. Host memory does
    not count, pinned or not, nor what libraries ask of the driver past torch. Memory is handed out on the host, ahead
    of the work that uses it, so that the peaks of phases are exact without waiting for the device.
    """

    def __init__(self, backend: Any, key: str, index: int, end_workspaces: Callable[[], None]) -> None:
        """Takes the device's key, and its index for `backend` (torch.cuda, torch.xpu)."""
        self._backend, self._index, self._end_workspaces = backend, index, end_workspaces
        self._stream, self._backward = AllocationStream(key), Backward(key)
        self._before = 0
        self._phase = ""
        self._phases: dict[str, PhaseMemory] = {}

    def start(self, blocks: bool = True) -> None:
        gc.collect()  # what is freed later would be subtracted from the count
        self._backend.synchronize(self._index)
        if blocks:
            self._backward.run()
        # cuBLAS keeps the workspace of its first product, tens of MiB. It must count for every case, not only for the
        # first of a process.
        self._end_workspaces()
        self._before = self._backend.memory_allocated(self._index)
        self._phase, self._phases = "", {}
        if blocks:
            self._stream.start(alone=False)

    def enter(self, phase: str) -> None:
        if not self._phase:
            self._backend.synchronize(self._index)
        if not self._phase and self._stream.listening:
            # Autograd's own thread has worked by now, so that its cuBLAS workspace counts. Its releases are not all
            # heard, and may be late; after one more pass they are done.
            self._backward.run()
            self._stream.note(Live(self._live()))
            self._stream.alone()
        self._leave()
        self._backend.reset_peak_memory_stats(self._index)
        self._phase = phase
        self._stream.note(Begun(phase))

    def say(self, addresses: Sequence[int], role: MemoryRole) -> None:
        self._stream.note(Said(tuple(addresses), role))

    @property
    def listening(self) -> bool:
        return self._stream.listening

    def note(self, note: DeviceNote) -> None:
        self._stream.note(note)

    def stop(self) -> MemoryCourse | None:
        try:
            # A step that never began has nothing to report.
            if self._phase:
                self._backend.synchronize(self._index)
                self._leave()
                self._stream.note(_END)
                self._end_workspaces()  # releases after _END are workspaces
        finally:
            self._phase = ""
            events = self._stream.stop()
        phases = tuple(self._phases.values())
        if not phases:
            return None
        at_peak = None if events is None else _course_at_peak(events)
        # Without the allocator's events the peaks of phases still hold; what was held at them is unknown.
        reserved = max(phase.reserved or 0 for phase in phases)
        most = MemoryCourse(max(phase.allocated for phase in phases), (), phases, reserved)
        if at_peak is None:
            return replace(most, why=_UNHEARD)
        return replace(most, held=at_peak.held, on_device=at_peak.on_device, forward=at_peak.forward)

    def _live(self) -> frozenset[int]:
        segments = self._backend.memory_snapshot()
        blocks = chain.from_iterable(segment["blocks"] for segment in segments if segment["device"] == self._index)
        return frozenset(block["address"] for block in blocks if block["state"] == "active_allocated")

    def _leave(self) -> None:
        """Assigns the peak since the last turn to the phase that ends."""
        if not self._phase:
            return
        # A phase may come several times in a step: its largest peak counts.
        allocated = max(0, self._backend.max_memory_allocated(self._index) - self._before)
        reserved = self._backend.max_memory_reserved(self._index)
        earlier = self._phases.get(self._phase, PhaseMemory(self._phase, 0, 0))
        self._phases[self._phase] = PhaseMemory(
            self._phase, max(allocated, earlier.allocated), max(reserved, earlier.reserved or 0)
        )


def _course_at_peak(events: Sequence[Event]) -> MemoryCourse | None:
    """Returns what is held at the peak; what is released after the end is workspace of products."""
    end = events.index(_END) if _END in events else len(events)
    at_peak = course(events[:end])
    released = {event.address for event in events[end:] if isinstance(event, Sized)}
    if at_peak is None:
        return None
    workspace = (MemoryRole.WORKSPACE,)

    def note_role(block: HeldBlock) -> HeldBlock:
        return replace(block, said=workspace) if block.lasting and block.address in released else block

    return replace(at_peak, held=tuple(map(note_role, at_peak.held)), forward=tuple(map(note_role, at_peak.forward)))


@contextmanager
def limit_fraction(backend: Any, index: int, limit: int) -> Iterator[None]:
    """Ends memory in the body after `limit` more bytes, as torch's allocator reserves them."""
    fraction = backend.get_per_process_memory_fraction(index)
    allowed = backend.memory_reserved(index) + limit
    total = backend.get_device_properties(index).total_memory
    # Never above a limit that somebody has set before.
    backend.set_per_process_memory_fraction(min(fraction, allowed / total), index)
    try:
        yield
    finally:
        backend.set_per_process_memory_fraction(fraction, index)


class Gpu(Device):
    """A kind of GPU for which torch has a module of its name, `backend` (torch.cuda, torch.xpu)."""

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
        return EventStamper(self.backend)

    def synchronise(self, index: int) -> None:
        self.backend.synchronize(index)

    def select(self, index: int) -> None:
        self.backend.set_device(index)

    def empty_cache(self) -> None:
        if self.backend.is_available():
            self.backend.empty_cache()
