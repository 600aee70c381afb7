"""What an arm begins with, and what it reads: the weights of a kept training, and another text from some step on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8bench.errors import UsageError
from fp8bench.features.train import run as job
from fp8bench.features.train.beginnings import started_from
from fp8bench.features.train.kind import newest_checkpoint, training_files
from fp8bench.features.train.lab import checkpoint
from fp8bench.features.train.lab.evaluate import windows_by_step
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import TokenSpan, Validation
from fp8bench.measure.handle import LocalWorker
from fp8bench.plan.corpus import Corpus
from tests.features.train.lab.labs import TINY, lab_of, rows, task_of
from tests.trainings import NotedTraining, write_tokens


def with_other(corpus: Corpus, tmp_path: Path, steps: int = 10, **settings: float):  # type: ignore[no-untyped-def]
    """A task whose other text is all of one token."""
    path = tmp_path / "other.tokens"
    np.full(4000, 7, dtype=np.uint16).tofile(path)
    task = task_of(corpus, "bf16", steps=steps, **settings)
    return replace(task, text=replace(task.text, other=TokenSpan(str(path), 0, 4000)))


def test_the_text_shifts_at_its_step(corpus: Corpus, tmp_path: Path) -> None:
    """Up to there the very steps of a training without a shift, after it the other text; never what is looked at."""
    plain, shifted = (lab_of(with_other(corpus, tmp_path, shift=share)) for share in (1.0, 0.6))
    one, other = (rows(lab.advance("bf16", 10)) for lab in (plain, shifted))
    assert one[:6] == other[:6] and all(a.loss != b.loss for a, b in zip(one[6:], other[6:], strict=True))
    trainer = shifted._trainers["bf16"]
    read = [trainer._read_in(step).drawn(0, step, 0, 2)[0] for step in (5, 6)]
    assert not (read[0] == 7).all() and (read[1] == 7).all()
    looks = {look.of: look.loss for look in shifted.validate("bf16") if isinstance(look, Validation)}
    usual = {look.of: look.loss for look in plain.validate("bf16") if isinstance(look, Validation)}
    assert looks["other-text"] < usual["other-text"]
    from_begin = lab_of(with_other(corpus, tmp_path, shift=0.0))._trainers["bf16"]
    assert (from_begin._read_in(0).drawn(0, 0, 0, 2)[0] == 7).all()


def test_what_is_looked_at_of_the_other_text_is_not_trained_on(corpus: Corpus) -> None:
    text = replace(task_of(corpus, "bf16").text, other=TokenSpan(corpus.path, 100, 1100))
    looked_at, read = windows_by_step(text, 0.5, 10, 16, "cpu", 256)
    assert looked_at.other == TokenSpan(corpus.path, 1000, 1100)
    assert read(4)._places == corpus.num_tokens - 16 and read(5)._places == 884 - 16
    assert windows_by_step(text, 1.0, 10, 16, "cpu", 256)[0] is text
    tuned, read = windows_by_step(text, 0.0, 10, 16, "cpu", 256)
    assert tuned.held_out == looked_at.other and tuned.other == text.held_out and read(0)._places == 884 - 16


def test_arms_begin_with_the_weights_of_a_checkpoint(corpus: Corpus, tmp_path: Path) -> None:
    """Bit for bit, in every precision and seed; another model's are refused."""
    lab = lab_of(task_of(corpus, "bf16", "fp8"))
    lab.advance("fp8", 5)
    lab.save(str(tmp_path / "kept"))
    begun = lab_of(task_of(corpus, "bf16", "nvfp4", seed=3, start=f"{tmp_path / 'kept'}::fp8"))
    for arm in ("bf16", "nvfp4"):
        own, kept = (one._trainers[name]._parameters for one, name in ((begun, arm), (lab, "fp8")))
        assert all(torch.equal(own[name], kept[name]) for name in kept)
    first = rows(begun.advance("bf16", 1))[0]
    assert first.loss < rows(lab_of(task_of(corpus, "bf16", seed=3)).advance("bf16", 1))[0].loss
    wide = lab_of(task_of(corpus, "bf16", model="nano", start=f"{tmp_path / 'kept'}::fp8"))
    with pytest.raises(UsageError, match="weights of another model"):
        wide.advance("bf16", 1)


def test_a_training_that_begins_with_another_one(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its id, with an arm or the reference; resumed it needs the words no more. What has none is refused."""
    write_tokens(Path("text"))
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: LocalWorker(settings, Lab))
    request = TrainingRequest(
        settings=TrainerSettings(model=TINY), steps=6, seeds=1, keep=5, data="text", energy=False, bands=("none",)
    )
    base = job.train(request, store, NotedTraining(), "")
    later = replace(request, settings=replace(request.settings, start=f"{base.training.id}:fp8"))
    kept = job.train(later, store, NotedTraining(), "")
    found = newest_checkpoint(Path(base.path))
    assert kept.finished and found is not None and kept.training.request.settings.start == f"{found[0]}::fp8"
    weights = checkpoint.weights(str(found[0]), "fp8")
    assert weights and job.resume(training_files(store)[0], store, NotedTraining())[0] is False
    for start, settings, why in (
        ("last:mxfp8", {}, "it has no arm 'mxfp8', but bf16, fp8"), ("last", {"arch": "mlp"}, "it trained --arch gpt"),
        ("nothing", {}, "no training 'nothing'"),
    ):  # fmt: skip
        with pytest.raises(UsageError if "no training" not in why else Exception, match=why):
            started_from(replace(request, settings=replace(request.settings, start=start, **settings)), store)
    short = job.train(replace(request, keep=10), store, NotedTraining(), "")
    with pytest.raises(UsageError, match="it has no checkpoint: 6 steps, --keep 10"):
        started_from(replace(request, settings=replace(request.settings, start=short.training.id)), store)
    with pytest.raises(UsageError, match="--shift needs a text of another kind"):
        job.train(replace(request, settings=replace(request.settings, shift=0.5)), store, NotedTraining(), "")
