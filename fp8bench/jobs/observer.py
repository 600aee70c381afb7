"""The interface through which jobs report their progress, because jobs never print."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from fp8bench.protocols import Observer

# A callback that gets the number of finished items, the number of all items, a word for the items, and the current
# activity.
ReportProgress = Callable[[int, int, str, str], None]


class JobObserver(Protocol):
    """Receives the progress of a job, and provides observers for its measurements."""

    def note(self, sentence: str) -> None:
        """Reports an event that is not part of the job's result."""

    def measuring(self) -> AbstractContextManager[Observer]:
        """Returns a context with the observer that receives the progress of a run's measurement."""

    def counting(self) -> AbstractContextManager[ReportProgress]:
        """Returns a callback by which a job reports its progress while it processes many items one by one."""
