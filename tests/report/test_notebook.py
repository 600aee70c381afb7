"""A run in a notebook: frames, short names, a table, a chart, and a line instead of pages of samples."""

from __future__ import annotations

import io
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import fp8bench
from fp8bench import api
from fp8bench.model import Case, Run, Timing
from fp8bench.report.data.plain import csv_text
from fp8bench.report.data.run import run_rows
from fp8bench.report.notebook import ENERGY_COLUMNS, SAMPLE_COLUMNS, STATISTICS_COLUMNS, RunFrames, short_names
from tests.counts import for_each
from tests.runs import measured

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run() -> api.Run:
    return fp8bench.load(measured()[0]).run  # type: ignore[return-value]


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


def test_findings_are_read_by_short_names_ids_and_words(run: api.Run) -> None:
    """A word that fits no case, or several, raises with the names there are."""
    findings = fp8bench.findings(run)
    assert len(findings) == len(run.records) and set(findings) == set(
        short_names([record.case for record in run.records])
    )
    for name, finding in findings.items():
        assert findings[finding.case.id] is finding and findings[f"{name} {finding.case.workload}"] is finding
        assert finding.case.id in findings
    assert "nothing" not in findings and findings.get("") is None
    with pytest.raises(KeyError, match=r"fits 0 cases\. Give one of: "):
        findings["nothing"]


def test_a_run_is_shown_on_a_line_as_a_table_and_as_a_chart(run: api.Run) -> None:
    place = run.path or "not stored"
    assert repr(run) == f"<Run {run.id}: {run.request.suite}, {len(run.records)} cases, finished, {place}>"
    page = api.Run(**{**vars(run), "path": "<b>"})._repr_html_()
    modes = {record.case.mode for record in run.records if not record.is_reference}
    assert page.count("<tr>") == 1 + len(modes) and "<b>" not in page and "faster" in page
    assert all(f"<td>{mode}</td>" in page and f"  {mode}" in str(run) for mode in modes)
    (axes,) = run.plot().axes
    told = ("faster", "slower", "same", "unsure")
    findings = fp8bench.findings(run).items()
    compared = [name for name, finding in findings if finding.verdict in told and finding.ratio is not None]
    assert [label.get_text() for label in axes.get_yticklabels()] == [*reversed(compared)]


def test_a_run_of_a_call_is_the_stored_value(run: api.Run) -> None:
    assert isinstance(run, Run) and isinstance(run, fp8bench.Run) and vars(run) == vars(measured()[0])
    assert isinstance(replace(run, path=""), fp8bench.Run)


@pytest.fixture(scope="module")
def frames() -> RunFrames:
    return RunFrames(measured()[0])


def test_results_are_what_reading_the_csv_gives(frames: RunFrames) -> None:
    """Down to the type of every column, so that code for one works with the other."""
    read = pd.read_csv(io.StringIO(csv_text(*run_rows([measured()]))))
    pd.testing.assert_frame_equal(frames.results, read, check_exact=True)
    for name in ("results", "samples", "statistics", "energy"):
        assert getattr(frames, name) is getattr(frames, name)


def test_samples_are_every_cell_of_every_call(frames: RunFrames) -> None:
    samples = frames.samples
    assert tuple(samples.columns) == SAMPLE_COLUMNS
    expected = [
        (record.case.id, record.case.mode, arm, slot.round, number, block, phase, nanoseconds)
        for record in frames.run.records
        for arm, timing in (("case", record.timing), ("control", record.control), ("reference", record.paired_with))
        if timing is not None
        for slot in timing.slots
        for number, call in enumerate(slot.calls_ns)
        for block, phase, nanoseconds in zip(timing.segments.blocks, timing.segments.phases, call, strict=True)
    ]
    assert list(samples.itertuples(index=False, name=None)) == expected
    assert {arm for _, _, arm, *_ in expected} == {"case", "control", "reference"}
    kinds = samples.dtypes
    assert {str(kinds[name]) for name in ("case", "mode", "arm", "phase")} == {"category"}
    assert {str(kinds[name]) for name in ("round", "call", "block", "nanoseconds")} == {"int64"}


def test_the_medians_of_the_results_follow_from_the_samples(frames: RunFrames) -> None:
    own = frames.samples[frames.samples.arm == "case"]
    results = frames.results[frames.results.metric == "time"].dropna(subset="median_in_unit")
    assert len(results) > 10
    for row in results.itertuples():
        chosen = own[own.case == row.case]
        if row.phase != "step":
            chosen = chosen[chosen.phase == row.phase]
        calls = chosen.groupby(["round", "call"]).nanoseconds.sum()
        assert row.median_in_unit == pytest.approx(statistics.median(calls) * 1e-9, rel=1e-12)
        assert row.n_samples == len(calls)


def test_a_run_without_records_has_empty_frames_with_their_columns() -> None:
    nothing = RunFrames(replace(measured()[0], records=()))
    assert len(nothing.results) == len(nothing.samples) == len(nothing.statistics) == 0
    assert tuple(nothing.samples.columns) == SAMPLE_COLUMNS and "verdict" in nothing.results.columns
    assert tuple(nothing.statistics.columns) == STATISTICS_COLUMNS
    assert tuple(nothing.energy.columns) == ENERGY_COLUMNS and not len(nothing.energy)
    first = measured()[0].records[0]
    assert first.timing is not None
    never_ran = replace(first, control=Timing(first.timing.segments, ()))
    assert set(RunFrames(replace(measured()[0], records=(never_ran,))).samples.arm) == {"case"}


def test_pandas_is_imported_by_the_first_frame() -> None:
    """Not by reading a run, which the command line does, too."""
    script = (
        "import sys; from tests.runs import measured; import fp8bench.api\n"
        "from fp8bench.report.notebook import RunFrames\n"
        "frames = RunFrames(measured()[0]); print('pandas' in sys.modules); frames.samples\n"
        "print('pandas' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
