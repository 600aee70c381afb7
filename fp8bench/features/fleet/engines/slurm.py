"""Workers as jobs of Slurm."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.features.fleet.by_submitit import MINUTES, Jobs, handed_out, package
from fp8bench.features.fleet.engine import Engine, Order, Workers, engines

# A benchmark has its node to itself, and is not begun again on another one: the next worker goes on with what it left.
OPTIONS: Mapping[str, str | bool] = {"exclusive": True, "no-requeue": True}
_PAUSE_SECONDS = 1.0


@engines.register("slurm")
class Slurm(Engine):
    """A job a worker."""

    name = "slurm"
    summary = "Slurm, by submitit"
    takes = "options of sbatch, like partition=gpu or gres=gpu:1; exclusive, which is the default, may be 'no'"

    def _started(self, order: Order) -> Workers:
        try:
            executor = package().SlurmExecutor(folder=order.logs)
        except RuntimeError as error:
            raise UsageError(
                f"there is no Slurm here ({error}). Start it where sbatch is, or give --on local."
            ) from None
        executor.update_parameters(time=MINUTES, additional_parameters=sbatch_options(order.options))
        return _Queued(handed_out(self.name, executor, order))


def sbatch_options(options: Mapping[str, str]) -> dict[str, str | bool]:
    """The defaults, with those that were given over them; 'no' takes one away."""
    given = {name.replace("_", "-"): value or True for name, value in options.items()}
    return {name: value for name, value in {**OPTIONS, **given}.items() if value != "no"}


class _Queued(Jobs):
    def _all(self, jobs: tuple[Any, ...]) -> None:
        """submitit would ask an accounting that not every Slurm has."""
        words = ["squeue", "--noheader", "--format=%i", "--jobs", ",".join(self.names)]
        while True:
            found = subprocess.run(words, capture_output=True, text=True, check=False)
            if found.returncode or not found.stdout.strip():
                return
            time.sleep(_PAUSE_SECONDS)
