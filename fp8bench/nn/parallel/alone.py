"""One rank that trains the whole model by itself: what ways are held against."""

from __future__ import annotations

from torch import Tensor

from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.model import ParallelModel
from fp8bench.nn.parallel.witness import Witness


class AloneModel(ParallelModel):
    """The whole model, which tells nobody."""

    def __init__(self, model: GPT, loss_scale: float) -> None:
        self.module = model
        super().__init__(dict(model.named_parameters()), loss_scale)

    def whole_loss(self, loss: Tensor) -> Tensor:
        return loss

    def witnesses(self) -> list[Witness]:
        return []
