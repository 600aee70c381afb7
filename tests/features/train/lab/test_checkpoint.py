"""Checkpoints: whole or not there, known again, and nothing is believed that is not as it was written."""

from __future__ import annotations

import errno
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
from fp8bench.features.train.lab.lab import Lab
from fp8bench.plan.corpus import Corpus
from tests.features.train.lab.labs import lab_of, rows, task_of
from tests.older import changed_document


@pytest.fixture
def lab(corpus: Corpus) -> Lab:
    lab = lab_of(task_of(corpus, "bf16", "fp8"))
    lab.advance("bf16", 1)
    return lab


@contextmanager
def files_end_after(size: int) -> Iterator[None]:
    """A real limit of the system's, met in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the new folder nor a half of it; the one before stands, and training goes on."""
    kept = tmp_path / "kept"
    lab.save(str(kept))
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    with files_end_after(4000), pytest.raises(StoreError, match=r"new cannot be written \(File too large\). Make room"):
        lab.save(str(tmp_path / "new"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(StoreError, match="No space left on device"):
            lab.save(str(kept))
    assert list(tmp_path.iterdir()) == [kept]
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert len(rows(lab.advance("bf16", 1))) == 1


@pytest.mark.parametrize("damage", ["bit", "short", "gone", "head", "no head"])
def test_a_damaged_one_is_named(lab: Lab, tmp_path: Path, damage: str) -> None:
    """And no arm has changed: not even those whose files are sound."""
    kept = tmp_path / "kept"
    lab.save(str(kept))
    wanted = "0.pt" if damage in ("bit", "short", "gone") else "kept"
    path = kept / ("1.pt" if wanted == "0.pt" else "checkpoint.json")
    content = bytearray(path.read_bytes())
    if damage in ("gone", "no head"):
        path.unlink()
    elif damage == "bit":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(content[:-20])
    step = lab._trainers["bf16"].step
    lab.advance("bf16", 1)
    with pytest.raises(StoreError, match=wanted.replace("0.pt", "1.pt")):
        lab.restore(str(kept))
    assert lab._trainers["bf16"].step == step + 1


def test_one_of_another_training_is_refused(corpus: Corpus, lab: Lab, tmp_path: Path) -> None:
    """Another seed, other settings, other arms, or a format of another time."""
    lab.save(str(tmp_path))
    task = task_of(corpus, "bf16", "fp8")
    for other in (replace(task, seed=1), replace(task, steps=21), replace(task, arms=task.arms[:1])):
        with pytest.raises(StoreError, match="is of another training"):
            lab_of(other).restore(str(tmp_path))
    head = changed_document(tmp_path / "checkpoint.json")
    (tmp_path / "checkpoint.json").write_text(json.dumps(head | {"version": 99}))
    with pytest.raises(StoreError, match="is of another training"):
        lab_of(task).restore(str(tmp_path))


def test_nothing_in_a_file_is_run(corpus: Corpus, lab: Lab, tmp_path: Path) -> None:
    """A file that would call something when it is loaded is refused, whatever its digest."""
    import hashlib

    class Harmful:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "harm"),)

    kept = tmp_path / "kept"
    lab.save(str(kept))
    torch.save({"step": Harmful()}, kept / "0.pt")
    head: dict[str, Any] = changed_document(kept / "checkpoint.json")
    head["arms"]["bf16"]["sha256"] = hashlib.sha256((kept / "0.pt").read_bytes()).hexdigest()
    (kept / "checkpoint.json").write_text(json.dumps(head))
    with pytest.raises(StoreError, match="holds more than tensors and plain values"):
        lab.restore(str(kept))
    assert not (tmp_path / "harm").exists()
