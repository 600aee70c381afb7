"""Tensors captured from a training: which they are, and that nothing else decides over them."""

from __future__ import annotations

import pytest
import torch

from fp8bench.nn.sizes import CAPTURED, CAPTURED_STEPS, SIZES, TRAINED_BATCH, TRAINED_SIZE
from fp8bench.nn.training_step import Course, captured
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import Role, float32_products


@pytest.fixture(scope="module")
def found(corpus: Corpus) -> dict[str, Course]:
    return dict(captured(corpus.path, 0))


@pytest.mark.slow
def test_there_is_one_for_each_layer_kind_and_role(found: dict[str, Course], corpus: Corpus) -> None:
    assert (
        list(found)
        == list(CAPTURED)
        == [f"{kind}-{role}" for kind in ("attn", "mlp", "head") for role in ("input", "weight", "gradient")]
    )
    assert all(captured(corpus.path, 0)[name] is course for name, course in found.items())
    for name, course in found.items():
        assert len(course) == CAPTURED_STEPS
        for tensor in course:
            assert tensor.shape == (CAPTURED[name].rows, CAPTURED[name].columns)
            assert tensor.dtype == torch.float32 and tensor.device.type == "cpu" and not tensor.requires_grad
            assert tensor.isfinite().all() and tensor.abs().max() > 0


def test_they_are_what_training_makes_of_them(found: dict[str, Course]) -> None:
    for name, course in found.items():
        change = float((course[-1] - course[-2]).norm() / course[-1].norm())
        assert (0 < change < 0.2) if CAPTURED[name].role is Role.WEIGHT else change > 0.3
        assert (float(course[-1].std()) < 1e-3) == (CAPTURED[name].role is Role.GRADIENT)
    tokens, config = TRAINED_BATCH * SIZES[TRAINED_SIZE].sequence, SIZES[TRAINED_SIZE]
    # The loss' gradient: probabilities less the target, over the tokens; each row sums to zero.
    head = found["head-gradient"][-1]
    assert head.shape == (tokens, config.vocabulary) and float(head.sum(1).abs().max()) < 1e-7
    assert float(head.min()) == pytest.approx(-1 / tokens, rel=0.1)


def test_the_training_learns(found: dict[str, Course]) -> None:
    head = found["head-gradient"][-1].double() * TRAINED_BATCH * SIZES[TRAINED_SIZE].sequence
    right = 1 + head.min(1).values
    assert float(right.log().mean()) > -3.2


def test_they_come_from_the_text_and_the_seed_alone(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8bench.nn.training_step.TRAINING_STEPS", CAPTURED_STEPS)
    anew = captured.__wrapped__
    one = anew(corpus.path, 0)
    torch.manual_seed(7)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.no_grad(), float32_products("high"):
        again = anew(corpus.path, 0)
        assert torch.get_float32_matmul_precision() == "high" and not torch.is_grad_enabled()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for name in one for a, b in zip(one[name], again[name], strict=True))
    other = anew(corpus.path, 1)
    assert not any(torch.equal(one[name][-1], other[name][-1]) for name in one)
