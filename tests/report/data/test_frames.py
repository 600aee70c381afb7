"""A run as pandas frames."""

from __future__ import annotations

import io
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from fp8bench.model import Run, Timing
from fp8bench.report.data.frames import ENERGY_COLUMNS, SAMPLE_COLUMNS, STATISTICS_COLUMNS, RunFrames
from fp8bench.report.data.run import as_csv
from fp8bench.report.data.tidy import rows
from tests.energies import energetic
from tests.runs import measured

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def frames() -> RunFrames:
    return RunFrames(measured()[0])


def test_results_are_what_reading_the_csv_gives(frames: RunFrames) -> None:
    """To the type of every column, so that what was written for one works with the other."""
    read = pd.read_csv(io.StringIO(as_csv(*measured())))
    pd.testing.assert_frame_equal(frames.results, read, check_exact=True)


def test_results_are_the_tidy_rows(frames: RunFrames) -> None:
    """Row by row and cell by cell; what is None there is missing here."""
    tidy = rows(*measured())
    assert len(frames.results) == len(tidy)
    for (_, row), expected in zip(frames.results.iterrows(), tidy, strict=True):
        for name, cell in expected.items():
            if cell is None:
                assert pd.isna(row[name]), name
            elif isinstance(cell, float):
                assert row[name] == pytest.approx(cell, rel=1e-14), name
            else:
                assert str(row[name]).removesuffix(".0") == str(cell), name


def test_samples_are_every_cell_of_every_call(frames: RunFrames) -> None:
    """Of all three arms a record may have, in the order they were measured."""
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


def test_samples_are_small_and_whole(frames: RunFrames) -> None:
    """Words that repeat are categories, nanoseconds stay integers."""
    kinds = frames.samples.dtypes
    assert {str(kinds[name]) for name in ("case", "mode", "arm", "phase")} == {"category"}
    assert {str(kinds[name]) for name in ("round", "call", "block", "nanoseconds")} == {"int64"}


def test_the_medians_of_the_results_follow_from_the_samples(frames: RunFrames) -> None:
    """Of the step and of each phase: anybody can check them."""
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


def test_statistics_are_by_kind_role_and_format(frames: RunFrames) -> None:
    """One that knows no format has a row of its own."""
    found = frames.statistics
    assert tuple(found.columns) == STATISTICS_COLUMNS
    assert list(found.format[:3]) == ["fp16", "e4m3", "e2m1"] and pd.isna(found.format[3])
    assert list(found["kind"]) == ["linear"] * 3 + ["batch"] and list(found["values"]) == [4096] * 3 + [64]
    assert list(found.share_vanishing[:3]) == [0, 0.0008, 0.2] and list(found.share_above[:3]) == [0, 0, 0]
    assert set(found.case) == {frames.run.records[0].case.id}


def test_energy_has_a_row_a_window() -> None:
    """From which joules of a step follow."""
    frames = RunFrames(energetic()[0])
    found = frames.energy
    assert tuple(found.columns) == ENERGY_COLUMNS and len(found) == 10 and list(found.window[:4]) == [0, 1, 2, 0]
    steps = (found.joules / found.steps).groupby(found["mode"]).median()
    assert steps.to_dict() == pytest.approx({"fp32": 3.1, "bf16": 1.9, "fp8": 3.02, "nvfp4": 31.0})
    results = frames.results[(frames.results.metric == "energy") & (frames.results.phase == "step")]
    assert results.set_index("mode").median_in_unit.dropna().to_dict() == pytest.approx(steps.to_dict())
    assert set(found.idle_before) == {81.0} and set(found.source) == {"counter"}


@pytest.mark.parametrize("name", ["results", "samples", "statistics", "energy"])
def test_a_frame_is_made_once(name: str, frames: RunFrames) -> None:
    assert getattr(frames, name) is getattr(frames, name)


def test_a_run_without_records_has_empty_frames_with_their_columns() -> None:
    nothing = RunFrames(replace(measured()[0], records=()))
    assert len(nothing.results) == len(nothing.samples) == len(nothing.statistics) == 0
    assert tuple(nothing.samples.columns) == SAMPLE_COLUMNS and "verdict" in nothing.results.columns
    assert tuple(nothing.statistics.columns) == STATISTICS_COLUMNS
    assert tuple(nothing.energy.columns) == ENERGY_COLUMNS and not len(nothing.energy)


def test_an_arm_without_slots_adds_no_samples() -> None:
    """A control that never came to run."""
    run: Run = measured()[0]
    first = run.records[0]
    assert first.timing is not None
    bare = replace(first, control=Timing(first.timing.segments, ()))
    assert set(RunFrames(replace(run, records=(bare,))).samples.arm) == {"case"}


def test_pandas_is_imported_by_the_first_frame() -> None:
    """Not by reading a run, which the command line's tables do too."""
    script = (
        "import sys; from tests.runs import measured; import fp8bench.api\n"
        "from fp8bench.report.data.frames import RunFrames\n"
        "frames = RunFrames(measured()[0]); print('pandas' in sys.modules); frames.samples\n"
        "print('pandas' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
