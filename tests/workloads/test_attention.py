"""The attention workload: its parameters, what it counts, marks and finds wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fp8bench.model import DeviceFacts, Level, Request, Scalar
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Setup, SilentPhases
from fp8bench.registry import precisions
from fp8bench.worker.products import inspect_products
from fp8bench.workloads.attention import Attention
from tests.counts import for_each
from tests.workloads.steps import CPU, H200, SMALL, small

TINY = SMALL["attention"]


def setup_for(precision: str = "fp32", **changes: Scalar) -> Setup:
    return small("attention", precision, **changes)


@for_each("causal", ["yes", "no"])
@for_each("pass_", ["forward", "training"])
@for_each("part", ["core", "layer"])
def test_the_flops_are_those_torch_counts(part: str, pass_: str, causal: str) -> None:
    """torch counts all scores, the plan only those inside a causal mask."""
    changes = {"part": part, "pass": pass_, "causal": causal, "key_heads": 4}
    state = Attention().prepare(setup_for(**changes))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        if state.output_gradient is None:
            Attention().step(state, SilentPhases())
        else:  # the counter cannot follow autograd.grad, which a step calls
            state.layer(*state.inputs, SilentPhases()).backward(state.output_gradient)
    counted = counter.get_flop_counts()["Global"]
    attention = counted[torch.ops.aten.bmm] / (2 if causal == "yes" else 1)
    assert Attention().work({**TINY, **changes}).flops == counted.get(torch.ops.aten.mm, 0) + attention


def test_work_counts_tokens_and_what_memory_must_hold() -> None:
    """Low-precision scores are fp32 matrices, two forward and three in backward; fused scores never exist."""
    high, low = (Attention().work({**TINY, "scores": scores}) for scores in ("high", "low"))
    assert high.tokens == 64 and high.flops == low.flops
    assert low.least_memory - high.least_memory == 3 * 4 * (2 * 4 * 32 * 32)
    forward = [Attention().work({**TINY, "scores": scores, "pass": "forward"}) for scores in ("high", "low")]
    assert forward[1].least_memory - forward[0].least_memory == 2 * 4 * (2 * 4 * 32 * 32)
    # Grouped keys: weights of 64 x (64 + 2 x 32) and 64 x 64, once and as gradients, and two-byte activations.
    assert high.least_memory == 2 * 4 * 64 * (128 + 64) + 2 * 2 * 64 * (128 + 64) + 2 * 64 * 64


def support(precision: str, facts: DeviceFacts = CPU, **changes: Scalar) -> tuple[Level, str]:
    found = Attention().support({**TINY, **changes}, precisions.get(precision), facts)
    return found.level, found.reason


@for_each("precision", ["fp32", "bf16", "fp16", "tf32", "fp8", "nvfp4"])
def test_the_core_refuses_precisions_that_would_change_nothing(precision: str) -> None:
    carried_by = precisions.get(precision).carried_by
    level, reason = support(precision, part="core")
    assert level is (Level.REFUSED if carried_by else Level.NATIVE)
    assert not carried_by or reason.startswith(f"{precision} leaves attention's scores to {carried_by}")
    for part in ("core", "layer"):
        for facts in (CPU, H200):
            level, reason = support(precision, facts, part=part, scores="low")
            assert level is Level.EMULATED and "explicit products" in reason


@for_each(
    ("changes", "fits"),
    [
        ({}, True),
        ({"head_width": 10}, False),
        ({"sequence": 20, "batch": 1}, False),
        ({"sequence": 20, "batch": 1, "pass": "forward"}, True),
        ({"part": "core", "head_width": 10}, None),
    ],
)
def test_a_native_layer_that_does_not_fit_says_why(changes: dict[str, Scalar], fits: bool | None) -> None:
    level, reason = support("fp8", H200, **changes)
    assert level is (Level.NATIVE if fits else Level.REFUSED)
    assert fits is not False or "multiples of 16" in reason
    assert support("fp8", CPU, **{**changes, "part": "layer"})[0] is Level.EMULATED
    assert support("fp8", H200, **{**changes, "scores": "low"})[0] is (
        Level.REFUSED if fits is False else Level.EMULATED
    )


def test_the_error_of_the_core_is_that_of_plain_formulas() -> None:
    setup = setup_for("bf16", part="core", key_heads=4, **{"pass": "forward"})
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 32, 16) for _ in range(3))
    scores = q.double() @ k.double().mT / 4
    hidden = torch.ones(32, 32, dtype=torch.bool).triu(1)
    exact = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v.double()
    low = torch.nn.functional.scaled_dot_product_attention(*(one.bfloat16() for one in (q, k, v)), is_causal=True)
    error = pytest.approx(relative_frobenius(low, exact), rel=1e-6)
    assert Attention().error(setup) == {"output_error": error, "scores_bytes": 0.0}


def test_scaling_queries_before_saves_scores_beyond_the_formats_range() -> None:
    """E4M3 ends at 448: scores of 64 features reach it."""
    common: dict[str, Scalar] = {"part": "core", "head_width": 64, "pass": "forward"}
    found = {
        (spread, scores): Attention().error(setup_for("fp8", scores=scores, spread=spread, **common))["output_error"]
        for spread in (1, 8)
        for scores in ("low", "low-prescaled")
    }
    assert found[1, "low"] == pytest.approx(found[1, "low-prescaled"], rel=0.1), "all within the range"
    assert found[8, "low"] > 1.5 * found[8, "low-prescaled"]


def test_the_core_gets_the_cases_own_carrier_under_a_precision_map() -> None:
    both = dict.fromkeys(("qkv", "out"), precisions.get("fp32").arithmetic(CPU))
    assert Attention().prepare(replace(setup_for("fp8"), layers=both)).outcome()[0].dtype == torch.bfloat16


def test_a_core_alone_has_no_layer_to_map() -> None:
    """A map that would change nothing is a reason to skip."""
    request = Request("attention", ("fp32", "bf16"), axes=(("sequence", ("128",)),), precision_map=(("out", "fp8"),))
    cases = {str(group.cases[1].case.param("part")): group.cases[1] for group in make_plan(request, (CPU,)).groups}
    assert cases["core"].skip.startswith("no layer is called out in this case")
    assert cases["layer"].support.level is Level.EMULATED


def test_which_kernel_auto_takes_is_seen() -> None:
    for scores, kernels in (("high", ("flash",)), ("low", ())):
        make = partial(setup_for, "bf16", part="core", scores=scores)
        assert inspect_products(Attention(), make, CPU).attention == kernels
