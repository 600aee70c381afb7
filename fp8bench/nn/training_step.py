"""A training step: micro-batches forward and backward, summed gradients, and the optimizer's step."""

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
from fp8bench.nn.attention import select_attention_kernel
from fp8bench.protocols import Phases, Setup, SilentPhases

# A function that opens a context in which layers use weights that were cast once. Its argument marks phases.
HoldCastWeights = Callable[[Phases], AbstractContextManager[None]]


class Loader(Protocol):
    """A source of a training's batches."""

    def next(self) -> tuple[Any, Tensor]:
        """Returns the inputs and targets of a batch on the device."""

    def preload_batches(self, batches: int) -> None:
        """Loads this many batches and replaces those that were loaded before. `next` then returns them in turn."""


# The distance between the seeds of two draws of the weights. A CPU generator has seeds of 32 bits.
_WEIGHT_DRAW_SEED_STRIDE = 0x9E3779B9


@contextmanager
def seed_weights(setup: Setup) -> Iterator[None]:
    """Opens a context for making a model on the case's device, with weights that depend on the case's seed and on
    `setup.draw`. torch's random state is restored afterwards.
    """
    gpu_indices = [setup.facts.index] if setup.facts.accelerated else []
    # fork_rng restores the random state afterwards. Without process isolation that state belongs to the user.
    with torch.random.fork_rng(gpu_indices, device_type=setup.facts.kind), torch.device(setup.facts.key):
        torch.manual_seed((setup.seed + setup.draw * _WEIGHT_DRAW_SEED_STRIDE) % (1 << 32))
        yield


# The methods besides `step` that torch wraps for its compiler.
_WRAPPED_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


@cache
def skip_compiler_wrappers(optimizer: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Returns a subclass of one of torch's optimizers, whose methods have no wrappers for torch's compiler. Results are
    bit-identical.

    The first call of a wrapper would import the compiler, which takes 1.4 s of CPU time and 75 MB in every process. The
    subclass keeps the name of the optimizer, because traces show it.
    """
    unwrapped_methods: dict[str, Any] = {name: unwrap(getattr(optimizer, name)) for name in ("step", *_WRAPPED_METHODS)}
    # Unwrapping `step` also removed the wrapper that turns gradients off.
    return type(
        optimizer.__name__, (optimizer,), {**unwrapped_methods, "step": torch.no_grad()(unwrapped_methods["step"])}
    )


def make_adamw(
    parameters: list[torch.nn.Parameter], rate: float, facts: DeviceFacts, fused: bool = True
) -> torch.optim.Optimizer:
    """Makes torch's AdamW, whose steps can be captured in a CUDA graph on a GPU."""
    optimizer_class = skip_compiler_wrappers(torch.optim.AdamW)
    return optimizer_class(parameters, lr=rate, weight_decay=0.1, fused=fused, capturable=facts.accelerated)


@dataclass
class TrainingState:
    """The state of one case's training: model, optimizer, fp32 gradient buffers and data.

    `forward` is the model or a compiled function, and returns the loss. `hold_cast_weights` opens a context around all
    micro-batches of a step, to cast weights once for all of them if the case does so.
    """

    model: torch.nn.Module
    forward: Callable[[Any, Tensor, Phases], Tensor]
    compiled: bool
    attention: str
    optimizer: torch.optim.Optimizer
    parameters: list[torch.nn.Parameter]
    gradient_buffers: list[Tensor]
    loader: Loader
    micro_batches: int
    loss_scale: float
    hold_cast_weights: HoldCastWeights

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.GRADIENTS: self.gradient_buffers}

    def step(self, phase: Phases) -> None:
        with select_attention_kernel(self.attention), self.hold_cast_weights(phase):
            for micro_batch in range(self.micro_batches):
                self._run_micro_batch(phase, first=micro_batch == 0)
        with phase.optimizer_step:
            for parameter, buffer in zip(self.parameters, self.gradient_buffers, strict=True):
                parameter.grad = buffer
            self.optimizer.step()
            # Otherwise the next backward pass would add its gradients to the buffers.
            for parameter in self.parameters:
                parameter.grad = None

    def losses(self, steps: int) -> list[float]:
        """Runs training steps and returns the mean loss of each. It stops after the first loss that is not finite."""
        original_forward = self.forward
        forward_pass_losses: list[Tensor] = []
        losses: list[float] = []

        # Wrap `forward` to record the losses, so that the timed step needs no code for them.
        def forward(tokens: Any, targets: Tensor, phase: Phases) -> Tensor:
            loss = original_forward(tokens, targets, phase)
            forward_pass_losses.append(loss.detach())
            return loss

        self.forward = forward
        # Stop at a loss that is not finite, because later losses are not finite either.
        while len(losses) < steps and all(map(math.isfinite, losses[-1:])):
            self.step(SilentPhases())
            losses.append(sum(map(float, forward_pass_losses)) / len(forward_pass_losses))
            forward_pass_losses.clear()
        self.forward = original_forward
        return losses

    def _run_micro_batch(self, phase: Phases, first: bool) -> None:
        with phase.data_load:
            tokens, targets = self.loader.next()
        phase_marker = nullcontext() if self.compiled else phase.elementwise
        with phase_marker:
            loss = self.forward(tokens, targets, phase) * self.loss_scale
        with phase_marker:
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        with phase.accumulate:
            # Add the gradients in a separate phase. Otherwise autograd would add those of later micro-batches inside
            # whatever phase is open.
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            # Undo the loss scale, and average over the micro-batches.
            gradient_factor = 1.0 / (self.loss_scale * self.micro_batches)
            if first:
                torch._foreach_zero_(self.gradient_buffers)
            torch._foreach_add_(self.gradient_buffers, gradients, alpha=gradient_factor)
            for parameter in self.parameters:
                parameter.grad = None


def make_training_state(
    setup: Setup,
    model: torch.nn.Module,
    loader: Loader,
    hold_cast_weights: HoldCastWeights,
    *,
    attention: str = "auto",
    rate: float = 3e-4,
    forward: Callable[[Any, Tensor, Phases], Tensor] | None = None,
    compiled: bool = False,
    fused: bool = True,
    micro_batches: int = 1,
) -> TrainingState:
    parameters = list(model.parameters())
    # The gradients of all micro-batches are summed in these buffers.
    gradient_buffers = [torch.zeros_like(parameter) for parameter in parameters]
    optimizer = make_adamw(parameters, rate, setup.facts, fused)
    return TrainingState(
        model,
        forward or model,
        compiled,
        attention,
        optimizer,
        parameters,
        gradient_buffers,
        loader,
        micro_batches,
        setup.loss_scale,
        hold_cast_weights,
    )
