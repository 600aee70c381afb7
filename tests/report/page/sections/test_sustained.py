"""What cases sustain, on the page."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import SustainedTurn
from fp8bench.report.elements import Table
from tests.materials import Made, built, of_kind, part
from tests.runs import transformer


def test_a_table_a_suite_where_somebody_asked() -> None:
    """The same as in the terminal; nothing where nobody did."""
    run, findings = transformer()
    turns = (SustainedTurn(10, (0.25,) * 4, None, 1.7e9, 650.0),) * 3
    made: Made = replace(run, records=tuple(replace(one, sustained=turns) for one in run.records)), findings
    (table,) = of_kind(part("sustained", made), Table)
    assert [column.title for column in table.columns][:4] == ["group", "case", "sustained", "speed-up"]
    first = [field.text for field in table.rows[0]]
    assert first[1] == "bf16" and first[2] == "25.0 ms" and first[5:] == ["1.70 GHz", "650 W", "3, cannot be told"]
    assert len(table.rows) == len(run.records)
    assert built("sustained", transformer()) is None
