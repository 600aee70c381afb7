"""A run as CSV and as one JSON document."""

from __future__ import annotations

import json
import statistics
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings

from fp8bench.analysis.findings import findings
from fp8bench.model import Finding, Interval, Level, Run, Verdict
from fp8bench.model.codec import SCHEMA, decode, encode
from fp8bench.model.specs import STEP
from fp8bench.report.data.plain import csv_text, json_line
from fp8bench.report.data.run import TidyCsvRow, csv_columns, run_document, tidy_rows
from fp8bench.store.runs.run_file import load_run
from tests.commands import ROOT
from tests.counts import for_each
from tests.runs import gemm, measured, transformer, wild_runs

NATIVE_CASE = "m=64,operands=cast]@cpu/bf16{head=fp32}"


RUN, FINDINGS = measured()
TABLE = tidy_rows(RUN, FINDINGS)


def chosen(case: str = "", table: list[TidyCsvRow] = TABLE, **wanted: object) -> list[TidyCsvRow]:
    return [
        row
        for row in table
        if str(row["case"]).endswith(case) and all(row[name] == value for name, value in wanted.items())
    ]


def only(case: str, table: list[TidyCsvRow] = TABLE, **wanted: object) -> TidyCsvRow:
    (row,) = chosen(case, table, **wanted)
    return row


def strict(text: str) -> Any:
    """Parses strict JSON: NaN and infinities are refused."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


# Stored runs that together fill all columns: sweep, ranks, tensor statistics, energy, a refused case.
FILLING = (
    "gpu/runs/gpubox/*-9a000002",
    "runs/runs/box/*-503e8537",
    "gpu/runs/gpubox/*-9a000003",
    "gpu/runs/gpubox/*-9a000001",
    "runs/runs/box/*-e12db2de",
)


def test_every_column_is_filled_by_some_run() -> None:
    """Columns of a failed rank are in tests/report/topics/test_ranks.py."""
    filled = {"failed_rank", "failed_phase"}
    for pattern in FILLING:
        (path,) = (ROOT / "tests" / "golden" / "stores").glob(f"{pattern}.jsonl")
        run = load_run(path)
        filled |= {name for row in tidy_rows(run, findings(run)) for name, cell in row.items() if cell is not None}
    assert set(csv_columns()) - filled == set()


@for_each("make", [measured, gemm, transformer])
def test_json_holds_the_whole_run(make: Any) -> None:
    run, findings = make()
    text = json_line(run_document(run, findings))
    document = strict(text)
    assert text.isascii() and text.endswith("}\n") and text.count("\n") == 1
    assert document.pop("schema") == SCHEMA and document.pop("break_even") == []
    assert set(document) == {field.name for field in fields(Run)}
    assert decode(Run, document) == run
    for record, plain in zip(run.records, document["records"], strict=True):
        finding = findings.get(record.case.id, Finding(record.case, Verdict.NONE))
        said, metrics = plain.pop("finding"), plain.pop("metrics")
        assert metrics.get("time") == finding.best_seconds and plain == encode(record)
        assert decode(Finding, {**said, "case": plain["case"]}) == replace(finding, typical=None)


def test_a_phase_s_medians_are_those_of_its_calls() -> None:
    """A phase's cells are added up in each call before taking the median."""
    timing = RUN.records[1].timing
    assert timing is not None and timing.segments.phases == ("cast", "gemm", "cast", "unattributed")
    calls = [call for slot in timing.slots for call in slot.calls_ns]
    seconds = statistics.median(call[0] + call[2] for call in calls) * 1e-9
    shares = statistics.median((call[0] + call[2]) / sum(call) for call in calls)
    assert only(NATIVE_CASE, phase="cast", metric="time")["median_in_unit"] == pytest.approx(seconds, rel=1e-12)
    share = only(NATIVE_CASE, phase="cast", metric="share_of_step")
    assert share["median_in_unit"] == pytest.approx(shares, rel=1e-12)
    assert (share["unit"], share["provenance"]) == ("ratio", "derived")


def test_an_emulated_case_has_no_speed() -> None:
    (emulated,) = [record for record in RUN.records if record.support.level is Level.EMULATED]
    finding = replace(FINDINGS[emulated.case.id], ratio=Interval(0.3, 0.2, 0.4, 0.99), verdict=Verdict.FASTER)
    table = tidy_rows(RUN, {**FINDINGS, emulated.case.id: finding})
    step = only("cpu/fp8", table, phase=STEP, metric="time")
    assert (step["verdict"], step["level"]) == ("emulated", "emulated") and step["best_in_unit"]
    assert step["ratio_to_reference"] is None
    assert not [row for row in chosen("cpu/fp8", table) if "per_second" in str(row["metric"])]


@settings(max_examples=12)
@given(wild_runs())
def test_any_run_has_rows_and_is_strict_json(wild: tuple[Run, dict[str, Finding]]) -> None:
    """Texts are one line and never empty, which a CSV reader could not distinguish from missing."""
    run, findings = wild
    tidy = tidy_rows(run, findings)
    texts = [cell for row in tidy for cell in row.values() if isinstance(cell, str)]
    assert all(text and text.isprintable() for text in texts)
    assert {row["case"] for row in tidy} == {record.case.id for record in run.records}
    assert len(strict(json_line(run_document(run, findings)))["records"]) == len(run.records)


@for_each(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd", "'+cmd"),
        ("-2+3", "'-2+3"),
        ("@x", "'@x"),
        ("-", "-"),
        ("a=1", "a=1"),
        (-1.5, "-1.5"),
        (None, ""),
        ("", ""),
        ("\x1b[2Jx", " [2Jx"),
    ],
)
def test_no_text_is_a_formula(value: object, cell: str) -> None:
    """Neither in a cell, in rows with or without names, nor as a column name."""
    name, written = (value, cell) if isinstance(value, str) and value else ("a", "a")
    assert csv_text((name, "b"), [{name: value, "b": 1}, (value, 2)]) == f"{written},b\n{cell},1\n{cell},2\n"
