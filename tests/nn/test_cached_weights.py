"""Weights cast once for several passes: the operands, the number of casts, and that nothing stays afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fp8bench.model import DeviceFacts
from fp8bench.nn.arithmetics import PlainArithmetic, RecipeArithmetic
from fp8bench.nn.linear import Linear
from fp8bench.nn.whole_layers import CachedWeights
from fp8bench.protocols import Arithmetic, Role, SilentPhases, WatchedArithmetic
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU, H200
from tests.nn.layers import given
from tests.nn.test_scaled_arithmetic import NEEDS_PRODUCTS

MODES = ("bf16", "fp8", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4", "fp8:weight-gradient=bf16")


class Pair(nn.Module):
    """Two layers, the second in another precision."""

    def __init__(self, first: Arithmetic, second: Arithmetic) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = Linear(64, 48, first), Linear(48, 32, second)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x, SilentPhases())
        y: Tensor = self.second(hidden.relu(), SilentPhases())
        return y.float().square().mean()


def gradients(model: Pair, passes: int = 1) -> list[Tensor]:
    inputs = [given(32, 64, seed=step).requires_grad_() for step in range(passes)]
    losses = torch.stack([model(x) for x in inputs])
    return [losses.detach(), *torch.autograd.grad(losses.sum(), [*inputs, *model.parameters()])]


@pytest.mark.parametrize(
    ("mode", "facts"),
    [
        *((mode, CPU) for mode in MODES),
        *(pytest.param(item, H200, marks=NEEDS_PRODUCTS) for item in ("fp8", "fp8-rowwise", "fp8-delayed:history=2")),
    ],
)
def test_cached_and_cast_again_are_the_same_bit_for_bit(mode: str, facts: DeviceFacts) -> None:
    own = [precisions.get(mode).arithmetic(facts).layer("first") for _ in range(2)]  # with draws from the start
    models = [Pair(item, PlainArithmetic(torch.float32)) for item in own]
    cached = CachedWeights(models[0])
    passes = 1 if own[0].settles else 2  # a delayed scale has an entry for each cast
    for _ in range(2):
        with cached.cast(SilentPhases()):
            result = gradients(models[0], passes)
        expected = gradients(models[1], passes)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(result, expected, strict=True))
        with torch.no_grad():
            for model in models:
                for weight in model.parameters():
                    weight.mul_(1.7).add_(0.01)


def watched(mode: str, seen: list[tuple[Role, bool]]) -> Arithmetic:
    inner = precisions.get(mode).arithmetic(CPU)
    return WatchedArithmetic(inner, lambda operand, source, role, before: seen.append((role, before is not None)))


@for_each("mode", ["fp8", "mxfp8", "bf16"])
def test_a_weight_is_cast_once_for_all_passes_in_both_orientations(mode: str) -> None:
    seen: list[tuple[Role, bool]] = []
    model = Pair(watched(mode, seen), watched(mode, seen))
    counts = []
    for cached in (True, False):
        seen.clear()
        if cached:
            with CachedWeights(model).cast(SilentPhases()):
                gradients(model, 3)
        else:
            gradients(model, 3)
        counts.append([seen.count((role, turned)) for role in Role for turned in (False, True)])
    (*inputs, weights, weights_turned, _, _), (*_, again, again_turned, _, _) = counts
    assert (weights, weights_turned, again, again_turned) == (2, 2, 6, 6)
    assert inputs == counts[1][:2] == [6, 6] and counts[0][4:] == counts[1][4:] == [6, 6]


def test_nothing_stays_when_the_passes_are_over_or_have_failed() -> None:
    model = Pair(precisions.get("fp8").arithmetic(CPU), PlainArithmetic(torch.float32))
    cached = CachedWeights(model)
    with cached.cast(SilentPhases()):
        assert model.first.operands is not None and model.second.operands is None
        operand, turned = model.first.operands
        assert torch.equal(operand.data.t(), turned.data) and not operand.data.requires_grad
    assert model.first.operands is None
    with pytest.raises(KeyError), cached.cast(SilentPhases()):
        raise KeyError
    assert model.first.operands is None


def test_a_delayed_scale_gets_one_entry_for_all_passes() -> None:
    """As in Transformer Engine; those of inputs and gradients get one per pass."""
    arithmetic = precisions.get("fp8-delayed:history=8").arithmetic(CPU).layer("one")
    assert isinstance(arithmetic, RecipeArithmetic)
    model = Pair(arithmetic, PlainArithmetic(torch.float32))
    for steps in (1, 2):
        with CachedWeights(model).cast(SilentPhases()):
            gradients(model, 3)
        entries = {role: int(torch.count_nonzero(item.history)) for role, item in arithmetic.scales.items()}
        assert entries == {Role.INPUT: 3 * steps, Role.WEIGHT: steps, Role.GRADIENT: 3 * steps}
