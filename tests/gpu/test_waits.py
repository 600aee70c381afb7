"""The watch for waits of this folder's tests; runs without a GPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.gpu.waits import none_may_wait


def test_the_mode_that_watches_for_waits_may_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []

    def prototype(mode: str) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", prototype)
    with none_may_wait():
        assert modes == ["error"]
    with pytest.raises(RuntimeError, match="synchronizing"), none_may_wait():
        raise RuntimeError("called a synchronizing CUDA operation")
    assert modes == ["error", "default"] * 2
