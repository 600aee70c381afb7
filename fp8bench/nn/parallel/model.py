"""One rank's part of a model that several ranks train together."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fp8bench.model import MemoryRole
from fp8bench.nn.gpt import GPT
from fp8bench.nn.linear import Linear
from fp8bench.nn.parallel.exchanges import FP8Wire
from fp8bench.nn.parallel.witness import ScaleWitness, Witness
from fp8bench.protocols import Phases, Role


class ParallelModel:
    """What a way makes on each rank: parameters, or the part of them that lies here, with gradients of torch's.

    `weights` are plain tensors that this rank updates in place, `names` their paths in the whole model. `module` has
    the parameters. `sharers` are the ranks that divide a batch where not each reads all of it, `fp8_wire` what sends
    in FP8 where anything does.
    """

    group: ProcessGroup
    module: nn.Module
    sharers: ProcessGroup | None = None
    fp8_wire: FP8Wire | None = None

    def __init__(self, named: Mapping[str, nn.Parameter], loss_scale: float) -> None:
        self.names, self.parameters = list(named), list(named.values())
        self.loss_scale = loss_scale
        self.weights = [local(one.detach()) for one in self.parameters]

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        """Forward and backward of a whole batch; the mean loss of this rank's share, and gradients are there."""
        with phase.elementwise:
            loss = self.forward(self.own_share(tokens), self.own_share(targets), phase)
            (loss * self.loss_scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def own_share(self, batch: Tensor) -> Tensor:
        """The sequences of a batch that are this rank's."""
        return batch if self.sharers is None else batch.chunk(self.sharers.size())[self.sharers.rank()]

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        loss: Tensor = self.module(tokens, targets, phase)
        return loss

    def gradients(self) -> list[Tensor]:
        """One for each weight, of the mean loss of the whole batch."""
        found = [local(one.grad) for one in self.parameters if one.grad is not None]
        if self.loss_scale != 1.0:
            torch._foreach_div_(found, self.loss_scale)
        return found

    def updated(self, phase: Phases) -> None:
        """The weights have been updated: whoever else has them is told."""
        return

    def forget(self) -> None:
        """Let the gradients go."""
        for one in self.parameters:
            one.grad = None

    def full_weights(self) -> dict[str, Tensor]:
        """Every weight of the whole model, whole, by its path in it; on every rank. All ranks ask together."""
        return dict(zip(self.names, self.weights, strict=True))

    def whole_loss(self, loss: Tensor) -> Tensor:
        """The mean loss of the whole batch, of what `loss` gave: the same on all ranks, which ask together."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total / self.group.size()

    def shared_roles(self, layer: str) -> Collection[Role]:
        """Operands of a layer of which ranks share one scale."""
        return ()

    def witnesses(self) -> list[Witness]:
        """What looks from now on at how this rank casts and sends. All ranks have as many."""
        wires = [self.fp8_wire.watched()] if self.fp8_wire is not None else []
        return [ScaleWitness(self.layers(), self.shared_roles, self.group), *wires]

    def layers(self) -> dict[str, Linear]:
        """Those of fp8bench's own, by their paths."""
        return {path: one for path, one in self.module.named_modules() if isinstance(one, Linear)}

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.WEIGHTS: self.weights, MemoryRole.GRADIENTS: [one.grad for one in self.parameters]}


def local(tensor: Tensor) -> Tensor:
    """Of one that is spread over ranks what lies here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_silent(group: ProcessGroup) -> bool:
    """Whether it is one that sends nothing."""
    return str(dist.get_backend(group)) == "fake"


def silent_group() -> ProcessGroup:
    """A group of all ranks in which nothing is sent: what a step takes in it is what it computes."""
    # Registers the backend of that name, which hands back what it is given.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    group: ProcessGroup = dist.new_group(list(range(dist.get_world_size())), backend="fake")
    return group


class AloneModel(ParallelModel):
    """One rank that trains the whole model by itself: what ways are held against."""

    def __init__(self, model: GPT, loss_scale: float) -> None:
        self.module = model
        super().__init__(dict(model.named_parameters()), loss_scale)

    def whole_loss(self, loss: Tensor) -> Tensor:
        return loss

    def witnesses(self) -> list[Witness]:
        return []
