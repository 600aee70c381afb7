"""Trainings from Python, as from the command line; callbacks, against the real packages where they are installed."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8bench
from fp8bench.cli.main import build_parser, subparsers_by_name
from fp8bench.errors import RunNotFound, UnknownName, UsageError
from fp8bench.features.train import run as job
from fp8bench.features.train.command import request_from
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import LayerReading, StepRow, StreamLine, Validation
from tests.features.train.lab.labs import hooks_of
from tests.trainings import FakeLab, NotedTraining, write_text


@pytest.fixture
def text(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: FakeLab())
    return write_text()


def test_arguments_equal_the_command_line(text: Path, store: Path) -> None:
    words = (
        "train --dtypes bf16,fp8-delayed --steps 6 --seeds 1 --margin 2 --sweep history=1 --sweep history=16 "
        "--rate 0.01 --data text.txt --optimizer adamw:betas=0.9,0.95 --rates norm=0 --clip 0.5/kind "
        "--precision-map mlp=bf16 --sequence 16"
    )
    noted = NotedTraining()
    kept = fp8bench.train(
        dtypes=["bf16", "fp8-delayed"],
        steps=6,
        seeds=1,
        margin=2,
        sweep={"history": [1, 16]},
        rate=0.01,
        data=text,
        optimizer="adamw:betas=0.9,0.95",
        rates={"norm": 0},
        clip="0.5/kind",
        precision_map={"mlp": "bf16"},
        sequence=16,
        store=store,
        observer=noted,
    )
    assert kept.training.request == request_from(build_parser().parse_args(words.split()))
    assert kept.finished and noted.places[-1] == (0, 6)
    for word in ("last", kept.training.id, Path(kept.path).parent):
        assert vars(fp8bench.load_training(word, store)) == vars(kept)
    rows = fp8bench.load_training(kept).results
    assert len(rows[(rows.line == "StepRow") & (rows.figure == "loss")]) == 6 * len(kept.training.arms)
    printed = " ".join(fp8bench.table(kept).split())
    compared = [arm.name for arm in kept.training.compared_arms[1:]]
    assert compared and all(f" {name} cannot tell " in printed for name in compared)
    assert repr(kept).startswith(f"<Training {kept.training.id}: ") and repr(kept).endswith(f", finished, {kept.path}>")
    assert "how to read this" not in str(kept) and str(kept).startswith("training of ")
    assert "<table>" in kept._repr_html_() and "<a href" not in kept._repr_html_()


def test_impossible_arguments_are_refused_before_training(text: Path, store: Path) -> None:
    with pytest.raises(UnknownName, match="unknown argument of train 'lr_rate'"):
        fp8bench.train(lr_rate=1e-3)
    for name, value in (("clip", -1), ("margin", 0)):
        with pytest.raises(UsageError, match=name):
            fp8bench.train(**{name: value})
    with pytest.raises(RunNotFound, match="no trainings yet"):
        fp8bench.load_training("last", store)
    pytest.importorskip("tensorboard")
    with pytest.raises(UsageError, match=r"--log tensorboard 'text\.txt' cannot be written"):
        fp8bench.train(log=f"tensorboard:{text}")
    kept = fp8bench.train(quick=True, steps=4, data=text, store=store, log="tensorboard:board")
    for series in ("fp8 seed 0", "fp8"):
        assert list(Path("board", kept.training.id, series).iterdir())


def test_the_signature_is_the_command_lines_options() -> None:
    plain = vars(build_parser().parse_args(["train"]))
    other_words = {"dry_run", "resume", "json", "csv", "explain", "fail_on", "help", "help_all", "config"}
    options = {action.dest for action in subparsers_by_name(build_parser())["train"]._actions} - other_words
    parameters = dict(inspect.signature(fp8bench.train).parameters)
    del parameters["observer"], parameters["progress"]
    settings = {field.name for field in fields(TrainerSettings)} - {"scales"}
    assert options - settings == set(parameters) - settings
    assert settings <= set(parameters)
    for name, parameter in parameters.items():
        if name in plain and name != "store":
            assert (parameter.default or None) == (plain[name] or None), name


def rows_of(lines: Sequence[StreamLine]) -> list[StepRow]:
    return [line for line in lines if isinstance(line, StepRow)]


def looks_of(lines: Sequence[StreamLine]) -> list[tuple[int, float]]:
    return [(line.step, line.loss) for line in lines if isinstance(line, Validation) and line.of == "held-out"]


class Rows(torch.utils.data.Dataset[Any]):
    """Tokens to learn by heart."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(12) * (index % 5 + 1)) % 50
        return {"input_ids": tokens, "labels": tokens}


