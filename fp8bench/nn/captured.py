"""Trains a small GPT and records the weights, activations and gradients that its linear layers cast."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.batches import TokenLoader
from fp8bench.nn.gpt import GPT
from fp8bench.nn.sizes import (
    CAPTURED,
    CAPTURED_MODEL_BATCH,
    CAPTURED_MODEL_SIZE,
    CAPTURED_STEP_COUNT,
    SIZES,
    TRAINING_STEPS,
)
from fp8bench.protocols import Arithmetic, Operand, Role, SilentPhases, float32_products, limit_to_one_thread

StepTensors = tuple[Tensor, ...]
_LEARNING_RATE = 1e-3
_MOMENT_DECAYS = (0.9, 0.99)


class _CastRecordingArithmetic(PlainArithmetic):
    """An fp32 arithmetic for one layer. It records a copy of each tensor that the layer casts, if the tensor's role
    is in `recorded`.
    """

    def __init__(self, name: str, recorded: dict[tuple[str, Role], list[Tensor]]) -> None:
        super().__init__(torch.float32)
        self._name = name
        self._recorded = recorded

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        if (recorded_tensors := self._recorded.get((self._name, role))) is not None:
            recorded_tensors.append(tensor.detach().clone())
        return super().cast(tensor, role)


class _Adam:
    """Adam in a few lines. torch's own Adam imports torch.compile, whose many objects slow down later code."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._moments = [(torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in parameters]
        self._steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self._steps += 1
        first_bias_correction, second_bias_correction = (1 - decay**self._steps for decay in _MOMENT_DECAYS)
        for parameter, (mean, square) in zip(self._parameters, self._moments, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            mean.lerp_(gradient, 1 - _MOMENT_DECAYS[0])
            square.lerp_(gradient.square(), 1 - _MOMENT_DECAYS[1])
            parameter.addcdiv_(
                mean,
                (square / second_bias_correction).sqrt_().add_(1e-8),
                value=-_LEARNING_RATE / first_bias_correction,
            )
            parameter.grad = None


@lru_cache(maxsize=2)
def capture_tensors(corpus: str, seed: int) -> Mapping[str, StepTensors]:
    """Trains a small model, and returns the tensors of the last training steps by their names in `CAPTURED`. The
    tensors of a name are in the order of steps.

    The training is fp32. The tensors depend only on the text and the seed, because the training always runs on the
    CPU. It runs once in each process and takes one or two seconds.
    """
    recorded_tensors: dict[tuple[str, Role], list[Tensor]] = {}
    config = SIZES[CAPTURED_MODEL_SIZE]

    def make_recording_arithmetic(name: str) -> Arithmetic:
        return _CastRecordingArithmetic(name, recorded_tensors)

    # With one thread and plain float32 products, the recorded tensors are the same on every machine.
    with limit_to_one_thread(), torch.random.fork_rng(devices=[]), float32_products("highest"), torch.enable_grad():
        torch.manual_seed(seed)
        model = GPT(config, make_recording_arithmetic, torch.float32)
        loader = TokenLoader(corpus, CAPTURED_MODEL_BATCH, config.sequence, "cpu", seed, config.vocabulary)
        optimizer = _Adam(list(model.parameters()))
        for step in range(TRAINING_STEPS):
            # Record only the last steps: tensors of early steps differ from those of a trained model.
            if step == TRAINING_STEPS - CAPTURED_STEP_COUNT:
                recorded_tensors.update({(tensor.layer, tensor.role): [] for tensor in CAPTURED.values()})
            model(*loader.next(), SilentPhases()).backward()
            optimizer.step()
    return {name: tuple(recorded_tensors[tensor.layer, tensor.role]) for name, tensor in CAPTURED.items()}
