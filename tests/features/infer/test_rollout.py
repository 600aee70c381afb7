"""Rollouts that an arm samples and the reference scores, against known truths."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8bench.features.infer import quality as module
from fp8bench.features.infer.job import SHIPPED, SHIPPED_WEIGHTS, make_held_out_windows
from fp8bench.features.infer.quality import (
    MakeArmModel,
    _serve_configured_model,
    compare_arms,
    measure_rollout_gap,
    summarize_rollout_gaps,
)
from fp8bench.features.infer.values import QualityTask, ServedModel
from fp8bench.nn.decoder import Decoder
from fp8bench.nn.served import ServedArm as Arm
from fp8bench.nn.sizes import SERVED_SIZES
from tests.workloads.steps import CPU

LEAD, LOW = Arm("fp32"), Arm("bf16", "fp8-tensor", "int4")
TASK = QualityTask(
    ServedModel(SHIPPED, SERVED_SIZES[SHIPPED], str(SHIPPED_WEIGHTS), text=make_held_out_windows(1024)),
    0,
    (LEAD, LOW),
    CPU,
    0,
    2,
)


def test_figures_are_those_of_their_definitions() -> None:
    rows = [[0.1, -0.3, 0.0], [0.02, 0.25, -0.01]]
    gap, flat = summarize_rollout_gaps(torch.tensor(rows, dtype=torch.float64)), [*rows[0], *rows[1]]
    ratios = [math.exp(value) for value in flat]
    assert gap.tokens == 6 and gap.mean == pytest.approx(sum(map(abs, flat)) / 6) and gap.largest == 0.3
    assert gap.kl == pytest.approx(sum(ratio - 1 - value for ratio, value in zip(ratios, flat, strict=True)) / 6)
    assert gap.ratio.point == pytest.approx(sum(ratios) / 6) and gap.ratio.low <= gap.ratio.point <= gap.ratio.high
    assert (gap.least, gap.most) == (pytest.approx(min(ratios)), pytest.approx(max(ratios)))
    assert gap.clipped == pytest.approx(2 / 6)  # exp(-0.3) and exp(0.25)
    texts = [math.exp(sum(row)) for row in rows]
    for share, weights in zip(gap.effective, (ratios, texts), strict=True):
        assert share == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights) / len(weights))


def test_an_interval_over_few_texts_is_wide() -> None:
    gaps = torch.tensor([[0.1, 0.3], [0.2, 0.4], [0.0, 0.1]], dtype=torch.float64)
    two, one = (summarize_rollout_gaps(gaps[:count]).ratio for count in (2, 1))
    spread = abs(float(gaps.exp()[0].mean() - gaps.exp()[1].mean())) / 2
    assert (two.high - two.low) / 2 == pytest.approx(12.71 * spread, rel=0.01)
    assert one.point == pytest.approx(float(gaps[0].exp().mean())) and (one.low, one.high) == (-math.inf, math.inf)


def test_figures_estimate_the_truth_of_known_distributions() -> None:
    """400,000 draws from one of two: k3 is the divergence, the mean ratio 1, the effective share 1 / (1 + chi2)."""
    random = np.random.default_rng(3)
    p, q = random.dirichlet(np.ones(40)), random.dirichlet(np.ones(40) * 50)
    p = 0.7 * q + 0.3 * p
    draws = random.choice(40, p=q, size=(400, 1000))
    gap = summarize_rollout_gaps(torch.tensor(np.log(p / q)[draws]))
    assert gap.kl == pytest.approx(float((q * np.log(q / p)).sum()), rel=0.02)
    assert gap.ratio.low < 1 < gap.ratio.high and gap.ratio.high - gap.ratio.low < 0.01
    assert gap.effective[0] == pytest.approx(1 / float((p * p / q).sum()), rel=0.01) and gap.effective[1] < 0.1
    assert gap.clipped == pytest.approx(float(q[(p / q < 0.8) | (p / q > 1.2)].sum()), abs=0.005)


@pytest.fixture(scope="module")
def serve() -> tuple[MakeArmModel, Tensor]:
    return _serve_configured_model(TASK)[:2]


def test_the_reference_against_itself_is_the_floor() -> None:
    floor, low = compare_arms(TASK).rollouts
    assert 0 < floor.mean < 1e-5 and floor.largest < 1e-3 and floor.clipped == 0 and floor.effective[1] > 0.999
    assert floor.ratio.point == pytest.approx(1, abs=1e-5)
    assert (
        low.mean > 1000 * floor.mean and low.tokens == floor.tokens == 8 * 65 and low.effective[1] < floor.effective[1]
    )
    # Equal weights: in any arithmetic the mean ratio is 1.
    assert low.ratio.low < 1 < low.ratio.high


def test_probabilities_while_sampling_equal_those_of_one_pass(
    serve: tuple[MakeArmModel, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked for bf16 weights with an exact cache; k3 estimates the exact divergence of whole distributions."""
    build, text = serve
    seen: list[Tensor] = []
    predicted = module._predict_tokens

    def watched(model: Decoder, tokens: Tensor) -> module.Predictions:
        seen.append(tokens)
        return predicted(model, tokens)

    monkeypatch.setattr(module, "_predict_tokens", watched)
    arm = Arm("fp32", "", "int4")
    gap = measure_rollout_gap(build, arm, LEAD, text, 7)
    (tokens,) = seen
    assert torch.equal(tokens[:, :64], text[:, :64]) and not torch.equal(tokens[:, 64:], text[:, 64:])
    with torch.no_grad():
        own, lead = (predicted(build(side, (8, 128)), tokens) for side in (arm, LEAD))
    differences = (lead.true - own.true)[:, 63:]
    assert gap.mean == pytest.approx(float(differences.abs().mean()), rel=1e-3)
    assert gap.ratio.point == pytest.approx(float(differences.exp().mean()), rel=1e-4)
    exact = float((own.logs.exp() * (own.logs - lead.logs)).sum(-1)[:, 63:].mean())
    assert gap.kl == pytest.approx(exact, rel=0.25)


def test_static_scales_come_from_the_prompt(serve: tuple[MakeArmModel, Tensor]) -> None:
    """If each step recomputed them, gaps would be 1.5 times as large."""
    build, text = serve
    scaled = Arm("fp32", "fp8-tensor")

    class Finding(Decoder):
        calibrates = property(lambda self: True, lambda self, value: None)  # type: ignore[assignment]

    def again(arm: Arm, sizes: tuple[int, int]) -> Decoder:
        model = build(arm, sizes)
        assert isinstance(model, Decoder)
        if arm == scaled:
            vars(model).pop("calibrates")
            model.__class__ = Finding
        return model

    right, wrong = (measure_rollout_gap(each, scaled, LEAD, text, 7).mean for each in (build, again))
    assert wrong > 1.5 * right
