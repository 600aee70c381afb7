"""Interfaces for measuring: devices with their clocks and memory meters, the markers of a step's phases, and the
observer of a run.
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
    """A clock of one device. Taking a time stamp is cheap. `intervals_ns` returns the times between stamps."""

    @abstractmethod
    def source(self) -> Callable[[], Any]:
        """Returns the function that takes a time stamp. The function is called inside the timed code, so call
        `source` before it, and only once.
        """

    @abstractmethod
    def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
        """Returns the nanoseconds between neighbouring stamps. Waits for the device if it must."""

    def recycle(self) -> None:
        """Tells the clock that no stamp taken until now will be read again, so that the stamps' events can be used
        again.
        """


class MemoryMeter(ABC):
    """Measures the peak memory of some work. It may slow the work down, so it is for untimed passes only."""

    @abstractmethod
    def start(self, blocks: bool = True) -> None:
        """Begins to count allocations. Memory that is already allocated never counts.

        With `blocks=False` the meter need not observe single allocations, which is cheaper on some devices.
        """

    @abstractmethod
    def enter(self, phase: str) -> None:
        """Tells the meter that the work is now in `phase`.

        The peak is searched from the first call on. It includes what was allocated between `start` and that call.
        """

    @abstractmethod
    def stop(self) -> MemoryCourse | None:
        """Stops counting and returns the memory of the work. Returns None if `enter` was never called. It is also
        called after an exception.
        """

    def mark(self) -> None:
        self.enter(UNATTRIBUTED)

    def say(self, addresses: Sequence[int], role: MemoryRole) -> None:
        """Records the role of the allocations at these addresses. A meter that does not observe single allocations
        ignores it.
        """

    @property
    def listening(self) -> bool:
        """Whether the meter observes single allocations, so that notes about them have an effect."""
        return False

    def note(self, note: DeviceNote) -> None:
        """Records what hardware with the emulated formats would do at this point. A meter that is not `listening`
        ignores it.
        """


class CannotCapture(RuntimeError):
    """Raised if a step cannot be captured in a CUDA graph and replayed as one launch."""


class CannotMark(RuntimeError):
    """Raised if a device has no named ranges that an external profiler could show."""


class CannotLimit(RuntimeError):
    """Raised if the memory of a device cannot be limited on this machine."""


class Device(ABC):
    """A kind of device. Only through this interface does measuring code reach CUDA events, synchronisation, memory,
    and the errors of devices.
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
        """Makes device `index` the current device of the calling thread. Clocks then record on this device."""

    def occupy(self, index: int, seconds: float) -> None:
        """Fills the device's queue with about `seconds` of work and returns at once. Kernels that are added to the
        queue afterwards run without gaps, as fast as the device can. A device without a queue does nothing.
        """

    def why_idle(self, index: int) -> str:
        """Returns why `occupy` had to let the device spin without work. Returns '' if it gave the device work."""
        return ""

    def captured(self, index: int, step: Callable[[], object]) -> Callable[[], object]:
        """Returns a function that repeats a step's work on the device, in one launch on the current stream.

        To capture the step, it is run a few times now. A replay does not run the host's part of the step again. The
        memory of the captured step stays reserved until the function is dropped. Raises CannotCapture with the
        reason.
        """
        raise CannotCapture(f"steps on {self.kind} devices cannot be replayed")

    def collecting(self, index: int) -> AbstractContextManager[Callable[[str], AbstractContextManager[object]]]:
        """Lets an external profiler of this process (nsys, ncu) collect during the body, and waits for the device at
        the body's end. Yields a function that opens a named range. Raises CannotMark if the device has no such
        ranges.
        """
        raise CannotMark(f"{self.kind} devices have no NVTX ranges")

    def captured_stamper(self, index: int) -> Stamper | None:
        """Returns a clock whose stamps can be captured together with a step. Each replay takes the stamps again.
        Returns None if the device has no such clock.
        """
        return None

    def empty_cache(self) -> None:
        """Gives memory that torch's allocator holds but does not use back to the driver."""

    def retried(self, index: int) -> int | None:
        """Returns how many allocations succeeded only at the second try, after torch had returned unused memory to
        the driver. Such a return waits for the device. The result is None if the number is unknown.
        """
        return None

    def allocations(self, index: int) -> Mapping[str, int] | None:
        """Returns the counters of torch's allocator for the device, by their names in torch. Returns None without an
        allocator.
        """
        return None

    def memory_meter(self, index: int) -> MemoryMeter | str:
        """Returns a memory meter for the device. If it has none, returns the reason."""
        return f"the memory of {self.kind} devices cannot be counted"

    def free_bytes(self) -> int:
        """Returns the bytes that can be allocated before the kernel kills a process for lack of memory. Returns 0 if
        unknown.
        """
        return 0

    def end_where_memory_does(self, shared_by: int = 1) -> None:
        """Limits this process to the memory that is free now. So a case that does not fit ends with an error message,
        and is not killed.

        `shared_by` processes share the free memory equally. If no limit can be set, nothing happens.
        """

    def memory_limited(self, index: int, limit: int) -> AbstractContextManager[None]:
        """Limits memory to `limit` more bytes during the body. An allocation beyond the limit raises an error that
        `is_out_of_memory` recognises.

        A device that counts more than tensors may set a larger limit. Raises CannotLimit if there can be no limit.
        """
        raise CannotLimit(f"the memory of {self.kind} devices cannot be limited")


class Markers:
    """The markers of a step's phases, which a workload uses as `with phase.gemm: ...`. The time inside a nested marker
    counts for the nested phase only.

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


Phases = Markers  # the name that workloads use


@dataclass(slots=True, eq=False)
class ReportingMarker:
    """The context manager of a phase, which reports the current phase of a step. It reports when the phase starts,
    and again when a nested phase ends.
    """

    _name: str
    _stack: list[str]
    _report: Callable[[str], None]

    def __enter__(self) -> None:
        self._stack.append(self._name)
        self._report(self._name)

    def __exit__(self, *exc: object) -> None:
        self._stack.pop()
        self._report(self._stack[-1])


class SilentPhases(Markers):
    """Markers that do nothing, for untimed passes."""

    __slots__ = ()

    def __init__(self) -> None:
        marker = nullcontext()
        super().__init__(lambda name: marker)


class Observer(Protocol):
    """An object that receives the progress of a run. Measuring code reports to an observer and never prints."""

    def planned(self, plan: Plan) -> None:
        return None

    def working(self, case: Case, doing: str, share: float) -> None:
        """Reports which case is being worked on, and which fraction of its group's time has passed."""
        return

    def finished(self, record: Record) -> None:
        return None


class SilentObserver(Observer):
    """An observer that ignores all reports."""
