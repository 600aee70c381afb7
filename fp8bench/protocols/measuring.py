"""Interfaces of measuring: kinds of devices, the markers of a step's phases, and the observer of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from fp8bench.model import PHASES, UNATTRIBUTED, Case, DeviceFacts, MemoryCourse, MemoryRole, Plan, Record
from fp8bench.model.consumed import DeviceNote


class Stamper(ABC):
    """A device's clock. A stamp is cheap to take and may be read only after `intervals_ns`."""

    @abstractmethod
    def source(self) -> Callable[[], Any]:
        """The function that takes a stamp; fetched once, called on the hot path."""

    @abstractmethod
    def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
        """Nanoseconds between neighbouring stamps; waits for the device if it must."""

    def recycle(self) -> None:
        """Declares that no stamp taken until now will be read again."""


class MemoryMeter(ABC):
    """The most memory that a stretch of work holds. For untimed passes: it may slow down the work."""

    @abstractmethod
    def start(self, blocks: bool = True) -> None:
        """Counts from here on; what is allocated already is never counted.

        Without `blocks` single allocations need not be observed, where that costs more than counting.
        """

    @abstractmethod
    def enter(self, phase: str) -> None:
        """Says that the work goes on in that phase.

        The first call begins the stretch whose highest point is wanted; what has been allocated since `start` counts in
        it.
        """

    @abstractmethod
    def stop(self) -> MemoryCourse | None:
        """Stops counting and returns the stretch, None where none began. Also called after an exception."""

    def mark(self) -> None:
        self.enter(UNATTRIBUTED)

    def say(self, addresses: Sequence[int], role: MemoryRole) -> None:
        """Notes the role of what lies at these addresses now; ignored where single allocations are not observed."""

    @property
    def listening(self) -> bool:
        """Whether single allocations are being observed, so that notes about them have an effect."""
        return False

    def note(self, note: DeviceNote) -> None:
        """Records what a device with the formats would do at this point; ignored unless `listening`."""


class CannotCapture(RuntimeError):
    """A step cannot be done again as one launch."""


class CannotMark(RuntimeError):
    """A device has no ranges that a profiler around the process would see."""


class CannotLimit(RuntimeError):
    """The memory of a device cannot be limited here."""


class Device(ABC):
    """A kind of device. Measuring reaches CUDA events, synchronising, memory and its errors through this only."""

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
        """Makes it the calling thread's device; clocks record there."""

    def occupy(self, index: int, seconds: float) -> None:
        """Keeps the device busy for about `seconds` without waiting, so that what is enqueued meanwhile runs as fast as
        the device can. Does nothing where work is not enqueued."""

    def why_idle(self, index: int) -> str:
        """Returns why `occupy` has let the device idle instead of work, '' where it has not."""
        return ""

    def captured(self, index: int, step: Callable[[], object]) -> Callable[[], object]:
        """Returns a function that repeats a step's device work in one launch on the current stream.

        The host's part is done now and not again. Runs the step a few times. Its memory is its own, until the function
        is dropped. Raises CannotCapture with the reason.
        """
        raise CannotCapture(f"steps on {self.kind} devices cannot be replayed")

    def collecting(self, index: int) -> AbstractContextManager[Callable[[str], AbstractContextManager[object]]]:
        """Lets a profiler that was started around this process (nsys, ncu) collect in the body, at whose end the device
        is done; yields what opens a named range. Raises CannotMark."""
        raise CannotMark(f"{self.kind} devices have no NVTX ranges")

    def captured_stamper(self, index: int) -> Stamper | None:
        """A clock whose stamps may be taken while a step is captured, and are taken again by each replay; None where
        there is none."""
        return None

    def empty_cache(self) -> None:
        """Gives unused memory back to the driver."""

    def retried(self, index: int) -> int | None:
        """How often an allocation succeeded only after unused memory was given back, which waits for the device. None
        if unknown."""
        return None

    def allocations(self, index: int) -> Mapping[str, int] | None:
        """Returns counts of torch's allocator for that device, by its names; None without an allocator."""
        return None

    def memory_meter(self, index: int) -> MemoryMeter | str:
        """A memory meter for one device, or the reason why the device has no meter."""
        return f"the memory of {self.kind} devices cannot be counted"

    def end_where_memory_does(self, shared_by: int = 1) -> None:
        """Makes this process's allocations fail where free memory ends, so that a case that does not fit gets an
        answer.

        `shared_by` processes share the memory. Does nothing where that cannot be had.
        """

    def memory_limited(self, index: int, limit: int) -> AbstractContextManager[None]:
        """Limits memory to `limit` more bytes for the body; what then fails is `is_out_of_memory`.

        The limit may be a little later, where more than tensors are counted. Raises CannotLimit.
        """
        raise CannotLimit(f"the memory of {self.kind} devices cannot be limited")


class Phases(Protocol):
    """The markers a workload sees: `with phase.gemm: ...`. Time under a nested marker counts for that only."""

    @property
    def data_load(self) -> AbstractContextManager[None]: ...
    @property
    def decode(self) -> AbstractContextManager[None]: ...
    @property
    def cast(self) -> AbstractContextManager[None]: ...
    @property
    def gemm(self) -> AbstractContextManager[None]: ...
    @property
    def attention(self) -> AbstractContextManager[None]: ...
    @property
    def accumulate(self) -> AbstractContextManager[None]: ...
    @property
    def optimizer_step(self) -> AbstractContextManager[None]: ...
    @property
    def elementwise(self) -> AbstractContextManager[None]: ...
    @property
    def communication(self) -> AbstractContextManager[None]: ...


Marker = TypeVar("Marker", bound=AbstractContextManager[None])


class Markers(Generic[Marker]):
    """A marker for each phase, by its name. A plain object, because backward may run on another thread."""

    __slots__ = (
        "accumulate",
        "attention",
        "cast",
        "communication",
        "data_load",
        "decode",
        "elementwise",
        "gemm",
        "optimizer_step",
    )

    data_load: Marker
    decode: Marker
    cast: Marker
    gemm: Marker
    attention: Marker
    accumulate: Marker
    optimizer_step: Marker
    elementwise: Marker
    communication: Marker

    def __init__(self, make: Callable[[str], Marker]) -> None:
        for name in PHASES:
            setattr(self, name, make(str(name)))


@dataclass(slots=True, eq=False)
class TellingMarker:
    """A phase's context manager that reports which phase a step is in, also when a nested one ends."""

    _name: str
    _stack: list[str]
    _report: Callable[[str], None]

    def __enter__(self) -> None:
        self._stack.append(self._name)
        self._report(self._name)

    def __exit__(self, *exc: object) -> None:
        self._stack.pop()
        self._report(self._stack[-1])


class SilentPhases(Markers[AbstractContextManager[None]]):
    """Phases that mark nothing, for untimed passes."""

    __slots__ = ()

    def __init__(self) -> None:
        marker = nullcontext()
        super().__init__(lambda name: marker)


class Observer(Protocol):
    """Receives a run's progress; measuring code reports here and never prints."""

    def planned(self, plan: Plan) -> None: ...

    def working(self, case: Case, doing: str, share: float) -> None:
        """A case is being worked on; `share` of its group's time has gone."""

    def finished(self, record: Record) -> None: ...


class SilentObserver:
    """An observer that ignores everything."""

    def planned(self, plan: Plan) -> None:
        return None

    def working(self, case: Case, doing: str, share: float) -> None:
        return None

    def finished(self, record: Record) -> None:
        return None
