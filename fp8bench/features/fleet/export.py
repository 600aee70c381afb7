"""A fleet as text for a scheduler: what it is told, and what every form of that text shares."""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, ClassVar

from fp8bench.errors import UsageError
from fp8bench.model.fleet import FleetPlan
from fp8bench.registry import Registry


@dataclass(frozen=True)
class Volume:
    """What machines share: the scheduler's name of it, and where it is mounted."""

    name: str
    mount: PurePosixPath


@dataclass(frozen=True)
class Tasks:
    """What a scheduler is to start: so many `workers`, or (None) a task for each cell, of at most so many `minutes`.

    `file` and `store` are the plan and the store where those machines see them, `python` is their interpreter with
    fp8bench, in an `image` if they run containers. `options` are the scheduler's own.
    """

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
        """For the scheduler's lists."""
        return f"fp8bench-{self.plan.id}"

    @property
    def count(self) -> int:
        """How many tasks that is."""
        return len(self.plan.cells) if self.workers is None else self.workers

    @property
    def gpus(self) -> int:
        """How many a machine needs, whichever cell it measures."""
        return max(cell.gpus for cell in self.plan.cells)

    @property
    def kind(self) -> str:
        """Of those GPUs, '' without any; UsageError where cells want different ones."""
        kinds = sorted({cell.kind for cell in self.plan.cells if cell.gpus})
        if len(kinds) > 1:
            raise UsageError(f"cells of the plan {self.plan.id} are for {' and '.join(kinds)}: write a plan for each.")
        return kinds[0] if kinds else ""

    def command(self, index: str) -> str:
        """In words of a shell: a worker, or that of the cell whose number the variable `index` has."""
        words = shlex.join([self.python, "-m", "fp8bench", "fleet", "work", self.file, "--store", self.store])
        return words if self.workers is not None else f'{words} --cell "${index}"'


class Form(ABC):
    """What one scheduler reads. `takes` says what its --option are; `contained` that it runs images and volumes."""

    name: ClassVar[str]
    summary: ClassVar[str]
    takes: ClassVar[str]
    contained: ClassVar[bool] = False

    def text(self, tasks: Tasks) -> str:
        """Raises UsageError where something is lacking that it needs, or given that it has no use for."""
        for path in (tasks.file, tasks.store, tasks.python):
            if any("\ud800" <= letter <= "\udfff" for letter in path):
                raise UsageError(f"{path!r:.200} is not UTF-8, and no text can hold it. Give the path another name.")
        if self.contained:
            _check_volume(tasks)
        elif tasks.image or tasks.volume:
            raise UsageError(f"--image and --volume are not for --to {self.name}. Leave them out.")
        return self._text(tasks)

    @abstractmethod
    def _text(self, tasks: Tasks) -> str: ...


def _check_volume(tasks: Tasks) -> None:
    """What ends with its container would leave nothing."""
    if tasks.volume is None:
        raise UsageError("the runs would be lost with the machines: give --volume NAME:/MOUNT, which keeps them.")
    for option, path in (("--plan-path", tasks.file), ("--store", tasks.store)):
        if ".." in PurePosixPath(path).parts or not PurePosixPath(path).is_relative_to(tasks.volume.mount):
            raise UsageError(
                f"{option} {path!r:.200} is not on the volume. Give it below {tasks.volume.mount}, as machines see it."
            )


def document(content: Mapping[str, Any]) -> str:
    """As YAML, whatever the names in it are; nothing refers to another place of it."""
    import yaml

    return yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False, width=10**6, allow_unicode=True)


forms: Registry[Form] = Registry("form", "fp8bench.features.fleet.exports", Form, ("name", "summary"))
