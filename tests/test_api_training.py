"""Trainings from Python, as from the command line."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

import fp8bench
from fp8bench.cli.grammar import build_parser, commands_of
from fp8bench.errors import RunNotFound, UnknownName, UsageError
from fp8bench.features.train import run as job
from fp8bench.features.train.command import request_from
from fp8bench.features.train.request import TrainerSettings
from tests.trainings import FakeLab, NotedTraining, strikes


@pytest.fixture
def text(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text of its own, and a lab that trains nothing."""
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: FakeLab())
    path = Path("text.txt")
    path.write_text("every token is a byte of this text. " * 4000)
    return path


def test_a_training_is_asked_for_as_on_the_command_line(text: Path, store: Path) -> None:
    """The same request; told as it goes; read back with frames and as the table."""
    words = (
        "train --dtypes bf16,fp8-delayed --steps 6 --seeds 1 --margin 2 --sweep history=1,16 --rate 0.01 "
        "--data text.txt --rates norm=0 --precision-map mlp=bf16 --sequence 16"
    )
    noted = NotedTraining()
    kept = fp8bench.train(
        dtypes=["bf16", "fp8-delayed"], steps=6, seeds=1, margin=2, sweep={"history": [1, 16]}, rate=0.01, data=text,
        rates={"norm": 0}, precision_map={"mlp": "bf16"}, sequence=16, store=store, observer=noted,
    )  # fmt: skip
    assert kept.training.request == request_from(build_parser().parse_args(words.split()))
    assert kept.finished and noted.places[-1] == (0, 6)
    for word in ("last", kept.training.id, Path(kept.path).parent):
        assert fp8bench.load_training(word, store).training == kept
    frames = fp8bench.load_training(kept)
    assert list(frames.arms.arm) == [arm.name for arm in kept.training.arms]
    assert len(frames.steps) == 6 * len(kept.training.arms)
    printed = " ".join(fp8bench.table(kept).split())
    assert all(
        arm in printed and words in printed for arm, words in zip(frames.arms.arm, frames.arms.words, strict=True)
    )


def test_what_was_cut_off_is_gone_on_with(text: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the training itself, its id, or 'last'; a whole one comes back as it is."""
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: FakeLab(strikes("fp8", 5, KeyboardInterrupt())))
    half = fp8bench.train(quick=True, steps=9, data="text.txt", store=store)
    assert not half.finished and half.training.request.seeds == 1
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: FakeLab())
    whole = fp8bench.resume_training(half, store=store)
    assert whole.finished and whole.training.id == half.training.id
    assert fp8bench.resume_training("last", store=store) == whole == fp8bench.resume_training(whole.path, store=store)


def test_nothing_is_trained_where_something_cannot_be(text: Path, store: Path) -> None:
    """A setting that there is none of, one that cannot be so, a board that cannot be written."""
    with pytest.raises(UnknownName, match="unknown setting 'lr_rate'"):
        fp8bench.train(lr_rate=1e-3)
    with pytest.raises(UsageError, match="clip"):
        fp8bench.train(clip=-1)
    with pytest.raises(UsageError, match="margin"):
        fp8bench.train(margin=0)
    with pytest.raises(UsageError, match="memory_limit"):
        fp8bench.train(memory_limit=0)
    pytest.importorskip("tensorboard")
    with pytest.raises(UsageError, match=r"--tensorboard 'text\.txt' cannot be written"):
        fp8bench.train(tensorboard=text)
    with pytest.raises(RunNotFound, match="The store has no trainings yet"):
        fp8bench.load_training("last", store)


def test_curves_are_written_for_tensorboard(text: Path, store: Path) -> None:
    pytest.importorskip("tensorboard")
    kept = fp8bench.train(quick=True, steps=4, data=text, store=store, tensorboard="board")
    assert list(Path("board", kept.training.id, "fp8", "seed-0").iterdir())


def test_the_signature_is_the_command_lines_options() -> None:
    """What one door has, the other has too, under the same name and with the same default."""
    plain = vars(build_parser().parse_args(["train"]))
    other_words = {"dry_run", "resume", "json", "csv", "wandb", "explain", "fail_on"}
    options = {one.dest for one in commands_of(build_parser())["train"]._actions if one.dest != "help"} - other_words
    parameters = dict(inspect.signature(fp8bench.train).parameters)
    del parameters["observer"]
    settings = {field.name for field in fields(TrainerSettings)}
    assert options - settings == set(parameters) - settings
    assert settings & set(parameters) == {"precision_map", "rates"}, "mappings, which pairs are made of"
    for name, parameter in parameters.items():
        if name != "store":
            assert (parameter.default or None) == (plain[name] or None), name
