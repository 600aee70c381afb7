"""The stage that steps are rehearsed on."""

from __future__ import annotations

import pytest

from fp8bench.worker.bench import Bench
from tests.rehearsal.stage import Stage


@pytest.fixture
def stage(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Stage:
    found = Stage(bench)
    found.set_up(monkeypatch)
    return found
