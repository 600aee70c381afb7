"""The interface through which jobs report progress: they never print."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from fp8bench.protocols import Observer

# Called with the number done, the total, what is counted, and the current activity.
Tell = Callable[[int, int, str, str], None]


class JobObserver(Protocol):
    """Receives the progress of a job, and provides the observer of measurements."""

    def note(self, sentence: str) -> None:
        """Reports an event that the job's result does not include."""

    def measuring(self) -> AbstractContextManager[Observer]:
        """Returns the observer for a run that is measured."""

    def counting(self) -> AbstractContextManager[Tell]:
        """Returns a function to call while many things of one kind are processed one by one."""
