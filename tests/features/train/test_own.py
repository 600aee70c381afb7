"""The user's own models and loops: what is refused, kept and resumed; loops compared by their streams."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8bench
from fp8bench.errors import RunNotFound, UsageError
from fp8bench.features.train.api import name_maker
from fp8bench.features.train.arms import check_training
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import COVERAGE_EVENT, StreamLine, TrainingEvent, TrainingObserver
from fp8bench.features.train.verdicts.curves import InconclusiveReason, LearningVerdict
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts, judge_training
from fp8bench.features.train.view import list_training_notes
from fp8bench.workloads.model import LOADED_MODELS, MODEL_MAKERS_IN_PROCESS
from tests.counts import for_each
from tests.trainings import said

MAKER = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
    def forward(self, x, y):
        return F.cross_entropy(self.head(F.relu(self.first(x))), y)

def batches(step, seed):
    x = torch.randn(32, 8)
    return x, (x.sum(1) > 0).long()

def make():
    return {"model": Net(), "batches": batches, "held_out": batches,
            "optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=0.01)}
"""


class Stops(TrainingObserver):
    """Interrupts a training once."""

    def trained(self, number: int, step: int, lines: Sequence[StreamLine]) -> None:
        if (number, step) == (0, 10):
            raise KeyboardInterrupt


def short(store: Path, make: Any, **more: Any) -> Any:
    how: dict[str, Any] = {"steps": 15, "seeds": 1, "keep": 5, "isolation": False, "progress": False, **more}
    return fp8bench.train(make=make, dtypes="untouched,fp8", store=store, bands="none", **how)


@pytest.mark.slow
def test_a_maker_in_a_file_is_trained_and_resumed(store: Path, tmp_path: Path) -> None:
    """To the same lines. Its file belongs to the training's environment."""
    file = tmp_path / "net.py"
    file.write_text(MAKER)
    whole = short(store, f"{file}:make")
    half = short(store, f"{file}:make", observer=Stops())
    cut = short(store, f"{file}:make", observer=Stops())
    LOADED_MODELS.clear()
    rest = fp8bench.resume_training(half, store=store, progress=False)
    assert not half.finished and rest.finished and said(rest) == said(whole)
    words = [event.words for event in whole.select_lines(TrainingEvent) if event.kind == COVERAGE_EVENT]
    assert words[0].startswith("100.0% of the FLOPs") and f"{file}:make (212 parameters)" in " ".join(
        str(whole).split()
    )
    file.write_text(MAKER + "\n# changed\n")
    with pytest.raises(UsageError, match="cannot be resumed here: the code of --import"):
        fp8bench.resume_training(cut, store=store, progress=False)


def test_a_function_of_this_process_is_trained_in_it(store: Path) -> None:
    def local() -> object:
        x = torch.randn(32, 8)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        return model, (x,), lambda output: F.cross_entropy(output, (x.sum(1) > 0).long())

    kept = short(store, local, seeds=5, steps=6, rate=0.01)
    assert not MODEL_MAKERS_IN_PROCESS and not LOADED_MODELS and kept.training.request.settings.make
    verdicts = judge_training(kept.training, kept.lines)
    assert not verdicts.has_held_out
    assert any("nothing was held out" in note for note in list_training_notes(JudgedTraining(kept)))
    assert verdicts.arms[0].judged.why is not InconclusiveReason.NO_HELD_OUT and len(verdicts.arms[0].pairs) == 5


def test_makers_are_known_by_what_a_worker_can_import() -> None:
    assert name_maker(name_maker) == "fp8bench.features.train.api:name_maker"
    assert name_maker(lambda: 0) == "test_makers_are_known_by_what_a_worker_can_import.locals.lambda"


@for_each(
    ("asked", "words"),
    [
        ({"settings": {"arch": "mlp"}}, "--arch is for built-in models"),
        ({"settings": {"rates": (("head", 2.0),)}}, "--rates is for"),
        ({"settings": {"start": "last"}}, "--start last does not work with"),
        ({"sweep": (("dropout", ("0.1",)),)}, "--dropout is for"),
        ({"data": "text.txt"}, "--data is for"),
        ({"own_batch": 1 << 30}, "--own-batch is for"),
        ({"ranks": 2, "settings": {"parallel": "ddp"}}, "--parallel is for"),
        ({"sweep": (("micro-batches", ("1", "2")),)}, "arms would not read the same batches"),
        ({"settings": {"make": "net.py"}}, "is not a function. Give module:function"),
    ],
)
def test_options_of_the_built_in_models_are_refused(asked: dict[str, Any], words: str) -> None:
    settings = TrainerSettings(**{"make": "net.py:make", **asked.pop("settings", {})})
    with pytest.raises(UsageError, match=words):
        check_training(TrainingRequest(settings=settings, **asked))


