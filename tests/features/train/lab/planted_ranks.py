"""Imported by ranks: makes rank 1 train differently from rank 0, or die, at the planted seed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fp8bench.features.train import step
from fp8bench.features.train.lab import evaluate
from fp8bench.features.train.lab.parallelism import DataParallel
from fp8bench.features.train.lab.trainer import Trainer
from fp8bench.features.train.values import Arm, SeedTask, StreamLine
from fp8bench.nn.sizes import SIZES
from tests.features.train.lab import plants
from tests.features.train.lab.labs import TINY, TINY_TIED

_RANK = int(os.environ.get("RANK", "0"))
_init = Trainer.__init__
_advance = step.advance


def _planted_init(self: Trainer, task: SeedTask, arm: Arm, *more: Any) -> None:
    planted = task.seed if _RANK == 1 and arm.role == "candidate" else 0
    if planted == plants.SEED:
        task = replace(task, seed=1)
    if planted == plants.SCALES:  # every largest magnitude that this rank received
        largest: Any = DataParallel._largest_over_ranks
        DataParallel._largest_over_ranks = lambda self, amax: 2 * largest(self, amax)  # type: ignore[method-assign]
    _init(self, task, arm, *more)
    if planted == plants.WEIGHTS:
        _move(self)
    if planted == plants.AVERAGE:
        _spoil_average(self)


@torch.no_grad()
def _move(trainer: Trainer) -> None:
    weight = next(iter(trainer.parameters.values())).view(-1)
    weight[5] = torch.nextafter(weight[5], torch.tensor(9.0))


def _spoil_average(trainer: Trainer) -> None:
    """In one step the rank uses its local gradients as the average."""
    together: Any = trainer.parallelism
    average = together.average_gradients

    def forgotten(gradients: Any, phase: Any) -> None:
        own = [gradient.clone() for gradient in gradients.fill_missing_gradients()]
        average(gradients, phase)
        if trainer.step == plants.KILLED_AT:
            torch._foreach_copy_(gradients.fill_missing_gradients(), own)

    together.average_gradients = forgotten


def _advanced(trainer: Trainer, *arguments: Any, **named: Any) -> Iterator[StreamLine]:
    planted = trainer.task.seed if _RANK == 1 and trainer.arm.role == "candidate" else 0
    # A rank that dies once leaves a mark file.
    died = Path(os.environ.get("PLANTED_RANKS", "")) / f"died-{planted}"
    if trainer.step == plants.KILLED_AT and planted == plants.KILLED and not died.exists():
        if "PLANTED_RANKS" in os.environ:
            died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    yield from _advance(trainer, *arguments, **named)


SIZES.setdefault(TINY, plants.SIZE)
SIZES.setdefault(TINY_TIED, replace(plants.SIZE, tied=True))
if "RANK" in os.environ:
    evaluate._VALIDATED_TOKENS = plants.LOOKED_AT
    Trainer.__init__ = _planted_init  # type: ignore[method-assign]
    step.advance = _advanced
