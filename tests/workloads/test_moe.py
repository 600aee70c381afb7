"""Mixtures of experts against plain loops, a router by sorting, FLOPs by hand, and mistakes that are planted."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fp8bench.analysis.tapes import sum_product_work
from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Level, Scalar
from fp8bench.nn.exercise import LayerExercise
from fp8bench.nn.experts import Mixture, compute_disagreement_shares, draw_expert_load, summarise_load, transport
from fp8bench.nn.sizes import MoeSizes
from fp8bench.registry import precisions
from fp8bench.workloads.moe import Moe, parse_load
from tests.counts import for_each
from tests.facts import B200
from tests.nn.grouped_kernel import GroupedKernel
from tests.tapes import tape_in_phases
from tests.workloads.steps import CPU, H200, SMALL, cast_again, kept_weights, small, weight_bytes

SIZES = MoeSizes(32, 48, 4, 2)
LOADS = ("uniform", "zipf:1", "zipf:4", "router")


def state_of(precision: str = "fp32", seed: int = 0, **changes: Scalar) -> LayerExercise:
    return Moe().prepare(small("moe", precision, seed, **changes))


def by_loops(state: LayerExercise, load: str, seed: int = 0) -> Tensor:
    (x,) = state.inputs
    layer = state.layer
    weights = dict(layer.named_parameters())
    normed = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights["norms.0.weight"]
    router = weights["blocks.0.router"]
    plan = draw_expert_load(load, len(x), SIZES, seed)
    rows = []
    for token, row in enumerate(normed):
        scores = [(row * expert).sum() for expert in router]
        ranked = sorted(range(len(scores)), key=lambda number: -scores[number].item())
        chosen = ranked[: SIZES.top_k] if plan is None else plan[token].tolist()
        total = sum((scores[number].exp() for number in chosen), torch.zeros(()))
        out = torch.zeros(SIZES.width)
        for number in chosen:
            up, down = (weights[f"blocks.0.experts.{number}.{name}.weight"] for name in ("up", "down"))
            gate, hidden = (up @ row).split(SIZES.hidden)
            out = out + scores[number].exp() / total * (down @ (functional.silu(gate) * hidden))
        rows.append(x[token] + out)
    return torch.stack(rows)


def agree(state: LayerExercise, load: str) -> bool:
    output, gradients = state.outcome()
    wanted = by_loops(state, load)
    others = torch.autograd.grad(wanted, state.list_leaf_tensors(), state.output_gradient, allow_unused=True)
    pairs = [
        (output, wanted),
        *((a, torch.zeros_like(a) if b is None else b) for a, b in zip(gradients, others, strict=True)),
    ]
    return all(torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5) for ours, theirs in pairs)


@for_each("load", LOADS)
def test_it_is_what_plain_loops_compute(load: str) -> None:
    assert agree(state_of(load=load), load)


def rows_of(state: LayerExercise) -> list[int]:
    assert isinstance(state.layer, Mixture)
    ((_, counts),) = state.layer.record_routing(state.outcome)
    return counts


@for_each("load", LOADS)
@for_each("passing", ["training", "decode"])
def test_flops_by_hand(load: str, passing: str) -> None:
    state = state_of(load=load, **{"pass": passing})
    tape = tape_in_phases(state.step)
    expert = 2 * 3 * 32 * 48
    times = 3 if passing == "training" else 1
    assert tape.flops == times * (24 * 2 * expert + 24 * 2 * 32 * 4)
    assert Moe().work({**SMALL["moe"], "load": load, "pass": passing}).flops == tape.flops


@for_each("load", LOADS)
def test_rows_that_fill_a_part_up_are_not_useful(load: str) -> None:
    plain, filled = (state_of(precision, load=load) for precision in ("fp32", "fp8"))
    tape, reference = (tape_in_phases(state.step) for state in (filled, plain))
    more = sum(-(-rows // 16) * 16 - rows for rows in rows_of(filled))
    assert more > 0
    assert tape.flops == reference.flops + 3 * more * 2 * 3 * 32 * 48
    work = sum_product_work(tape, reference)
    assert (work.useful_flops, work.padding_flops) == (reference.flops, 3 * more * 2 * 3 * 32 * 48)


def test_a_uniform_load_is_exactly_so() -> None:
    plan = draw_expert_load("uniform", 64, MoeSizes(8, 8, 16, 4), 0)
    assert plan is not None and plan.flatten().bincount().tolist() == [16] * 16
    assert all(len(set(row)) == 4 for row in plan.tolist())


@for_each("exponent", [0.5, 1.0, 2.0])
def test_a_zipf_load_is_drawn_without_an_expert_twice(exponent: float) -> None:
    plan = draw_expert_load(f"zipf:{exponent:g}", 20_000, MoeSizes(8, 8, 6, 2), 3)
    assert plan is not None and all(len(set(row)) == 2 for row in plan.tolist())
    law = np.arange(1, 7.0) ** -exponent
    law /= law.sum()
    shares = plan[:, 0].bincount(minlength=6).double().numpy() / len(plan)
    assert np.abs(shares - law).max() < 5 * math.sqrt(0.25 / len(plan))


def test_rows_travel_as_e4m3_with_a_scale_for_128_elements() -> None:
    torch.manual_seed(0)
    x = (torch.randn(5, 256) * torch.logspace(-3, 3, 5)[:, None]).requires_grad_(True)
    numbers = torch.tensor([4, 0, 0, 2])
    rows = transport(x, numbers, "fp8")
    for row, number in zip(rows.detach().numpy(), numbers.tolist(), strict=True):
        for start in (0, 128):
            part = x.detach().numpy()[number, start : start + 128]
            scale = np.float32(np.abs(part).max() / np.float32(448))
            codes = (part / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            assert np.array_equal(row[start : start + 128], codes * scale)
    gradient = torch.randn(4, 256)
    (back,) = torch.autograd.grad(rows, x, gradient)
    assert (
        torch.allclose(back[0], gradient[1] + gradient[2]) and not back[1].any() and torch.equal(back[4], gradient[0])
    )


def test_a_low_router_chooses_others_and_says_from_which_layer_on() -> None:
    for load in ("router", "uniform"):
        exact = Moe().error(small("moe", "fp32", tokens=96, layers=3, load=load))
        assert exact["top_k_differs_percent"] == 0 and exact["layers_that_agree"] == 3
        low = Moe().error(small("moe", "fp32", tokens=96, layers=3, load=load, router="nvfp4"))
        shares = [low[f"top_k_layer{number}_differs_percent"] for number in range(3)]
        assert 0 < shares[0] < 50 and low["layers_that_agree"] == 0
        assert low["top_k_differs_percent"] == pytest.approx(sum(shares) / 3)


def test_agreement_and_load_by_hand() -> None:
    ours = torch.tensor([[0, 1], [2, 3]])
    exact = torch.tensor([[1, 0], [2, 1]])
    assert compute_disagreement_shares([ours], [exact]) == [0.25]
    assert summarise_load([[6, 0, 1, 1], [2, 2, 2, 2]], 10) == {
        "load_ratio": 3.0,
        "distinct_experts": 7.0,
        "expert_bytes": 70.0,
        "rows_least": 1.0,
        "rows_median": 2.0,
    }


@for_each(("precision", "each"), [("fp32", 4), ("bf16", 2)])
def test_bytes_are_those_of_experts_that_have_tokens(precision: str, each: int) -> None:
    figures = Moe().error(small("moe", precision, tokens=1, load="uniform", **{"pass": "decode"}))
    assert figures["distinct_experts"] == 2 and figures["expert_bytes"] == 2 * 3 * 32 * 48 * each


def test_decoding_casts_no_weight_in_its_step_and_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of("fp8", **{"pass": "decode"})
    assert state.output_gradient is None and weight_bytes(state.layer.modules()) == 8 * 4  # one number each
    kept_weights(monkeypatch)
    other = state_of("fp8", **{"pass": "decode"})
    assert cast_again(other.layer.modules()) == 8
    assert torch.equal(state.outcome()[0], other.outcome()[0])


@for_each("load", LOADS)
def test_decoding_in_bf16_multiplies_no_row_more(load: str) -> None:
    tapes = [
        tape_in_phases(state_of(name, tokens=6, load=load, **{"pass": "decode"}).step) for name in ("fp32", "bf16")
    ]
    assert tapes[0].flops == tapes[1].flops
    assert any("grouped" in operator.operator for operator in tapes[1].operators)


def _product_of_codes(a: Tensor, b: Tensor, *others: object) -> Tensor:
    return (a.float() @ b.float()).to(torch.bfloat16)


@for_each(
    ("precision", "facts", "rows"),
    [("fp8-rowwise", H200, 32), ("mxfp8", B200, 128), ("fp8", H200, 1)],
)
def test_native_decoding_fills_groups_up_to_what_its_products_take(
    precision: str, facts: DeviceFacts, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.aten._scaled_mm_v2, "default", _product_of_codes)
    monkeypatch.setattr(torch.ops.aten._scaled_grouped_mm, "default", GroupedKernel())
    setup = small("moe", precision, load="zipf:2", hidden=64, **{"pass": "decode"})
    state = Moe().prepare(replace(setup, arithmetic=precisions.get(precision).arithmetic(facts)))
    counts = rows_of(state)
    reference = tape_in_phases(state_of(load="zipf:2", hidden=64, **{"pass": "decode"}).step)
    filled = sum(-(-count // rows) * rows - count for count in counts)
    assert (filled > 0) == (rows > 1)
    work = sum_product_work(tape_in_phases(state.step), reference)
    assert (work.useful_flops, work.padding_flops) == (reference.flops, filled * 2 * 3 * 32 * 64)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="top_k=5 is more than experts=4"):
        Moe().expand({**SMALL["moe"], "top_k": 5})
    for text in ("zipf", "zipf:0", "zipf:9", "skewed"):
        with pytest.raises(ValueError, match="expected"):
            parse_load(text)
    assert parse_load("zipf:1.50") == "zipf:1.5"
    support = Moe().support({**SMALL["moe"], "width": 40}, precisions.get("fp8"), H200)
    assert support.level is Level.REFUSED and "width=40" in support.reason
    support = Moe().support({**SMALL["moe"], "router": "fp8"}, precisions.get("bf16"), H200)
    assert support.level is Level.REFUSED and "router=fp8" in support.reason
    for axis in ("router", "dispatch", "combine"):
        support = Moe().support({**SMALL["moe"], axis: "fp8"}, precisions.get("bf16"), CPU)
        assert support.level is Level.EMULATED and f"{axis}=fp8: " in support.reason
    assert Moe().support(SMALL["moe"], precisions.get("bf16"), CPU).level is Level.NATIVE
    assert Moe().support({**SMALL["moe"], "dispatch": "fp8"}, precisions.get("bf16"), H200).level is Level.NATIVE
    assert Moe().support(SMALL["moe"], precisions.get("fp8"), CPU).level is Level.EMULATED
