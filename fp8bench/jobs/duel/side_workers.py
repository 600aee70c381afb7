"""A side while it is measured: its workers, what it planned, and what it does about quantisers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from fp8bench.errors import UsageError
from fp8bench.measure.interrupts import ignored
from fp8bench.measure.limits import HANG_SECONDS
from fp8bench.measure.other_interpreter import PartnerWorker, Start
from fp8bench.measure.quantisers import Quantisers
from fp8bench.model import DeviceFacts, PlannedCase, Request
from fp8bench.model.raw import Settings
from fp8bench.plan.make import make_plan

# A process is fast or slow for its own reasons: with two a side and session, a few sessions tell by how much.
PROCESSES = 2


@dataclass
class SideWorkers:
    """`workers` are alike, and the first one makes the passes that look at numbers and memory."""

    start: Start
    workers: Sequence[PartnerWorker]
    quantisers: Quantisers
    devices: tuple[DeviceFacts, ...] = ()
    cases: dict[str, PlannedCase] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.start.name

    @property
    def facts(self) -> dict[str, DeviceFacts]:
        return {one.key: one for one in self.devices}

    def meet(self, request: Request, suites: Sequence[str], corpus: str | None) -> None:
        """Start the first worker and plan what this side can do."""
        self.devices = self.workers[0].probe()
        self.versions = self.workers[0].within(HANG_SECONDS).versions(tuple(suites))
        try:
            plan = make_plan(request, self.devices, corpus, compares=False)
        except UsageError as error:
            raise UsageError(f"side {self.name} ({self.start.python}): {error}") from None
        self.cases = {planned.case.id: planned for group in plan for planned in group.cases}


def refresh(pair: Sequence[SideWorkers], seed: int, number: int) -> None:
    """Fresh processes for a session, started in random order: a process is as it is until it ends.

    The first session takes those that there are.
    """
    workers = [worker for one in pair for worker in one.workers]
    if number:
        for worker in workers:
            worker.restart()
    random.Random(f"{seed}:{number}:start").shuffle(workers)
    for worker in workers:
        worker.start()


@contextmanager
def side_workers(start: Start, settings: Settings, why_eager: str) -> Iterator[SideWorkers]:
    """A side whose workers end with the body, whatever happens."""
    workers = [PartnerWorker(settings, start) for _ in range(PROCESSES)]
    try:
        yield SideWorkers(start, workers, Quantisers(why_eager))
    finally:
        with ignored():
            for worker in workers:
                worker.close()
