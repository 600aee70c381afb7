"""ZeRO by whole tensors: each weight has one rank that keeps and updates it, and travels whole, with a scale of its own
where it does so in FP8."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.optimizer import Gradients, gradient_of
from fp8bench.features.train.lab.samples import alike, as_sent, sampled, wrong_means
from fp8bench.features.train.lab.together import FullySharded, T
from fp8bench.nn.parallel.exchanges import OwnedTensors, RankGroup
from fp8bench.protocols import Phases

# Of steps that nobody asks about, as where memory is measured, the last ones.
_MOST_STEPS = 64


class ZeroTensors(FullySharded):
    """Every rank reads an equal part of every micro-batch, and keeps and updates whole weights, as FP8-LM divides them.

    What `wire` says goes to owners and comes from them: all ranks, the owner too, compute a step with the weights as
    they were sent. After a slice some numbers of every gradient in each of its steps, and of every weight, are held
    against what all ranks have brought, rounded by the definition: in FP8 to the bit.
    """

    def __init__(self, group: RankGroup, own_amax: bool, wire: str) -> None:
        super().__init__(group, own_amax)
        self._wire = wire
        # Of each step some numbers of all tensors that this rank has brought, and of the means that it was given.
        self._seen, self._turn = deque[tuple[Tensor, Tensor]](maxlen=_MOST_STEPS), 0

    def own(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        self._wholes, self._names = list(parameters.values()), list(parameters)
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
        self._owned.put(
            [parameter.detach() for parameter in self._own], [whole.detach() for whole in self._wholes], phase
        )

    def average(self, gradients: Gradients, phase: Phases) -> None:
        found, turn = [gradient_of(whole) for whole in self._wholes], self._turn
        brought = _rows(found, turn)
        means = self._owned.means(found, phase)
        for whole in self._wholes:
            whole.grad = None
        for parameter, mean in zip(self._own, means, strict=True):
            parameter.grad = mean
        gradients.given()
        self._seen.append((brought, _rows(means, turn)[:, 1:]))
        self._turn += 1

    def norms(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Each is its owner's; several figures of all parameters come one behind the other."""
        squares = torch.stack(list(own)).to(torch.float64).square().view(-1, len(self._own))
        every = squares.new_zeros(len(squares), len(self._wholes))
        every[:, self.mine(range(len(self._wholes)))] = squares
        return list(self._group.added(every).sqrt().to(torch.float32).flatten())

    def faults(self) -> tuple[str, ...]:
        """Asked while parameters are present."""
        seen = list(self._seen)
        self._seen.clear()
        place = torch.tensor(self.mine(range(len(self._wholes))))
        words = []
        if seen:
            brought, got = map(torch.stack, zip(*seen, strict=True))
            wrong = self._apart_from_mean(got, torch.stack(self._group.everybodys(brought))[:, :, place])
            words.append(self._said("was given a gradient that is not the mean of what all have brought", wrong, place))
        theirs = torch.stack(self._group.everybodys(self._own_numbers(place)))
        kept = theirs[torch.tensor(self._owned.owners), torch.arange(len(self._wholes))]
        numbers = _rows([whole.detach() for whole in self._wholes], 0)[:, 1:]
        wrong = ~alike(numbers, as_sent(kept[:, 1:], kept[:, :1], self._wire))
        words.append(self._said("has a weight that is not what its owner has sent", wrong, torch.arange(len(wrong))))
        return tuple(filter(None, words))

    def _own_numbers(self, place: Tensor) -> Tensor:
        """Of all weights, zeros in the place of others'."""
        own = _rows([parameter.detach() for parameter in self._own], 0)
        every = own.new_zeros(len(self._wholes), own.shape[1])
        every[place.to(own.device)] = own
        return every

    def _said(self, words: str, wrong: Tensor, place: Tensor) -> str:
        """Names the first tensor that is."""
        tensors = wrong.any(-1).view(-1, len(place)).any(0).nonzero().flatten().tolist()
        return f"{words}: {self._names[int(place[tensors[0]])]}" if tensors else ""

    def _apart_from_mean(self, got: Tensor, brought: Tensor) -> Tensor:
        """Of (steps, tensors, numbers) those that are not the mean of (ranks, steps, tensors, amax and numbers)."""
        amax, numbers = brought[..., :1].amax(0), brought[..., 1:]
        return wrong_means(got, numbers, amax, self._wire)


def _rows(tensors: Sequence[Tensor], turn: int) -> Tensor:
    """Of each tensor its largest magnitude and some of its numbers."""
    return torch.stack([sampled(tensor, turn) for tensor in tensors])
