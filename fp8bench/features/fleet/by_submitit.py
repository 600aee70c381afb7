"""What engines share that start workers by submitit."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.features.fleet.engine import Order, Workers
from fp8bench.features.fleet.tied import ended, tied

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
            self._all(self._jobs)
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


def handed_out(
    engine: str, executor: Any, order: Order, variables: Mapping[str, str | None] | None = None
) -> tuple[Any, ...]:
    """The workers as jobs of an executor; of `variables` in their environment those that are None are taken away."""
    submitit = package()
    given = (list(order.words), dict(variables or {}))
    try:
        return tuple(executor.submit(worked, *given) for _ in range(order.workers or 1))
    except submitit.core.utils.FailedJobError as error:
        why = str(error).strip().rstrip(".")
        raise UsageError(f"{engine} took no job: {why:.500}. --option NAME=VALUE sets its options.") from None


def worked(words: list[str], variables: dict[str, str | None]) -> int:
    """In a process of submitit's: the exit code of a worker, which ends with this process, whatever ends it."""
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    return ended(tied([sys.executable, "-m", "fp8bench", *words], environment=environment))
