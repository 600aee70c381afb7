"""What engines share that start workers by submitit."""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.jobs.fleet.engine import Order, Workers

MINUTES = 24 * 60


class Jobs(Workers):
    """submitit's jobs."""

    def __init__(self, jobs: tuple[Any, ...]) -> None:
        self.names = [str(job.job_id) for job in jobs]
        self._jobs = jobs

    def wait(self) -> tuple[str, ...]:
        try:
            self._all(self._jobs)
        except BaseException:
            for job in self._jobs:
                job.cancel()
            raise
        return ()

    @abstractmethod
    def _all(self, jobs: tuple[Any, ...]) -> None:
        """Until they have ended."""


def package() -> Any:
    """submitit; UsageError where it is not installed."""
    try:
        import submitit
    except ImportError:
        raise UsageError(
            "submitit, which hands out workers, is not installed: pip install 'fp8bench[fleet]'."
        ) from None
    return submitit


def handed_out(engine: str, executor: Any, order: Order) -> tuple[Any, ...]:
    """The workers as jobs of an executor."""
    submitit = package()
    command = submitit.helpers.CommandFunction([sys.executable, "-m", "fp8bench", *order.words], verbose=False)
    try:
        return tuple(executor.submit(command) for _ in range(order.workers or 1))
    except submitit.core.utils.FailedJobError as error:
        why = str(error).strip().rstrip(".")
        raise UsageError(f"{engine} took no job: {why:.500}. --option NAME=VALUE sets its options.") from None
