"""A run as CSV, tidy and wide, and as one JSON document."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings

from fp8bench.model import Finding, Measurement, Run
from fp8bench.model.codec import SCHEMA, decode, encode
from fp8bench.report.data.run import all_as_csv, as_csv, as_json
from fp8bench.report.data.tidy import columns_of, rows, widened
from tests.runs import gemm, measured, transformer, wild_runs


def test_it_is_the_tidy_rows_under_their_columns() -> None:
    """Numbers come back to the last digit; what is missing is empty."""
    run, findings = measured()
    text = as_csv(run, findings)
    read = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    assert tuple(read[0]) == columns_of(run)
    expected = [["" if cell is None else str(cell) for cell in row.values()] for row in rows(run, findings)]
    assert read[1:] == expected and len(expected) > 50


def test_lines_end_as_everywhere_else_and_one_line_is_one_row() -> None:
    """Also where a reason has quotes, commas and line ends of its own."""
    run, findings = measured()
    records = tuple(replace(one, reason='a "b",\r\nc\x00\x1b[31m' if one.reason else "") for one in run.records)
    text = as_csv(replace(run, records=records), findings)
    assert "\r" not in text and "\x00" not in text and text.endswith("\n") and not text.endswith("\n\n")
    assert text.count("\n") == len(rows(run, findings)) + 1
    assert '"a ""b"",  c  [31m"' in text


def test_columns_do_not_depend_on_what_became_of_a_run() -> None:
    """So that files of many runs stand below each other."""
    run, findings = measured()
    first = as_csv(run, findings).splitlines()[0]
    assert as_csv(run, {}).splitlines()[0] == first
    nothing: Run = replace(run, records=())
    assert as_csv(nothing, {}).splitlines() == [",".join(name for name in first.split(",") if "param_" not in name)]


def test_one_row_a_case_and_every_figure_in_a_column_of_its_own() -> None:
    """Nothing of the tidy rows is lost, and nothing is said twice."""
    run, findings = measured()
    tidy = rows(run, findings)
    columns, wide = widened(tidy)
    assert [row["case"] for row in wide] == [record.case.id for record in run.records]
    assert len(set(columns)) == len(columns) and all(set(row) == set(columns) for row in wide)
    first = next(row for row in wide if row["precision"] == "bf16" and row["time_best_s"] is not None)
    of_it = {(row["phase"], row["metric"]): row for row in tidy if row["case"] == first["case"]}
    assert first["time_best_s"] == of_it["step", "time"]["best_in_unit"]
    assert first["time_median_s"] == of_it["step", "time"]["median_in_unit"]
    assert first["cast_time_best_s"] == of_it["cast", "time"]["best_in_unit"]
    assert first["product_error"] == of_it["step", "product_error"]["median_in_unit"]
    assert first["ratio_to_reference"] == of_it["step", "time"]["ratio_to_reference"]
    assert first["flops_per_second_best_FLOP_per_s"] == of_it["step", "flops_per_second"]["best_in_unit"]


def test_a_unit_that_a_metric_names_is_not_named_twice() -> None:
    """'sqnr_db' is a column, and 'peak_memory_B'."""
    run, findings = measured()
    record = run.records[0]
    units = (("sqnr_db", "dB"), ("underflow_percent", "%"), ("slope", "ratio"), ("peak_memory", "B"), ("heat", "%"))
    more = tuple(Measurement(name, unit, (1.0,)) for name, unit in units)
    run = replace(run, records=(replace(record, measurements=more), *run.records[1:]))
    columns, _ = widened(rows(run, findings))
    assert {"sqnr_db", "underflow_percent", "slope", "peak_memory_B", "heat_%"} <= set(columns)


def test_a_row_has_what_there_is_of_its_case() -> None:
    """What the data are made of stands with the reference ('linear_input_amax'); of a skipped case only the reason."""
    _, wide = widened(rows(*measured()))
    assert wide[0]["linear_input_amax"] == 4.5 and wide[1]["linear_input_amax"] is None
    skipped = next(row for row in wide if row["status"] == "skipped")
    assert skipped["reason"] and skipped["time_best_s"] is None


def test_runs_stand_below_each_other() -> None:
    """Tidy or wide, with the columns of both; cases of the same name in two runs are two."""
    pairs = [gemm(), transformer()]
    read = list(csv.DictReader(io.StringIO(all_as_csv(pairs, wide=True))))
    assert len(read) == sum(len(run.records) for run, _ in pairs)
    tidy = list(csv.DictReader(io.StringIO(all_as_csv(pairs))))
    assert [row["case"] for row in tidy] == [row["case"] for run, found in pairs for row in rows(run, found)]
    assert {"param_m", "param_layers"} <= set(tidy[0])
    assert all_as_csv([gemm()]) == as_csv(*gemm())
    assert all_as_csv([]) == "\n"


def strict(text: str) -> Any:
    """The document; Python's own words for what JSON has no word for are refused."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("make", [measured, gemm, transformer])
def test_it_holds_the_whole_run(make: Any) -> None:
    """Header, records as in its file, with every raw sample, and beside each its finding if it has one: they come back
    as they were."""
    run, findings = make()
    text = as_json(run, findings)
    document = strict(text)
    assert text.isascii() and text.endswith("}\n") and text.count("\n") == 1
    assert document.pop("schema") == SCHEMA and document.pop("break_even") == []
    assert set(document) == {field.name for field in fields(Run)}
    assert decode(Run, document) == run
    for record, plain in zip(run.records, document["records"], strict=True):
        found, said, metrics = findings.get(record.case.id), plain.pop("finding"), plain.pop("metrics")
        assert metrics.get("time") == (found and found.best_seconds and found.median_seconds)
        assert plain == encode(record) and (said is None) == (found is None)
        if found is not None:
            assert "case" not in said and decode(Finding, {**said, "case": plain["case"]}) == found
    assert {plain["finding"] for plain in strict(as_json(run, {}))["records"]} == {None}


def test_what_json_has_no_word_for_is_text() -> None:
    run, findings = measured()
    measurement = Measurement("product_error", "ratio", (float("inf"), float("-inf"), float("nan")))
    run = replace(run, records=(replace(run.records[0], measurements=(measurement,)),))
    plain = strict(as_json(run, findings))["records"][0]
    assert plain["measurements"][0]["samples"] == ["inf", "-inf", "nan"]


@settings(max_examples=40)
@given(wild_runs())
def test_any_run_is_strict_json(wild: tuple[Run, dict[str, Finding]]) -> None:
    run, findings = wild
    assert len(strict(as_json(run, findings))["records"]) == len(run.records)
