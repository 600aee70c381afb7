"""Windows of a text, held-out losses, scores on tasks and metrics of the user's own; evaluation changes no later
step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from fp8bench.errors import UsageError
from fp8bench.features.train.beginnings import prepare_text
from fp8bench.features.train.lab import models
from fp8bench.features.train.lab.evaluate import HeldOutEvaluation, ModelScorer, TokenWindows, measure_user_metric
from fp8bench.features.train.lab.parallelism import SingleRank
from fp8bench.features.train.request import TASKS, TrainerSettings
from fp8bench.features.train.values import SeedTask, StepFigure, TokenSpan, TrainingTokens, Validation
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.gpt import LanguageModel
from fp8bench.nn.sizes import GPTConfig
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import SilentPhases
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU
from tests.features.train.lab.labs import lab_of, rows, task_of
from tests.features.train.test_beginnings import PROSE

SETTINGS = TrainerSettings(batch=2, sequence=24)
WHO = ("bf16", 3, 7)


@pytest.fixture
def text(tmp_path: Path) -> TrainingTokens:
    """Tokens at random."""
    file = tmp_path / "tokens"
    np.random.default_rng(0).integers(200, 258, 3000).astype(np.uint16).tofile(file)
    held_out = TokenSpan(str(file), 1000, 1390)
    return TrainingTokens(held_out, held_out, 258, "given", "text")


def made(text: TrainingTokens) -> tuple[LanguageModel, HeldOutEvaluation]:
    config = replace(models.make_config(SETTINGS, text.vocabulary), width=32, hidden=32)
    plain = PlainArithmetic(torch.float32)
    torch.manual_seed(0)
    model = models.build_model(SETTINGS, config, lambda name: plain, plain.carrier)
    return model, HeldOutEvaluation(
        text, config, models.list_layers("gpt", config), CPU, SingleRank().share_scales_across_ranks
    )


@torch.no_grad()
def looks(model: LanguageModel, evaluation: HeldOutEvaluation, last: bool = True) -> dict[str, Validation]:
    return {look.of: look for look in evaluation.measure_losses(model, WHO, is_last=last)}


@torch.no_grad()
def plain_losses(model: LanguageModel, span: TokenSpan) -> Tensor:
    """Window by window through the whole stretch."""
    ids = torch.from_numpy(np.fromfile(span.path, dtype=np.uint16)[span.start : span.stop].astype(np.int64))
    windows = torch.stack([ids[at : at + 25] for at in range(0, len(ids) - 24, 24)])
    logits = [model.logits(window[None, :-1], SilentPhases())[0] for window in windows]
    losses = [functional.cross_entropy(*pair, reduction="none") for pair in zip(logits, windows[:, 1:], strict=True)]
    return torch.stack(losses)


def test_a_validation_is_what_a_plain_loop_over_the_text_finds(text: TrainingTokens) -> None:
    """Losses by token and by position; positions are parts of the held-out text."""
    model, evaluation = made(text)
    by_kind = looks(model, evaluation)
    losses = plain_losses(model, text.held_out)
    held_out = by_kind["held-out"]
    assert (held_out.arm, held_out.seed, held_out.step) == WHO
    assert held_out.tokens == losses.numel() == 16 * 24
    assert held_out.loss == pytest.approx(float(losses.mean()), rel=1e-5)
    positions = [look for look in by_kind.values() if look.of.startswith("position:")]
    assert [look.of for look in positions] == [f"position:{at}-{at + 2}" for at in range(0, 24, 3)]
    for number, look in enumerate(positions):
        part = slice(3 * number, 3 * number + 3)
        assert look.loss == pytest.approx(float(losses[:, part].mean()), rel=1e-5)
        assert look.tokens == 16 * 3
    assert list(looks(model, evaluation, last=False)) == ["held-out"], "the rest is for the end"


@for_each("mode", ["fp8", "nvfp4"])
def test_a_quantised_model_is_the_same_weights_in_that_precision(text: TrainingTokens, mode: str) -> None:
    """Every layer but the head is quantised; the model is unchanged afterwards."""
    model, evaluation = made(text)
    by_kind = looks(model, evaluation)
    assert by_kind == looks(model, evaluation)
    config = replace(models.make_config(SETTINGS, 258), width=32, hidden=32)
    plain = PlainArithmetic(torch.float32)
    low = precisions.get(mode).arithmetic(CPU)
    quantised = models.build_model(SETTINGS, config, lambda name: plain if name == "head" else low, plain.carrier)
    quantised.load_state_dict(model.state_dict())
    wanted = looks(quantised, evaluation, last=False)["held-out"]
    assert by_kind[f"quantised:{mode}"].loss == wanted.loss != by_kind["held-out"].loss


@for_each(("mode", "settings"), [("fp8-delayed", {}), ("nvfp4", {}), ("bf16", {"arch": "cnn"})])
def test_validations_change_no_later_step(corpus: Corpus, mode: str, settings: dict[str, Any]) -> None:
    """They leave histories, counters of stochastic rounding and running statistics alone."""
    looked, unseen = (lab_of(task_of(corpus, mode, steps=3, **settings)) for _ in range(2))
    steps = []
    for _ in range(3):
        steps += rows(looked.advance(mode, 1))
        looked.validate(mode)
    assert steps == rows(unseen.advance(mode, 3))
    at_end = [look.of for look in looked.validate(mode)]
    assert at_end[0] == "held-out" and at_end[-2:] == ["quantised:fp8", "quantised:nvfp4"]
    assert looked.validate(mode) == unseen.validate(mode)


@pytest.fixture
def span(tmp_path: Path) -> TokenSpan:
    """A stretch of a file of tokens that count up."""
    file = tmp_path / "tokens"
    np.arange(1000, dtype=np.uint16).tofile(file)
    return TokenSpan(str(file), 100, 700)


def test_a_window_and_the_tokens_that_follow(span: TokenSpan) -> None:
    """A window lies inside its stretch; the first and the last possible one occur."""
    windows = TokenWindows(span, 595, "cpu")
    tokens, targets = windows.draw(0, 3, 0, 100)
    assert tokens.shape == targets.shape == (100, 595) and tokens.is_contiguous()
    assert torch.equal(targets, tokens + 1)
    assert set(tokens[:, 0].tolist()) == set(range(100, 105)) and int(targets.max()) == 699


def test_windows_depend_on_seed_and_step_only(span: TokenSpan) -> None:
    """Neither earlier draws nor how a step is split changes them."""
    windows = TokenWindows(span, 8, "cpu")
    again = TokenWindows(span, 8, "cpu")
    first = [windows.draw(5, step, 0, 12)[0] for step in range(20)]
    assert all(torch.equal(again.draw(5, step, 0, 12)[0], first[step]) for step in reversed(range(20)))
    assert len({tuple(tokens[:, 0].tolist()) for tokens in first}) == 20
    assert not torch.equal(windows.draw(6, 0, 0, 12)[0], first[0])
    for batch in (1, 3, 4, 6):
        parts = [windows.draw(5, 7, part, batch)[0] for part in range(12 // batch)]
        assert torch.equal(torch.cat(parts), first[7])


def test_draws_are_fixed_for_good(span: TokenSpan) -> None:
    """So a stored training continues with the same text under another numpy."""
    words = np.random.Philox(key=3, counter=11 << 192).random_raw(3)
    tokens, _ = TokenWindows(span, 8, "cpu").draw(3, 11, 0, 3)
    assert tokens[:, 0].tolist() == [100 + int(word) % 592 for word in words] == [632, 395, 281]


@for_each("most", [1, 5, 73, 74, 75, 1000])
def test_validation_reads_windows_of_all_parts_in_order(span: TokenSpan, most: int) -> None:
    """Windows do not overlap; with as many as fit, they cover all but less than a window."""
    batches = TokenWindows(span, 8, "cpu").select_spaced_windows(4, most)
    starts = torch.cat([tokens[:, 0] for tokens, _ in batches]).tolist()
    assert len(starts) == min(most, 74) and starts[0] == 100
    assert all(after - before >= 8 for before, after in pairwise(starts))
    assert starts[-1] + 8 < 700 and (most < 74 or starts[-1] + 8 + 8 >= 700)
    assert all(len(tokens) <= 4 for tokens, _ in batches)


CONFIG = GPTConfig(256, 8, 1, 1, 1, 8, batch=1, sequence=48)
CHANCES = {"copy": 1 / 26, "retrieval": 1 / 10, "cloze": 1 / 4}


@pytest.fixture
def task(corpus: Corpus, tmp_path: Path) -> SeedTask:
    """A task whose held-out text has words to mask."""
    (tmp_path / "prose").write_bytes(PROSE)
    text = prepare_text(str(tmp_path / "prose"), tmp_path / "data", 48)
    return replace(task_of(corpus, "bf16"), text=text)


def figures(task: SeedTask, predict: Callable[[Tensor], Tensor]) -> dict[str, float]:
    return dict(ModelScorer(task, TrainerSettings(tasks=TASKS), [], CONFIG).score_tasks(predict))


def test_a_model_that_learnt_nothing_scores_at_chance(task: SeedTask) -> None:
    """Constant logits score exactly chance; random ones within the sampling error."""
    for name, share in figures(task, lambda rows: torch.zeros(*rows.shape, 256)).items():
        assert share == pytest.approx(CHANCES[name.split(":")[1].split("@")[0]]), name
    generator = torch.Generator().manual_seed(0)
    for name, share in figures(task, lambda rows: torch.randn(*rows.shape, 256, generator=generator)).items():
        chance = CHANCES[name.split(":")[1].split("@")[0]]
        assert abs(share - chance) < 4 * math.sqrt(chance / 128), name


def knowing(rows: Tensor) -> Tensor:
    """The logits of a model that sees the next token."""
    return torch.nn.functional.one_hot(rows.roll(-1, 1), 256).float() * 9


def remembering(rows: Tensor) -> Tensor:
    """The logits of a model that knows the text by heart, for the last letters of a passage."""
    logs = torch.zeros(*rows.shape, 256)
    for row, ids in enumerate(rows.tolist()):
        for place in range(42, len(ids) - 1):
            if (at := PROSE.find(bytes(ids[: place + 1]))) >= 0:
                logs[row, place, PROSE[at + place + 1]] = 9.0
    return logs


def test_a_knowing_model_scores_one_and_one_that_is_not_finite_has_no_score(task: SeedTask) -> None:
    assert {share for name, share in figures(task, knowing).items() if "cloze" not in name} == {1.0}
    assert figures(task, remembering)["task:cloze"] > 0.95
    assert all(math.isnan(share) for share in figures(task, lambda rows: knowing(rows) + math.nan).values())


def test_padding_behind_a_row_is_not_read(task: SeedTask) -> None:
    def spoilt(rows: Tensor) -> Tensor:
        logs = knowing(rows)
        logs[rows == ord("\n")] = math.inf
        return logs

    scores = figures(task, spoilt)
    assert scores["task:retrieval@8"] == scores["task:copy"] == 1.0


def test_tasks_need_the_bytes_of_a_text(task: SeedTask) -> None:
    given = replace(task, text=replace(task.text, tokens="given"))
    with pytest.raises(UsageError, match="cannot be decoded"):
        ModelScorer(given, TrainerSettings(tasks=("copy",)), [], CONFIG)


@for_each("arch", ["gpt", "mlp", "cnn"])
def test_every_architecture_is_scored_and_scoring_changes_no_step(task: SeedTask, arch: str) -> None:
    settings = replace(task.settings, arch=arch, sequence=64)
    asked, plain = (lab_of(replace(task, settings=replace(settings, tasks=tasks))) for tasks in (TASKS, ()))
    scores = [line.value for line in asked.validate("bf16", True) if isinstance(line, StepFigure)]
    assert len(scores) == 6 and all(0 <= share <= 1 for share in scores)
    assert rows(asked.advance("bf16", 3)) == rows(plain.advance("bf16", 3))


@pytest.mark.slow
@for_each(("name", "precision", "steps"), [("copy", "fp8", 160), ("retrieval", "bf16", 120)])
def test_a_model_that_is_trained_on_a_task_learns_it(
    corpus: Corpus, tmp_path: Path, name: str, precision: str, steps: int
) -> None:
    text = prepare_text(f"task:{name}", tmp_path, 32)
    task = task_of(corpus, precision, steps=steps, sequence=32, batch=16, rate=3e-3, tasks=(name,))
    lab = lab_of(replace(task, text=text))
    before = lab.validate(precision, True)
    _ = lab.advance(precision, steps)
    after = lab.validate(precision, True)
    first, last = ([line.value for line in some if isinstance(line, StepFigure)] for some in (before, after))
    assert max(first) < CHANCES[name] + 0.12 and min(last) > 0.9, last


def test_a_metric_gets_the_model_and_the_held_out_batches(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def f(model, held_out):\n    return float(model(held_out[0]))\n"
        "def g(model, held_out):\n    return {'a': 1, 'b': held_out[1]}\n"
        "def words(model, held_out):\n    return 'good'\n"
        "def fails(model, held_out):\n    raise KeyError('no answer')\n"
    )
    held_out = [torch.ones(2), 3.5]
    assert dict(measure_user_metric(f"{file}:f=lower", lambda x: x.sum(), held_out)) == {f"metric:{file}:f": 2.0}
    scores = dict(measure_user_metric(f"{file}:g", SimpleNamespace(), held_out))
    assert scores == {f"metric:{file}:g.a": 1.0, f"metric:{file}:g.b": 3.5}
    for name in ("words", "fails"):
        with pytest.raises(UsageError, match="returned no figure"):
            list(measure_user_metric(f"{file}:{name}", None, held_out))
    with pytest.raises(UsageError, match="has no 'h'"):
        list(measure_user_metric(f"{file}:h", None, held_out))
