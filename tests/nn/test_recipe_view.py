"""A recipe as numbers: whatever mode casts a tensor, its factors and its scale are those that the cast used."""

from __future__ import annotations

import pytest
import torch

from fp8bench.nn.tensor_scales import view_of
from fp8bench.numerics.tensor_error import tensor_error
from fp8bench.protocols import Role
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU


def normal(scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(48, 160, generator=torch.Generator().manual_seed(seed)) * scale


def cast(mode: str, role: Role, *steps: torch.Tensor) -> torch.Tensor:
    """What is left of the last tensor after the others."""
    arithmetic = precisions.get(mode).arithmetic(CPU).layer("x")
    for step in steps:
        operand = arithmetic.cast(step, role)
    return arithmetic.restore(operand, torch.float32)


@for_each("role", list(Role))
@for_each(
    "mode",
    ["fp8", "fp8-rowwise", "fp8-block", "fp8-e4m3", "fp8-e5m2", "mxfp8", "mxfp6", "mxfp4", "nvfp4:stochastic=off",
     "custom:format=e3m2:scaling=none", "custom:format=e5m2fnuz:scaling=128x128", "bf16", "fp16"],
)  # fmt: skip
def test_what_is_left_lies_within_half_an_ulp_by_the_view(mode: str, role: Role) -> None:
    """Which no other grid or scale would say of it; saturated values are told apart."""
    x = normal(3.0)
    view = view_of(precisions.get(mode), role, x)
    found = tensor_error(x, cast(mode, role, x), view.fmt, view.factors)
    assert view.fmt is not None and view.course is None
    assert found.max_ulp is not None and 0.45 < found.max_ulp < 0.5 + 2**-18
    assert found.saturation_percent is not None and found.saturation_percent < 6


def test_a_delayed_scale_is_that_of_the_steps_before() -> None:
    steps = [normal(2.0**power) for power in range(4)]
    before = list(reversed(steps[:-1]))
    view = view_of(precisions.get("fp8-delayed"), Role.INPUT, steps[-1], before)
    assert view.factors is not None and view.course is not None
    amax = float(steps[-2].abs().max())
    assert float(view.factors.steps) == pytest.approx(amax / 448, rel=1e-6)
    assert view.course.lag == pytest.approx([1.0, 1.0, 1.0], abs=1e-6)
    assert view.course.drift == pytest.approx([1.0, 1.0], abs=1e-6)
    found = tensor_error(steps[-1], cast("fp8-delayed", Role.INPUT, *steps), view.fmt, view.factors)
    assert found.utilisation == pytest.approx(2, rel=1e-5) and found.saturated
    assert found.max_ulp is not None and found.max_ulp < 0.5 + 2**-18


def test_a_margin_lies_idle() -> None:
    """Two octaves of it, where the data stay as they are."""
    steps = [normal() for _ in range(3)]
    view = view_of(precisions.get("fp8-delayed:margin=2"), Role.INPUT, steps[-1], steps[:-1])
    assert (
        view.course is not None and max(view.course.lag) == pytest.approx(-2, abs=1e-6) and not any(view.course.drift)
    )
