"""Imported by ranks: makes rank 1 train something else than rank 0, or die, where the seed says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fp8bench.model.training import Arm, Line, SeedTask
from fp8bench.nn.sizes import SIZES
from fp8bench.training.together import DataParallel
from fp8bench.training.trainer import Trainer
from tests.training.labs import TINY
from tests.training.plants import AVERAGE, KILLED, KILLED_AT, KILLED_TWICE, SCALES, SEED, SHARE, SIZE, TEXT, WEIGHTS

_RANK = int(os.environ.get("RANK", "0"))
_begin, _advance, _over_ranks = Trainer.__init__, Trainer.advance, DataParallel._over_ranks


def _begun(self: Trainer, task: SeedTask, arm: Arm, *more: Any) -> None:
    planted = task.seed if _RANK == 1 and arm.role == "candidate" else 0
    if planted == SEED:
        task = replace(task, seed=1)
    if planted == SCALES:
        DataParallel._over_ranks = lambda self, amax: 2 * _over_ranks(self, amax)  # type: ignore[method-assign]
    if planted == TEXT:
        task = replace(task, text=replace(task.text, train=replace(task.text.train, start=1)))
    _begin(self, task, arm, *more)
    if planted == SHARE:
        self.together.share = 0
    if planted == WEIGHTS:
        with torch.no_grad():
            weight = next(iter(self._parameters.values())).view(-1)
            weight[5] = torch.nextafter(weight[5], torch.tensor(9.0))
    if planted == AVERAGE:
        assert isinstance(self.together, DataParallel)
        average = self.together.average

        def forgotten(gradients: Any, phase: Any) -> None:
            own = [one.clone() for one in gradients.filled()]
            average(gradients, phase)
            if self.step == KILLED_AT:
                torch._foreach_copy_(gradients.filled(), own)

        self.together.average = forgotten  # type: ignore[method-assign]


def _advanced(self: Trainer, *arguments: Any, **named: Any) -> Iterator[Line]:
    planted = self._task.seed if _RANK == 1 and self.arm.role == "candidate" else 0
    # One that is to die once leaves a word that it has.
    died = Path(os.environ.get("PLANTED_RANKS", "")) / f"died-{planted}"
    if self.step == KILLED_AT and (planted == KILLED_TWICE or (planted == KILLED and not died.exists())):
        if "PLANTED_RANKS" in os.environ:
            died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    yield from _advance(self, *arguments, **named)


SIZES.setdefault(TINY, SIZE)
if "RANK" in os.environ:
    Trainer.__init__ = _begun  # type: ignore[method-assign]
    Trainer.advance = _advanced  # type: ignore[method-assign]
