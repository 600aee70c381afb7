"""Scales from data as a table."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import LayerScale
from fp8bench.report.elements import Table, Text
from fp8bench.report.page.section import MOST_ROWS
from tests.materials import Made, many, of_kind, part
from tests.runs import transformer

FOUND = (LayerScale("blocks.0.mlp.up", "input", 3.5, 128.0), LayerScale("blocks.0.mlp.up", "gradient", 7e-5, 8e8, 12))


def scaled(made: Made, *modes: str) -> Made:
    """These modes with scales, or every case."""
    run, findings = made
    records = [replace(one, scales=FOUND) if not modes or one.case.mode in modes else one for one in run.records]
    return replace(run, records=tuple(records)), findings


def test_every_scale_is_a_row() -> None:
    """Of the cases that have some."""
    (table,) = of_kind(part("scales", scaled(transformer(), "fp8")), Table)
    assert [tuple(field.text for field in row) for row in table.rows] == [
        ("fp8 (emulated)", "blocks.0.mlp.up", "input", "3.50", "128", "0"),
        ("fp8 (emulated)", "blocks.0.mlp.up", "gradient", "0.0000700", "8.00e+08", "12"),
    ]
    assert [field.value for field in table.rows[1][3:]] == [7e-5, 8e8, 12.0]


def test_a_table_has_an_end() -> None:
    """Which cases it leaves out is said."""
    found = part("scales", scaled(many(160)))
    (table,) = of_kind(found, Table)
    assert MOST_ROWS - 2 < len(table.rows) <= MOST_ROWS
    assert any("not shown, for want of room: m=" in text.text for text in of_kind(found, Text))
