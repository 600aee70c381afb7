"""ZeRO by whole tensors: each weight has one rank that keeps and updates it, and travels whole, with a scale of its own
where it does so in FP8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.optimizer import Gradients, gradient_of
from fp8bench.features.train.lab.together import FullySharded, T
from fp8bench.nn.parallel.exchanges import RankGroup
from fp8bench.nn.parallel.owned import OwnedTensors
from fp8bench.numerics.fp8_reduce import Pieces, mean_of_tensors, tensors_transported
from fp8bench.numerics.rank_programs import simulated
from fp8bench.protocols import Phases

# Of the sum of magnitudes, what additions in other orders may come to, for each rank.
_ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7}


class ZeroTensors(FullySharded):
    """Every rank reads an equal part of every micro-batch, and keeps and updates whole weights, as FP8-LM divides them.

    What `wire` says goes to owners and comes from them: all ranks, the owner too, compute a step with the weights as
    they were sent. After a slice one tensor of its last step is held against what all ranks have brought of it.
    """

    def __init__(self, group: RankGroup, own_amax: bool, wire: str) -> None:
        super().__init__(group, own_amax)
        self._wire, self._steps = wire, 0
        # The place of a tensor, this rank's gradient of it, and the mean if this rank owns it.
        self._sample: tuple[int, Tensor, Tensor | None] | None = None

    def own(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        self._wholes = list(parameters.values())
        if len(self._wholes) < self.shares:
            raise UsageError(
                f"--parallel zero: {self.shares} ranks have no weight each, there are {len(self._wholes)}. Give fewer "
                "--ranks."
            )
        self._bytes = [whole.untyped_storage().nbytes() for whole in self._wholes]
        self._owned = OwnedTensors(self._group, [whole.numel() for whole in self._wholes], self._wire)
        self._own = [nn.Parameter(whole.detach().clone()) for whole in self.mine(self._wholes)]
        self._release()
        return dict(zip(self.mine(list(parameters)), self._own, strict=True))

    def mine(self, some: Sequence[T]) -> list[T]:
        return self._owned.own(some)

    def updated(self, phase: Phases) -> None:
        self._owned.put([one.detach() for one in self._own], [whole.detach() for whole in self._wholes], phase)

    def average(self, gradients: Gradients, phase: Phases) -> None:
        found = [gradient_of(whole) for whole in self._wholes]
        place = self._steps % len(found)
        brought = found[place].clone()
        means = self._owned.means(found, phase)
        for whole in self._wholes:
            whole.grad = None
        for one, mean in zip(self._own, means, strict=True):
            one.grad = mean
        own = dict(zip(self.mine(range(len(found))), self._own, strict=True))
        got = gradient_of(own[place]).clone() if place in own else None
        self._sample, self._steps = (place, brought, got), self._steps + 1

    def norms(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Each is its owner's; several figures of all parameters come one behind the other."""
        squares = torch.stack(list(own)).to(torch.float64).square().view(-1, len(self._own))
        every = squares.new_zeros(len(squares), len(self._wholes))
        every[:, self.mine(range(len(self._wholes)))] = squares
        return list(self._group.added(every).sqrt().to(torch.float32).flatten())

    def faults(self) -> tuple[str, ...]:
        """Asked while parameters are present."""
        if self._sample is None:
            return ()
        (place, brought, got), self._sample = self._sample, None
        owner, whole = self._owned.owners[place], self._wholes[place].detach()
        own = dict(zip(self.mine(range(len(self._wholes))), self._own, strict=True))
        kept = self._group.everybodys(own[place].detach() if place in own else torch.zeros_like(whole))[owner]
        brought_by_all = self._group.everybodys(brought)
        words = []
        if got is not None and not self._is_mean(got, brought_by_all):
            words.append(f"was given a gradient (tensor {place}) that is not the mean of what all ranks have brought")
        if not _alike(whole, self._as_sent(kept)):
            words.append(f"has a weight (tensor {place}) that is not what its owner, rank {owner}, has sent")
        return tuple(words)

    def _is_mean(self, got: Tensor, brought: Sequence[Tensor]) -> bool:
        ranks = range(self.shares)
        if self._owned.fp8 is not None:
            pieces = [Pieces([got.numel()], 1)] * self.shares
            rows = [one.flatten().expand(self.shares, -1) for one in brought]
            means = simulated([mean_of_tensors(rows[rank], rank, pieces) for rank in ranks])
            return _alike(got, means[0].view_as(got))
        sent = torch.stack([one.to(self._owned.sent_as).to(torch.float32) for one in brought])
        apart = (got - sent.mean(0)).abs()
        most = _ROUNDING[self._owned.sent_as] * self.shares * sent.abs().mean(0)
        return not bool((apart.isfinite() & (apart > most)).any())

    def _as_sent(self, kept: Tensor) -> Tensor:
        if self._owned.fp8 is None:
            return kept.to(self._owned.sent_as).to(torch.float32)
        pieces, row = [Pieces([kept.numel()], 1)] * self.shares, kept.flatten()
        every = simulated([tensors_transported(row, rank, pieces) for rank in range(self.shares)])[0]
        return every[: kept.numel()].view_as(kept)


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
