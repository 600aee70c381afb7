"""Code and models that another user may have put where a stored run's once lay are not taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fp8bench.errors import NotSent
from fp8bench.plan.resumable import _may_be_anybodys
from fp8bench.workloads.model import sent


def test_code_of_another_user_where_everybody_may_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is ours is taken, wherever it lies; so is another's where only its owner writes."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    for folder in (shared, own):
        folder.mkdir()
        (folder / "suite.py").touch()
    shared.chmod(0o1777)
    assert not _may_be_anybodys(shared / "suite.py") and not _may_be_anybodys(tmp_path / "gone.py")
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid == 0:  # root's files are everybody's to trust
        os.chown(shared / "suite.py", 12345, -1)
    assert _may_be_anybodys(shared / "suite.py")


def test_a_model_of_another_user_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    file = tmp_path / "model.pt"
    torch.save((1, 2), file)
    assert sent(str(file)) == (1, 2)
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    with pytest.raises(NotSent, match="belongs to user"):
        sent(str(file))
