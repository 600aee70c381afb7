"""What an arm begins with and reads: weights of a kept training or of a file, and another text from some step on."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fp8bench.errors import UsageError
from fp8bench.features.train import run as job
from fp8bench.features.train.beginnings import started_from
from fp8bench.features.train.kind import KIND, newest_checkpoint
from fp8bench.features.train.lab import checkpoint
from fp8bench.features.train.lab.evaluate import windows_by_step
from fp8bench.features.train.lab.fine_tuning import take_file
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import SeedTask, TokenSpan, Validation
from fp8bench.measure.handle import LocalWorker
from fp8bench.plan.corpus import Corpus
from tests.features.train.lab.labs import TINY, TINY_TIED, lab_of, rows, task_of
from tests.trainings import NotedTraining, write_tokens


def with_other(corpus: Corpus, tmp_path: Path, **settings: float) -> SeedTask:
    """A task whose other text is all of one token."""
    path = tmp_path / "other.tokens"
    np.full(4000, 7, dtype=np.uint16).tofile(path)
    task = task_of(corpus, "bf16", steps=10, **settings)
    return replace(task, text=replace(task.text, other=TokenSpan(str(path), 0, 4000)))


def test_the_text_shifts_at_its_step(corpus: Corpus, tmp_path: Path) -> None:
    """Before it the steps are those of a training without a shift; after it they read the other text, never its
    held-out part."""
    plain, shifted = (lab_of(with_other(corpus, tmp_path, shift=share)) for share in (1.0, 0.6))
    usual, other = (rows(lab.advance("bf16", 10)) for lab in (plain, shifted))
    assert usual[:6] == other[:6] and all(a.loss != b.loss for a, b in zip(usual[6:], other[6:], strict=True))
    trainer = shifted._trainers["bf16"]
    read = [trainer.made.windows(step).drawn(0, step, 0, 2)[0] for step in (5, 6)]
    assert not (read[0] == 7).all() and (read[1] == 7).all()
    looks, before = (
        {look.of: look.loss for look in lab.validate("bf16") if isinstance(look, Validation)}
        for lab in (shifted, plain)
    )
    assert looks["other-text"] < before["other-text"]
    from_begin = lab_of(with_other(corpus, tmp_path, shift=0.0))._trainers["bf16"]
    assert (from_begin.made.windows(0).drawn(0, 0, 0, 2)[0] == 7).all()


def test_the_held_out_part_of_the_other_text_is_not_trained_on(corpus: Corpus) -> None:
    text = replace(task_of(corpus, "bf16").text, other=TokenSpan(corpus.path, 100, 1100))
    looked_at, read = windows_by_step(text, 0.5, 10, 16, "cpu", 256)
    assert looked_at.other == TokenSpan(corpus.path, 1000, 1100)
    assert read(4)._places == corpus.num_tokens - 16 and read(5)._places == 884 - 16
    assert windows_by_step(text, 1.0, 10, 16, "cpu", 256)[0] is text
    tuned, read = windows_by_step(text, 0.0, 10, 16, "cpu", 256)
    assert tuned.held_out == looked_at.other and tuned.other == text.held_out and read(0)._places == 884 - 16


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
    with pytest.raises(UsageError, match="are of another model"):
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
    assert checkpoint.weights(str(newest[0]), "fp8")
    assert job.resume(KIND.files(store)[0], store, NotedTraining())[0] is False
    short = job.train(replace(request, keep=10), store, NotedTraining(), "")
    for asked, why in (
        (beginning("last:mxfp8"), "it has no arm 'mxfp8', but bf16, fp8"),
        (beginning("last", arch="mlp"), "it trained --arch gpt"), (beginning("nothing"), "no training 'nothing'"),
        (beginning(short.training.id), "it has no checkpoint: 6 steps, --keep 10"),
    ):  # fmt: skip
        with pytest.raises(Exception, match=why):
            started_from(asked, store)
    with pytest.raises(UsageError, match="--shift needs a text of another kind"):
        job.train(replace(request, settings=replace(request.settings, shift=0.5)), store, NotedTraining(), "")


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
        (kept(tmp_path / "c", {**state, name: torch.ones(3)}), rf"{name} has shape \[3\]"),
        (kept(tmp_path / "d", {**state, name: state[name] / 0}), "not finite"),
        (kept(tmp_path / "e", [1, 2]), "expected tensors by name"),
        (named(tmp_path / "junk.pt"), "is no state dict"), (f"{tmp_path / 'a'}::0", "has changed"),
    )  # fmt: skip
    for start, words in cases:
        with pytest.raises(UsageError, match=words):
            take_file(model, start)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def test_a_file_whose_weights_are_not_tied_is_refused_by_a_model_whose_are(corpus: Corpus, tmp_path: Path) -> None:
    tied, untied = (model_of(lab_of(task_of(corpus, "bf16", model=name))) for name in (TINY_TIED, TINY))
    take_file(tied, kept(tmp_path / "tied", tied.state_dict()))
    without_head = {name: tensor for name, tensor in tied.state_dict().items() if name != "head.weight"}
    take_file(tied, kept(tmp_path / "without", without_head))
    with pytest.raises(UsageError, match="embedding is the same tensor as another one in this model"):
        take_file(tied, kept(tmp_path / "untied", untied.state_dict()))


def test_a_request_has_the_digest_of_its_file(tmp_path: Path) -> None:
    start = kept(tmp_path / "weights.pt", {})
    asked = TrainingRequest(settings=TrainerSettings(start=str(tmp_path / "weights.pt")))
    assert started_from(asked, tmp_path).settings.start == start
    assert started_from(started_from(asked, tmp_path), tmp_path).settings.start == start
