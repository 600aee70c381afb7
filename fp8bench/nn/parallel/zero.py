"""Every rank has the whole model and its share of a batch; each weight is updated by its owner alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fp8bench.nn.parallel.alone import AloneModel
from fp8bench.nn.parallel.model import HeldModel, ParallelModel, share
from fp8bench.nn.parallel.way import Job
from fp8bench.nn.parallel.witness import Witness
from fp8bench.protocols import Phases


class ZeroModel(AloneModel):
    """Gradients go to their owners, and updated weights from them to all."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.make(), job.loss_scale)
        self.group = job.group
        self._all_names, self._all_weights = self.names, self.weights
        self._owners = owners([one.numel() for one in self.weights], self.group.size())
        self._mine = [place for place, owner in enumerate(self._owners) if owner == self.group.rank()]
        self.names = [self._all_names[place] for place in self._mine]
        self.weights = [self._all_weights[place] for place in self._mine]
        self.sharded = [True] * len(self._mine)

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        loss = super().loss(share(tokens, self.group), share(targets, self.group), phase)
        with phase.communication:
            gradients = [one.grad for one in self.parameters if one.grad is not None]
            pairs = zip(gradients, self._owners, strict=True)
            works = [dist.reduce(one, group=self.group, group_dst=owner, async_op=True) for one, owner in pairs]
            for work in filter(None, works):
                work.wait()
        for parameter, owner in zip(self.parameters, self._owners, strict=True):
            if owner != self.group.rank():
                parameter.grad = None
        torch._foreach_div_(super().gradients(), self.group.size())
        return loss

    def updated(self, phase: Phases) -> None:
        with phase.communication:
            pairs = zip(self._all_weights, self._owners, strict=True)
            works = [dist.broadcast(one, group=self.group, group_src=owner, async_op=True) for one, owner in pairs]
            for work in filter(None, works):
                work.wait()

    def full_weights(self) -> dict[str, Tensor]:
        return dict(zip(self._all_names, self._all_weights, strict=True))

    def witnesses(self) -> list[Witness]:
        return HeldModel.witnesses(self)

    def whole_loss(self, loss: Tensor) -> Tensor:
        return ParallelModel.whole_loss(self, loss)


def owners(elements: Sequence[int], ranks: int) -> list[int]:
    """For each tensor the rank that owns it: the largest first, each to whoever has least so far."""
    owned, found = [0] * ranks, [0] * len(elements)
    for place in sorted(range(len(elements)), key=lambda one: (-elements[one], one)):
        found[place] = owned.index(min(owned))
        owned[found[place]] += elements[place]
    return found
