"""Who starts workers of a fleet: engines, each a class in a file of engines/, and what they are asked for."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fp8bench.errors import UsageError
from fp8bench.features.fleet.tied import tied
from fp8bench.model.fleet import FleetPlan
from fp8bench.registry import Registry
from fp8bench.store.runs.write import check_store


@dataclass(frozen=True)
class Order:
    """What is to be started: so many `workers` (None: the engine's default) for the cells of a plan, into a store.

    `file` is where the plan lies, `options` are the engine's own, and `stays` says that the caller waits for the end.
    """

    plan: FleetPlan
    file: Path
    store: Path
    workers: int | None = None
    retry: bool = False
    stays: bool = False
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def logs(self) -> Path:
        """The folder of what workers print."""
        return self.store.resolve() / "cells" / "logs"

    @property
    def words(self) -> list[str]:
        """What a worker is called with, behind fp8bench."""
        words = ["fleet", "work", str(self.file.resolve()), "--store", str(self.store.resolve())]
        return [*words, "--retry"] if self.retry else words


class Workers(ABC):
    """Those that were started. `names` are the engine's own."""

    names: Sequence[str]

    @abstractmethod
    def wait(self) -> tuple[str, ...]:
        """Until all have ended, and what went wrong with the engine; an interrupt of this process ends them."""


class Engine(ABC):
    """`takes` says which --option it knows, '' that it knows none."""

    name: ClassVar[str]
    summary: ClassVar[str]
    takes: ClassVar[str] = ""

    def start(self, order: Order) -> Workers:
        """Raises UsageError where it cannot, and StoreError where nothing can be kept in the store."""
        if order.options and not self.takes:
            raise UsageError(f"--option is not for --on {self.name}, which knows none. Leave it out.")
        check_store(order.store)
        order.logs.mkdir(parents=True, exist_ok=True)
        return self._started(order)

    @abstractmethod
    def _started(self, order: Order) -> Workers: ...


engines: Registry[Engine] = Registry("engine", "fp8bench.features.fleet.engines", Engine, ("name", "summary"))


def crew(order: Order) -> None:
    """Until its workers have ended; the store says what came of it. They end where this process is interrupted.

    Raises StoreError where nothing can be kept in the store.
    """
    check_store(order.store)
    workers = [tied([sys.executable, "-m", "fp8bench", *order.words]) for _ in range(order.workers or 1)]
    try:
        for worker in workers:
            worker.wait()
    except BaseException:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
        raise
