"""The interface by which jobs report their progress: they never print."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from fp8bench.protocols import Observer

# Called with the number done, the total, what is counted, and what is being done now.
Tell = Callable[[int, int, str, str], None]


class JobObserver(Protocol):
    """Hears what a user should know while a job runs, and provides the observer of what is measured."""

    def note(self, sentence: str) -> None:
        """Something happened that the job's result does not say."""

    def measuring(self) -> AbstractContextManager[Observer]:
        """The observer of a run that is measured."""

    def counting(self) -> AbstractContextManager[Tell]:
        """What is called while many things of one kind are done one by one."""
