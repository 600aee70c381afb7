"""From where on a precision pays, as other programs read it: rows, CSV, JSON and frames say what the terminal says."""

from __future__ import annotations

import csv
import io
import json

import pytest

from fp8bench.model.specs import STEP
from fp8bench.report.break_evens import swept
from fp8bench.report.data.break_even import BreakEvenRow, break_even_rows
from fp8bench.report.data.frames import RunFrames
from fp8bench.report.data.run import as_csv, as_json
from fp8bench.report.panels import panels_of
from tests.materials import Made, shapes
from tests.report.test_break_evens import params, swept_shapes

HELD = (("n", 64), ("k", 64), ("product", "forward"))
TWICE = swept_shapes(0.5, 2.0, 2.0, 0.5)


def of_bf16(made: Made) -> list[BreakEvenRow]:
    return [row for row in break_even_rows(*made) if row.mode == "bf16"]


def test_each_crossing_has_a_row_with_its_interval() -> None:
    """As the sweep found it, of all that it is about."""
    (panel,) = panels_of(*TWICE)
    ((_, modes),) = swept(panel)
    found = modes[0].found
    assert found is not None and len(found.crossings) == 2
    rows = of_bf16(TWICE)
    assert [(row.size, row.low, row.high, row.begins) for row in rows] == [tuple(one) for one in found.crossings]
    assert [row.begins for row in rows] == [True, False] and {row.confidence for row in rows} == {found.level or None}
    assert all(row.pays.startswith("from m = ") and " to " in row.pays for row in rows)
    assert {row[:6] + row[12:14] for row in rows} == {("gemm", "cpu", "m", HELD, "bf16", "fp32", 16, 128)}


@pytest.mark.parametrize(("speed", "pays"), [(2.0, "at every size"), (0.5, "nowhere")])
def test_without_a_crossing_words_say_all(speed: float, pays: str) -> None:
    (row,) = of_bf16(swept_shapes(speed, speed, speed))
    assert (row.pays, row.size, row.low, row.high, row.begins) == (pays, None, None, None, None)


def test_what_has_no_ratio_says_why() -> None:
    (row,) = (row for row in break_even_rows(*TWICE) if row.mode == "fp8")
    assert (row.pays, row.size, row.confidence) == ("", None, None) and "emulated here: no speed" in row.remarks


def test_csv_json_and_frames_have_them() -> None:
    """In CSV a row of no case, so that rows of cases stay as they are; one row a case has none."""
    wanted = of_bf16(TWICE)
    told = [row for row in csv.DictReader(io.StringIO(as_csv(*TWICE))) if row["metric"] == "break_even"]
    assert [row for row in told if row["mode"] == "bf16"] == told[:2] and {row["case"] for row in told} == {""}
    for row, one in zip(told, wanted, strict=False):
        numbers = [float(row[name]) for name in ("median_in_unit", "size_low", "size_high")]
        assert numbers == [one.size, one.low, one.high]
        assert (row["axis"], row["param_n"], row["param_m"], row["phase"]) == ("m", "64", "", "")
        assert (row["reference_mode"], row["verdict"], row["provenance"]) == ("fp32", one.pays, "derived")
    assert "break_even" not in as_csv(*TWICE, wide=True)
    document = json.loads(as_json(*TWICE))["break_even"]
    assert [one["size"] for one in document if one["mode"] == "bf16"] == [one.size for one in wanted]
    assert document[0]["held"] == dict(HELD)


def test_a_run_without_a_sweep_has_none() -> None:
    made = shapes(params(16), params(32))
    assert not [*break_even_rows(*made)] and json.loads(as_json(*made))["break_even"] == []
    assert RunFrames(made[0]).break_even.empty


def test_the_frame_is_of_what_the_samples_say() -> None:
    """Made from the run alone, as all frames are."""
    frames = RunFrames(TWICE[0])
    assert list(frames.break_even.columns) == [*BreakEvenRow._fields]
    assert set(frames.break_even["mode"]) == {"bf16", "fp8"} and set(frames.break_even["axis"]) == {"m"}
    results = frames.results
    assert len(results[results.metric == "break_even"]) == len(frames.break_even)
    assert results[results.case.isna()].phase.isna().all() and (results.phase == STEP).any()