STEPS = 40
SEEDS = 5


def loop(path: Path, seed: int, *, name: str, noise: float = 0.0, steps: int = STEPS, worse: float = 0.0) -> Path:
    """A small classifier in an ordinary loop with noise on its weights in each step.

    `worse` of its labels are wrong.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    true = torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    own = torch.Generator().manual_seed(seed + 1000)

    def loss(count: int) -> torch.Tensor:
        x = torch.randn(count, 8)
        y = torch.where(torch.rand(count, generator=own) < worse, 0, (x @ true).argmax(1))
        return F.cross_entropy(model(x), y)

    with fp8bench.watch(model, optimizer, path, name=name, health=False) as watched:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(64).backward()
            optimizer.step()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(noise * torch.randn(weight.shape, generator=own))
        with torch.no_grad():
            watched.held_out(loss(256))
    return path


@pytest.mark.slow
def test_planted_differences_are_found_and_nothing_else(tmp_path: Path) -> None:
    """20% wrong labels are worse, noise is as good, a copy is recognised, and an unfinished loop has no verdict."""

    def seeds(name: str, **how: Any) -> Sequence[Path]:
        return [loop(tmp_path / f"{name}-{seed}.jsonl", seed, name=name, **how) for seed in range(SEEDS)]

    compared = fp8bench.compare_streams(
        seeds("plain"),
        seeds("wrong", worse=0.2),
        seeds("rounding", noise=1e-6),
        seeds("copy"),
        seeds("short", steps=STEPS - 1),
    )
    verdicts = compared.found
    assert isinstance(verdicts, TrainingVerdicts)
    learned = {
        "wrong": LearningVerdict.WORSE,
        "rounding": LearningVerdict.WITHIN_NOISE,
        "copy": LearningVerdict.WITHIN_NOISE,
        "short": LearningVerdict.INCONCLUSIVE,
    }
    assert {said.arm.name: said.judged.learned for said in verdicts.arms} == learned
    printed = " ".join(str(compared).split())
    assert "?." not in printed
    assert "does this arm take effect?" in printed and "seeds 0, 1, 2, 3 and 4 do not count" in printed
    summaries = [row for row in compared.as_rows()[1] if isinstance(row, dict) and row["figure"] == "loss"]
    assert [row["arm"] for row in summaries] == ["plain", *learned][: len(summaries)] and len(summaries) >= 4


def test_files_that_are_not_streams_are_refused(tmp_path: Path) -> None:
    good = loop(tmp_path / "good.jsonl", 0, name="own", steps=12)
    unseen = "".join(line for line in good.read_text().splitlines(True) if '"validation"' not in line)
    texts = {"text": "no stream\n", "empty": "", "unseen": unseen, "cut": unseen[:-20]}
    paths = {name: tmp_path / f"{name}.jsonl" for name in (*texts, "none")}
    for name, content in texts.items():
        paths[name].write_text(content)
    refused: list[tuple[tuple[Any, ...], str]] = [
        ((good,), "one stream"),
        ((good, paths["text"]), "line 1 of .* not from a stream"),
        ((good, paths["empty"]), "no row"),
        ((good, [good, good]), "1 and 2 seeds"),
        ((good, []), "empty"),
    ]
    for streams, words in refused:
        with pytest.raises(UsageError, match=words):
            fp8bench.compare_streams(*streams)
    with pytest.raises(RunNotFound, match="cannot be read"):
        fp8bench.compare_streams(good, paths["none"])
    with pytest.raises(UsageError, match="margin"):
        fp8bench.compare_streams(good, good, margin=100)
    printed = " ".join(str(fp8bench.compare_streams(paths["unseen"], paths["cut"])).split())
    assert "0 seeds count, fewer than 5" in printed and "loop.held_out(value) gives one" in printed
