"""Checkpoints: every way of training resumes to the same bits, damaged files are refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8bench.errors import StoreError
from fp8bench.features.train.arms import MSAMP_LEVELS
from fp8bench.features.train.lab import rates
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.request import SCHEDULES
from fp8bench.features.train.values import Arm
from fp8bench.plan.corpus import Corpus
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.features.train.lab.labs import TINY_TIED, lab_of, restarted, rows, task_of
from tests.older import changed_document

LOW = (("optimizer_states", "fp8lm"), ("master", "fp16-scaled"), ("gradients", "fp8"), ("micro_batches", 2))
DRAWN = (("master", "bf16-stochastic"), ("dropout", 0.1))
HALF = (("optimizer_states", "bf16"), ("gradients", "bf16"), ("dropout", 0.1), ("checkpointing", "blocks"))
MODES = (
    "nvfp4", Arm("fp8lm", "fp8", settings=LOW), Arm("drawn", "bf16", settings=DRAWN),
    Arm("o3", "fp8:scale=pow2", settings=MSAMP_LEVELS["msamp-o3"].settings),
    Arm("half", "fp8-delayed:history=3", settings=HALF), Arm("dynamic", "fp16", settings=(("loss_scale", "dynamic"),)),
    Arm("attention", "fp8-delayed:history=4", settings=(("attention", "rounded"),)),
    Arm("renewed", "fp8", settings=(("refresh_scales", 3),)),
    Arm("bound", "fp8", settings=(("saturation_bound", 0.0),)),
    *(Arm(f"then {share}", "fp8-delayed", settings=(("then", f"nvfp4@{share}%"),)) for share in (25, 50, 75)),
)  # fmt: skip
MANY = (
    *precisions.names(),
    "fp8-delayed:algorithm=most_recent:margin=1",
    "fp8-delayed:history=2:interval=2",
    "nvfp4:hadamard=off",
    "nvfp4:stochastic=off",
)


@pytest.mark.parametrize("arms", [MODES, pytest.param(MANY, marks=pytest.mark.slow)], ids=["some", "all"])
def test_arms_resume_to_the_same_bits(arms: tuple[Arm | str, ...], corpus: Corpus, tmp_path: Path) -> None:
    """In a new lab that has taken other steps before."""
    task = task_of(corpus, *arms, steps=4)
    names = [arm.name for arm in task.arms]
    lab = lab_of(task)
    other = lab_of(task)
    for name in names:
        lab.advance(name, 2)
    assert lab.save(str(tmp_path / "kept")) == ()
    wanted = {name: rows(lab.advance(name, 5)) for name in names}
    assert all(len(steps) == 2 for steps in wanted.values()), "no more steps than the task has"
    for name in names[:2]:
        other.advance(name, 1)
    assert other.restore(str(tmp_path / "kept")) == tuple((name, 2) for name in names)
    assert {name: rows(other.advance(name, 2)) for name in names} == wanted


AROUND = (("embed", "fp16"), ("norm", "fp8"), ("residual", "fp32"), ("logits", "mxfp8"), ("output", "fp16"))
WAYS: dict[str, dict[str, Any]] = {
    **{f"schedule {name}": {"schedule": name} for name in SCHEDULES},
    **{f"optimizer {name}": {"optimizer": name} for name in ("adamw", "sgd", "adafactor")},
    **{f"arch {name}": {"arch": name} for name in ("cnn", "mlp", "moe")},
    "sgd in low precision": {"optimizer": "sgd", "optimizer_states": "fp8lm", "master": "fp16-scaled"},
    "plateau that drops at once": {"schedule": "plateau:floor=0.01", "rate": 1e-6},
    "updates in fp8": {"updates": "fp8", "optimizer": "sgd"},
    "clipping by kind": {"clip": "0.1/kind"},
    "clipping by tensor": {"clip": "0.05/tensor"},
    "a tied head": {"model": TINY_TIED},
    "rates": {"rates": (("attn", 0.5), ("blocks.0", 2.0))},
    "betas": {"optimizer": "adamw:betas=0.8,0.95"},
    "a scale that changes": {"loss_scale": "dynamic"},
    "parts in other precisions": {"precision_map": AROUND},
    "batch norm in fp16": {"arch": "cnn", "precision_map": (("norm", "fp16"),)},
    "batch norm in fp8": {"arch": "cnn", "precision_map": (("norm", "fp8"), ("embed", "mxfp4"))},
}
# Independent settings are tested together, each of them once.
TOGETHER = (
    ("schedule cosine", "optimizer adamw", "clipping by kind", "parts in other precisions"),
    ("schedule linear", "betas", "clipping by tensor"),
    ("schedule constant", "optimizer adafactor", "rates", "a tied head"),
    ("schedule wsd", "updates in fp8", "a scale that changes"),
    ("schedule one-cycle", "sgd in low precision"),
    ("schedule inverse-sqrt", "optimizer sgd"),
    ("schedule plateau",), ("plateau that drops at once",), ("batch norm in fp16",), ("batch norm in fp8",),
    ("arch cnn",), ("arch mlp",), ("arch moe",),
)  # fmt: skip


@pytest.mark.slow
@for_each("ways", TOGETHER, ids=lambda ways: ways[0])
def test_every_setting_resumes_to_the_same_bits(
    ways: tuple[str, ...], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validations too: batch norm's statistics and a plateau's best loss are part of a checkpoint."""
    monkeypatch.setattr(rates, "PLATEAU_PATIENCE", 0)
    assert sorted(way for ways in TOGETHER for way in ways) == sorted(WAYS)
    settings = {name: value for way in ways for name, value in WAYS[way].items()}
    assert len(settings) == sum(len(WAYS[way]) for way in ways)
    task = task_of(corpus, "fp8-delayed", steps=20, **settings)
    mode = "fp8-delayed"
    whole = lab_of(task)
    _ = [whole.advance(mode, 3), whole.validate(mode)]
    other = restarted(whole, task, tmp_path)
    wanted, again = (
        [rows(lab.advance(mode, 2)), lab.validate(mode), rows(lab.advance(mode, 2))] for lab in (whole, other)
    )
    assert again == wanted


