"""The stage that steps are rehearsed on."""

from __future__ import annotations

import pytest

from fp8bench.worker.bench import Bench
from tests.rehearsal.stage import Stage


@pytest.fixture
def stage(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Stage:
    made_stage = Stage(bench)
    made_stage.set_up(monkeypatch)
    return made_stage
