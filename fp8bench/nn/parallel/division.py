"""One rank's part of a model that several ranks train together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fp8bench.model import MemoryRole
from fp8bench.nn.gpt import GPT
from fp8bench.nn.linear import Linear
from fp8bench.nn.parallel.exchanges import FP8Wire, RankGroup, WireWitness
from fp8bench.nn.parallel.witnesses import ScaleWitness
from fp8bench.protocols import Phases, Role

Witness = ScaleWitness | WireWitness


class Division:
    """A rank's part of a model, and how the rank trains it.

    A step calls `loss`, `gradients`, then updates `weights` in place, then `send_updates` and `drop_gradients`.
    `weights` are plain tensors, `names` their paths in the whole model; `module` has their parameters. `sharers` are
    the ranks that divide a batch, None where each reads all of it; `fp8_wire` sends in FP8 where anything does. Ranks
    of a `_shared` group exchange tensors inside the model, and sum the gradients of the `common` parameters that all
    of them have.
    """

    group: ProcessGroup
    module: nn.Module
    sharers: ProcessGroup | None = None
    fp8_wire: FP8Wire | None = None
    _shared: RankGroup | None = None
    common: Sequence[nn.Parameter] = ()

    def __init__(self, named: Mapping[str, nn.Parameter], loss_scale: float) -> None:
        self.names = list(named)
        self.parameters = list(named.values())
        self.loss_scale = loss_scale
        self.weights = [local(parameter.detach()) for parameter in self.parameters]

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        """Runs forward and backward of a whole batch; returns the mean loss of this rank's share."""
        shared = self._shared
        if shared is not None:
            shared.phase = phase
        with phase.elementwise:
            loss = self.forward(self.share_of(tokens), self.share_of(targets), phase)
            ranks = shared.size if shared is not None and self.common else 1
            (loss * (self.loss_scale / ranks)).backward()  # type: ignore[no-untyped-call]
            if shared is not None and self.common:
                shared.added_together([part.grad for part in self.common if part.grad is not None])
        return loss.detach()

    def share_of(self, batch: Tensor) -> Tensor:
        return batch if self.sharers is None else batch.chunk(self.sharers.size())[self.sharers.rank()]

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        return self.module(tokens, targets, phase)

    def gradients(self) -> list[Tensor]:
        gradients = [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        if self.loss_scale != 1.0:
            torch._foreach_div_(gradients, self.loss_scale)
        return gradients

    def send_updates(self, phase: Phases) -> None:
        """Sends the new weights to the ranks that hold copies of them."""

    def figures(self) -> dict[str, float]:
        return {}

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def full_weights(self) -> dict[str, Tensor]:
        """All weights of the whole model by path, on every rank. All ranks must call it together."""
        return dict(zip(self.names, self.weights, strict=True))

    def whole_loss(self, loss: Tensor) -> Tensor:
        """The mean loss of the whole batch from the result of `loss`. All ranks must call it together."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total / self.group.size()

    def shared_roles(self, layer: str) -> Collection[Role]:
        return ()

    def witnesses(self) -> list[Witness]:
        wires = [self.fp8_wire.watch()] if self.fp8_wire is not None else []
        return [ScaleWitness(self.layers(), self.shared_roles, self.group), *wires]

    def layers(self) -> dict[str, Linear]:
        return {path: layer for path, layer in self.module.named_modules() if isinstance(layer, Linear)}

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {
            MemoryRole.WEIGHTS: self.weights,
            MemoryRole.GRADIENTS: [parameter.grad for parameter in self.parameters],
        }


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def silent_group() -> ProcessGroup:
    """A group of all ranks that sends nothing, to measure what a step takes without communication."""
    # The import registers the backend, which returns what it is given.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    return dist.new_group(list(range(dist.get_world_size())), backend="fake")


class Undivided(Division):
    """One rank that trains the whole model by itself: the reference for all ways."""

    def __init__(self, model: GPT, loss_scale: float) -> None:
        self.module = model
        super().__init__(dict(model.named_parameters()), loss_scale)

    def whole_loss(self, loss: Tensor) -> Tensor:
        return loss

    def witnesses(self) -> list[Witness]:
        return []
