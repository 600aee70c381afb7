"""A model that another user may have put where a live one once lay is not taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fp8bench.errors import ModelNotSendable
from fp8bench.workloads.model import load_transferred_model


def test_a_model_of_another_user_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    file = tmp_path / "model.pt"
    torch.save((1, 2), file)
    assert load_transferred_model(str(file)) == (1, 2)
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    with pytest.raises(ModelNotSendable, match="belongs to user"):
        load_transferred_model(str(file))
