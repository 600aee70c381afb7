"""Starting points of an arm: weights of a stored training or file, and a text that changes at some step."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8bench.errors import UsageError
from fp8bench.features.train import run as job
from fp8bench.features.train.beginnings import resolve_training_start
from fp8bench.features.train.kind import newest_checkpoint
from fp8bench.features.train.lab.checkpoint import load_state_dict_file
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.measure.handle import LocalWorker
from fp8bench.plan.corpus import Corpus
from tests.features.train.lab.labs import TINY, TINY_TIED, lab_of, rows, task_of
from tests.trainings import NotedTraining, write_tokens


def test_arms_begin_with_the_weights_of_a_checkpoint(corpus: Corpus, tmp_path: Path) -> None:
    """Weights are equal bit for bit, in every precision and seed."""
    lab = lab_of(task_of(corpus, "bf16", "fp8"))
    lab.advance("fp8", 5)
    lab.save(str(tmp_path / "kept"))
    start = f"{tmp_path / 'kept'}::fp8"
    begun = lab_of(task_of(corpus, "bf16", "nvfp4", seed=3, start=start))
    for arm in ("bf16", "nvfp4"):
        own, kept = (lab._trainers[name].parameters for lab, name in ((begun, arm), (lab, "fp8")))
        assert all(torch.equal(own[name], kept[name]) for name in kept)
    first = rows(begun.advance("bf16", 1))[0]
    assert first.loss < rows(lab_of(task_of(corpus, "bf16", seed=3)).advance("bf16", 1))[0].loss
    with pytest.raises(UsageError, match="belong to a different model"):
        lab_of(task_of(corpus, "bf16", model="nano", start=start)).advance("bf16", 1)


@pytest.mark.slow
def test_a_training_that_begins_with_another_one(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other is named by its id, with an arm or without, which means the reference."""
    write_tokens(Path("text"))
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: LocalWorker(settings, Lab))
    request = TrainingRequest(
        settings=TrainerSettings(model=TINY), steps=6, seeds=1, keep=5, data="text", energy=False, bands=("none",)
    )

    def beginning(start: str, **settings: str) -> TrainingRequest:
        return replace(request, settings=replace(request.settings, start=start, **settings))

    base = job.train(request, store, NotedTraining(), "")
    kept = job.train(beginning(f"{base.training.id}:fp8"), store, NotedTraining(), "")
    newest = newest_checkpoint(Path(base.path))
    assert kept.finished and newest is not None and kept.training.request.settings.start == f"{newest[0]}::fp8"
    short = job.train(replace(request, keep=10), store, NotedTraining(), "")
    for asked, why in (
        (beginning("last:mxfp8"), "it has no arm 'mxfp8', but bf16, fp8"),
        (beginning("last", arch="mlp"), "it trained --arch gpt"),
        (beginning("nothing"), "no training 'nothing'"),
        (beginning(short.training.id), "it has no checkpoint: 6 steps, --keep 10"),
    ):
        with pytest.raises(Exception, match=why):
            resolve_training_start(asked, store)


def kept(path: Path, state: object) -> str:
    torch.save(state, path)
    return named(path)


def named(path: Path) -> str:
    return f"{path}::{hashlib.sha256(path.read_bytes()).hexdigest()}"


def model_of(lab: Lab, arm: str = "bf16") -> nn.Module:
    model: nn.Module = lab._trainers[arm].model
    return model


@pytest.mark.parametrize("wrap", ["plain", "within", "module", "safetensors"])
def test_arms_begin_with_the_bits_of_a_file(corpus: Corpus, tmp_path: Path, wrap: str) -> None:
    """The file may have any layout that trainers use."""
    other = lab_of(task_of(corpus, "bf16", seed=9))
    state = {name: tensor.detach().clone() for name, tensor in model_of(other).state_dict().items()}
    file = tmp_path / "weights.safetensors"
    if wrap == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(state, file)
        start = named(file)
    else:
        prefixed = {f"module.{name}": tensor for name, tensor in state.items()}
        wrapped = {"plain": state, "within": {"state_dict": state, "step": 3}, "module": prefixed}[wrap]
        start = kept(tmp_path / "weights.pt", wrapped)
    lab = lab_of(task_of(corpus, "bf16", "fp8", start=start))
    for arm in ("bf16", "fp8"):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model_of(lab, arm).state_dict().items())
    assert rows(lab.advance("bf16", 2))[0].loss != rows(other.advance("bf16", 2))[0].loss  # other batches
    assert len(state) > 8


def test_an_unfit_file_is_refused_with_what_it_has(corpus: Corpus, tmp_path: Path) -> None:
    model = model_of(lab_of(task_of(corpus, "bf16")))
    state = dict(model.state_dict())
    name = next(name for name in state if name.endswith("qkv.weight"))
    (tmp_path / "junk.pt").write_bytes(b"no weights")
    cases = (
        (kept(tmp_path / "a", {**state, "more.weight": torch.ones(1)}), "has more.weight, which this model lacks"),
        (kept(tmp_path / "b", {key: tensor for key, tensor in state.items() if key != name}), f"lacks {name}"),
        (kept(tmp_path / "c", {**state, name: torch.ones(3)}), rf"size mismatch for {name}: "),
        (kept(tmp_path / "d", {**state, name: state[name] / 0}), "not finite"),
        (kept(tmp_path / "e", [1, 2]), "expected tensors by name"),
        (named(tmp_path / "junk.pt"), "is not a state dict"),
        (f"{tmp_path / 'a'}::0", "has changed"),
    )
    for start, words in cases:
        with pytest.raises(UsageError, match=words):
            load_state_dict_file(model, start)


def test_a_file_whose_weights_are_not_tied_is_refused_by_a_model_whose_are(corpus: Corpus, tmp_path: Path) -> None:
    tied, untied = (model_of(lab_of(task_of(corpus, "bf16", model=name))) for name in (TINY_TIED, TINY))
    load_state_dict_file(tied, kept(tmp_path / "tied", tied.state_dict()))
    without_head = {name: tensor for name, tensor in tied.state_dict().items() if name != "head.weight"}
    load_state_dict_file(tied, kept(tmp_path / "without", without_head))
    with pytest.raises(UsageError, match="embedding is the same tensor as another one in this model"):
        load_state_dict_file(tied, kept(tmp_path / "untied", untied.state_dict()))


def test_a_request_has_the_digest_of_its_file(tmp_path: Path) -> None:
    start = kept(tmp_path / "weights.pt", {})
    asked = TrainingRequest(settings=TrainerSettings(start=str(tmp_path / "weights.pt")))
    assert resolve_training_start(asked, tmp_path).settings.start == start
    assert resolve_training_start(resolve_training_start(asked, tmp_path), tmp_path).settings.start == start
