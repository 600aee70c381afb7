"""Imported by ranks: makes rank 1 train something else than rank 0, or die, where the seed says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fp8bench.features.train.lab.sequence_parallel import SequenceParallel
from fp8bench.features.train.lab.together import DataParallel, FullySharded, TensorParallel
from fp8bench.features.train.lab.trainer import Trainer
from fp8bench.features.train.lab.zero import ZeroTensors
from fp8bench.features.train.values import Arm, SeedTask, StreamLine
from fp8bench.nn.parallel.exchanges import RankGroup
from fp8bench.nn.sizes import SIZES
from fp8bench.nn.tensor_scales import backward_is_running
from fp8bench.numerics import fp8_reduce
from tests.features.train.lab.labs import TINY
from tests.features.train.lab.plants import (
    AVERAGE,
    CUT,
    FOUR_HEADS,
    KILLED,
    KILLED_AT,
    KILLED_TWICE,
    NAN_IN_GRADIENT,
    NAN_IN_OUTPUT,
    SCALES,
    SEED,
    SHARE,
    SIZE,
    SIZE_OF_FOUR,
    SWAP,
    TEXT,
    WEIGHTS,
    WIRE,
)

_RANK = int(os.environ.get("RANK", "0"))
_begin, _advance, _take, _own = Trainer.__init__, Trainer.advance, TensorParallel.take, FullySharded.own


def _begun(self: Trainer, task: SeedTask, arm: Arm, *more: Any) -> None:
    planted = task.seed if _RANK == 1 and arm.role == "candidate" else 0
    if planted == SEED:
        task = replace(task, seed=1)
    if planted == SCALES:
        _double(DataParallel)
        _double(TensorParallel)
    if planted == CUT:
        TensorParallel.take = _misplaced  # type: ignore[method-assign]
    if planted == TEXT:
        task = replace(task, text=replace(task.text, train=replace(task.text.train, start=1)))
    FullySharded.own = _swapped if task.seed == SWAP else _own  # type: ignore[method-assign]
    _begin(self, task, arm, *more)
    if planted == SHARE:
        self.together.share = 0
    if planted == WEIGHTS:
        _spoil_weights(self)
    if planted == AVERAGE:
        _spoil_average(self)
    if planted in (NAN_IN_OUTPUT, NAN_IN_GRADIENT):
        _spoil_step(self, planted == NAN_IN_OUTPUT)
    if planted == WIRE:
        _spoil_wire(self)


def _spoil_wire(self: Trainer) -> None:
    """What it sends in FP8 is by twice the scale that its values ask for."""
    together: Any = self.together
    wire = together._owned.fp8 if isinstance(together, ZeroTensors) else together.stream.wire
    own, result = fp8_reduce.largest_scale, wire._result

    def wrong(*given: Any) -> Any:
        fp8_reduce.largest_scale = lambda amax: own(amax) * 2
        try:
            return result(*given)
        finally:
            fp8_reduce.largest_scale = own

    wire._result = wrong


def _double(kind: type[DataParallel] | type[TensorParallel]) -> None:
    """Every largest magnitude that this rank has got."""
    largest: Any = kind._over_ranks
    kind._over_ranks = lambda self, amax: 2 * largest(self, amax)  # type: ignore[method-assign]


def _swapped(self: FullySharded, parameters: Any) -> Any:
    """Both ranks keep each other's rows."""
    place, self.share = self.share, 1 - self.share
    kept = _own(self, parameters)
    self.share = place
    return kept


def _misplaced(self: TensorParallel, model: Any) -> None:
    """It takes the share of rank 0."""
    shared = getattr(self, "stream", self._group)
    place, shared.rank = shared.rank, 0
    _take(self, model)
    shared.rank = place


def _spoil_weights(self: Trainer) -> None:
    """What it keeps of them, or what it gets of the others'."""
    if not isinstance(self.together, FullySharded):
        _move(self)
        return
    gathered = self.together.updated

    def misheard(phase: Any) -> None:
        gathered(phase)
        _move(self)

    self.together.updated = misheard  # type: ignore[method-assign]


def _spoil_average(self: Trainer) -> None:
    """In one step it takes its own gradients for those of all."""
    together = self.together
    if isinstance(together, SequenceParallel):
        summed = RankGroup.own_part

        def alone(group: RankGroup, parts: torch.Tensor) -> torch.Tensor:
            whole = summed(group, parts)
            return parts[group.rank] if self.step == KILLED_AT and backward_is_running() else whole

        RankGroup.own_part = alone  # type: ignore[method-assign]
        return
    if isinstance(together, TensorParallel):
        added = together._group.added

        def own(x: torch.Tensor) -> torch.Tensor:
            whole = added(x)
            return x if self.step == KILLED_AT and backward_is_running() else whole

        together._group.added = own  # type: ignore[method-assign]
        return
    assert isinstance(together, DataParallel)
    if isinstance(together, ZeroTensors):
        means = together._owned.means

        def by_itself(gradients: Any, phase: Any) -> Any:
            own = [one.clone() for one in together.mine(gradients)]
            found = means(gradients, phase)
            return own if self.step == KILLED_AT else found

        together._owned.means = by_itself  # type: ignore[method-assign]
        return
    if isinstance(together, FullySharded):
        scattered = together._group.own_part

        def kept(every: torch.Tensor) -> torch.Tensor:
            whole = scattered(every)
            return every[together.share] * together.shares if self.step == KILLED_AT else whole

        together._group.own_part = kept  # type: ignore[method-assign]
        return
    average = together.average

    def forgotten(gradients: Any, phase: Any) -> None:
        own = [one.clone() for one in gradients.filled()]
        average(gradients, phase)
        if self.step == KILLED_AT:
            torch._foreach_copy_(gradients.filled(), own)

    together.average = forgotten  # type: ignore[method-assign]


def _spoil_step(trainer: Trainer, output: bool) -> None:
    """Every time that it takes the step."""

    def spoilt(x: torch.Tensor) -> torch.Tensor:
        return x * torch.nan if trainer.step == KILLED_AT else x

    layer = trainer._model.get_submodule("blocks.0.mlp.up")
    if output:
        layer.register_forward_hook(lambda module, given, x: spoilt(x))
    else:
        layer.get_parameter("weight").register_hook(spoilt)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _move(trainer: Trainer) -> None:
    """One weight, by a bit."""
    weight = next(iter(trainer._parameters.values())).view(-1)
    weight[5] = torch.nextafter(weight[5], torch.tensor(9.0))


def _advanced(self: Trainer, *arguments: Any, **named: Any) -> Iterator[StreamLine]:
    planted = self._task.seed if _RANK == 1 and self.arm.role == "candidate" else 0
    # One that is to die once leaves a word that it has.
    died = Path(os.environ.get("PLANTED_RANKS", "")) / f"died-{planted}"
    if self.step == KILLED_AT and (planted == KILLED_TWICE or (planted == KILLED and not died.exists())):
        if "PLANTED_RANKS" in os.environ:
            died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    yield from _advance(self, *arguments, **named)


SIZES.setdefault(TINY, SIZE)
SIZES.setdefault(FOUR_HEADS, SIZE_OF_FOUR)
if "RANK" in os.environ:
    Trainer.__init__ = _begun  # type: ignore[method-assign]
    Trainer.advance = _advanced  # type: ignore[method-assign]
