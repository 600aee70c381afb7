"""Writes a fleet for schedulers that fp8bench does not call: a script for sbatch, or a Job of Kubernetes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from fp8bench.errors import UsageError
from fp8bench.features.fleet.engines import sbatch_options
from fp8bench.model.run import FleetPlan


@dataclass(frozen=True)
class Volume:
    """What machines share: the scheduler's name for it, and where it is mounted."""

    name: str
    mount: PurePosixPath


@dataclass(frozen=True)
class Tasks:
    """What a scheduler is to start: so many `workers`, or (None) a task for each cell, of at most so many `minutes`.
    `file`, `store` and `python` (an interpreter with fp8bench, in an `image` if there are containers) are paths on
    those machines. `options` are the scheduler's own."""

    plan: FleetPlan
    file: str
    store: str
    python: str
    minutes: int
    workers: int | None = None
    image: str = ""
    volume: Volume | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"fp8bench-{self.plan.id}"

    @property
    def count(self) -> int:
        return len(self.plan.cells) if self.workers is None else self.workers

    @property
    def gpus(self) -> int:
        """How many a machine needs, whichever cell it measures."""
        return max(cell.gpus for cell in self.plan.cells)

    def command(self, index: str) -> str:
        """Returns words of a shell for a worker, or for the cell whose number the variable `index` has."""
        words = shlex.join([self.python, "-m", "fp8bench", "fleet", "work", self.file, "--store", self.store])
        return words if self.workers is not None else f'{words} --cell "${index}"'


@dataclass(frozen=True)
class Form:
    """What one scheduler reads. `takes` describes its --option; a `contained` one runs images and mounts volumes."""

    summary: str
    write: Callable[[Tasks], str]
    takes: str
    contained: bool = False


def text_for(name: str, tasks: Tasks) -> str:
    """Raises UsageError where the form lacks something, or was given what it has no use for."""
    form = FORMS[name]
    for path in (tasks.file, tasks.store, tasks.python):
        if any("\ud800" <= letter <= "\udfff" for letter in path):
            raise UsageError(f"{path!r:.200} is not UTF-8, and no text can hold it. Give the path another name.")
    if not form.contained and (tasks.image or tasks.volume):
        raise UsageError(f"--image and --volume are not for --to {name}. Leave them out.")
    return form.write(tasks)


def _sbatch(tasks: Tasks) -> str:
    """Gives each task a node to itself, and has Slurm not restart it."""
    given: dict[str, str] = {
        "job-name": tasks.name, "array": f"0-{tasks.count - 1}", "nodes": "1", "ntasks": "1",
        "time": str(tasks.minutes), **({"gpus-per-node": str(tasks.gpus)} if tasks.gpus else {}),
        **{name.replace("_", "-"): value for name, value in tasks.options.items()},
    }  # fmt: skip
    lines = [f"#SBATCH --{name}{_value(name, value)}" for name, value in sbatch_options(given).items()]
    return "\n".join(["#!/bin/bash", *lines, "", f"exec {tasks.command('SLURM_ARRAY_TASK_ID')}", ""])


def _value(name: str, value: str | bool) -> str:
    """Quotes as sbatch reads it, which is not how a shell does."""
    if isinstance(value, bool):
        return ""
    if not value.isprintable():
        raise UsageError(f"the option {name} has {value!r:.80}, which no line of sbatch can hold.")
    plain = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'="{plain}"' if not value.replace("-", "").isalnum() else f"={value}"


_LABELS = {"app": "fp8bench"}


def _kubernetes(tasks: Tasks) -> str:
    """Lets no two pods share a node, nor a failed pod start again or end the others. Only a limit for each index
    says the latter; the Job's own backoffLimit would end all."""
    import yaml

    volume = _volume_of(tasks)
    if not tasks.image:
        raise UsageError("Kubernetes runs images: give --image NAME, one with fp8bench in it.")
    apart = {"labelSelector": {"matchLabels": _LABELS}, "topologyKey": "kubernetes.io/hostname"}
    # Kubernetes would expand variables itself; it reads $$ as one $.
    shell = f"exec {tasks.command('JOB_COMPLETION_INDEX')}".replace("$", "$$")
    job = {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": tasks.name, "labels": _LABELS},
        "spec": {
            "completionMode": "Indexed", "completions": tasks.count, "parallelism": tasks.count,
            "backoffLimitPerIndex": 0,
            "template": {"metadata": {"labels": _LABELS}, "spec": {
                "restartPolicy": "Never", "activeDeadlineSeconds": 60 * tasks.minutes,
                **({"nodeSelector": dict(tasks.options)} if tasks.options else {}),
                "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
                "containers": [{
                    "name": "fp8bench", "image": tasks.image, "command": ["sh", "-c", shell],
                    "volumeMounts": [{"name": "shared", "mountPath": str(volume.mount)}],
                    **({"resources": {"limits": {_resource(tasks.plan): str(tasks.gpus)}}} if tasks.gpus else {}),
                }],
                "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": volume.name}}],
            }},
        },
    }  # fmt: skip
    # The detour over JSON keeps YAML from writing references.
    return yaml.safe_dump(json.loads(json.dumps(job)), sort_keys=False, width=10**6, allow_unicode=True)


def _volume_of(tasks: Tasks) -> Volume:
    if tasks.volume is None:
        raise UsageError("the runs would be lost with the machines: give --volume NAME:/MOUNT, which keeps them.")
    for option, path in (("--plan-path", tasks.file), ("--store", tasks.store)):
        if ".." in PurePosixPath(path).parts or not PurePosixPath(path).is_relative_to(tasks.volume.mount):
            raise UsageError(
                f"{option} {path!r:.200} is not on the volume. Give it below {tasks.volume.mount}, as machines see it."
            )
    return tasks.volume


def _resource(plan: FleetPlan) -> str:
    """Returns the name that device plugins give its GPUs; raises UsageError where cells want different ones."""
    if any("@xpu" in cell.setting for cell in plan.cells):
        raise UsageError("what Kubernetes calls Intel's GPUs depends on their driver: fp8bench does not know it.")
    kinds = sorted({cell.kind for cell in plan.cells if cell.gpus})
    if len(kinds) > 1:
        raise UsageError(f"cells of the plan {plan.id} are for {' and '.join(kinds)}: write a plan for each.")
    return "amd.com/gpu" if kinds[0].startswith("mi") else "nvidia.com/gpu"


FORMS = {
    "k8s": Form(
        "an indexed Job of Kubernetes (1.33 or later)", _kubernetes,
        "labels that nodes must have, like nvidia.com/gpu.product=NVIDIA-H200", contained=True,
    ),
    "sbatch": Form(
        "a job array of Slurm", _sbatch,
        "options of sbatch, like partition=gpu; exclusive=no and gpus-per-node=no leave those out",
    ),
}  # fmt: skip
