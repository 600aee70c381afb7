"""A model of a user's own from the command and from Python: what is refused, said, kept and gone on with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8bench
from fp8bench.errors import UsageError
from fp8bench.features.train.api import name_of_maker
from fp8bench.features.train.arms import check_training
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import COVERAGE, StreamLine, TrainingEvent, TrainingObserver
from fp8bench.features.train.verdicts.curves import Why
from fp8bench.features.train.verdicts.verdicts import verdicts_of
from fp8bench.workloads.model import LIVE, MADE
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
    """Interrupts a training once, at a step."""

    def trained(self, number: int, step: int, lines: Sequence[StreamLine]) -> None:
        if (number, step) == (0, 10):
            raise KeyboardInterrupt


def short(store: Path, make: Any, **more: Any) -> Any:
    how: dict[str, Any] = {"steps": 15, "seeds": 1, "keep": 5, "isolation": False, "progress": False, **more}
    return fp8bench.train(make=make, dtypes="untouched,fp8", store=store, bands="none", **how)


def test_a_maker_in_a_file_is_trained_cut_off_and_gone_on_with(store: Path, tmp_path: Path) -> None:
    """To the same lines as without; the words of its conversion are there, and its file is part of what it is."""
    file = tmp_path / "net.py"
    file.write_text(MAKER)
    whole = short(store, f"{file}:make")
    half = short(store, f"{file}:make", observer=Stops())
    cut = short(store, f"{file}:make", observer=Stops())
    MADE.clear()
    rest = fp8bench.resume_training(half, store=store, progress=False)
    assert not half.finished and rest.finished and said(rest) == said(whole)
    words = [event.words for event in whole.of(TrainingEvent) if event.kind == COVERAGE]
    assert words[0].startswith("100.0% of the FLOPs") and f"{file}:make (212 parameters)" in " ".join(
        str(whole).split()
    )
    file.write_text(MAKER + "\n# changed\n")
    with pytest.raises(UsageError, match="cannot be resumed here: the code of --import"):
        fp8bench.resume_training(cut, store=store, progress=False)


def test_a_function_of_this_process_is_trained_in_it(store: Path) -> None:
    """Nothing of it is left behind; without held-out batches the training loss decides, and that is said."""

    def local() -> object:
        x = torch.randn(32, 8)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        return model, (x,), lambda output: F.cross_entropy(output, (x.sum(1) > 0).long())

    kept = short(store, local, seeds=5, steps=6, rate=0.01)
    assert not LIVE and not MADE and kept.training.request.settings.make
    verdicts = verdicts_of(kept.training, kept.lines)
    assert not verdicts.looks and "nothing was held out" in " ".join(str(kept).split())
    assert verdicts.arms[0].judged.why is not Why.NO_HELD_OUT and len(verdicts.arms[0].pairs) == 5


def test_makers_are_known_by_what_a_worker_can_import() -> None:
    assert name_of_maker(name_of_maker) == "fp8bench.features.train.api:name_of_maker"
    assert name_of_maker(lambda: 0) == "test_makers_are_known_by_what_a_worker_can_import.locals.lambda"


@for_each(("asked", "words"), [
    ({"settings": {"arch": "mlp"}}, "--arch is about the built-in models"),
    ({"settings": {"rates": (("head", 2.0),)}}, "--rates is about"),
    ({"sweep": (("dropout", ("0.1",)),)}, "--dropout is about"), ({"data": "text.txt"}, "--data is about"),
    ({"ranks": 2, "settings": {"parallel": "ddp"}}, "--parallel is about"),
    ({"max_batch": True}, "--max-batch does not go with"),
    ({"sweep": (("micro-batches", ("1", "2")),)}, "arms would not read the same batches"),
    ({"sweep": (("nudge", ("order",)),)}, "nudge order does not go with"),
    ({"settings": {"make": "net.py"}}, "names no function. Give net.py:make"),
])  # fmt: skip
def test_what_is_about_the_built_in_models_is_refused(asked: dict[str, Any], words: str) -> None:
    settings = TrainerSettings(**{"make": "net.py:make", **asked.pop("settings", {})})
    with pytest.raises(UsageError, match=words):
        check_training(TrainingRequest(settings=settings, **asked))
