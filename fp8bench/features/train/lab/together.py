"""Ranks that train one model together: how they divide a batch or the model, and what each sends.

Gradients are averaged after the last micro-batch, not during backward as in torch's DDP. DDP regroups them after its
first step, so that a resumed training would add them up in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.features.train.lab.low_precision import Gradients, Parameters, Tensors, gradient_of
from fp8bench.nn.gpt import GPT, LanguageModel
from fp8bench.nn.moments import split_into_buckets
from fp8bench.nn.parallel.exchanges import RankGroup
from fp8bench.nn.parallel.group_scales import cut_roles, scaled_together
from fp8bench.nn.parallel.tensor_parallel import share_blocks
from fp8bench.nn.parallel.ways import cut_of
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Arithmetic, Phases, Role, SilentPhases

# At most this many gradient values are sent together,
_MOST_ELEMENTS = 1 << 24
# and this many values of sharded weights or gradients: fewer, because a whole gradient is freed once it is sent.
_MOST_SHARDED = 1 << 22
_DIGESTED_ELEMENTS = 1 << 20
# Per rank, two sums of the same float32 numbers in different orders differ by at most this share of the sum of
# magnitudes: torch adds in blocks of fewer than 100 and then in pairs.
_ROUNDING = 2.0**-16

T = TypeVar("T")


class Alone:
    """A training by one rank. A batch is divided into `shares` parts, of which this rank reads number `share`."""

    shares = 1
    share = rank = 0

    def share_scales(self, layer: str, arithmetic: Arithmetic) -> Arithmetic:
        """Makes a layer's scales depend on the largest magnitudes of all ranks."""
        return arithmetic

    def take(self, model: LanguageModel) -> None:
        """Reduces a model to what this rank computes."""

    def own(self, parameters: Parameters) -> Parameters:
        """Returns the part of each parameter that this rank keeps and updates."""
        return parameters

    @contextmanager
    def present(self, phase: Phases) -> Iterator[None]:
        """Gives the model's parameters their values during the body: for one step, or one validation."""
        yield

    def refresh(self, phase: Phases) -> None:
        """Gives the model's parameters their new values, after an update inside `present`."""

    def mean(self, loss: Tensor) -> Tensor:
        """Returns the mean over all ranks."""
        return loss

    def average(self, gradients: Gradients, phase: Phases) -> None:
        """Averages gradients over all ranks, in place."""

    def norms(self, norms: Tensors) -> list[Tensor]:
        """Returns norms of whole parameters from those of this rank's parts, in the same order."""
        return list(norms)

    def mine(self, values: Sequence[T]) -> list[T]:
        """Selects, from one value per parameter, those of the parameters that this rank keeps."""
        return list(values)

    def common(self, parameters: Parameters) -> list[nn.Parameter]:
        """Returns the parameters that must be equal on all ranks."""
        return list(parameters.values())

    def faults(self) -> tuple[str, ...]:
        """Returns errors in what this rank received since the last call."""
        return ()


class Together(Alone):
    """Several ranks, which form a group."""

    def __init__(self, group: RankGroup) -> None:
        self._group, self.rank = group, group.rank

    def _over_ranks(self, amax: Tensor) -> Tensor:
        """Returns the maximum over ranks; infinite if it is NaN on any, because a maximum may drop a NaN."""
        return self._group.largest(torch.where(amax.isnan(), torch.inf, amax))


