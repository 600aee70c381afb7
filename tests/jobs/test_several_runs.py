"""Several sessions of a suite: what the last run knows of those before it, and what an interrupt leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.analysis.findings import findings
from fp8bench.jobs import several_runs
from fp8bench.model import Interval, Reruns, Run
from fp8bench.protocols.measuring import SilentObserver
from tests.fakes import CPU, MS, record, steady
from tests.runs import run_of

TEN = steady(10 * MS, 24)
Asked = list[dict[str, Any]]


def run_like(milliseconds: float, finished: bool = True, rounds: int = 24) -> Run:
    own = replace(record(steady(round(milliseconds * MS), rounds)), reruns=Reruns(0.1, 9, 9))
    made = run_of([record(TEN, "fp32", is_reference=True, control=TEN), own])
    return replace(made, devices=(CPU,), finished=finished)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Requests to the pipeline; the n-th run takes 5, 6, 7 ms."""
    calls: Asked = []

    def execute(*_: object, **options: Any) -> Run:
        calls.append(options)
        return run_like(4 + len(calls))

    monkeypatch.setattr(several_runs, "execute", execute)
    return calls


def measured(number: int, apart: float = 0.0) -> Run:
    return several_runs.execute_sessions(run_like(1).request, Path(), SilentObserver(), "", number, apart)


def test_the_last_run_knows_what_all_before_it_said(asked: Asked) -> None:
    run = measured(3)
    assert [call["note"] for call in asked] == [f"session {number} of 3" for number in (1, 2, 3)]
    case = run.records[1].case.id
    known = asked[2]["sessions"][case]
    assert asked[0]["sessions"] == {} and [round(call.point, 3) for call in known] == [0.5, 0.6]
    assert all(call.half_width < 0.05 for call in known)


def test_a_session_of_few_rounds_widens_the_hull_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a range instead of an interval; without it the last session alone would decide."""
    calls: Asked = []
    monkeypatch.setattr(
        several_runs, "execute", lambda *_, **options: calls.append(options) or run_like(4 + len(calls), rounds=12)
    )
    run = measured(2)
    (range_of_first,) = calls[1]["sessions"][run.records[1].case.id]
    assert range_of_first.point == pytest.approx(0.5) and not range_of_first.level


def test_an_interval_is_the_hull_of_all_sessions() -> None:
    run = run_like(9.9)
    lead, case = run.records
    others = tuple(Interval(point, 0.99 * point, 1.01 * point, 0.99) for point in (0.98, 1.05))
    run = replace(run, records=(lead, replace(case, reruns=None, sessions=others)))
    finding = findings(run)[case.case.id]
    assert finding.ratio is not None and finding.ratio.point == pytest.approx((0.99 * 0.98 * 1.05) ** (1 / 3))
    assert (finding.ratio.low, finding.ratio.high) == (pytest.approx(0.98 * 0.99), pytest.approx(1.05 * 1.01))
    assert finding.verdict == "cannot tell"


def test_who_interrupts_has_the_sessions_that_there_are(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(several_runs.time, "sleep", interrupted)
    assert measured(3, apart=60).finished and len(asked) == 1
    monkeypatch.setattr(
        several_runs, "execute", lambda *_, **options: asked.append(options) or run_like(5, finished=False)
    )
    assert not measured(3).finished and len(asked) == 2
