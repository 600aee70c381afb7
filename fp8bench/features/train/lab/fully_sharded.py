"""A training whose ranks keep equal rows of every weight, of its moments and of its gradient.

Whole weights are put together for as long as a step lasts, and between two steps nobody has them. torch's fully_shard
does so block by block, with modules whose parameters are DTensors; here a step casts all weights at its beginning and
uses them for all of its micro-batches, and plain tensors are what a checkpoint keeps and AdamW's kernels take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.features.train.lab.gradients import Gradients
from fp8bench.features.train.lab.together import DataParallel, digest_of
from fp8bench.nn.moments import bucketed
from fp8bench.protocols import Phases, SilentPhases

# So many numbers are put together, or taken apart, at a time: whole gradients go as they come to that.
_MOST_ELEMENTS = 1 << 22
# Two sums of the same float32 numbers, in other orders, are nearer than this share of the sum of their magnitudes, for
# each rank: torch adds in blocks of fewer than 100 and then in pairs.
_ROUNDING = 2.0**-16


class FullySharded(DataParallel):
    """Every rank reads an equal part of every micro-batch, and updates its rows of the model.

    Rows that do not divide are filled up with zeros, which stay zeros.
    """

    def own(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        self._wholes = list(parameters.values())
        self._bytes = [one.untyped_storage().nbytes() for one in self._wholes]
        self._own = [nn.Parameter(self._cut(one.detach())[self.share].clone()) for one in self._wholes]
        self._buckets = list(bucketed([one.numel() * self.shares for one in self._own], _MOST_ELEMENTS))
        self._wrong = torch.zeros((), dtype=torch.bool, device=self._wholes[0].device)
        self._misplaced = self._put_together()
        self._release()
        return dict(zip(parameters, self._own, strict=True))

    def _put_together(self) -> str:
        """Whose rows lie elsewhere once those of all ranks are put together: later on nobody has the whole model to
        compare."""
        wanted = self._digests()
        self.updated(SilentPhases())
        for place, (found, own) in enumerate(zip(self._digests(), wanted, strict=True)):
            if found != own:
                whose = f"those of rank {wanted.index(found)}" if found in wanted else "others"
                return f"finds {whose} in place of the rows of rank {place} in the weights that were put together"
        return ""

    def _digests(self) -> list[int]:
        """Of each rank's rows of the whole model."""
        return [digest_of(self._cut(one)[share] for one in self._wholes) for share in range(self.shares)]

    def _cut(self, whole: Tensor) -> Tensor:
        """(ranks, rows of each, ...)."""
        rows = -(-len(whole) // self.shares)
        if missing := rows * self.shares - len(whole):
            whole = F.pad(whole, [0, 0] * (whole.ndim - 1) + [0, missing])
        return whole.view(self.shares, rows, *whole.shape[1:])

    @contextmanager
    def present(self, phase: Phases) -> Iterator[None]:
        with phase.communication:
            for one, size in zip(self._wholes, self._bytes, strict=True):
                one.untyped_storage().resize_(size)
        try:
            self.updated(phase)
            yield
        finally:
            self._release()

    def _release(self) -> None:
        for one in self._wholes:
            one.grad = None
            one.untyped_storage().resize_(0)

    def updated(self, phase: Phases) -> None:
        with phase.communication:
            for part in self._buckets:
                own = [one.detach().reshape(-1) for one in self._own[part]]
                pieces = torch.split(self._group.all_parts(torch.cat(own)), list(map(len, own)), 1)
                for whole, rows in zip(self._wholes[part], pieces, strict=True):
                    whole.detach().copy_(rows.reshape(-1, *whole.shape[1:])[: len(whole)])

    def average(self, gradients: Gradients, phase: Phases) -> None:
        """Of each rank's rows the mean is sent to it alone, and the gradients of whole parameters are let go."""
        sums = []
        with phase.communication:
            for part in self._buckets:
                every = torch.cat([self._cut(_gradient(one)).flatten(1) for one in self._wholes[part]], 1)
                for one in self._wholes[part]:
                    one.grad = None
                sums.append(torch.stack((every.sum(1), torch.linalg.vector_norm(every, 1, 1))))
                self._take(self._own[part], self._group.own_part(every) / self.shares)
            self._check(torch.stack(sums))

    def _take(self, own: Sequence[nn.Parameter], mean: Tensor) -> None:
        for one, piece in zip(own, torch.split(mean, [one.numel() for one in own]), strict=True):
            one.grad = piece.view_as(one)

    def _check(self, sums: Tensor) -> None:
        """What this rank has got is held against sums of what all have brought for it, which travel apart: nobody else
        knows its share."""
        wanted_of = self._group.added(sums)[:, :, self.share] / self.shares
        for part, (wanted, size) in zip(self._buckets, wanted_of, strict=True):
            got = torch.stack([_gradient(one).sum() for one in self._own[part]]).sum()
            apart = (got - wanted).abs()
            self._wrong |= apart.isfinite() & (apart > _ROUNDING * self.shares * size)

    def norms(self, own: Sequence[Tensor]) -> list[Tensor]:
        squares = self._group.added(torch.stack(list(own)).to(torch.float64).square())
        return list(squares.sqrt().to(torch.float32))

    def faults(self) -> tuple[str, ...]:
        """Asked while parameters are present."""
        wrong, self._wrong = bool(self._wrong), torch.zeros_like(self._wrong)
        placed = [self._cut(one.detach())[self.share] for one in self._wholes]
        bits = zip(*([one.detach().view(torch.int32) for one in some] for some in (placed, self._own)), strict=True)
        lost = not all(torch.equal(one, own) for one, own in bits)
        words = {
            "was given gradients for its rows that are not the mean of what all ranks have brought": wrong,
            self._misplaced: bool(self._misplaced),
            "does not find its own rows in the weights that were put together": lost,
        }
        return tuple(one for one, true in words.items() if true)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Zeros where a step has found none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