class DataParallel(Together):
    """Every rank has the whole model, and reads an equal part of every micro-batch."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group)
        self.shares, self.share = group.size, group.rank

    def share_scales(self, layer: str, arithmetic: Arithmetic) -> Arithmetic:
        return scaled_together(arithmetic, Role, self._over_ranks)

    def mean(self, loss: Tensor) -> Tensor:
        return self._group.add_over_ranks(loss) / self.shares

    def average(self, gradients: Gradients, phase: Phases) -> None:
        # A rank whose experts had no token still takes part in every exchange.
        all_gradients = gradients.fill()
        with phase.communication:
            for part in split_into_buckets([tensor.numel() for tensor in all_gradients], _MOST_ELEMENTS):
                tensors = all_gradients[part]
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
                dist.all_reduce(flat, group=self._group.handle)
                means = torch.split(flat / self.shares, [tensor.numel() for tensor in tensors])
                torch._foreach_copy_(tensors, [new.view_as(old) for new, old in zip(means, tensors, strict=True)])


def digest_of(tensors: Iterable[Tensor]) -> int:
    """Returns 63 bits that change with any bit of float32 tensors, and with the position of each value."""
    total = place = 0
    for tensor in tensors:
        for part in torch.split(tensor.detach().reshape(-1), _DIGESTED_ELEMENTS):
            places = torch.arange(place, place + len(part), device=part.device)
            total += int(((2 * places + 1) * part.view(torch.int32)).sum())
            place += len(part)
    return total & ((1 << 63) - 1)


class FullySharded(DataParallel):
    """Every rank reads an equal part of every micro-batch, and keeps and updates an equal number of rows of each
    weight, padded with zeros. Whole weights exist only during a step. Unlike torch's fully_shard, which works on
    modules with DTensors, a step casts all weights once, and checkpoints and AdamW's kernels take plain tensors."""

    def own(self, parameters: Parameters) -> Parameters:
        self._wholes = list(parameters.values())
        self._bytes = [weight.untyped_storage().nbytes() for weight in self._wholes]
        self._own = [nn.Parameter(self._rows_by_rank(weight.detach())[self.share].clone()) for weight in self._wholes]
        self._buckets = list(
            split_into_buckets([parameter.numel() * self.shares for parameter in self._own], _MOST_SHARDED)
        )
        self._wrong = torch.zeros((), dtype=torch.bool, device=self._wholes[0].device)
        self._release()
        return dict(zip(parameters, self._own, strict=True))

    def _rows_by_rank(self, tensor: Tensor) -> Tensor:
        """Returns a view (ranks, rows per rank, ...)."""
        rows = -(-len(tensor) // self.shares)
        if missing := rows * self.shares - len(tensor):
            tensor = F.pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, missing])
        return tensor.view(self.shares, rows, *tensor.shape[1:])

    @contextmanager
    def present(self, phase: Phases) -> Iterator[None]:
        with phase.communication:
            for weight, size in zip(self._wholes, self._bytes, strict=True):
                weight.untyped_storage().resize_(size)
        try:
            self.refresh(phase)
            yield
        finally:
            self._release()

    def _release(self) -> None:
        for weight in self._wholes:
            weight.grad = None
            weight.untyped_storage().resize_(0)

    def refresh(self, phase: Phases) -> None:
        with phase.communication:
            for part in self._buckets:
                rows_kept = [parameter.detach().reshape(-1) for parameter in self._own[part]]
                pieces = torch.split(self._group.all_parts(torch.cat(rows_kept)), list(map(len, rows_kept)), 1)
                for weight, rows in zip(self._wholes[part], pieces, strict=True):
                    weight.detach().copy_(rows.reshape(-1, *weight.shape[1:])[: len(weight)])

    def average(self, gradients: Gradients, phase: Phases) -> None:
        """Gives each rank the mean of its rows; the gradients of whole parameters are freed."""
        sums = []
        with phase.communication:
            for part in self._buckets:
                rows = torch.cat(
                    [self._rows_by_rank(gradient_of(parameter)).flatten(1) for parameter in self._wholes[part]], 1
                )
                for parameter in self._wholes[part]:
                    parameter.grad = None
                # Sums and magnitudes are sent separately, and show later whether rows arrived unchanged.
                sums.append(torch.stack((rows.sum(1), torch.linalg.vector_norm(rows, 1, 1))))
                rows_kept, mean = self._own[part], self._group.own_part(rows) / self.shares
                for parameter, piece in zip(
                    rows_kept, torch.split(mean, [parameter.numel() for parameter in rows_kept]), strict=True
                ):
                    parameter.grad = piece.view_as(parameter)
            self._check(torch.stack(sums))

    def _check(self, sums: Tensor) -> None:
        """Compares what this rank received with sums that were sent separately: no other rank has these rows."""
        # The order of a float sum changes its rounding: the bound follows from the magnitudes.
        expected_sums = self._group.add_over_ranks(sums)[:, :, self.share] / self.shares
        for part, (expected, size) in zip(self._buckets, expected_sums, strict=True):
            received = torch.stack([gradient_of(parameter).sum() for parameter in self._own[part]]).sum()
            difference = (received - expected).abs()
            self._wrong |= difference.isfinite() & (difference > _ROUNDING * self.shares * size)

    def norms(self, norms: Tensors) -> list[Tensor]:
        squares = self._group.add_over_ranks(torch.stack(list(norms)).to(torch.float64).square())
        return list(squares.sqrt().to(torch.float32))

    def faults(self) -> tuple[str, ...]:
        """Like the base class; parameters must be present."""
        wrong, self._wrong = bool(self._wrong), torch.zeros_like(self._wrong)
        cut = [self._rows_by_rank(weight.detach())[self.share] for weight in self._wholes]
        gathered, rows = map(_bits, cut), map(_bits, self._own)
        faults = (
            (wrong, "received gradients for its rows that are not the mean of what all ranks sent"),
            (not all(map(torch.equal, gathered, rows)), "does not find its own rows in the gathered weights"),
        )
        return tuple(text for is_wrong, text in faults if is_wrong)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.int32)


class TensorParallel(Together):
    """Each rank has some heads and hidden features of every block, and reads whole batches. Between the parts of a
    block all ranks have bit-identical values, so that a wrong sum on one of them is detected."""

    def __init__(self, group: RankGroup, config: GPTConfig) -> None:
        super().__init__(group)
        self._config = config

    def share_scales(self, layer: str, arithmetic: Arithmetic) -> Arithmetic:
        """Makes scales depend on all ranks if a tensor is divided; of other tensors every rank has the same
        magnitudes."""
        cut = cut_of(f"{layer}.weight", self._config)
        roles = cut_roles(cut) if cut is not None else tuple(Role) if ".core." in layer else ()
        return scaled_together(arithmetic, roles, self._over_ranks) if roles else arithmetic

    def take(self, model: LanguageModel) -> None:
        """Keeps only this rank's share of every block."""
        assert isinstance(model, GPT)
        share_blocks(model, self._config, self._group)

    def own(self, parameters: Parameters) -> Parameters:
        self._cut = torch.tensor([cut_of(name, self._config) is not None for name in parameters])
        return parameters

    @contextmanager
    def present(self, phase: Phases) -> Iterator[None]:
        self._group.phase = phase
        try:
            yield
        finally:
            self._group.phase = SilentPhases()

    def norms(self, norms: Tensors) -> list[Tensor]:
        """Returns norms of divided parameters over all shares; parameters that all ranks have count once."""
        stacked = torch.stack(list(norms))
        added = self._group.add_over_ranks(stacked.to(torch.float64).square()).sqrt().to(torch.float32)
        return list(torch.where(self._cut.to(stacked.device).repeat(len(stacked) // len(self._cut)), added, stacked))

    def common(self, parameters: Parameters) -> list[nn.Parameter]:
        return [parameter for parameter, cut in zip(parameters.values(), self._cut.tolist(), strict=True) if not cut]
