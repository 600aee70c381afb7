"""A script for sbatch: an array of jobs."""

from __future__ import annotations

from fp8bench.errors import UsageError
from fp8bench.features.fleet.engines.slurm import sbatch_options
from fp8bench.features.fleet.export import Form, Tasks, forms


@forms.register("sbatch")
class Sbatch(Form):
    """Each task has its node to itself, and is not begun again by Slurm."""

    name = "sbatch"
    summary = "a job array of Slurm"
    takes = "options of sbatch, like partition=gpu; exclusive=no and gpus-per-node=no leave those out"

    def _text(self, tasks: Tasks) -> str:
        given: dict[str, str] = {
            "job-name": tasks.name, "array": f"0-{tasks.count - 1}", "nodes": "1", "ntasks": "1",
            "time": str(tasks.minutes), **({"gpus-per-node": str(tasks.gpus)} if tasks.gpus else {}),
            **{name.replace("_", "-"): value for name, value in tasks.options.items()},
        }  # fmt: skip
        lines = [f"#SBATCH --{name}{_value(name, value)}" for name, value in sbatch_options(given).items()]
        return "\n".join(["#!/bin/bash", *lines, "", f"exec {tasks.command('SLURM_ARRAY_TASK_ID')}", ""])


def _value(name: str, value: str | bool) -> str:
    """Quoted as sbatch reads it, which is not how a shell does."""
    if isinstance(value, bool):
        return ""
    if not value.isprintable():
        raise UsageError(f"the option {name} has {value!r:.80}, which no line of sbatch can hold.")
    plain = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'="{plain}"' if not value.replace("-", "").isalnum() else f"={value}"
