"""Workers of a fleet handed to an engine, by submitit: this machine, or Slurm."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8bench.errors import UsageError

ENGINES = ("local", "slurm")
# A benchmark has its node to itself, and is not begun again on another one: the next worker goes on with what it left.
_SLURM: Mapping[str, str | bool] = {"exclusive": True, "no-requeue": True}
_MINUTES = 24 * 60
_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class Workers:
    """Jobs of an engine, and the folder of what they print."""

    engine: str
    jobs: tuple[Any, ...]
    logs: Path

    @property
    def names(self) -> list[str]:
        return [str(job.job_id) for job in self.jobs]

    def wait(self) -> None:
        """Until all have ended; an interrupt of this process ends them."""
        try:
            if self.engine == "slurm":
                while _queued(self.names):  # submitit would ask an accounting that not every Slurm has
                    time.sleep(_PAUSE_SECONDS)
            else:
                for job in self.jobs:
                    job.wait()
        except BaseException:
            for job in self.jobs:
                job.cancel()
            raise


def submit(plan: Path, store: Path, engine: str, count: int, retry: bool, options: Mapping[str, str]) -> Workers:
    """So many workers, which take the cells among them. `options` are sbatch's, by their long names."""
    try:
        import submitit
    except ImportError:
        raise UsageError(
            "submitit, which hands out workers, is not installed: pip install 'fp8bench[fleet]'."
        ) from None
    if options and engine != "slurm":
        raise UsageError(f"--option is sbatch's, and {engine} knows none. Leave it out, or give --on slurm.")
    logs = store / "cells" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    executor: Any
    if engine == "slurm":
        executor = _slurm(submitit, logs, options)
    else:
        executor = submitit.LocalExecutor(folder=logs)
        executor.update_parameters(timeout_min=_MINUTES)
    words = [sys.executable, "-m", "fp8bench", "fleet", "work", str(plan.resolve()), "--store", str(store.resolve())]
    command = submitit.helpers.CommandFunction([*words, *(["--retry"] if retry else [])], verbose=False)
    try:
        return Workers(engine, tuple(executor.submit(command) for _ in range(count)), logs)
    except submitit.core.utils.FailedJobError as error:
        raise UsageError(f"{engine} took no job: {str(error).strip():.500}") from None


def _slurm(submitit: Any, logs: Path, options: Mapping[str, str]) -> Any:
    try:
        executor = submitit.SlurmExecutor(folder=logs)
    except RuntimeError as error:
        raise UsageError(f"there is no Slurm here ({error}). Start it where sbatch is, or give --on local.") from None
    given = {name.replace("_", "-"): value or True for name, value in options.items()}
    wanted = {name: value for name, value in {**_SLURM, **given}.items() if value != "no"}
    executor.update_parameters(time=_MINUTES, additional_parameters=wanted)
    return executor


def _queued(jobs: list[str]) -> bool:
    """Whether Slurm still has one of them waiting or running."""
    words = ["squeue", "--noheader", "--format=%i", "--jobs", ",".join(jobs)]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return found.returncode == 0 and bool(found.stdout.strip())
