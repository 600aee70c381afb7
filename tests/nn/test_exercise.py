"""One layer exercised alone: the same numbers for every dtype, and errors against fp64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8bench.model import Case
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.exercise import Exercise, make_exercise
from fp8bench.protocols import Phases, Setup
from tests.facts import CPU


class Scaled(nn.Module):
    """A weight a feature, and one input that is only added."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, other: Tensor, phase: Phases) -> Tensor:
        return x * self.weight.to(x.dtype) + other


def made(dtype: torch.dtype = torch.float32, training: bool = True, seed: int = 0) -> Exercise:
    arithmetic = PlainArithmetic(dtype)
    setup = Setup(Case("some", (), "fp32", "cpu"), CPU, seed, arithmetic, arithmetic, {})
    return make_exercise(setup, Scaled, [(4, 8), (4, 8)], dtype, training)


def test_the_numbers_are_the_same_in_every_dtype() -> None:
    single, half, double = (made(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64))
    assert (
        single.output_gradient is not None and half.output_gradient is not None and double.output_gradient is not None
    )
    for item, low, high in zip(
        (*single.inputs, single.output_gradient),
        (*half.inputs, half.output_gradient),
        (*double.inputs, double.output_gradient),
        strict=True,
    ):
        assert torch.equal(item.to(torch.bfloat16), low) and torch.equal(item.double(), high)
    assert not torch.equal(single.inputs[0], single.inputs[1])
    weights = [next(item.layer.parameters()).detach() for item in (single, half, double)]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0].double(), weights[2])


def test_errors_are_those_of_output_and_gradients() -> None:
    exact = made(torch.float64)
    errors = made(torch.bfloat16).measure_errors(exact)
    assert set(errors) == {"output_error", "gradient_error"} and all(1e-4 < error < 1e-2 for error in errors.values())
    assert exact.measure_errors(made(torch.float64)) == {"output_error": 0.0, "gradient_error": 0.0}
    assert set(made(training=False).measure_errors(made(torch.float64, training=False))) == {"output_error"}
