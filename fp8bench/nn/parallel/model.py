"""One rank's part of a model that several ranks train together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fp8bench.model import MemoryRole
from fp8bench.nn.linear import Linear
from fp8bench.nn.parallel.witness import ScaleWitness, Witness
from fp8bench.protocols import Phases, Role


class ParallelModel(ABC):
    """What a way makes on each rank.

    `weights` are plain tensors that this rank updates in place, `names` their paths in the whole model, and `sharded`
    says of each whether it is a part that no other rank has. Batches are whole: a way takes its share of one itself.
    """

    group: ProcessGroup
    names: list[str]
    weights: list[Tensor]
    sharded: list[bool]

    @abstractmethod
    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        """Forward and backward of a whole batch; the mean loss of this rank's share, and gradients are there."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """One for each weight, of the mean loss of the whole batch."""

    @abstractmethod
    def forget(self) -> None:
        """Let the gradients go."""

    @abstractmethod
    def full_weights(self) -> dict[str, Tensor]:
        """Every weight of the whole model, whole, by its path in it; on every rank. All ranks ask together."""

    def updated(self, phase: Phases) -> None:
        """The weights have been updated: whoever else has them is told."""
        return

    def whole_loss(self, loss: Tensor) -> Tensor:
        """The mean loss of the whole batch, of what `loss` gave: the same on all ranks, which ask together."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total / self.group.size()

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.WEIGHTS: self.weights}

    def witnesses(self) -> list[Witness]:
        """What looks from now on at how this rank casts and sends. All ranks have as many."""
        return []


class HeldModel(ParallelModel):
    """One of parameters that this rank holds, whole or the part of them that lies here, with gradients of torch's.

    `module` is what has them.
    """

    module: nn.Module

    def __init__(self, named: Mapping[str, nn.Parameter], loss_scale: float, sharded: Sequence[bool]) -> None:
        self.names, self.parameters = list(named), list(named.values())
        self.loss_scale, self.sharded = loss_scale, list(sharded)
        self.weights = [local(one.detach()) for one in self.parameters]

    def gradients(self) -> list[Tensor]:
        return scaled_back([local(one.grad) for one in self.parameters if one.grad is not None], self.loss_scale)

    def forget(self) -> None:
        for one in self.parameters:
            one.grad = None

    def shared_roles(self, layer: str) -> Collection[Role]:
        """Operands of a layer of which ranks share one scale."""
        return ()

    def witnesses(self) -> list[Witness]:
        layers = {path: one for path, one in self.module.named_modules() if isinstance(one, Linear)}
        return [ScaleWitness(layers, self.shared_roles, self.group)]

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.WEIGHTS: self.weights, MemoryRole.GRADIENTS: [one.grad for one in self.parameters]}


def local(tensor: Tensor) -> Tensor:
    """Of one that is spread over ranks what lies here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share(batch: Tensor, group: ProcessGroup) -> Tensor:
    """The sequences of a batch that are this rank's."""
    return batch.chunk(group.size())[group.rank()]


def is_silent(group: ProcessGroup) -> bool:
    """Whether it is one that sends nothing."""
    return str(dist.get_backend(group)) == "fake"


def silent_group() -> ProcessGroup:
    """A group of all ranks in which nothing is sent: what a step takes in it is what it computes."""
    # Registers the backend of that name, which hands back what it is given.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    group: ProcessGroup = dist.new_group(list(range(dist.get_world_size())), backend="fake")
    return group


def scaled_back(gradients: list[Tensor], loss_scale: float) -> list[Tensor]:
    """Of a loss that was multiplied."""
    if loss_scale != 1.0:
        torch._foreach_div_(gradients, loss_scale)
    return gradients
