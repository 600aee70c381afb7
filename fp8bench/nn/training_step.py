"""A training step of a GPT: micro-batches forward and backward, their gradients added up, the optimizer.

Also the weights, activations and gradients of a small GPT in training, as its linear layers cast them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from inspect import unwrap
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8bench.model import DeviceFacts, MemoryRole
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.attention import attention_by
from fp8bench.nn.batches import TokenLoader
from fp8bench.nn.gpt import GPT
from fp8bench.nn.sizes import CAPTURED, CAPTURED_STEPS, SIZES, TRAINED_BATCH, TRAINED_SIZE, TRAINING_STEPS
from fp8bench.protocols import Arithmetic, Operand, Phases, Role, Setup, SilentPhases, float32_products, one_thread

# Opens a context in which layers multiply by weights that were cast once.
Cast = Callable[[Phases], AbstractContextManager[None]]


class Loader(Protocol):
    """The source of a training's batches."""

    def next(self) -> tuple[Any, Tensor]:
        """Inputs and targets of a batch, on the device."""

    def load_ahead(self, batches: int) -> None:
        """Loads so many batches, each into the memory of the one before in its place; `next` then takes turns."""


# Spreads the seeds of other draws of the weights; a CPU generator takes 32 bits of them.
_DRAWS_APART = 0x9E3779B9


@contextmanager
def seeded(setup: Setup) -> Iterator[None]:
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
    own: dict[str, Any] = {name: unwrap(getattr(optimizer, name)) for name in ("step", *_WRAPPED)}
    return type(optimizer.__name__, (optimizer,), {**own, "step": torch.no_grad()(own["step"])})


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
        seen: list[Tensor] = []
        losses: list[float] = []

        def forward(tokens: Any, targets: Tensor, phase: Phases) -> Tensor:
            loss = inner(tokens, targets, phase)
            seen.append(loss.detach())
            return loss

        self.forward = forward
        while len(losses) < steps and all(map(math.isfinite, losses[-1:])):
            self.step(SilentPhases())
            losses.append(sum(map(float, seen)) / len(seen))
            seen.clear()
        self.forward = inner
        return losses

    def _micro_batch(self, phase: Phases, first: bool) -> None:
        with phase.data_load:
            tokens, targets = self.loader.next()
        rest = nullcontext() if self.compiled else phase.elementwise
        with rest:
            loss = self.forward(tokens, targets, phase) * self.loss_scale
        with rest:
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
    setup: Setup, model: torch.nn.Module, loader: Loader, weights: Cast, *, attention: str = "auto",
    rate: float = 3e-4, forward: Callable[[Any, Tensor, Phases], Tensor] | None = None, compiled: bool = False,
    fused: bool = True, micro_batches: int = 1,
) -> TrainingState:  # fmt: skip
    parameters = list(model.parameters())
    buffers = [torch.zeros_like(parameter) for parameter in parameters]
    optimizer = adamw(parameters, rate, setup.facts, fused)
    return TrainingState(
        model, forward or model, compiled, attention, optimizer, parameters, buffers, loader, micro_batches,
        setup.loss_scale, weights,
    )  # fmt: skip


Course = tuple[Tensor, ...]
_LEARNING_RATE = 1e-3
_DECAYS = (0.9, 0.99)


class _Capturing(PlainArithmetic):
    """fp32, keeping copies of what one layer casts for the roles that are in `kept`."""

    def __init__(self, name: str, kept: dict[tuple[str, Role], list[Tensor]]) -> None:
        super().__init__(torch.float32)
        self._name, self._kept = name, kept

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        if (course := self._kept.get((self._name, role))) is not None:
            course.append(tensor.detach().clone())
        return super().cast(tensor, role)


class _Adam:
    """Adam written out, because torch's own imports torch.compile, whose many objects slow down what follows."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._moments = [(torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in parameters]
        self._steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self._steps += 1
        first, second = (1 - decay**self._steps for decay in _DECAYS)
        for parameter, (mean, square) in zip(self._parameters, self._moments, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            mean.lerp_(gradient, 1 - _DECAYS[0])
            square.lerp_(gradient.square(), 1 - _DECAYS[1])
            parameter.addcdiv_(mean, (square / second).sqrt_().add_(1e-8), value=-_LEARNING_RATE / first)
            parameter.grad = None


@lru_cache(maxsize=2)
def captured(corpus: str, seed: int) -> Mapping[str, Course]:
    """The tensors of the last steps of an fp32 training, by the names of `CAPTURED`, the newest last.

    They depend on the text and the seed alone: the training runs on the CPU, whatever the case. It takes a second or
    two, once a process.
    """
    kept: dict[tuple[str, Role], list[Tensor]] = {}
    config = SIZES[TRAINED_SIZE]

    def choose(name: str) -> Arithmetic:
        return _Capturing(name, kept)

    with one_thread(), torch.random.fork_rng(devices=[]), float32_products("highest"), torch.enable_grad():
        torch.manual_seed(seed)
        model = GPT(config, choose, torch.float32)
        loader = TokenLoader(corpus, TRAINED_BATCH, config.sequence, "cpu", seed, config.vocabulary)
        optimizer = _Adam(list(model.parameters()))
        for step in range(TRAINING_STEPS):
            if step == TRAINING_STEPS - CAPTURED_STEPS:
                kept.update({(tensor.layer, tensor.role): [] for tensor in CAPTURED.values()})
            model(*loader.next(), SilentPhases()).backward()
            optimizer.step()
    return {name: tuple(kept[tensor.layer, tensor.role]) for name, tensor in CAPTURED.items()}
