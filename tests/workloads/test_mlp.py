"""The feed-forward block: results and phases, hardware's size requirements, errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional

from fp8bench.model import Level, Scalar
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.parts import FeedForward
from fp8bench.protocols import Setup, SilentPhases
from fp8bench.registry import precisions
from fp8bench.workloads.mlp import Mlp
from tests.counts import for_each
from tests.workloads.steps import CPU, H200, SMALL, small

SIZES = SMALL["mlp"]


def setup_for(precision: str = "bf16", seed: int = 0, **changes: Scalar) -> Setup:
    return small("mlp", precision, seed, **changes)


@for_each("gated", ["no", "yes"])
def test_it_is_a_feed_forward_block(gated: str) -> None:
    state = Mlp().prepare(setup_for("fp32", gated=gated))
    (x,) = state.inputs
    (up, down) = list(state.layer.parameters())
    hidden = x @ up.t()
    if gated == "yes":
        hidden = functional.silu(hidden[:, :48]) * hidden[:, 48:]
    else:
        hidden = functional.gelu(hidden, approximate="tanh")
    torch.testing.assert_close(state.layer(x, SilentPhases()), hidden @ down.t())
    assert x.shape == (24, 16) and up.shape == (96 if gated == "yes" else 48, 16) and down.shape == (16, 48)


@for_each("gated", ["no", "yes"])
def test_a_unit_scaled_block_is_the_plain_one(gated: str) -> None:
    exact = PlainArithmetic(torch.float64)
    setups = (replace(setup_for(mode, gated=gated), arithmetic=exact, high=exact) for mode in ("fp8", "fp8-unit"))
    plain, unit = map(Mlp().prepare, setups)
    assert isinstance(plain.layer, FeedForward) and isinstance(unit.layer, FeedForward)
    assert (
        plain.layer.unit_scaling is None
        and unit.layer.unit_scaling is not None
        and unit.layer.up.weight_factor == pytest.approx(4)
    )
    (wanted, gradients) = plain.outcome()
    (found, others) = unit.outcome()
    assert len(gradients) == 3 and found.dtype == torch.float64
    for one, other in zip((wanted, *gradients), (found, *others), strict=True):
        assert (other - one).norm() < 1e-12 * one.norm()


@for_each("cut", ["norm-linear", "norm-mlp"])
def test_a_norm_before_the_block_is_an_axis_of_its_own(cut: str) -> None:
    axis = next(one for one in Mlp().axes(CPU) if one.name == "cut")
    assert axis.quiet and axis.default == ("linear",)
    state = Mlp().prepare(setup_for("fp32", cut=cut))
    (x,) = state.inputs
    (norm, *_) = list(state.layer.parameters())
    plain = Mlp().prepare(setup_for("fp32"))
    for mine, theirs in zip(list(plain.layer.parameters()), list(state.layer.parameters())[1:], strict=True):
        mine.data.copy_(theirs)
    normed = functional.rms_norm(x, (16,), norm, 1e-5)
    torch.testing.assert_close(state.layer(x, SilentPhases()), plain.layer(normed, SilentPhases()))
    _, gradients = state.outcome()
    assert len(gradients) == 4 and all(bool(one.any()) for one in gradients)


def test_a_block_that_may_be_one_layer_has_no_precision_map() -> None:
    params = {**SIZES, "tokens": 32, "gated": "no", "pass": "training", "cut": "norm-mlp"}
    refused = Mlp().layer_support("up", params, precisions.get("fp8"), H200)
    assert refused.level is Level.REFUSED and "choose cut=norm-linear" in refused.reason
    parted = Mlp().layer_support("up", {**params, "cut": "norm-linear"}, precisions.get("fp8"), H200)
    assert parted.level is Level.NATIVE
