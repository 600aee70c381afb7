"""One rank that trains the whole model by itself: what ways are held against."""

from __future__ import annotations

from torch import Tensor

from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.model import HeldModel
from fp8bench.nn.parallel.witness import Witness
from fp8bench.protocols import Phases


class AloneModel(HeldModel):
    """The whole model, which tells nobody."""

    module: GPT

    def __init__(self, model: GPT, loss_scale: float) -> None:
        parameters = dict(model.named_parameters())
        super().__init__(parameters, loss_scale, [False] * len(parameters))
        self.module = model

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        with phase.elementwise:
            loss = self._forward(tokens, targets, phase)
            (loss * self.loss_scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def full_weights(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.weights, strict=True))

    def whole_loss(self, loss: Tensor) -> Tensor:
        return loss

    def witnesses(self) -> list[Witness]:
        return []

    def _forward(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        loss: Tensor = self.module(tokens, targets, phase)
        return loss
