"""Defines the interfaces for measuring: devices with their clocks and memory meters, the markers of a step's phases,
and the observer of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from fp8bench.model import PHASES, UNATTRIBUTED, Case, DeviceFacts, MemoryCourse, MemoryRole, Plan, Record
from fp8bench.model.consumed import DeviceNote


class Stamper(ABC):
    """A clock of one device with cheap time stamps. `intervals_ns` returns the times between stamps."""

    @abstractmethod
    def source(self) -> Callable[[], Any]:
        """Returns the function that takes a time stamp. Only this function is called inside the timed code: `source` is
        called once, before the timed code.
        """

    @abstractmethod
    def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
        """Returns the nanoseconds between neighbouring stamps. Waits for the device if necessary."""

    def recycle(self) -> None:
        """Tells the clock that no earlier stamp will be read again, so that the clock may reuse the events of these
        stamps.
        """


class MemoryMeter(ABC):
    """Measures the peak memory of some work. A meter may slow the work down, so it is for untimed passes only."""

    @abstractmethod
    def start(self, blocks: bool = True) -> None:
        """Starts counting allocations. Memory that is already allocated never counts.

        With `blocks=False` the meter need not observe single allocations, which makes it cheaper on some devices.
        """

    @abstractmethod
    def enter(self, phase: str) -> None:
        """Tells the meter that the work is now in `phase`.

        The peak is the largest memory from the first call of `enter` on. It includes the memory that was
        allocated between `start` and this call.
        """

    @abstractmethod
    def stop(self) -> MemoryCourse | None:
        """Stops counting and returns the memory peaks since `enter` was first called, or None if it never was.
        `stop` is also called after an exception.
        """

    def mark(self) -> None:
        """Tells the meter that the work is now in no phase."""
        self.enter(UNATTRIBUTED)

    def say(self, addresses: Sequence[int], role: MemoryRole) -> None:
        """Records the role of the allocations at these addresses. A meter that does not observe single allocations
        ignores this call.
        """

    @property
    def listening(self) -> bool:
        """Whether the meter observes single allocations. Only such a meter records roles and notes."""
        return False

    def note(self, note: DeviceNote) -> None:
        """Records a note about the memory that hardware with the emulated formats would use from this point on. A meter
        that is not `listening` ignores this call.
        """


class CannotCapture(RuntimeError):
    """Raised if a step cannot be captured in a CUDA graph and replayed as one launch."""


class CannotMark(RuntimeError):
    """Raised if a device has no named ranges for an external profiler, such as NVTX ranges."""


class CannotLimit(RuntimeError):
    """Raised if the memory of a device cannot be limited on this machine."""


class Device(ABC):
    """A kind of device. Measuring code uses CUDA events, synchronisation, memory and the errors of devices only through
    this interface.
    """

    kind: ClassVar[str]

    @abstractmethod
    def available(self) -> tuple[DeviceFacts, ...]: ...

    @abstractmethod
    def stamper(self, index: int) -> Stamper: ...

    @abstractmethod
    def synchronise(self, index: int) -> None: ...

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool: ...

    def select(self, index: int) -> None:
        """Makes device `index` the current device of the calling thread, on which clocks then record."""

    def occupy(self, index: int, seconds: float) -> None:
        """Adds about `seconds` of work to the device's queue and returns at once. Kernels that are enqueued during this
        time then run without gaps, as fast as the device can. Does nothing on a device without a queue.
        """

    def why_idle(self, index: int) -> str:
        """Returns why `occupy` only makes the device wait and gives it no products to compute. Returns '' without such
        a reason.
        """
        return ""

    def captured(self, index: int, step: Callable[[], object]) -> Callable[[], object]:
        """Captures a step, and returns a function that replays the step's work on the device in one launch on the
        current stream. Raises CannotCapture with the reason if this is impossible.

        To capture the step, it is run a few times now. A replay does not run the host's part of the step again. The
        memory of the captured step stays reserved as long as the returned function exists.
        """
        raise CannotCapture(f"steps on {self.kind} devices cannot be replayed")

    def collecting(self, index: int) -> AbstractContextManager[Callable[[str], AbstractContextManager[object]]]:
        """A context in which an external profiler of this process (nsys, ncu) collects. Yields a function that opens a
        named range. Waits for the device at the end. Raises CannotMark if the device has no named ranges.
        """
        raise CannotMark(f"{self.kind} devices have no NVTX ranges")

    def captured_stamper(self, index: int) -> Stamper | None:
        """Returns a clock whose stamps can be captured together with a step, so that each replay takes them again.
        Returns None if the device has no such clock.
        """
        return None

    def empty_cache(self) -> None:
        """Returns to the driver the memory that torch's allocator holds but does not use."""

    def retried(self, index: int) -> int | None:
        """Returns how many allocations succeeded only at the second try. Before the second try, torch waits for the
        device and returns unused memory to the driver. Returns None if the number is unknown.
        """
        return None

    def allocations(self, index: int) -> Mapping[str, int] | None:
        """Returns the counters of torch's allocator for the device, by their names in torch. Returns None if torch has
        no allocator for the device.
        """
        return None

    def memory_meter(self, index: int) -> MemoryMeter | str:
        """Returns a memory meter for the device, or the reason why the device has none."""
        return f"the memory of {self.kind} devices cannot be counted"

    def free_bytes(self) -> int:
        """Returns the bytes that can still be allocated before the kernel kills a process for lack of memory. Returns 0
        if this is unknown.
        """
        return 0

    def end_where_memory_does(self, shared_by: int = 1) -> None:
        """Limits this process to the memory that is free now, so that a case that needs more raises an error and is not
        killed by the system.

        `shared_by` processes share the free memory equally. Does nothing if no limit can be set.
        """

    def memory_limited(self, index: int, limit: int) -> AbstractContextManager[None]:
        """Opens a context in which at most `limit` more bytes can be allocated. An allocation beyond the limit raises
        an error that `is_out_of_memory` recognises.

        The actual limit may be larger on a device that can only limit tensors together with other memory. Raises
        CannotLimit if no limit can be set.
        """
        raise CannotLimit(f"the memory of {self.kind} devices cannot be limited")


