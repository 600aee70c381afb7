"""Unit scaling: the same function and gradients as without it, deviations near 1, casts without scales."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.compiling import compile_model
from fp8bench.nn.gpt import GPT
from fp8bench.nn.linear import Linear
from fp8bench.nn.parts import FeedForward, gelu, silu_gate
from fp8bench.nn.sizes import SIZES, GPTConfig
from fp8bench.nn.text_models import TextCNN, WindowMLP
from fp8bench.nn.unit_scaling import (
    GATED_DEVIATION,
    GATED_SLOPE,
    GELU_DEVIATION,
    GELU_SLOPE,
    scale_to_unit,
)
from fp8bench.protocols import Operand, Role, SilentPhases
from tests.counts import paired

SILENT = SilentPhases()
NANO = replace(SIZES["nano"], width=96, hidden=384, sequence=48)
CONFIGS = {
    "gpt2": NANO,
    "tied": replace(NANO, tied=True),
    "deep": replace(NANO, layers=5),
    "llama": replace(NANO, is_llama_like=True, key_heads=2),
}


def built(config: GPTConfig, dtype: torch.dtype, checkpointing: bool = False) -> GPT:
    torch.manual_seed(0)
    arithmetic = PlainArithmetic(dtype)
    return GPT(config, lambda name: arithmetic, dtype, checkpointing).to(dtype)


def batch(config: GPTConfig) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    shape = 4, config.sequence
    return torch.randint(config.vocabulary, shape), torch.randint(config.vocabulary, shape)


@pytest.mark.parametrize(("name", "checkpointing"), paired([*CONFIGS], [False, True]))
def test_function_and_gradients_are_those_of_the_model_as_it_was(name: str, checkpointing: bool) -> None:
    config = CONFIGS[name]
    plain, unit = built(config, torch.float64), built(config, torch.float64, checkpointing)
    scale_to_unit(unit, config.sequence)
    for rows in (4, 2):
        tokens, targets = (item[:rows] for item in batch(config))
        losses = [model(tokens, targets, SILENT) for model in (plain, unit)]
        torch.stack(losses).sum().backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
        for (path, expected), result in zip(plain.named_parameters(), unit.parameters(), strict=True):
            assert expected.grad is not None and result.grad is not None and expected.grad.norm() > 0
            assert (result.grad - expected.grad).norm() < 1e-12 * expected.grad.norm(), path
            expected.grad = result.grad = None


class Seen(PlainArithmetic):
    """fp32, with the deviation of what is cast."""

    def __init__(self, kept: dict[str, float], name: str) -> None:
        super().__init__(torch.float32)
        self.kept, self.name = kept, name

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        self.kept[f"{self.name} {role}"] = float(tensor.std())
        return super().cast(tensor, role)


def watched(model: nn.Module) -> dict[str, float]:
    stored: dict[str, float] = {}

    def hook(path: str) -> None:
        def see(module: nn.Module, given: tuple[object, ...], result: Tensor) -> None:
            stored[f"{path} out"] = float(result.detach().std())
            result.register_hook(lambda gradient: stored.update({f"{path} back": float(gradient.std())}))

        model.get_submodule(path).register_forward_hook(see)

    for path, module in model.named_modules():
        if isinstance(module, Linear):
            module.arithmetic = Seen(stored, path)
        if path and not isinstance(module, nn.ModuleList):
            hook(path)
    return stored


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_has_a_deviation_near_1_when_a_training_begins(name: str) -> None:
    """Within a factor of 3: deeper blocks mix correlated tokens."""
    config = CONFIGS[name]
    result = []
    for scaled in (True, False):
        model = built(config, torch.float32)
        if scaled:
            scale_to_unit(model, config.sequence)
        stored = watched(model)
        model(*batch(config), SILENT).backward()
        result.append(stored)
    unit, plain = result
    assert len(unit) > 40 and all(1 / 3 < deviation < 3 for deviation in unit.values()), unit
    assert max(value for key, value in plain.items() if key.endswith("gradient")) < 0.01
    gradients = [value for key, value in unit.items() if key.endswith(("weight", "head gradient"))]
    assert all(0.95 < value < 1.05 for value in gradients)


def test_constants_are_those_of_a_gaussian() -> None:
    z = torch.linspace(-12, 12, 24001, dtype=torch.float64, requires_grad=True)
    density = torch.exp(-z.detach().square() / 2)
    density /= density.sum()

    def mean(values: Tensor) -> float:
        return float((values * density).sum())

    def both(values: Tensor) -> tuple[float, float]:
        (slopes,) = torch.autograd.grad(values.sum(), z)
        return mean(values.detach().square()), mean(slopes.square())

    squares, slopes = both(gelu(z))
    average = mean(gelu(z.detach()))
    assert math.sqrt(squares - average**2) == pytest.approx(GELU_DEVIATION, abs=5e-4)
    assert math.sqrt(slopes) == pytest.approx(GELU_SLOPE, abs=5e-4)
    squares, slopes = both(silu_gate(z, torch.ones_like(z)))
    assert math.sqrt(squares) == pytest.approx(GATED_DEVIATION, abs=5e-4)
    assert math.sqrt((squares + slopes) / 2) == pytest.approx(GATED_SLOPE, abs=5e-4)


def test_a_model_that_it_has_no_constants_for_is_refused() -> None:
    arithmetic, mixture = PlainArithmetic(torch.float32), replace(NANO, experts=4)
    kinds = (GPT, mixture), (WindowMLP, NANO), (TextCNN, NANO)
    models = [kind(config, lambda name: arithmetic, torch.float32) for kind, config in kinds]
    for model in (*models, nn.Sequential(nn.Linear(4, 4))):
        name = "a GPT with experts" if type(model) is GPT else type(model).__name__
        with pytest.raises(UsageError, match=f"none for {name}"):
            scale_to_unit(model, 48)
        assert not any(
            module.unit_scaling is not None for module in model.modules() if isinstance(module, Linear | FeedForward)
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:dynamo_pgo force disabled:UserWarning")  # torch's
def test_a_compiled_graph_has_the_same_gradients() -> None:
    tokens, targets = batch(NANO)
    result = []
    for graph in (False, True):
        model = built(NANO, torch.float32)
        scale_to_unit(model, NANO.sequence)
        forward = compile_model(model, tokens, targets) if graph else model
        forward(tokens, targets, SILENT).backward()
        result.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*result, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
