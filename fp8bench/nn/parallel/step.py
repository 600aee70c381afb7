"""A training step of a rank's part of a model, and what its parts take by themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.model import DeviceFacts, MemoryRole
from fp8bench.nn.batches import TokenLoader
from fp8bench.nn.parallel.model import ParallelModel
from fp8bench.nn.training_step import adamw
from fp8bench.protocols import Phases, SilentPhases

_RATE = 3e-4
# Of steps that are held against one rank's: gradients as they are, where AdamW would take their scale out again, and
# would make as much of a gradient that should be zero as of any other.
_PLAIN_RATE = 0.05


class Update(NamedTuple):
    """Of what steps of ranks have changed in a weight, beside those of one rank: the square of the distance, that of
    one rank's change, and the product of both."""

    distance: float
    wanted: float
    product: float

    @property
    def error(self) -> float:
        """The relative distance."""
        return (self.distance / self.wanted) ** 0.5 if self.wanted else math.inf if self.distance else 0.0

    @property
    def gain(self) -> float:
        """How many times one rank's change is in it: noise falls out, what is added twice does not."""
        return self.product / self.wanted if self.wanted else 1.0


@dataclass(frozen=True)
class Apart:
    """How far ranks are from one alone: the largest distances of a loss and of a weight, and what steps changed in each
    weight."""

    loss: float
    weight: float
    updates: Mapping[str, Update]

    @property
    def update(self) -> Update:
        """Of all weights."""
        return Update(*map(sum, zip(*self.updates.values(), strict=True)))

    @property
    def furthest(self) -> tuple[str, Update]:
        """The weight whose change is furthest away, relatively."""
        return max(self.updates.items(), key=lambda one: one[1].error)

    def figures(self) -> dict[str, float]:
        """All are zero where every bit is the same."""
        return {
            "loss_gap": self.loss, "weight_gap": self.weight, "update_error": self.update.error,
            "furthest_error": self.furthest[1].error, "gain_error": abs(self.update.gain - 1),
        }  # fmt: skip


class NotTheSame(RuntimeError):
    """Ranks train together what one rank alone does not."""


@dataclass
class ParallelState:
    """Everything that one rank trains: its part, what updates it, and the text, of which every rank reads all."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    parameters: list[torch.nn.Parameter]
    loader: TokenLoader

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {**self.model.memory_roles(), MemoryRole.OPTIMIZER: list(self.optimizer.state.values())}

    def step(self, phase: Phases) -> None:
        self.trained(phase)

    def trained(self, phase: Phases) -> Tensor:
        """One step; the mean loss of this rank's share."""
        with phase.data_load:
            tokens, targets = self.loader.next()
        loss = self.model.loss(tokens, targets, phase)
        with phase.optimizer_step:
            for parameter, gradient in zip(self.parameters, self.model.gradients(), strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            for parameter in self.parameters:
                parameter.grad = None
        self.model.updated(phase)
        self.model.forget()
        return loss


def begun(model: ParallelModel, loader: TokenLoader, facts: DeviceFacts, plain: bool = False) -> ParallelState:
    """A state that takes AdamW's steps, or `plain` ones."""
    parameters = [torch.nn.Parameter(one) for one in model.weights]
    optimizer = torch.optim.SGD(parameters, _PLAIN_RATE) if plain else adamw(parameters, _RATE, facts)
    return ParallelState(model, optimizer, parameters, loader)


def agreement(together: ParallelState, alone: ParallelState, steps: int) -> Apart:
    """How far so many steps are from those of one rank alone. Raises where a rank casts or sends otherwise than what
    it has asks for: much of that would be less than rounding."""
    witnesses = together.model.witnesses()
    before = {name: one.clone() for name, one in alone.model.full_weights().items()}
    phase, gaps = SilentPhases(), []
    for _ in range(steps):
        loss = together.model.whole_loss(together.trained(phase))
        gaps.append((loss.double() - alone.trained(phase).double()).abs().max())
    for mistake in [one.mistake() for one in witnesses]:
        if mistake:
            raise NotTheSame(mistake)
    found, wanted = together.model.full_weights(), alone.model.full_weights()
    if found.keys() != wanted.keys():
        raise NotTheSame(f"of the weights {sorted(found.keys() ^ wanted.keys())} one side has none")
    largest = max((found[name].double() - wanted[name].double()).abs().max() for name in wanted)
    updates = {name: (found[name].double() - one, wanted[name].double() - one) for name, one in before.items()}
    return Apart(float(max(gaps)), float(largest), {name: _update(*both) for name, both in updates.items()})


def _update(found: Tensor, wanted: Tensor) -> Update:
    squared = (found - wanted).square().sum(), wanted.square().sum(), (found * wanted).sum()
    return Update(*map(float, squared))


def stepping(state: ParallelState) -> Callable[[], object]:
    return partial(state.step, SilentPhases())
