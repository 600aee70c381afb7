"""A run in a notebook: short names, a table, and a line instead of pages of samples."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import fp8bench
from fp8bench import api
from fp8bench.model import Case, Run
from fp8bench.report.data.plain import csv_text
from fp8bench.report.data.run import run_rows
from fp8bench.report.notebook import short_names
from tests.counts import for_each
from tests.runs import measured

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run() -> api.Run:
    return api.load(measured()[0])


def case(mode: str, suite: str = "gemm", device: str = "cpu", **params: int) -> Case:
    return Case(suite, tuple(params.items()), mode, device)


@for_each(
    ("cases", "names"),
    [
        ([case("bf16", m=8), case("fp8", m=8)], ["bf16", "fp8"]),
        ([case("bf16", m=8, n=1), case("bf16", m=9, n=1)], ["bf16 m=8", "bf16 m=9"]),
        ([case("bf16", m=8), case("bf16", "cast", k=2)], ["bf16 gemm", "bf16 cast"]),
        ([case("bf16", m=8), case("bf16", device="cuda:0", m=8)], ["bf16 cpu", "bf16 cuda:0"]),
    ],
    ids=["the mode", "a parameter", "the suite", "the device"],
)
def test_names_hold_what_differs_within_the_run(cases: list[Case], names: list[str]) -> None:
    assert short_names(cases) == dict(zip(names, (case.id for case in cases), strict=True))


def test_findings_are_read_by_short_names_and_ids(run: api.Run) -> None:
    findings = fp8bench.findings(run)
    assert set(findings) == set(short_names([record.case for record in run.records]))
    for finding in findings.values():
        assert findings[finding.case.id] is finding
    with pytest.raises(KeyError, match=r"'nothing' is not a case\. Give one of: "):
        findings["nothing"]


def test_a_run_of_a_call_is_the_stored_value(run: api.Run) -> None:
    assert isinstance(run, Run) and isinstance(run, fp8bench.Run) and vars(run) == vars(measured()[0])
    assert isinstance(replace(run, path=""), fp8bench.Run)


def test_results_are_what_reading_the_csv_gives(run: api.Run) -> None:
    """Including every column's type, so that the same code works with both."""
    read = pd.read_csv(io.StringIO(csv_text(*run_rows([measured()]))))
    pd.testing.assert_frame_equal(run.results, read, check_exact=True)
    assert run.results is run.results


@pytest.mark.slow
def test_pandas_is_imported_by_the_results() -> None:
    """Not by reading a run, which the command line does too."""
    script = (
        "import sys; from tests.runs import measured; import fp8bench.api\n"
        "run = fp8bench.api.load(measured()[0]); print('pandas' in sys.modules); run.results\n"
        "print('pandas' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
