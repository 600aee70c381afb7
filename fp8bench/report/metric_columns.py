"""The columns that figures have in tables of cases because their specs say so, and the tables of nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fp8bench.model.specs import METRICS, MetricSpec
from fp8bench.report.elements import Column, Field, Table
from fp8bench.report.panels import Figures, Panel, Result, ResultGroup, together

Member = tuple[ResultGroup, Result]
# Those that have other columns, too.
TABLES = ("cases", "sustained", "energy", "capacity")


def with_figures(table: Table, members: Iterable[Member]) -> Table:
    """The table of some cases, a row each, and in it the figures whose specs name it, as far as any case has them."""
    wanted = in_table(table.name)
    figures = [Figures(*one) for one in members] if wanted else []
    known = [spec for spec in wanted if any(one[spec].value is not None for one in figures)]
    rows = (
        (*row, *(Field(one[spec].shown, one[spec].value) for spec in known))
        for row, one in zip(table.rows, figures, strict=True)
    )
    return replace(table, columns=(*table.columns, *map(column_of, known)), rows=tuple(rows)) if known else table


def in_table(name: str) -> list[MetricSpec]:
    return [spec for spec in METRICS.values() if spec.table == name]


def column_of(spec: MetricSpec) -> Column:
    return Column(spec.heading or spec.name, number=True, unit=spec.unit, hint=spec.description)


def other_tables(panel: Panel) -> Iterator[Table]:
    """Tables of figures alone, where any case has one."""
    columns = (Column("group", shared=True), Column("case"))
    for name in together((spec.table, spec) for spec in METRICS.values() if spec.table not in ("", *TABLES)):
        rows = tuple((Field(panel.place(group)), Field(one.mode)) for group, one in panel.members)
        table = with_figures(Table(name, name, columns, rows), panel.members)
        if len(table.columns) > len(columns):
            yield table
