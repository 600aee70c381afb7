"""How one of several ranks trains the same model as the others: its share of a batch or of the model, and what they
tell each other.

Gradients are averaged after the last micro-batch and not behind backward, as torch's own DDP does: that one arranges
them anew after its first step, so that a training that was gone on with would add them in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8bench.features.train.lab.gradients import Gradients
from fp8bench.nn.gpt import LanguageModel
from fp8bench.nn.moments import bucketed
from fp8bench.nn.parallel.exchanges import Group
from fp8bench.nn.parallel.tensor_parallel import scaled_together
from fp8bench.protocols import Arithmetic, Phases, Role

# So many gradients travel together.
_MOST_ELEMENTS = 1 << 24
# So many values are multiplied by their places at a time.
_DIGESTED_ELEMENTS = 1 << 20


class Alone:
    """There are no others. The batch is cut into `shares` parts, and `share` is this rank's."""

    shares = 1
    share = 0

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

    def common(self, parameters: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
        """Those that all ranks must have alike."""
        return list(parameters.values())

    def faults(self) -> tuple[str, ...]:
        """What is wrong with what this rank has got of the others since it was asked last."""
        return ()


class Together(Alone):
    """Several ranks, which are a group."""

    def __init__(self, group: Group, own_amax: bool) -> None:
        self._group, self.shares_scales = group, not own_amax

    def _over_ranks(self, amax: Tensor) -> Tensor:
        """Infinite where it is NaN on any rank: a maximum of several need not keep that."""
        return self._group.largest(torch.where(amax.isnan(), torch.inf, amax))


class DataParallel(Together):
    """Every rank has the whole model, and reads an equal part of every micro-batch."""

    def __init__(self, group: Group, own_amax: bool) -> None:
        super().__init__(group, own_amax)
        self.shares, self.share = group.size, group.rank

    def scaled(self, layer: str, arithmetic: Arithmetic) -> Arithmetic:
        return scaled_together(arithmetic, Role, self._over_ranks) if self.shares_scales else arithmetic

    def mean(self, loss: Tensor) -> Tensor:
        return self._group.added(loss) / self.shares

    def average(self, gradients: Gradients, phase: Phases) -> None:
        found = gradients.filled()
        with phase.communication:
            for part in bucketed([one.numel() for one in found], _MOST_ELEMENTS):
                some = found[part]
                flat = torch.cat([one.reshape(-1) for one in some])
                dist.all_reduce(flat, group=self._group.handle)
                pieces = torch.split(flat / self.shares, [one.numel() for one in some])
                torch._foreach_copy_(some, [new.view_as(one) for new, one in zip(pieces, some, strict=True)])


def digest_of(tensors: Iterable[Tensor]) -> int:
    """A number of 63 bits that changes with any bit of float32 tensors, and with the place of each value in them."""
    total = place = 0
    for one in tensors:
        for part in torch.split(one.detach().reshape(-1), _DIGESTED_ELEMENTS):
            places = torch.arange(place, place + len(part), device=part.device)
            total += int(((2 * places + 1) * part.view(torch.int32)).sum())
            place += len(part)
    return total & ((1 << 63) - 1)
