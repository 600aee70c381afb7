"""The last runs before one: those of the same suite on the same machine, whose best case is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.jobs.earlier_runs import find_earlier_step_seconds
from fp8bench.jobs.report_files import write_report
from fp8bench.model import Environment, Run
from fp8bench.store.runs.run_file import start_run
from tests.fakes import record, steady
from tests.runs import run_of


def keep(store: Path, day: int, milliseconds: int, machine: str = "box", suite: str = "gemm") -> Run:
    run = run_of([record(steady(milliseconds * 1_000_000, 3), "bf16")])
    environment = Environment({**run.environment.facts, "machine": machine})
    request = replace(run.request, suite=suite)
    run = replace(
        run, id=f"{day:02x}{milliseconds:06x}", started=f"2026-01-{day:02}T00:00:00.000+00:00", environment=environment
    )
    writer = start_run(replace(run, request=request), store)
    writer.append(run.records)
    writer.finish("finished")
    return replace(run, request=request, path=str(writer.path))


def test_the_last_five_before_it_are_told_newest_first(tmp_path: Path) -> None:
    runs = [keep(tmp_path, day, 10 + day) for day in range(1, 9)]
    keep(tmp_path, 6, 900, machine="other")
    keep(tmp_path, 5, 800, suite="mlp")
    ((_, seconds),) = find_earlier_step_seconds(runs[6], tmp_path).items()
    assert seconds == pytest.approx([0.016, 0.015, 0.014, 0.013, 0.012])
    assert find_earlier_step_seconds(runs[0], tmp_path) == {}


def test_a_page_compares_a_case_with_its_earlier_runs(tmp_path: Path) -> None:
    first, *_, last = [keep(tmp_path, day, 10 + day) for day in (1, 2, 3)]
    words = "bf16: the last 2 runs of this case took 11.0 ms to 12.0 ms a step, this one 13.0 ms"
    assert words in write_report([last], tmp_path).read_text()
    assert "runs of this case" not in write_report([first], tmp_path).read_text()
    assert "runs of this case" not in write_report([first, last], tmp_path).read_text()
