"""Whole ceilings: measured, kept, told, and used by the next run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8bench.errors import WorkerLost
from fp8bench.jobs import ceilings as job
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Ceilings, DeviceFacts, Limit, Rate
from fp8bench.worker.bench import Bench
from tests.report.words.test_ceilings import FOUND


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's answers without a process of its own."""
    monkeypatch.setattr(job, "ProcessWorker", LocalWorker)


def test_they_are_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five runs, with the threads that were asked for, and what is kept bounds the next run's cases."""
    asked = []

    def found(self: Bench, facts: DeviceFacts, seconds: float, runs: int) -> Ceilings:
        asked.append((facts.key, runs))
        return FOUND

    monkeypatch.setattr(Bench, "ceilings", found)
    lines = list(job.ceilings(tmp_path / "store", 2))
    assert asked == [("cpu", 5)] and lines[0].startswith("cpu: what ") and lines[0].endswith("threads 2, in 5 runs")
    assert lines[2].startswith("  product bf16   425 GFLOP/s; spread 0.5%") and "threads 2" in lines[1]
    assert len(list((tmp_path / "store" / "ceilings").glob("*whole*.json"))) == 1


def test_a_worker_that_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Bench, facts: DeviceFacts, seconds: float, runs: int) -> Ceilings:
        raise WorkerLost("it crashed")

    monkeypatch.setattr(Bench, "ceilings", lost)
    assert list(job.ceilings(tmp_path / "store"))[1] == "  not measured: WorkerLost: it crashed"


@pytest.mark.slow
def test_on_this_machine_within_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every rate that a processor has, five runs; the time is a few seconds here, and 40 s where nobody says so."""
    monkeypatch.setattr(job, "WHOLE_SECONDS", 2.0)
    lines = list(job.ceilings(tmp_path / "store"))
    for limit in set(Limit) - {Limit.LOAD}:
        (line, *_) = [one for one in lines if one.startswith(f"  {limit.value} ")]
        assert "over 5 runs" in line
    assert job.WHOLE_SECONDS <= 40 and Rate(Limit.LOAD).value is None
