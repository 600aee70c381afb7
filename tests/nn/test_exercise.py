"""One layer exercised alone: the same numbers for every dtype, and errors against fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.model import Case
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.exercise import LayerExercise, make_exercise
from fp8bench.protocols import Phases, Setup
from tests.facts import CPU


class Scaled(nn.Module):
    """A weight a feature, and one input that is only added."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, other: Tensor, phase: Phases) -> Tensor:
        return x * self.weight.to(x.dtype) + other


def made(dtype: torch.dtype = torch.float32, training: bool = True, seed: int = 0) -> LayerExercise:
    arithmetic = PlainArithmetic(dtype)
    setup = Setup(Case("some", (), "fp32", "cpu"), CPU, seed, arithmetic, arithmetic, {})
    return make_exercise(setup, Scaled, [(4, 8), (4, 8)], dtype, training)


def test_the_numbers_are_the_same_in_every_dtype() -> None:
    numbers: list[list[Any]] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        exercise = made(dtype)
        numbers.append([*exercise.inputs, exercise.output_gradient, *exercise.layer.parameters()])
    first, second, _, weight = numbers[0]
    assert not torch.equal(first, second) and numbers[1][3].dtype is weight.dtype
    for single, half, double in zip(*numbers, strict=True):
        assert torch.equal(single.to(half.dtype), half) and torch.equal(single.double(), double)


def test_errors_are_those_of_output_and_gradients() -> None:
    exact = made(torch.float64)
    errors = made(torch.bfloat16).measure_errors(exact)
    assert set(errors) == {"output_error", "gradient_error"} and all(1e-4 < error < 1e-2 for error in errors.values())
    assert exact.measure_errors(made(torch.float64)) == {"output_error": 0.0, "gradient_error": 0.0}
    assert set(made(training=False).measure_errors(made(torch.float64, training=False))) == {"output_error"}