class Markers:
    """The markers of a step's phases. A workload uses them as `with phase.gemm: ...`. The time inside a nested marker
    counts only for the phase of the nested marker.

    Markers have no thread-local state, because the backward pass may run on another thread.
    """

    __slots__ = tuple(map(str, PHASES))

    data_load: AbstractContextManager[None]
    decode: AbstractContextManager[None]
    cast: AbstractContextManager[None]
    gemm: AbstractContextManager[None]
    attention: AbstractContextManager[None]
    accumulate: AbstractContextManager[None]
    optimizer_step: AbstractContextManager[None]
    elementwise: AbstractContextManager[None]
    communication: AbstractContextManager[None]

    def __init__(self, make: Callable[[str], AbstractContextManager[None]]) -> None:
        for name in PHASES:
            setattr(self, name, make(str(name)))


Phases = Markers  # workloads import the class under this name


@dataclass(slots=True, eq=False)
class ReportingMarker:
    """The context manager of a phase. It reports the name of the current phase: of this phase when it starts, and of
    the phase around it when it ends. `_open_phases` holds the names of all open phases, after UNATTRIBUTED.
    """

    _phase_name: str
    _open_phases: list[str]
    _report: Callable[[str], None]

    def __enter__(self) -> None:
        self._open_phases.append(self._phase_name)
        self._report(self._phase_name)

    def __exit__(self, *exc: object) -> None:
        self._open_phases.pop()
        self._report(self._open_phases[-1])


class SilentPhases(Markers):
    """Markers without effect, for untimed passes of a step."""

    __slots__ = ()

    def __init__(self) -> None:
        marker = nullcontext()
        super().__init__(lambda name: marker)


class Observer(Protocol):
    """Receives the progress of a run. Measuring code reports to an observer and never prints."""

    def planned(self, plan: Plan) -> None:
        return None

    def working(self, case: Case, doing: str, share: float) -> None:
        """Reports the case that is being measured, what is being done, and the share of its group's time that has
        passed.
        """
        return

    def finished(self, record: Record) -> None:
        return None


class SilentObserver(Observer):
    """An observer that ignores all progress."""
