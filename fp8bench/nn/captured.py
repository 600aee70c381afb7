"""Weights, activations and gradients of a small GPT in training, as its linear layers cast them."""

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
    """fp32, keeping copies of what one layer casts for the roles that are in `courses`."""

    def __init__(self, name: str, courses: dict[tuple[str, Role], list[Tensor]]) -> None:
        super().__init__(torch.float32)
        self._name = name
        self._kept = courses

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
def capture_tensors(corpus: str, seed: int) -> Mapping[str, Course]:
    """The tensors of the last steps of an fp32 training, by the names of `CAPTURED`, the newest last.

    They depend on the text and the seed alone: the training runs on the CPU, whatever the case. It takes a second or
    two, once a process.
    """
    courses: dict[tuple[str, Role], list[Tensor]] = {}
    config = SIZES[TRAINED_SIZE]

    def choose(name: str) -> Arithmetic:
        return _Capturing(name, courses)

    # One thread and float32 products make the tensors the same on every machine.
    with one_thread(), torch.random.fork_rng(devices=[]), float32_products("highest"), torch.enable_grad():
        torch.manual_seed(seed)
        model = GPT(config, choose, torch.float32)
        loader = TokenLoader(corpus, TRAINED_BATCH, config.sequence, "cpu", seed, config.vocabulary)
        optimizer = _Adam(list(model.parameters()))
        for step in range(TRAINING_STEPS):
            # Only the last steps are recorded: tensors of early ones differ from a trained model's.
            if step == TRAINING_STEPS - CAPTURED_STEPS:
                courses.update({(tensor.layer, tensor.role): [] for tensor in CAPTURED.values()})
            model(*loader.next(), SilentPhases()).backward()
            optimizer.step()
    return {name: tuple(courses[tensor.layer, tensor.role]) for name, tensor in CAPTURED.items()}
