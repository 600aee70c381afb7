"""Whole ceilings: measured, kept, told, and used by the next run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8bench.analysis.findings import findings
from fp8bench.analysis.metrics import metrics_of
from fp8bench.errors import UsageError, WorkerLost
from fp8bench.jobs import ceilings as job
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Ceilings, DeviceFacts, Limit, Rate, Request
from fp8bench.model.metric_names import OwnMetric
from fp8bench.report.terminal.run import render
from fp8bench.store.runs.read import load_run
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
    lines = list(job.ceiling_lines(tmp_path / "store", 2))
    assert asked == [("cpu", 5)] and lines[0].startswith("cpu: what ") and lines[0].endswith("threads 2, in 5 runs")
    assert lines[2].startswith("  product bf16   425 GFLOP/s; spread 0.5%") and "threads 2" in lines[1]
    assert len(list((tmp_path / "store" / "ceilings").glob("whole*.json"))) == 1


def test_the_suite_is_a_run_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record for each rate, in the order of limits; what a device refuses is skipped with its words."""
    monkeypatch.setattr(Bench, "ceilings", lambda self, facts, seconds, runs: FOUND)
    run = job.ceilings_run(Request("ceilings", devices=("cpu",)), tmp_path, "a test")
    assert run.finished and run.ok and run == load_run(Path(run.path))
    found = [(one.case.param("limit"), one.case.precision, one.status.value) for one in run.records]
    assert found == [
        ("product", "bf16", "ok"), ("product", "nvfp4", "skipped"), ("copy", "fp32", "ok"), ("launch", "fp32", "ok"),
    ]  # fmt: skip
    bf16, nvfp4, copied, _ = run.records
    assert bf16.measurements[0].samples == FOUND.rates[0].runs and nvfp4.reason == "RuntimeError: no kernel"
    assert copied.detail == "arrays of 64.0 MiB, the best of 2 searched; spread 22.2% over 3 runs: no bound"
    (metric,) = [one for one in metrics_of(bf16, None) if one.name == OwnMetric.CEILING_RATE]
    assert (metric.unit, metric.value, metric.better) == ("FLOP/s", 4.25e11, "higher")
    assert "throughput" in render(run, findings(run)) and "425 GFLOP/s" in render(run, findings(run))


@pytest.mark.parametrize("change", [{"quick": True}, {"dtypes": ("bf16",)}, {"axes": (("m", ("1",)),)}, {"rounds": 3}])
def test_the_suite_refuses_what_it_would_ignore(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="takes --devices, --threads"):
        job.ceilings_run(Request("ceilings", **change), tmp_path, "a test")


def test_a_worker_that_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Bench, facts: DeviceFacts, seconds: float, runs: int) -> Ceilings:
        raise WorkerLost("it crashed")

    monkeypatch.setattr(Bench, "ceilings", lost)
    assert list(job.ceiling_lines(tmp_path / "store"))[1] == "  not measured: WorkerLost: it crashed"


@pytest.mark.slow
def test_on_this_machine_within_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every rate that a processor has, five runs; the time is a few seconds here, and 35 s where nobody says so."""
    monkeypatch.setattr(job, "WHOLE_SECONDS", 2.0)
    lines = list(job.ceiling_lines(tmp_path / "store"))
    for limit in set(Limit) - {Limit.LOAD}:
        (line, *_) = [one for one in lines if one.startswith(f"  {limit.value} ")]
        assert "over 5 runs" in line
    assert job.WHOLE_SECONDS <= 35 and Rate(Limit.LOAD).value is None
