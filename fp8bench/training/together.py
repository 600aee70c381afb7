"""How one of several ranks trains the same model as the others: its share of a batch, and what is averaged over them.

Gradients are averaged after the last micro-batch and not behind backward, as torch's own DDP does: that one arranges
them anew after its first step, so that a training that was gone on with would add them in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8bench.model import DeviceFacts
from fp8bench.model.training import TrainerSettings
from fp8bench.nn.moments import bucketed
from fp8bench.nn.parallel.amax_groups import Largest
from fp8bench.protocols import Phases
from fp8bench.training.gradients import Gradients

# So many gradients travel together.
_MOST_ELEMENTS = 1 << 24


class Alone:
    """There are no others. The batch is cut into `shares` parts, and `share` is this rank's."""

    shares = 1
    share = 0

    def mean(self, loss: Tensor) -> Tensor:
        """Over all ranks, of the losses of their shares."""
        return loss

    def average(self, gradients: Gradients, phase: Phases) -> None:
        """Over all ranks, where they lie."""

    @property
    def largest(self) -> Largest | None:
        """What makes the largest magnitude of all ranks of each rank's own; None where that is its own."""
        return None


class DataParallel(Alone):
    """Every rank has the whole model, and reads an equal part of every micro-batch."""

    def __init__(self, own_amax: bool) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.shares, self.share = dist.get_world_size(), dist.get_rank()
        self._own_amax = own_amax

    def mean(self, loss: Tensor) -> Tensor:
        total = loss.clone()
        self._dist.all_reduce(total)
        return total / self.shares

    def average(self, gradients: Gradients, phase: Phases) -> None:
        found = gradients.filled()
        with phase.communication:
            for part in bucketed([one.numel() for one in found], _MOST_ELEMENTS):
                some = found[part]
                flat = torch.cat([one.reshape(-1) for one in some])
                self._dist.all_reduce(flat)
                pieces = torch.split(flat / self.shares, [one.numel() for one in some])
                torch._foreach_copy_(some, [new.view_as(one) for new, one in zip(pieces, some, strict=True)])

    @property
    def largest(self) -> Largest | None:
        return None if self._own_amax else self._over_ranks

    def _over_ranks(self, amax: Tensor) -> Tensor:
        """NaN where it is one on any rank: a maximum of several need not keep it."""
        finite = torch.where(amax.isnan(), torch.inf, amax).reshape(1)
        self._dist.all_reduce(finite, self._dist.ReduceOp.MAX)
        return finite.reshape(())


def together_of(settings: TrainerSettings, facts: DeviceFacts) -> Alone:
    """As settings and the number of ranks have it."""
    return Alone() if facts.ranks == 1 else DataParallel(own_amax=settings.amax_group == "own")


def digest_of(tensors: Sequence[Tensor]) -> int:
    """A number of 63 bits that changes with any bit of float32 tensors."""
    total = torch.zeros((), dtype=torch.int64)
    for place, one in enumerate(tensors):
        bits = one.detach().contiguous().view(torch.int32)
        total = total + (2 * place + 1) * bits.sum(dtype=torch.int64).to("cpu")
    return int(total) & ((1 << 63) - 1)
