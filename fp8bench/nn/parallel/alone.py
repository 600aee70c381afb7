"""One rank that trains the whole model by itself: what ways are held against."""

from __future__ import annotations

from torch import Tensor

from fp8bench.model import MemoryRole
from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.model import ParallelModel, scaled_back
from fp8bench.protocols import Phases


class AloneModel(ParallelModel):
    """The whole model, which tells nobody."""

    def __init__(self, model: GPT, loss_scale: float) -> None:
        self._model, self._loss_scale = model, loss_scale
        parameters = dict(model.named_parameters())
        self.names, self._parameters = list(parameters), list(parameters.values())
        self.weights = [one.detach() for one in self._parameters]
        self.sharded = [False] * len(self.names)

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        with phase.elementwise:
            loss = self._forward(tokens, targets, phase)
            (loss * self._loss_scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        return scaled_back([one.grad for one in self._parameters if one.grad is not None], self._loss_scale)

    def forget(self) -> None:
        for one in self._parameters:
            one.grad = None

    def full_weights(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.weights, strict=True))

    def whole_loss(self, loss: Tensor) -> Tensor:
        return loss

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.WEIGHTS: self.weights, MemoryRole.GRADIENTS: [one.grad for one in self._parameters]}

    def _forward(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        loss: Tensor = self._model(tokens, targets, phase)
        return loss