@pytest.mark.slow
def test_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    )
    lines: list[StreamLine] = []
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=4,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    callback = fp8bench.hugging_face_callback(tmp_path / "steps.jsonl", told=lines.extend, stride=3)
    trainer = transformers.Trainer(
        model=model, args=settings, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[callback]
    )
    trainer.train()
    rows = rows_of(lines)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [row.step for row in rows] == list(range(6))
    assert [row.loss for row in rows] == pytest.approx([float(entry["loss"]) for entry in logged], rel=1e-3)
    assert [row.rate for row in rows] == pytest.approx([entry["learning_rate"] for entry in logged], rel=1e-3)
    evaluated = [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    assert looks_of(lines) == [(step, pytest.approx(loss)) for step, loss in evaluated] and len(evaluated) == 3
    read = {(line.layer, line.role) for line in lines if isinstance(line, LayerReading)}
    assert ("transformer.h.0.attn.c_attn", "gradient") in read and ("transformer.wte", "weight") in read
    assert hooks_of(model) == 0 and (tmp_path / "steps.jsonl").read_text().count("\n") == len(lines)


class LightningProtocol:
    """Calls a callback as Lightning's Trainer does: a validation check before the first step, the loss divided by
    micro-batches before backward, metrics after validation."""

    def __init__(self, module: nn.Module, callback: Any) -> None:
        self.module = module
        self.callback = callback
        self.optimizers = [torch.optim.SGD(module.parameters(), lr=0.01)]
        self.accumulate_grad_batches = 2
        self.sanity_checking = False
        self.callback_metrics: dict[str, torch.Tensor] = {}

    def validated(self, loss: float | None, checking: bool = False) -> None:
        self.sanity_checking = checking
        self.callback_metrics = {} if loss is None else {"val_loss": torch.tensor(loss)}
        self.callback.on_validation_end(self, self.module)

    def fit(self, steps: int, looks: dict[int, float | None], fails: bool = False) -> None:
        self.validated(9.0, checking=True)
        self.callback.on_train_start(self, self.module)
        self.validated(8.0, checking=True)
        for step in range(1, steps + 1):
            for _ in range(2):
                loss = self.module(torch.ones(4, 6)).square().mean()
                self.callback.on_before_backward(self, self.module, loss / 2)
                (loss / 2).backward()
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()
            if step in looks:
                self.validated(looks[step])
            if fails:
                self.callback.on_exception(self, self.module, RuntimeError())
                return
        self.callback.on_train_end(self, self.module)
        self.validated(7.0)  # a separate trainer.validate() after the training


def test_lightnings_losses_on_held_out_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At their steps: without the check before the first step, without val_loss, and without those after the end."""
    stand_in = types.SimpleNamespace(Callback=object)
    monkeypatch.setitem(sys.modules, "lightning", types.SimpleNamespace(pytorch=stand_in))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", stand_in)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    lines = list[StreamLine]()
    first = float(module(torch.ones(4, 6)).square().mean().detach())
    callback = fp8bench.lightning_callback(told=lines.extend, stride=3)
    LightningProtocol(module, callback).fit(6, {2: 0.5, 4: None, 6: 0.25})
    assert looks_of(lines) == [(2, 0.5), (6, 0.25)] and hooks_of(module) == 0
    assert len(rows_of(lines)) == 6 and rows_of(lines)[0].loss == pytest.approx(first)
    failed = fp8bench.lightning_callback(told=lines.extend)
    LightningProtocol(module, failed).fit(6, {}, fails=True)
    assert hooks_of(module) == 0
    two = LightningProtocol(module, failed)
    two.optimizers *= 2
    with pytest.raises(UsageError, match="2 optimizers do not share a step"):
        two.fit(1, {})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    for make, word in ((fp8bench.hugging_face_callback, "transformers"), (fp8bench.lightning_callback, "lightning")):
        with pytest.raises(UsageError, match=f"pip install {word}"):
            make()
