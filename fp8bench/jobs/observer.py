"""Who is told how a job goes along: jobs report here, and never print."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from fp8bench.protocols import Observer

# Told how many of how many things are done, what they are called, and what is being done now.
Tell = Callable[[int, int, str, str], None]


class JobObserver(Protocol):
    """Told what a person should know while a job is done, and asked who watches what is measured."""

    def note(self, sentence: str) -> None:
        """Something happened that the job's result does not say."""

    def measuring(self) -> AbstractContextManager[Observer]:
        """A run is measured."""

    def counting(self) -> AbstractContextManager[Tell]:
        """Many things of one kind are done, one after the other."""
