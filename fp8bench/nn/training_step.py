"""A training step of a GPT: micro-batches forward and backward, their gradients added up, the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8bench.model import MemoryRole
from fp8bench.nn.batches import TokenLoader
from fp8bench.nn.gpt import GPT, Forward
from fp8bench.nn.support import attention_by
from fp8bench.protocols import Phases

# What goes on while it is open takes weights that were cast once.
Cast = Callable[[Phases], AbstractContextManager[None]]


@dataclass
class TrainingState:
    """Everything one arm trains: model, optimiser, fp32 gradient buffers, data.

    `forward` gives the loss: the model, or what torch.compile made of it; inside `weights`, once a step.
    """

    model: GPT
    forward: Forward
    compiled: bool
    attention: str
    optimizer: torch.optim.Optimizer
    parameters: list[torch.nn.Parameter]
    buffers: list[Tensor]
    loader: TokenLoader
    micro_batches: int
    loss_scale: float
    weights: Cast

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.GRADIENTS: self.buffers}

    def step(self, phase: Phases) -> None:
        with attention_by(self.attention), self.weights(phase):
            for micro_batch in range(self.micro_batches):
                self._micro_batch(phase, first=micro_batch == 0)
        with phase.optimizer_step:
            for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
                parameter.grad = buffer
            self.optimizer.step()
            for parameter in self.parameters:
                parameter.grad = None

    def _micro_batch(self, phase: Phases, first: bool) -> None:
        """One forward and backward, its gradients added to the buffers. Reads no value, which would wait."""
        with phase.data_load:
            tokens, targets = self.loader.next()
        rest = nullcontext() if self.compiled else phase.elementwise
        with rest:
            loss = self.forward(tokens, targets, phase) * self.loss_scale
        with rest:
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        with phase.accumulate:
            # Fresh gradients, added by hand: left to autograd, the second micro-batch's add would run inside whatever
            # phase is open in backward.
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            share = 1.0 / (self.loss_scale * self.micro_batches)
            if first:
                torch._foreach_zero_(self.buffers)
            torch._foreach_add_(self.buffers, gradients, alpha=share)
            for parameter in self.parameters:
                parameter.grad = None
