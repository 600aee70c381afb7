"""How one of several ranks trains the same model as the others: its share of a batch or of the model, and what they
tell each other.

Gradients are averaged after the last micro-batch and not behind backward, as torch's own DDP does: that one arranges
them anew after its first step, so that a training that was gone on with would add them in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.features.train.lab.optimizer import Gradients, gradient_of
from fp8bench.nn.gpt import GPT, LanguageModel
from fp8bench.nn.moments import bucketed
from fp8bench.nn.parallel.exchanges import RankGroup
from fp8bench.nn.parallel.tensor_parallel import cut_roles, scaled_together, share_blocks
from fp8bench.nn.parallel.ways import cut_of
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Arithmetic, Phases, Role, SilentPhases

# So many gradients travel together.
_MOST_ELEMENTS = 1 << 24
# So many numbers are put together, or taken apart, at a time: whole gradients go as they come to that.
_MOST_SHARDED = 1 << 22
# So many values are multiplied by their places at a time.
_DIGESTED_ELEMENTS = 1 << 20
# Two sums of the same float32 numbers, in other orders, are nearer than this share of the sum of their magnitudes, for
# each rank: torch adds in blocks of fewer than 100 and then in pairs.
_ROUNDING = 2.0**-16


T = TypeVar("T")


class Alone:
    """There are no others. The batch is cut into `shares` parts, and `share` is this rank's."""

    shares = 1
    share = rank = 0
    shares_scales = False

    def scaled(self, layer: str, arithmetic: Arithmetic) -> Arithmetic:
        """A layer's, by its path in the model, whose scales come from all ranks' largest magnitudes where they are
        shared."""
        return arithmetic

    def take(self, model: LanguageModel) -> None:
        """Leave of a model what this rank computes."""

    def own(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        """What this rank keeps and updates of each."""
        return parameters

    @contextmanager
    def present(self, phase: Phases) -> Iterator[None]:
        """The model's parameters have their values in the body, which is of one step, or looks at the model."""
        yield

    def updated(self, phase: Phases) -> None:
        """What is kept of the parameters was changed, and somebody looks at them before the body ends."""

    def mean(self, loss: Tensor) -> Tensor:
        """Over all ranks, of the losses of their shares."""
        return loss

    def average(self, gradients: Gradients, phase: Phases) -> None:
        """Over all ranks, where they lie."""

    def norms(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Of whole parameters, or what is like them, from those of what this rank has of each; in their order."""
        return list(own)

    def mine(self, some: Sequence[T]) -> list[T]:
        """Of what there is for each parameter that of those which this rank keeps."""
        return list(some)

    def common(self, parameters: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
        """Those that all ranks must have alike."""
        return list(parameters.values())

    def faults(self) -> tuple[str, ...]:
        """What is wrong with what this rank has got of the others since it was asked last."""
        return ()


class Together(Alone):
    """Several ranks, which are a group."""

    def __init__(self, group: RankGroup, own_amax: bool) -> None:
        self._group, self.rank, self.shares_scales = group, group.rank, not own_amax

    def _over_ranks(self, amax: Tensor) -> Tensor:
        """Infinite where it is NaN on any rank: a maximum of several need not keep that."""
        return self._group.largest(torch.where(amax.isnan(), torch.inf, amax))


class DataParallel(Together):
    """Every rank has the whole model, and reads an equal part of every micro-batch."""

    def __init__(self, group: RankGroup, own_amax: bool) -> None:
        super().__init__(group, own_amax)
        self.shares, self.share = group.size, group.rank

    def scaled(self, layer: str, arithmetic: Arithmetic) -> Arithmetic:
        return scaled_together(arithmetic, Role, self._over_ranks) if self.shares_scales else arithmetic

    def mean(self, loss: Tensor) -> Tensor:
        return self._group.added(loss) / self.shares

    def average(self, gradients: Gradients, phase: Phases) -> None:
        whole = gradients.filled()
        with phase.communication:
            for part in bucketed([tensor.numel() for tensor in whole], _MOST_ELEMENTS):
                some = whole[part]
                flat = torch.cat([tensor.reshape(-1) for tensor in some])
                dist.all_reduce(flat, group=self._group.handle)
                pieces = torch.split(flat / self.shares, [tensor.numel() for tensor in some])
                torch._foreach_copy_(some, [new.view_as(tensor) for new, tensor in zip(pieces, some, strict=True)])


def digest_of(tensors: Iterable[Tensor]) -> int:
    """A number of 63 bits that changes with any bit of float32 tensors, and with the place of each value in them."""
    total = place = 0
    for tensor in tensors:
        for part in torch.split(tensor.detach().reshape(-1), _DIGESTED_ELEMENTS):
            places = torch.arange(place, place + len(part), device=part.device)
            total += int(((2 * places + 1) * part.view(torch.int32)).sum())
            place += len(part)
    return total & ((1 << 63) - 1)


class FullySharded(DataParallel):
    """Every rank reads an equal part of every micro-batch, and keeps and updates equal rows of every weight.

    Whole weights are put together for as long as a step lasts, and between two steps nobody has them. torch's
    fully_shard does so block by block, with modules whose parameters are DTensors; here a step casts all weights at its
    beginning and uses them for all of its micro-batches, and plain tensors are what a checkpoint keeps and AdamW's
    kernels take. Rows that do not divide are filled up with zeros, which stay zeros.
    """

    def own(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        self._wholes = list(parameters.values())
        self._bytes = [whole.untyped_storage().nbytes() for whole in self._wholes]
        self._own = [nn.Parameter(self._cut(whole.detach())[self.share].clone()) for whole in self._wholes]
        self._buckets = list(bucketed([parameter.numel() * self.shares for parameter in self._own], _MOST_SHARDED))
        self._wrong = torch.zeros((), dtype=torch.bool, device=self._wholes[0].device)
        self._release()
        return dict(zip(parameters, self._own, strict=True))

    def _cut(self, whole: Tensor) -> Tensor:
        """(ranks, rows of each, ...)."""
        rows = -(-len(whole) // self.shares)
        if missing := rows * self.shares - len(whole):
            whole = F.pad(whole, [0, 0] * (whole.ndim - 1) + [0, missing])
        return whole.view(self.shares, rows, *whole.shape[1:])

    @contextmanager
    def present(self, phase: Phases) -> Iterator[None]:
        with phase.communication:
            for whole, size in zip(self._wholes, self._bytes, strict=True):
                whole.untyped_storage().resize_(size)
        try:
            self.updated(phase)
            yield
        finally:
            self._release()

    def _release(self) -> None:
        for whole in self._wholes:
            whole.grad = None
            whole.untyped_storage().resize_(0)

    def updated(self, phase: Phases) -> None:
        with phase.communication:
            for part in self._buckets:
                own = [parameter.detach().reshape(-1) for parameter in self._own[part]]
                pieces = torch.split(self._group.all_parts(torch.cat(own)), list(map(len, own)), 1)
                for whole, rows in zip(self._wholes[part], pieces, strict=True):
                    whole.detach().copy_(rows.reshape(-1, *whole.shape[1:])[: len(whole)])

    def average(self, gradients: Gradients, phase: Phases) -> None:
        """Of each rank's rows the mean is sent to it alone, and the gradients of whole parameters are let go."""
        sums = []
        with phase.communication:
            for part in self._buckets:
                every = torch.cat([self._cut(gradient_of(parameter)).flatten(1) for parameter in self._wholes[part]], 1)
                for parameter in self._wholes[part]:
                    parameter.grad = None
                sums.append(torch.stack((every.sum(1), torch.linalg.vector_norm(every, 1, 1))))
                self._take(self._own[part], self._group.own_part(every) / self.shares)
            self._check(torch.stack(sums))

    def _take(self, own: Sequence[nn.Parameter], mean: Tensor) -> None:
        for parameter, piece in zip(own, torch.split(mean, [parameter.numel() for parameter in own]), strict=True):
            parameter.grad = piece.view_as(parameter)

    def _check(self, sums: Tensor) -> None:
        """What this rank has got is held against sums of what all have brought for it, which travel apart: nobody else
        knows its share."""
        wanted_of = self._group.added(sums)[:, :, self.share] / self.shares
        for part, (wanted, size) in zip(self._buckets, wanted_of, strict=True):
            got = torch.stack([gradient_of(parameter).sum() for parameter in self._own[part]]).sum()
            apart = (got - wanted).abs()
            self._wrong |= apart.isfinite() & (apart > _ROUNDING * self.shares * size)

    def norms(self, own: Sequence[Tensor]) -> list[Tensor]:
        squares = self._group.added(torch.stack(list(own)).to(torch.float64).square())
        return list(squares.sqrt().to(torch.float32))

    def faults(self) -> tuple[str, ...]:
        """Asked while parameters are present."""
        wrong, self._wrong = bool(self._wrong), torch.zeros_like(self._wrong)
        placed = [self._cut(whole.detach())[self.share] for whole in self._wholes]
        put, own = ([tensor.detach().view(torch.int32) for tensor in some] for some in (placed, self._own))
        words = (
            (wrong, "was given gradients for its rows that are not the mean of what all ranks have brought"),
            (not all(map(torch.equal, put, own)), "does not find its own rows in the weights that were put together"),
        )
        return tuple(text for true, text in words if true)


class TensorParallel(Together):
    """Ranks have heads and hidden features of every block each, and read whole batches. What lies between the parts of
    the blocks all have and compute alike, bit for bit: a sum that one of them has not got shows there."""

    def __init__(self, group: RankGroup, config: GPTConfig, own_amax: bool) -> None:
        super().__init__(group, own_amax)
        self._config = config

    def scaled(self, layer: str, arithmetic: Arithmetic) -> Arithmetic:
        """By the largest magnitudes of all ranks where a tensor is cut; of the others every rank knows them."""
        cut = cut_of(f"{layer}.weight", self._config)
        roles = cut_roles(cut) if cut is not None else tuple(Role) if ".core." in layer else ()
        return scaled_together(arithmetic, roles, self._over_ranks) if roles and self.shares_scales else arithmetic

    def take(self, model: LanguageModel) -> None:
        """This rank's share of every block."""
        assert isinstance(model, GPT)
        share_blocks(model, self._config, self._group)

    def own(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        self._cut = torch.tensor([cut_of(name, self._config) is not None for name in parameters])
        return parameters

    @contextmanager
    def present(self, phase: Phases) -> Iterator[None]:
        self._group.phase = phase
        try:
            yield
        finally:
            self._group.phase = SilentPhases()

    def norms(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Of what is cut, of all shares; what all ranks have counts once."""
        each = torch.stack(list(own))
        whole = self._group.added(each.to(torch.float64).square()).sqrt().to(torch.float32)
        return list(torch.where(self._cut.to(each.device).repeat(len(each) // len(self._cut)), whole, each))

    def common(self, parameters: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
        return [parameter for parameter, cut in zip(parameters.values(), self._cut.tolist(), strict=True) if not cut]
