"""Times of steps apart from the rounds: how many, and that long steps are few."""

from __future__ import annotations

import pytest

from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Request
from fp8bench.model.raw import Settings
from fp8bench.plan.make import make_plan
from fp8bench.worker import untimed_passes
from tests.facts import CPU


def test_a_pace_leaves_out_warm_steps_and_ends_early_where_steps_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("mlp", ("fp32",), axes=(("tokens", ("8",)), ("width", ("32",)), ("hidden", ("64",))))
    case = make_plan(request, (CPU,)).groups[0].cases[0].case
    worker = LocalWorker(Settings())
    assert len(taken := worker.with_time_limit(60).pace(case, CPU, 5)) == 5 and min(taken) > 0
    monkeypatch.setattr(untimed_passes, "_MAX_PACE_STEPS_SECONDS", 0.0)
    assert len(worker.with_time_limit(60).pace(case, CPU, 5)) == 1
