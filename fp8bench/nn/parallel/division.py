"""The part of a model that one rank holds when several ranks train the model together."""

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
from fp8bench.nn.parallel.exchanges import FP8ExchangeWitness, FP8Wire, RankGroup
from fp8bench.nn.parallel.witnesses import ScaleWitness
from fp8bench.protocols import Phases, Role

ScaleOrWireWitness = ScaleWitness | FP8ExchangeWitness


class RankModelPart:
    """One rank's part of a model, and how the rank trains it.

    A step calls `loss` and `gradients`, updates `weights` in place, and then calls `send_updates` and `drop_gradients`.
    `module` has the parameters, `weights` are their plain tensors, and `names` are their paths in the whole model. The
    ranks of `batch_group` divide a batch among them. It is None if each rank reads the whole batch. `fp8_wire` is set
    if tensors are sent in FP8.

    The ranks of `_rank_group` exchange tensors inside the model. Each of these ranks has the same `common_parameters`,
    and they sum the gradients of these parameters.
    """

    group: ProcessGroup
    module: nn.Module
    batch_group: ProcessGroup | None = None
    fp8_wire: FP8Wire | None = None
    _rank_group: RankGroup | None = None
    common_parameters: Sequence[nn.Parameter] = ()

    def __init__(self, named: Mapping[str, nn.Parameter], loss_scale: float) -> None:
        self.names = list(named)
        self.parameters = list(named.values())
        self.loss_scale = loss_scale
        self.weights = [to_local_tensor(parameter.detach()) for parameter in self.parameters]

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        """Runs forward and backward for a batch. Returns the mean loss over this rank's share of the batch."""
        shared_group = self._rank_group
        if shared_group is not None:
            shared_group.phase = phase
        with phase.elementwise:
            loss = self.forward(self.take_batch_share(tokens), self.take_batch_share(targets), phase)
            # The gradients of common parameters are summed over ranks, so divide by the number of ranks for a mean.
            ranks = shared_group.size if shared_group is not None and self.common_parameters else 1
            (loss * (self.loss_scale / ranks)).backward()  # type: ignore[no-untyped-call]
            if shared_group is not None and self.common_parameters:
                shared_group.sum_gradients([part.grad for part in self.common_parameters if part.grad is not None])
        return loss.detach()

    def take_batch_share(self, batch: Tensor) -> Tensor:
        return batch if self.batch_group is None else batch.chunk(self.batch_group.size())[self.batch_group.rank()]

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        return self.module(tokens, targets, phase)

    def gradients(self) -> list[Tensor]:
        gradients = [to_local_tensor(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
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

    def gather_weights(self) -> dict[str, Tensor]:
        """Returns all weights of the whole model by path, on every rank. All ranks must call it together."""
        return dict(zip(self.names, self.weights, strict=True))

    def average_loss(self, loss: Tensor) -> Tensor:
        """Returns the mean loss over the whole batch. `loss` is what the method `loss` returned on this rank. All
        ranks must call it together.
        """
        loss_sum = loss.detach().clone()
        dist.all_reduce(loss_sum, group=self.group)
        return loss_sum / self.group.size()

    def list_shared_roles(self, layer: str) -> Collection[Role]:
        return ()

    def witnesses(self) -> list[ScaleOrWireWitness]:
        fp8_wire_witnesses = [self.fp8_wire.watch()] if self.fp8_wire is not None else []
        return [ScaleWitness(self.layers(), self.list_shared_roles, self.group), *fp8_wire_witnesses]

    def layers(self) -> dict[str, Linear]:
        return {path: layer for path, layer in self.module.named_modules() if isinstance(layer, Linear)}

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {
            MemoryRole.WEIGHTS: self.weights,
            MemoryRole.GRADIENTS: [parameter.grad for parameter in self.parameters],
        }


def to_local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_silent_process_group() -> ProcessGroup:
    """Returns a group of all ranks that sends nothing, to time a step without communication."""
    # This import registers the backend `fake`, which sends nothing.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    return dist.new_group(list(range(dist.get_world_size())), backend="fake")


class UndividedModel(RankModelPart):
    """One rank that trains the whole model alone. All parallel methods are compared with it."""

    def __init__(self, model: GPT, loss_scale: float) -> None:
        self.module = model
        super().__init__(dict(model.named_parameters()), loss_scale)

    def average_loss(self, loss: Tensor) -> Tensor:
        return loss

    def witnesses(self) -> list[ScaleOrWireWitness]:
        return []
