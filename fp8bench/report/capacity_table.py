"""The table of the largest batches that fit, for a terminal."""

from __future__ import annotations

from fp8bench import units
from fp8bench.report.blocks import Panel, Result, ResultGroup
from fp8bench.report.capacities import EMULATED, beyond, place_of, searched, sentences, share_within, show_batch, title
from fp8bench.report.layout import INDENT, Column, Paint, Row, SectionRow, table, wrap
from fp8bench.report.standing import emulated


def capacity_table(panel: Panel, width: int, paint: Paint) -> list[str]:
    """A title, a row for each case, and what it comes to; no lines where nobody asked."""
    found = list(searched(panel))
    if not found:
        return []
    rows: list[Row | SectionRow] = []
    place = ""
    for group, result, capacity in found:
        if place != (place := place_of(panel, group, capacity)):
            rows.append(SectionRow(place))
        tokens = units.whole(capacity.tokens) if capacity.tokens else units.NONE
        cells = (result.mode, show_batch(capacity), _versus(group, result), tokens, units.size(capacity.peak))
        rows.append(Row((*cells, beyond(capacity))))
    columns = [
        Column("case"), Column("largest", right=True), Column(f"vs {panel.reference or 'reference'}"),
        Column("tokens a step", right=True), Column("peak memory", right=True), Column("does not fit"),
    ]  # fmt: skip
    told = [line for text in sentences(panel) for line in wrap(text, width, INDENT, INDENT)]
    return [*wrap(title(found[0][2]), width, hang=INDENT), *table(columns, rows, width, paint), *told]


def _versus(group: ResultGroup, result: Result) -> str:
    share = share_within(group, result)
    if share is not None:
        return units.speed_up(share)
    if emulated(result):
        return EMULATED
    return "reference" if result.record.is_reference else units.NONE
