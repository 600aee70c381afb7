"""Looks at text that is not trained on: what they say, and that no step to come is changed by them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from fp8bench.features.train.lab import models
from fp8bench.features.train.lab.evaluate import Evaluation
from fp8bench.features.train.lab.together import Alone
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import TokenSpan, TrainingText, Validation
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.gpt import LanguageModel
from fp8bench.plan.bpe import token_bytes
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import SilentPhases
from fp8bench.registry import precisions
from tests.facts import CPU
from tests.features.train.lab.labs import lab_of, rows, task_of

MERGES = ((104, 101), (256, 108))
SETTINGS = TrainerSettings(batch=2, sequence=24)
WHO = ("bf16", 3, 7)


@pytest.fixture
def text(tmp_path: Path) -> TrainingText:
    """Tokens at random, some of which stand for two or three bytes."""
    file = tmp_path / "tokens"
    np.random.default_rng(0).integers(200, 258, 3000).astype(np.uint16).tofile(file)
    held_out, other = TokenSpan(str(file), 1000, 1410), TokenSpan(str(file), 2000, 3000)
    return TrainingText(held_out, held_out, other, 258, "bpe", "text", MERGES)


def made(text: TrainingText) -> tuple[LanguageModel, Evaluation]:
    config = replace(models.config_of(SETTINGS, text.vocabulary), width=32, hidden=32)
    plain = PlainArithmetic(torch.float32)
    torch.manual_seed(0)
    model = models.built(SETTINGS, config, lambda name: plain, plain.carrier)
    return model, Evaluation(text, config, models.layers_of("gpt", config), CPU, Alone().scaled)


@torch.no_grad()
def plain_losses(model: LanguageModel, span: TokenSpan) -> tuple[torch.Tensor, torch.Tensor]:
    """Window by window through all of the stretch: targets, and the loss of each."""
    ids = torch.from_numpy(np.fromfile(span.path, dtype=np.uint16)[span.start : span.stop].astype(np.int64))
    windows = [ids[at : at + 25] for at in range(0, len(ids) - 24, 24)]
    found = [functional.cross_entropy(model.logits(one[None, :-1], SilentPhases())[0], one[1:], reduction="none")
             for one in windows]  # fmt: skip
    return torch.stack([one[1:] for one in windows]), torch.stack(found)


def test_a_look_says_what_a_plain_loop_over_the_text_finds(text: TrainingText) -> None:
    """By token, by byte, by position; positions are parts of the held-out text."""
    model, evaluation = made(text)
    with torch.no_grad():
        found = {one.of: one for one in evaluation.look(model, WHO, last=True)}
    targets, losses = plain_losses(model, text.held_out)
    lengths = torch.tensor([len(one) for one in token_bytes(MERGES)])[targets]
    assert targets.shape == (17, 24)
    held_out = found["held-out"]
    assert (held_out.arm, held_out.seed, held_out.step) == WHO
    assert (held_out.tokens, held_out.bytes) == (17 * 24, int(lengths.sum()))
    assert held_out.loss == pytest.approx(float(losses.mean()), rel=1e-5)
    assert held_out.perplexity == pytest.approx(math.exp(held_out.loss))
    assert held_out.perplexity_by_byte == pytest.approx(math.exp(float(losses.sum()) / int(lengths.sum())), rel=1e-5)
    positions = [one for one in found.values() if one.of.startswith("position:")]
    assert [one.of for one in positions] == [f"position:{at}-{at + 2}" for at in range(0, 24, 3)]
    for number, one in enumerate(positions):
        part = slice(3 * number, 3 * number + 3)
        assert one.loss == pytest.approx(float(losses[:, part].mean()), rel=1e-5)
        assert (one.tokens, one.bytes) == (17 * 3, int(lengths[:, part].sum()))
    assert text.other is not None
    assert found["other-text"].loss == pytest.approx(float(plain_losses(model, text.other)[1].mean()), rel=1e-5)


def test_a_look_on_the_way_is_short(text: TrainingText) -> None:
    """The rest is for the end; without another text there is no line of it."""
    model, evaluation = made(text)
    with torch.no_grad():
        assert [one.of for one in evaluation.look(model, WHO, last=False)] == ["held-out"]
        _, without = made(replace(text, other=None))
        assert "other-text" not in {one.of for one in without.look(model, WHO, last=True)}


def test_nobody_knows_the_bytes_of_a_token_file(text: TrainingText) -> None:
    """So there is no perplexity of a byte; one beyond all numbers is infinite."""
    model, evaluation = made(replace(text, tokens="given", merges=()))
    with torch.no_grad():
        (found,) = evaluation.look(model, WHO, last=False)
    assert found.bytes is None and found.perplexity_by_byte is None
    beyond = Validation("bf16", 0, 1, "held-out", 1e4, 10, 5)
    assert beyond.perplexity == beyond.perplexity_by_byte == math.inf
    assert math.isnan(Validation("bf16", 0, 1, "held-out", math.nan, 10, 5).perplexity)


@pytest.mark.parametrize("mode", ["fp8", "nvfp4"])
def test_a_quantised_model_is_the_same_weights_in_that_precision(text: TrainingText, mode: str) -> None:
    """Every layer but the head, as in a model that was built so; the look leaves the model as it was."""
    model, evaluation = made(text)
    with torch.no_grad():
        found = {one.of: one for one in evaluation.look(model, WHO, last=True)}
        again = {one.of: one for one in evaluation.look(model, WHO, last=True)}
    assert found == again
    config, plain = replace(models.config_of(SETTINGS, 258), width=32, hidden=32), PlainArithmetic(torch.float32)
    low = precisions.get(mode).arithmetic(CPU)
    quantised = models.built(SETTINGS, config, lambda name: plain if name == "head" else low, plain.carrier)
    quantised.load_state_dict(model.state_dict())
    with torch.no_grad():
        wanted = next(evaluation.look(quantised, WHO, last=False))
    assert found[f"quantised:{mode}"].loss == wanted.loss != found["held-out"].loss


@pytest.mark.parametrize("mode", ["fp8-delayed", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_looks_change_no_step_to_come(corpus: Corpus, mode: str) -> None:
    """Neither histories nor counters of stochastic rounding, on the way or at the end."""
    looked, unseen = (lab_of(task_of(corpus, mode, steps=4)) for _ in range(2))
    found = []
    for _ in range(4):
        found += rows(looked.advance(mode, 1))
        looked.validate(mode)
    assert found == rows(unseen.advance(mode, 4))
    at_end = [one.of for one in looked.validate(mode)]
    assert at_end[0] == "held-out" and at_end[-2:] == ["quantised:fp8", "quantised:nvfp4"]
    assert looked.validate(mode) == unseen.validate(mode)


def test_batch_norm_goes_by_what_it_kept_and_keeps_nothing_of_a_look(corpus: Corpus) -> None:
    """A look sees no more of a batch than one text of it."""
    looked, unseen = (lab_of(task_of(corpus, "bf16", steps=3, arch="cnn")) for _ in range(2))
    looked.advance("bf16", 2)
    unseen.advance("bf16", 2)
    first = looked.validate("bf16")
    assert first == looked.validate("bf16")
    assert rows(looked.advance("bf16", 1)) == rows(unseen.advance("bf16", 1))
    assert looked.validate("bf16") == unseen.validate("bf16")
