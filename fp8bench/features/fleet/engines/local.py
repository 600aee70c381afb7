"""Workers on this machine, which go on when the command has ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8bench.features.fleet.by_submitit import MINUTES, Jobs, handed_out, package
from fp8bench.features.fleet.engine import Engine, Order, Workers, engines

# submitit's local executor hides all GPUs from its jobs unless their numbers are given to it.
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@engines.register("local")
class Local(Engine):
    """Processes of this machine, all at once."""

    name = "local"
    summary = "this machine, by submitit"

    def _started(self, order: Order) -> Workers:
        executor = package().LocalExecutor(folder=order.logs)
        executor.update_parameters(timeout_min=MINUTES)
        with _stderr_in(order.logs / "local.txt"):
            return _Here(handed_out(self.name, executor, order, {_VISIBLE: os.environ.get(_VISIBLE)}))


@contextmanager
def _stderr_in(file: Path) -> Iterator[None]:
    """What is started meanwhile has its stderr there: submitit's controllers print tracebacks when cancelled."""
    saved = os.dup(2)
    try:
        with file.open("ab") as opened:
            os.dup2(opened.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


class _Here(Jobs):
    def _all(self, jobs: tuple[Any, ...]) -> None:
        for job in jobs:
            job.wait()
