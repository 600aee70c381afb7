"""A training step of a GPT: micro-batches forward and backward, their gradients added up, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8bench.model import DeviceFacts, MemoryRole
from fp8bench.nn.batches import TokenLoader
from fp8bench.nn.gpt import GPT, Forward
from fp8bench.nn.support import attention_by
from fp8bench.protocols import Phases, Setup, SilentPhases

# What goes on while it is open takes weights that were cast once.
Cast = Callable[[Phases], AbstractContextManager[None]]
# Seeds of other draws of the weights; a generator on a processor takes 32 bits of them.
_DRAWS_APART = 0x9E3779B9


@contextmanager
def drawn(setup: Setup) -> Iterator[None]:
    """Weights that are made in the body are those of a case's seed and draw, on its device."""
    gpus = [setup.facts.index] if setup.facts.accelerated else []
    # The process's own random state is put back: without isolation it is the user's.
    with torch.random.fork_rng(gpus, device_type=setup.facts.kind), torch.device(setup.facts.key):
        torch.manual_seed((setup.seed + setup.draw * _DRAWS_APART) % (1 << 32))
        yield


def adamw(parameters: list[torch.nn.Parameter], rate: float, facts: DeviceFacts) -> torch.optim.Optimizer:
    """A fused one keeps its count on the GPU anyway; asked to, it lets itself be captured there."""
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.1, fused=True, capturable=facts.accelerated)


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

    def losses(self, steps: int) -> list[float]:
        """The loss of each of the next steps, its mean over micro-batches, up to one that is not finite."""
        inner = self.forward
        seen: list[Tensor] = []
        found: list[float] = []

        def forward(tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
            loss = inner(tokens, targets, phase)
            seen.append(loss.detach())
            return loss

        self.forward = forward
        while len(found) < steps and all(map(math.isfinite, found[-1:])):
            self.step(SilentPhases())
            found.append(sum(map(float, seen)) / len(seen))
            seen.clear()
        self.forward = inner
        return found

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
