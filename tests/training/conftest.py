"""A model of a few thousand weights, for labs in this process."""

from __future__ import annotations

import pytest

from fp8bench.nn.sizes import SIZES, GPTConfig
from tests.training.labs import TINY


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, TINY, GPTConfig(256, 32, 1, 2, 2, 64, batch=2, sequence=16))
