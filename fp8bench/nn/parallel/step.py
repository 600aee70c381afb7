"""A training step of a rank's part of a model, and what its parts take by themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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


def agreement(together: ParallelState, alone: ParallelState, steps: int) -> dict[str, float]:
    """How far so many steps are from those of one rank alone: the largest distances of a loss and of a weight, and the
    relative distance of what all steps have changed. All are zero where every bit is the same."""
    before = {name: one.clone() for name, one in alone.model.full_weights().items()}
    phase, gaps = SilentPhases(), []
    for _ in range(steps):
        loss = together.model.whole_loss(together.trained(phase))
        gaps.append((loss.double() - alone.trained(phase).double()).abs().max())
    found, wanted = together.model.full_weights(), alone.model.full_weights()
    if found.keys() != wanted.keys():
        raise NotTheSame(f"of the weights {sorted(found.keys() ^ wanted.keys())} one side has none")
    apart = {name: (found[name].double() - wanted[name].double()) for name in wanted}
    changed = sum((wanted[name].double() - before[name].double()).square().sum() for name in wanted)
    noise = sum(one.square().sum() for one in apart.values())
    return {
        "loss_gap": float(max(gaps)),
        "weight_gap": float(max(one.abs().max() for one in apart.values())),
        "update_error": float((noise / changed) ** 0.5),
    }


def stepping(state: ParallelState) -> Callable[[], object]:
    return partial(state.step, SilentPhases())
