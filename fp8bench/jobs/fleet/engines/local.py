"""Workers on this machine, which go on when the command has ended."""

from __future__ import annotations

from typing import Any

from fp8bench.jobs.fleet.by_submitit import MINUTES, Jobs, handed_out, package
from fp8bench.jobs.fleet.engine import Engine, Order, Workers, engines


@engines.register("local")
class Local(Engine):
    """Processes of this machine, all at once."""

    name = "local"
    summary = "this machine, by submitit"

    def _started(self, order: Order) -> Workers:
        executor = package().LocalExecutor(folder=order.logs)
        executor.update_parameters(timeout_min=MINUTES)
        return _Here(handed_out(self.name, executor, order))


class _Here(Jobs):
    def _all(self, jobs: tuple[Any, ...]) -> None:
        for job in jobs:
            job.wait()
