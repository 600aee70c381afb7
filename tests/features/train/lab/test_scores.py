"""Scores of models: at chance of one that learnt nothing, high of one that learnt; metrics of the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fp8bench.errors import UsageError
from fp8bench.features.train.beginnings import prepare_text
from fp8bench.features.train.lab.scores import TaskScores, measured
from fp8bench.features.train.request import TASKS
from fp8bench.features.train.values import SeedTask, StepFigure
from fp8bench.nn.sizes import GPTConfig
from fp8bench.plan.corpus import Corpus
from tests.counts import for_each
from tests.features.train.lab.labs import lab_of, task_of
from tests.features.train.test_tasks import PROSE

CONFIG = GPTConfig(256, 8, 1, 1, 1, 8, batch=1, sequence=48)
CHANCES = {"copy": 1 / 26, "retrieval": 1 / 10, "cloze": 1 / 4}


@pytest.fixture
def task(corpus: Corpus, tmp_path: Path) -> SeedTask:
    """With words to hide in its held-out text."""
    (tmp_path / "prose").write_bytes(PROSE)
    text = prepare_text(str(tmp_path / "prose"), None, "bytes", tmp_path / "data", 48)
    return replace(task_of(corpus, "bf16"), text=text)


def figures(task: SeedTask, predict: Callable[[Tensor], Tensor]) -> dict[str, float]:
    return dict(TaskScores(TASKS, task, CONFIG).of(predict))


def test_a_model_that_learnt_nothing_scores_at_chance(task: SeedTask) -> None:
    """One that says the same of all tokens exactly so, a random one within what so many questions leave to chance."""
    for name, share in figures(task, lambda rows: torch.zeros(*rows.shape, 256)).items():
        assert share == pytest.approx(CHANCES[name.split(":")[1].split("@")[0]]), name
    generator = torch.Generator().manual_seed(0)
    for name, share in figures(task, lambda rows: torch.randn(*rows.shape, 256, generator=generator)).items():
        chance = CHANCES[name.split(":")[1].split("@")[0]]
        assert abs(share - chance) < 4 * math.sqrt(chance / 128), name


def knowing(rows: Tensor) -> Tensor:
    """What a model that sees the next token would say."""
    return torch.nn.functional.one_hot(rows.roll(-1, 1), 256).float() * 9


def remembering(rows: Tensor) -> Tensor:
    """What a model would say of the last letters of a passage that knows the text by heart."""
    logs = torch.zeros(*rows.shape, 256)
    for row, ids in enumerate(rows.tolist()):
        for place in range(42, len(ids) - 1):
            if (at := PROSE.find(bytes(ids[: place + 1]))) >= 0:
                logs[row, place, PROSE[at + place + 1]] = 9.0
    return logs


def test_a_model_that_knows_scores_one_and_one_whose_numbers_are_none_has_no_score(task: SeedTask) -> None:
    found = figures(task, knowing)
    assert {name: share for name, share in found.items() if "cloze" not in name} == dict.fromkeys(
        (name for name in found if "cloze" not in name), 1.0
    )
    assert figures(task, remembering)["task:cloze"] > 0.95
    assert all(math.isnan(share) for share in figures(task, lambda rows: knowing(rows) + math.nan).values())


def test_rows_are_filled_up_behind_their_end_and_the_filling_is_not_read(task: SeedTask) -> None:
    """A causal model is given the same in front of each answer."""

    def spoilt(rows: Tensor) -> Tensor:
        logs = knowing(rows)
        logs[rows == ord("\n")] = math.inf
        return logs

    found = figures(task, spoilt)
    assert found["task:retrieval@8"] == found["task:copy"] == 1.0


def test_tokens_of_a_file_ask_nothing(task: SeedTask) -> None:
    given = replace(task, text=replace(task.text, tokens="given"))
    with pytest.raises(UsageError, match="nobody knows what tokens"):
        TaskScores(("copy",), given, CONFIG)


@pytest.mark.parametrize("arch", ["gpt", "mlp", "cnn"])
def test_every_architecture_is_scored_and_scoring_changes_no_step(task: SeedTask, arch: str) -> None:
    asked = replace(task, settings=replace(task.settings, arch=arch, sequence=64, tasks=TASKS), arms=task.arms)
    plain = lab_of(replace(asked, settings=replace(asked.settings, tasks=())))
    lab = lab_of(asked)
    found = [one for one in lab.validate("bf16", True) if isinstance(one, StepFigure)]
    assert len(found) == 6 and all(0 <= one.value <= 1 for one in found)
    losses = [
        [getattr(one, "loss", None) for one in some.advance("bf16", 3)] for some in (lab, plain)
    ]  # fmt: skip
    assert losses[0] == losses[1]


@pytest.mark.slow
@for_each(("name", "precision", "steps"), [("copy", "fp8", 160), ("retrieval", "bf16", 120)])
def test_a_model_that_is_trained_on_a_task_learns_it(
    corpus: Corpus, tmp_path: Path, name: str, precision: str, steps: int
) -> None:
    """From a text of tasks, in the lab's own steps: from chance to nearly all."""
    text = prepare_text(f"task:{name}", None, "bytes", tmp_path, 32)
    task = task_of(corpus, precision, steps=steps, sequence=32, batch=16, rate=3e-3, tasks=(name,))
    lab = lab_of(replace(task, text=text))
    before, _, after = lab.validate(precision, True), lab.advance(precision, steps), lab.validate(precision, True)
    first, last = ([one.value for one in some if isinstance(one, StepFigure)] for some in (before, after))
    assert max(first) < CHANCES[name] + 0.12 and min(last) > 0.9, last


def test_a_metric_is_called_with_the_model_and_what_was_held_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def f(model, held_out):\n    return float(model(held_out[0]))\n"
        "def g(model, held_out):\n    return {'a': 1, 'b': held_out[1]}\n"
        "def words(model, held_out):\n    return 'good'\n"
        "def fails(model, held_out):\n    raise KeyError('no answer')\n"
    )
    held_out = [torch.ones(2), 3.5]
    assert dict(measured(f"{file}:f=lower", lambda x: x.sum(), held_out)) == {f"metric:{file}:f": 2.0}
    found = dict(measured(f"{file}:g", SimpleNamespace(), held_out))
    assert found == {f"metric:{file}:g.a": 1.0, f"metric:{file}:g.b": 3.5}
    for name in ("words", "fails"):
        with pytest.raises(UsageError, match="gives no figure"):
            list(measured(f"{file}:{name}", None, held_out))
    with pytest.raises(UsageError, match="has no 'h'"):
        list(measured(f"{file}:h", None, held_out))
