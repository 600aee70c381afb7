"""Windows of a text, a pure function of seed and step; looks at those that are not trained on: what they say, and that
no step to come is changed by them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from fp8bench.features.train.lab import models
from fp8bench.features.train.lab.evaluate import DIGESTS, Evaluation, TokenWindows
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


@pytest.fixture
def span(tmp_path: Path) -> TokenSpan:
    """A stretch of a file of tokens that count up."""
    file = tmp_path / "tokens"
    np.arange(1000, dtype=np.uint16).tofile(file)
    return TokenSpan(str(file), 100, 700)


def test_a_window_and_the_tokens_that_follow(span: TokenSpan) -> None:
    """Nothing outside the stretch, whose first and last windows come up, too."""
    windows = TokenWindows(span, 595, "cpu", 1000)
    tokens, targets = windows.drawn(0, 3, 0, 100)
    assert tokens.shape == targets.shape == (100, 595) and tokens.is_contiguous()
    assert torch.equal(targets, tokens + 1)
    assert set(tokens[:, 0].tolist()) == set(range(100, 105)) and int(targets.max()) == 699


def test_they_depend_on_seed_and_step_and_on_nothing_else(span: TokenSpan) -> None:
    """Whatever was drawn before, so that a resumed training goes on with the same text."""
    windows, again = TokenWindows(span, 8, "cpu", 1000), TokenWindows(span, 8, "cpu", 1000)
    first = [windows.drawn(5, step, 0, 4)[0] for step in range(20)]
    assert all(torch.equal(again.drawn(5, step, 0, 4)[0], first[step]) for step in reversed(range(20)))
    assert len({tuple(one[:, 0].tolist()) for one in first}) == 20
    assert not torch.equal(windows.drawn(6, 0, 0, 4)[0], first[0])


def test_a_step_has_the_same_windows_however_it_is_cut(span: TokenSpan) -> None:
    windows = TokenWindows(span, 8, "cpu", 1000)
    whole = windows.drawn(1, 7, 0, 12)[0]
    for batch in (1, 3, 4, 6):
        assert torch.equal(torch.cat([windows.drawn(1, 7, part, batch)[0] for part in range(12 // batch)]), whole)


def test_the_draws_are_these_for_good(span: TokenSpan) -> None:
    """A stored training goes on with the same text under another numpy."""
    words = np.random.Philox(key=3, counter=11 << 192).random_raw(3)
    tokens, _ = TokenWindows(span, 8, "cpu", 1000).drawn(3, 11, 0, 3)
    assert tokens[:, 0].tolist() == [100 + int(word) % 592 for word in words] == [632, 395, 281]


def test_places_are_drawn_evenly(span: TokenSpan) -> None:
    """Every window as often as any other, within what chance does."""
    windows = TokenWindows(TokenSpan(span.path, 100, 208), 8, "cpu", 1000)
    counts = torch.bincount(windows.drawn(0, 0, 0, 20_000)[0][:, 0], minlength=200)[100:200].double()
    assert int((counts > 0).sum()) == 100
    assert float(((counts - 200) ** 2 / 200).sum()) < 170  # chi square of 99 degrees of freedom: 1 in 10,000 above


@pytest.mark.parametrize("most", [1, 5, 73, 74, 75, 1000])
def test_validation_reads_windows_of_all_parts_in_order(span: TokenSpan, most: int) -> None:
    """None overlaps another; as many as there are cover the stretch, up to less than a window."""
    batches = TokenWindows(span, 8, "cpu", 1000).in_order(4, most)
    starts = torch.cat([tokens[:, 0] for tokens, _ in batches]).tolist()
    assert len(starts) == min(most, 74) and starts[0] == 100
    assert all(after - before >= 8 for before, after in pairwise(starts))
    assert starts[-1] + 8 < 700 and (most < 74 or starts[-1] + 8 + 8 >= 700)
    assert all(len(tokens) <= 4 for tokens, _ in batches)


def test_what_does_not_fit_is_refused(span: TokenSpan) -> None:
    """A window longer than the stretch, and a token that the model does not know."""
    with pytest.raises(ValueError, match="600 tokens here; a window of 600 needs one more"):
        TokenWindows(span, 600, "cpu", 1000)
    with pytest.raises(ValueError, match="the model knows those below 256"):
        TokenWindows(span, 500, "cpu", 256).drawn(0, 0, 0, 4)


def test_digests_of_parts_come_to_that_of_the_step(span: TokenSpan) -> None:
    """Each part where it belongs; other text, seeds, steps and orders have others."""
    windows = TokenWindows(span, 8, "cpu", 1000)
    whole = windows.digest(5, 3, 0, 8)
    for count in (2, 4, 8):
        assert sum(windows.digest(5, 3, part, 8 // count) for part in range(count)) % DIGESTS == whole
    assert 2 * windows.digest(5, 3, 0, 4) % DIGESTS != whole
    other = TokenWindows(TokenSpan(span.path, 101, 700), 8, "cpu", 1000)
    assert len({whole, windows.digest(6, 3, 0, 8), windows.digest(5, 4, 0, 8), other.digest(5, 3, 0, 8)}) == 4
