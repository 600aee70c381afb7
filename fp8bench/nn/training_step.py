"""A training step: micro-batches forward and backward, their gradients added up, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from inspect import unwrap
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8bench.model import DeviceFacts, MemoryRole
from fp8bench.nn.attention import attention_by
from fp8bench.protocols import Phases, Setup, SilentPhases

# Opens a context in which layers multiply by weights that were cast once.
Cast = Callable[[Phases], AbstractContextManager[None]]


class Loader(Protocol):
    """The source of a training's batches."""

    def next(self) -> tuple[Any, Tensor]:
        """Inputs and targets of a batch, on the device."""

    def load_ahead(self, batches: int) -> None:
        """Loads this many batches, each into the memory of its predecessor; `next` then takes turns."""


# Spreads the seeds of other draws of the weights; a CPU generator takes 32 bits of them.
_DRAWS_APART = 0x9E3779B9


@contextmanager
def seed_weights(setup: Setup) -> Iterator[None]:
    """Weights made in the body are drawn from the case's seed and draw, on its device."""
    gpus = [setup.facts.index] if setup.facts.accelerated else []
    # fork_rng restores the process's random state: without isolation it is the user's.
    with torch.random.fork_rng(gpus, device_type=setup.facts.kind), torch.device(setup.facts.key):
        torch.manual_seed((setup.seed + setup.draw * _DRAWS_APART) % (1 << 32))
        yield


# Methods besides `step` that torch wraps for its compiler.
_WRAPPED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


@cache
def eager(optimizer: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """One of torch's optimizers, the same to the bit, without the wrappers for torch's compiler.

    The first call of each wrapper imports the compiler: 1.4 s of a processor and 75 MB in every process. The class
    keeps its name, which traces show.
    """
    methods: dict[str, Any] = {name: unwrap(getattr(optimizer, name)) for name in ("step", *_WRAPPED)}
    return type(optimizer.__name__, (optimizer,), {**methods, "step": torch.no_grad()(methods["step"])})


def adamw(
    parameters: list[torch.nn.Parameter], rate: float, facts: DeviceFacts, fused: bool = True
) -> torch.optim.Optimizer:
    """torch's AdamW. On a GPU it may be captured in a graph; a fused one keeps its step count there anyway."""
    kind = eager(torch.optim.AdamW)
    return kind(parameters, lr=rate, weight_decay=0.1, fused=fused, capturable=facts.accelerated)


@dataclass
class TrainingState:
    """All that one arm trains: model, optimizer, fp32 gradient buffers, data.

    `forward` gives the loss; it is the model, or a compiled function. `weights` is entered once a step around all
    micro-batches, and casts the weights.
    """

    model: torch.nn.Module
    forward: Callable[[Any, Tensor, Phases], Tensor]
    compiled: bool
    attention: str
    optimizer: torch.optim.Optimizer
    parameters: list[torch.nn.Parameter]
    buffers: list[Tensor]
    loader: Loader
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
        """The mean loss of each of the next steps, up to the first that is not finite."""
        inner = self.forward
        losses_of_step: list[Tensor] = []
        losses: list[float] = []

        # A wrapper notes the losses, so that the step needs no code for it.
        def forward(tokens: Any, targets: Tensor, phase: Phases) -> Tensor:
            loss = inner(tokens, targets, phase)
            losses_of_step.append(loss.detach())
            return loss

        self.forward = forward
        # A loss that is not finite never recovers: further steps would only take time.
        while len(losses) < steps and all(map(math.isfinite, losses[-1:])):
            self.step(SilentPhases())
            losses.append(sum(map(float, losses_of_step)) / len(losses_of_step))
            losses_of_step.clear()
        self.forward = inner
        return losses

    def _micro_batch(self, phase: Phases, first: bool) -> None:
        with phase.data_load:
            tokens, targets = self.loader.next()
        unmarked = nullcontext() if self.compiled else phase.elementwise
        with unmarked:
            loss = self.forward(tokens, targets, phase) * self.loss_scale
        with unmarked:
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        with phase.accumulate:
            # Added by hand: autograd would add the second micro-batch's gradients inside whatever phase is open then.
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            share = 1.0 / (self.loss_scale * self.micro_batches)
            if first:
                torch._foreach_zero_(self.buffers)
            torch._foreach_add_(self.buffers, gradients, alpha=share)
            for parameter in self.parameters:
                parameter.grad = None


def new_state(
    setup: Setup,
    model: torch.nn.Module,
    loader: Loader,
    weights: Cast,
    *,
    attention: str = "auto",
    rate: float = 3e-4,
    forward: Callable[[Any, Tensor, Phases], Tensor] | None = None,
    compiled: bool = False,
    fused: bool = True,
    micro_batches: int = 1,
) -> TrainingState:
    parameters = list(model.parameters())
    # Gradients are summed over micro-batches here, so that the optimizer may change the model's.
    buffers = [torch.zeros_like(parameter) for parameter in parameters]
    optimizer = adamw(parameters, rate, setup.facts, fused)
    return TrainingState(
        model,
        forward or model,
        compiled,
        attention,
        optimizer,
        parameters,
        buffers,
        loader,
        micro_batches,
        setup.loss_scale,
        weights,
    )
