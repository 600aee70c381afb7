"""What measuring asks of a kind of device: clocks, memory, its errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from fp8bench.model import UNATTRIBUTED, DeviceFacts, MemoryCourse, MemoryRole
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
        """Stamps taken so far will not be read any more."""


class MemoryMeter(ABC):
    """How much memory a stretch of work holds at most. For untimed passes: it may slow down what runs under it."""

    @abstractmethod
    def start(self, blocks: bool = True) -> None:
        """Count from here on; what is allocated already is not counted, now or later.

        Without `blocks` single allocations need not be seen, where that takes more than to count.
        """

    @abstractmethod
    def enter(self, phase: str) -> None:
        """The work goes on in that phase.

        The first call begins the stretch whose highest point is wanted; what has been allocated since `start` counts
        in it.
        """

    @abstractmethod
    def stop(self) -> MemoryCourse | None:
        """Count no more: what the stretch came to, None where none began. Also called after an exception."""

    def mark(self) -> None:
        """The stretch begins, in no phase."""
        self.enter(UNATTRIBUTED)

    def say(self, addresses: Sequence[int], role: MemoryRole) -> None:
        """What lies at these addresses now is for that; where single allocations are not seen, nobody listens."""

    @property
    def listening(self) -> bool:
        """Whether single allocations are being seen, so that what is said of them has its place among them."""
        return False

    def note(self, note: DeviceNote) -> None:
        """What a device that keeps the formats would do at this place of the stretch; nothing where nobody listens."""


class CannotCapture(RuntimeError):
    """A step cannot be done again as one launch."""


class CannotLimit(RuntimeError):
    """Nothing here makes a device's memory end earlier than it does."""


class Device(ABC):
    """A kind of device. CUDA events, synchronising, memory and its errors reach measuring through this only."""

    kind: ClassVar[str]

    @abstractmethod
    def available(self) -> tuple[DeviceFacts, ...]:
        """The devices of this kind on this machine, none if there is none."""

    @abstractmethod
    def stamper(self, index: int) -> Stamper:
        """A clock for one device."""

    @abstractmethod
    def synchronise(self, index: int) -> None:
        """Wait until the device has nothing left to do."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception means that the device's memory did not suffice."""

    def select(self, index: int) -> None:
        """Make it the device that the calling thread works on; clocks record there."""

    def occupy(self, index: int, seconds: float) -> None:
        """Give the device nothing to do for about so long, without waiting for it: what is enqueued meanwhile runs
        as fast as the device can. Nothing where work is not enqueued."""

    def captured(self, index: int, step: Callable[[], object]) -> Callable[[], object]:
        """What does the device's work of a step again, in one launch, where the current stream is; the host's part is
        done now and not again. Runs the step a few times. Its memory is its own, until nobody has it any more.

        Raises CannotCapture with the reason.
        """
        raise CannotCapture(f"nothing replays the steps of a device of the kind {self.kind}")

    def empty_cache(self) -> None:
        """Give memory that nobody uses back."""

    def retried(self, index: int) -> int | None:
        """How often memory did not suffice so far, and did once what nobody used had been given back: that waits for
        the device. None where nobody counts."""
        return None

    def allocations(self, index: int) -> Mapping[str, int] | None:
        """What torch's allocator of that device counts, by its own names; None where nobody does."""
        return None

    def memory_meter(self, index: int) -> MemoryMeter | str:
        """What counts the memory of one device, or why nobody can say."""
        return f"nobody counts the memory of a device of the kind {self.kind}"

    def end_where_memory_does(self, shared_by: int = 1) -> None:
        """Have a process's own allocations fail where free memory ends, so that a case that does not fit is an answer;
        so many processes share it. Nothing where nobody can say."""

    def memory_limited(self, index: int, limit: int) -> AbstractContextManager[None]:
        """In the body memory ends after so many bytes more, and what then fails is `is_out_of_memory`.

        It may end a little later, where more than tensors are counted. Raises CannotLimit where nothing can do it.
        """
        raise CannotLimit(f"nothing is known that limits the memory of {self.kind}")
