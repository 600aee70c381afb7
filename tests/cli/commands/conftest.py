"""Working directories, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

Anew = Callable[[], Path]


@pytest.fixture
def anew(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Anew:
    """Changes into a new empty directory, and returns its store."""
    numbers = itertools.count()

    def begun() -> Path:
        here = tmp_path / f"here-{next(numbers)}"
        here.mkdir()
        monkeypatch.chdir(here)
        return store

    return begun
