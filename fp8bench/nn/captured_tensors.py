"""Weights, activations and gradients of a small transformer in training, as its linear layers cast them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.batches import TokenLoader
from fp8bench.nn.gpt import GPT
from fp8bench.nn.sizes import CAPTURED, CAPTURED_STEPS, SIZES, TRAINED_BATCH, TRAINED_SIZE, TRAINING_STEPS
from fp8bench.protocols import Arithmetic, Operand, Role, SilentPhases, float32_products, one_thread

Course = tuple[Tensor, ...]
_LEARNING_RATE = 1e-3
_DECAYS = (0.9, 0.99)


class _Capturing(PlainArithmetic):
    """fp32, keeping a copy of what one layer casts while `kept` is open for it."""

    def __init__(self, name: str, kept: dict[tuple[str, Role], list[Tensor]]) -> None:
        super().__init__(torch.float32)
        self._name, self._kept = name, kept

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        if (course := self._kept.get((self._name, role))) is not None:
            course.append(tensor.detach().clone())
        return super().cast(tensor, role)


class _Adam:
    """Adam written out: torch's own imports torch.compile, whose hundred thousand objects slow down what follows."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in parameters]
        self._steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Take the gradients, and leave none."""
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
    """The tensors of the last steps of a training in fp32, by the names of `CAPTURED`, the newest last.

    From the text and the seed alone: trained on the processor, whatever the device and the precision of the case. Done
    once a process, in a second or two.
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
                kept.update({(one.layer, one.role): [] for one in CAPTURED.values()})
            model(*loader.next(), SilentPhases()).backward()
            optimizer.step()
    return {name: tuple(kept[one.layer, one.role]) for name, one in CAPTURED.items()}