@pytest.fixture
def lab(corpus: Corpus) -> Lab:
    lab = lab_of(task_of(corpus, "bf16", "fp8"))
    lab.advance("bf16", 1)
    return lab


@contextmanager
def files_end_after(size: int) -> Iterator[None]:
    """A real file size limit, reached in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier checkpoint stays, and training continues."""
    kept = tmp_path / "kept"
    lab.save(str(kept))
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    with files_end_after(4000), pytest.raises(StoreError, match="File too large"):
        lab.save(str(tmp_path / "new"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(StoreError, match="No space left on device"):
            lab.save(str(kept))
    assert list(tmp_path.iterdir()) == [kept]
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert len(rows(lab.advance("bf16", 1))) == 1


@for_each("damage", ["bit", "short", "gone", "head", "no head"])
def test_a_damaged_checkpoint_is_named(corpus: Corpus, tmp_path: Path, damage: str) -> None:
    """No arm changes, not even those with intact files."""
    lab = lab_of(task_of(corpus, "bf16", "fp8"))
    kept = tmp_path / "kept"
    lab.save(str(kept))
    path = kept / ("checkpoint.json" if "head" in damage else "1.pt")
    content = bytearray(path.read_bytes())
    if damage in ("gone", "no head"):
        path.unlink()
    elif damage == "bit":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(content[:-20])
    lab.advance("bf16", 1)
    with pytest.raises(StoreError, match="kept" if "head" in damage else "1.pt"):
        lab.restore(str(kept))
    assert lab._trainers["bf16"].step == 1


def test_a_checkpoint_of_another_training_is_refused(corpus: Corpus, lab: Lab, tmp_path: Path) -> None:
    lab.save(str(tmp_path))
    task = task_of(corpus, "bf16", "fp8")
    for other in (replace(task, seed=1), replace(task, steps=21), replace(task, arms=task.arms[:1])):
        with pytest.raises(StoreError, match="from another training"):
            lab_of(other).restore(str(tmp_path))
    other_rank = lab_of(task)
    other_rank._rank = 1
    with pytest.raises(StoreError, match="from another training"):
        other_rank.restore(str(tmp_path))


def test_nothing_in_a_file_is_run(lab: Lab, tmp_path: Path) -> None:
    """Whatever its digest."""

    class Harmful:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "harm"),)

    kept = tmp_path / "kept"
    lab.save(str(kept))
    torch.save({"step": Harmful()}, kept / "0.pt")
    head: dict[str, Any] = changed_document(kept / "checkpoint.json")
    head["arms"]["bf16"]["sha256"] = hashlib.sha256((kept / "0.pt").read_bytes()).hexdigest()
    (kept / "checkpoint.json").write_text(json.dumps(head))
    with pytest.raises(StoreError, match="has more than tensors and plain values"):
        lab.restore(str(kept))
    assert not (tmp_path / "harm").exists()
