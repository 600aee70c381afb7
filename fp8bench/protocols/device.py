"""What measuring asks of a kind of device: clocks, memory, its errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from fp8bench.model import DeviceFacts


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
    def start(self) -> None:
        """Count from here on; what is allocated already is not counted, now or later."""

    @abstractmethod
    def mark(self) -> None:
        """The stretch whose highest point is wanted begins; what has been allocated since `start` counts in it."""

    @abstractmethod
    def stop(self) -> int | None:
        """Count no more: bytes at the highest point since `mark`, None without one. Also called after an exception."""


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

    def empty_cache(self) -> None:
        """Give memory that nobody uses back."""

    def memory_meter(self, index: int) -> MemoryMeter | None:
        """What counts the memory of one device; None where nobody can say."""
        return None
