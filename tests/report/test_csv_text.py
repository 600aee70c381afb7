"""A run as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

from fp8bench.model import Run
from fp8bench.report.csv_text import render
from fp8bench.report.tidy import columns_of, rows
from tests.runs import measured


def test_it_is_the_tidy_rows_under_their_columns() -> None:
    """Numbers come back to the last digit; what is missing is empty."""
    run, findings = measured()
    text = render(run, findings)
    read = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    assert tuple(read[0]) == columns_of(run)
    expected = [["" if cell is None else str(cell) for cell in row.values()] for row in rows(run, findings)]
    assert read[1:] == expected and len(expected) > 50


def test_lines_end_as_everywhere_else_and_one_line_is_one_row() -> None:
    """Also where a reason has quotes, commas and line ends of its own."""
    run, findings = measured()
    records = tuple(replace(one, reason='a "b",\r\nc\x00\x1b[31m' if one.reason else "") for one in run.records)
    text = render(replace(run, records=records), findings)
    assert "\r" not in text and "\x00" not in text and text.endswith("\n") and not text.endswith("\n\n")
    assert text.count("\n") == len(rows(run, findings)) + 1
    assert '"a ""b"",  c  [31m"' in text


def test_columns_do_not_depend_on_what_became_of_a_run() -> None:
    """So that files of many runs stand below each other."""
    run, findings = measured()
    first = render(run, findings).splitlines()[0]
    assert render(run, {}).splitlines()[0] == first
    nothing: Run = replace(run, records=())
    assert render(nothing, {}).splitlines() == [",".join(name for name in first.split(",") if "param_" not in name)]
