"""Trainings that begin with given weights: the bits of a file, what is no such file, and adapters beside what stays."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8bench.errors import UsageError
from fp8bench.features.train.arms import check_training
from fp8bench.features.train.beginnings import with_file
from fp8bench.features.train.lab.fine_tuning import LORA_SCALE, take_adapters, take_file
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.lab.trainer import Trainer
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import StepRow
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.linear import Linear
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import SilentPhases
from tests.counts import for_each
from tests.features.train.lab.labs import lab_of, rows, task_of


def kept(path: Path, state: object) -> str:
    torch.save(state, path)
    return f"{path}::{hashlib.sha256(path.read_bytes()).hexdigest()}"


def model_of(lab: Lab, arm: str = "bf16") -> nn.Module:
    model: nn.Module = lab._trainers[arm]._model
    return model


@pytest.mark.parametrize("wrap", ["plain", "within", "module", "safetensors"])
def test_arms_begin_with_the_bits_of_a_file(corpus: Corpus, tmp_path: Path, wrap: str) -> None:
    """However trainers keep them; the steps are then those of a model that had these weights by itself."""
    other = lab_of(task_of(corpus, "bf16", seed=9))
    state = {name: one.detach().clone() for name, one in model_of(other).state_dict().items()}
    file = tmp_path / ("one.safetensors" if wrap == "safetensors" else "one.pt")
    if wrap == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(state, file)
        start = f"{file}::{hashlib.sha256(file.read_bytes()).hexdigest()}"
    else:
        prefixed = {f"module.{name}": one for name, one in state.items()}
        start = kept(file, {"plain": state, "within": {"state_dict": state, "step": 3}, "module": prefixed}[wrap])
    lab = lab_of(task_of(corpus, "bf16", "fp8", weights_from=start))
    for arm in ("bf16", "fp8"):
        assert all(torch.equal(one, state[name]) for name, one in model_of(lab, arm).state_dict().items())
    assert rows(lab.advance("bf16", 2))[0].loss != rows(other.advance("bf16", 2))[0].loss  # other batches
    assert len(state) > 8


def test_a_file_that_is_no_such_state_dict_is_told_by_what_it_has(corpus: Corpus, tmp_path: Path) -> None:
    model = model_of(lab_of(task_of(corpus, "bf16")))
    state = dict(model.state_dict())
    name = next(name for name in state if name.endswith("qkv.weight"))
    (tmp_path / "junk.pt").write_bytes(b"no weights")
    junk = f"{tmp_path / 'junk.pt'}::{hashlib.sha256(b'no weights').hexdigest()}"
    cases = (
        (kept(tmp_path / "a", {**state, "more.weight": torch.ones(1)}), "has more.weight, which the model has not"),
        (kept(tmp_path / "b", {key: one for key, one in state.items() if key != name}), f"has no {name}"),
        (kept(tmp_path / "c", {**state, name: torch.ones(3)}), rf"{name} is \[3\]"),
        (kept(tmp_path / "d", {**state, name: state[name] / 0}), "not finite"),
        (kept(tmp_path / "e", [1, 2]), "expected tensors by name"), (junk, "is no state dict"),
        (f"{tmp_path / 'a'}::0", "is another file than the training began with"),
    )  # fmt: skip
    for start, words in cases:
        with pytest.raises(UsageError, match=words):
            take_file(model, start)
    assert all(torch.equal(one, state[key]) for key, one in model.state_dict().items())


def test_a_request_has_the_digest_of_its_file(tmp_path: Path) -> None:
    start = kept(tmp_path / "one.pt", {})
    asked = TrainingRequest(settings=TrainerSettings(weights_from=str(tmp_path / "one.pt")))
    assert with_file(asked).settings.weights_from == start
    with pytest.raises(UsageError, match="cannot be read"):
        with_file(replace(asked, settings=TrainerSettings(weights_from=str(tmp_path))))


@for_each(
    ("settings", "words"),
    [
        ({"lora": 4}, "these are random"), ({"start": "last", "weights_from": "x.pt"}, "both say"),
        ({"lora": 4, "weights_from": "x.pt", "arch": "moe"}, "--lora is for --arch gpt"),
        ({"lora": 4, "weights_from": "x.pt", "compile": "yes"}, "no --compile yes"),
        ({"lora": 4, "make": "pkg:make", "weights_from": "x.pt"}, "--lora is about the built-in"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_training(TrainingRequest(settings=TrainerSettings(**settings)))  # type: ignore[arg-type]


def test_an_adapter_adds_its_two_products_and_at_first_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList([Linear(6, 5, PlainArithmetic(torch.float32))])
    layer, x = model.blocks[0], torch.randn(3, 6)
    before = layer(x, SilentPhases()).detach()
    take_adapters(model, 2)
    assert torch.equal(layer(x, SilentPhases()), before)
    with torch.no_grad():
        layer.lora_b.copy_(torch.randn(5, 2))
    merged = layer.weight + LORA_SCALE * layer.lora_b @ layer.lora_a
    torch.testing.assert_close(layer(x, SilentPhases()), x @ merged.T)
    layer(x, SilentPhases()).sum().backward()
    assert layer.weight.grad is None and layer.lora_a.grad is not None


@for_each("precision", ["bf16", "fp8"])
def test_adapters_learn_while_all_else_stays_and_a_resumed_arm_is_the_same(
    corpus: Corpus, tmp_path: Path, precision: str
) -> None:
    start = kept(tmp_path / "one.pt", model_of(lab_of(task_of(corpus, "bf16", seed=9))).state_dict())
    task = task_of(corpus, precision, weights_from=start, lora=4, rate=1e-2, checkpointing="blocks")
    lab, state = lab_of(task), torch.load(tmp_path / "one.pt", weights_only=True)
    first = [one for one in lab.advance(precision, 10) if isinstance(one, StepRow)]
    lab.save(str(tmp_path / "checkpoint"))
    second = rows(lab.advance(precision, 10))
    after = model_of(lab, precision).state_dict()
    assert all(torch.equal(after[name], one) for name, one in state.items())
    moved = [name for name in after if name not in state]
    assert len(moved) == 2 * 4 and all(after[name].abs().max() > 0 for name in moved)
    assert second[-1].loss < first[0].loss and first[0].update_ratio > 0
    again = lab_of(task)
    again.restore(str(tmp_path / "checkpoint"))
    assert rows(again.advance(precision, 10)) == second


def test_frozen_weights_are_counted_once_and_have_neither_gradients_nor_moments(corpus: Corpus, tmp_path: Path) -> None:
    start = kept(tmp_path / "one.pt", model_of(lab_of(task_of(corpus, "bf16"))).state_dict())
    trainer: Trainer = lab_of(task_of(corpus, "bf16", weights_from=start, lora=4))._trainers["bf16"]
    parameters = list(trainer._model.parameters())
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    sizes = {name: sum(one.nbytes for one in some) for name, some in trainer._kept().items()}
    assert sizes["frozen"] == 4 * (sum(one.numel() for one in parameters) - trained)
    for name in ("weights", "gradients", "first moment", "second moment"):
        assert sizes[name] == 4 * trained, name
    assert 0 < trained < 0.2 * sizes["frozen"] / 4
    cost = lab_of(task_of(corpus, "bf16")).alone(trainer._task)
    assert cost.memory is not None and dict(cost.memory.roles)["weights"] >= sizes["frozen"]
