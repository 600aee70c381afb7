"""A run as wide rows."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

from fp8bench.model import Measurement
from fp8bench.report.csv_text import render, render_all
from fp8bench.report.tidy import rows
from fp8bench.report.wide import widened
from tests.runs import gemm, measured, transformer


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


def test_data_stand_with_the_reference_under_their_kind_and_role() -> None:
    """'linear_input_amax'; the others have nothing there."""
    run, findings = measured()
    _, wide = widened(rows(run, findings))
    assert wide[0]["linear_input_amax"] == 4.5 and wide[1]["linear_input_amax"] is None


def test_a_case_without_figures_is_a_row_with_its_reason() -> None:
    """Skipped and failed ones."""
    run, findings = measured()
    _, wide = widened(rows(run, findings))
    skipped = next(row for row in wide if row["status"] == "skipped")
    assert skipped["reason"] and skipped["time_best_s"] is None


def test_runs_stand_below_each_other() -> None:
    """Tidy or wide, with the columns of both; cases of the same name in two runs are two."""
    pairs = [gemm(), transformer()]
    read = list(csv.DictReader(io.StringIO(render_all(pairs, wide=True))))
    assert len(read) == sum(len(run.records) for run, _ in pairs)
    tidy = list(csv.DictReader(io.StringIO(render_all(pairs))))
    assert [row["case"] for row in tidy] == [row["case"] for run, found in pairs for row in rows(run, found)]
    assert {"param_m", "param_layers"} <= set(tidy[0])
    assert render_all([gemm()]) == render(*gemm())
    assert render_all([]) == "\n"
