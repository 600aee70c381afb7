"""Tensors in a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.model import Status
from fp8bench.report.terminal.run import render
from fp8bench.report.terminal.tensors import LEGEND
from tests.report.tensors import products, tensors


def test_every_figure_that_matters_of_one_tensor() -> None:
    """A row for each precision; no times, no verdicts."""
    text = render(*tensors("gaussian"))
    assert (
        """\
  precision        SQNR  worst rows  worst blocks  underflow  saturated    slope
  fp16             70.0        69.0          67.0      0.08%         0%  0.99925
  e4m3fn none      60.0        59.0          57.0      0.08%         0%  0.99925
  e4m3fn row       50.0        49.0          47.0      0.08%         0%  0.99925
  e4m3fn mx rceil  40.0        39.0          37.0      0.08%         0%  0.99925
  e2m1 mx rceil    30.0        29.0          27.0      0.08%         0%  0.99925
  fp8              20.0        19.0          17.0      0.08%         0%  0.99925
"""
        in text
    )
    assert "verdict" not in text and "reference" not in text and "relative_error" not in text
    assert LEGEND[:40] in text


def test_two_tensors_stand_below_each_other() -> None:
    """Under their names."""
    lines = render(*tensors("gaussian", "outliers")).splitlines()
    assert lines.index("gaussian") + len(("fp16", "none", "row", "mx", "mx", "fp8")) + 1 == lines.index("outliers")


def test_of_many_tensors_the_sqnr_alone() -> None:
    """A row for each precision, a column for each tensor."""
    text = render(*tensors("gaussian", "outliers", "log-normal"))
    assert (
        """\
SQNR in dB, higher is better; all other figures: the report, --csv, or one tensor alone
  precision        gaussian  outliers  log-normal
  fp16                 70.0      71.0        72.0
  e4m3fn none          60.0      61.0        62.0
"""
        in text
    )
    assert "underflow:" in text and "0.08%" not in text


@pytest.mark.parametrize(("width", "sizes"), [(40, [2, 2, 2, 1]), (60, [4, 3]), (100, [7])])
def test_many_tensors_are_as_many_tables_as_the_width_asks_for(width: int, sizes: list[int]) -> None:
    """As few as there can be, with every tensor once, and no line too long."""
    names = [f"tensor-{number}" for number in range(7)]
    text = render(*tensors(*names), width=width)
    heads = [line.split()[1:] for line in text.splitlines() if line.startswith("  precision ")]
    assert [name for head in heads for name in head] == names
    assert [len(head) for head in heads] == sizes
    assert all(len(line) <= width for line in text.splitlines())


def test_a_case_without_figures_has_dashes_and_a_note() -> None:
    """Skipped or failed."""
    run, findings = tensors("gaussian", "outliers", "log-normal")
    failed = replace(run.records[1], status=Status.FAILED, reason="out of memory", measurements=())
    text = render(replace(run, records=(run.records[0], failed, *run.records[2:])), findings)
    assert "  e4m3fn none             -      61.0        62.0" in text
    assert "custom:scaling=none FAILED at" in text and "out of memory" in text


def test_other_suites_keep_their_tables_and_legends() -> None:
    """Both in one run."""
    one, other = tensors("gaussian"), products()
    text = render(replace(one[0], records=(*one[0].records, *other[0].records)), {**one[1], **other[1]})
    assert "  e4m3fn row " in text and "  fp32  " in text
    assert text.count("best: the step undisturbed") == 1 and text.count("SQNR: the tensor's power") == 1
    alone = render(*other)
    assert "SQNR" not in alone
