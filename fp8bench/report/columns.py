"""A table is a list of columns over items: each has a heading and says what of an item stands in it.

Figures get columns in the tables that their specs name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from fp8bench import units
from fp8bench.model.specs import METRICS, MetricSpec
from fp8bench.report.elements import Column, Field, Table, Tone
from fp8bench.report.panels import Figures, Panel, Result, ResultGroup, together
from fp8bench.report.words.naming import figure_words

T = TypeVar("T")
# A number is shown by the column's `show` or unit, and sorts by its value; None is a dash.
Content = Field | str | float | None
Member = tuple[ResultGroup, Result]
# Tables that have other columns, too.
TABLES = ("cases", "sustained", "energy", "capacity")


@dataclass(frozen=True)
class Col(Generic[T]):
    """`of` gives an item's content of the field, `tone` how it is meant; the column is left out unless `when`."""

    heading: str
    of: Callable[[T], Content]
    number: bool = False
    show: Callable[[Any], str] | None = None
    unit: str = ""
    tone: Callable[[T], Tone] | None = None
    hint: str = ""
    shared: bool = False
    below: bool = False
    when: bool = True

    @property
    def column(self) -> Column:
        return Column(self.heading, self.number, self.hint, self.unit, self.shared, self.below)

    def field(self, item: T) -> Field:
        content = self.of(item)
        if isinstance(content, Field):
            return content
        tone = self.tone(item) if self.tone is not None else Tone.PLAIN
        if isinstance(content, str):
            return Field(content, tone=tone)
        if content is None:
            return Field(units.NONE, tone=tone)
        text = self.show(content) if self.show else units.shown(content, self.unit)
        return Field(text, None if math.isnan(content) else content, tone)


def table(
    name: str,
    caption: str,
    cols: Sequence[Col[T]],
    items: Iterable[T],
    *,
    main: bool = False,
    folded: bool = False,
    kept: Collection[str] | None = None,
) -> Table:
    """A row for each item. With `kept`, other columns are left out if all their fields are empty or dashes."""
    items = list(items)
    shown = [(col.column, [col.field(item) for item in items]) for col in cols if col.when]
    if kept is not None:
        silent = ("", units.NONE)
        shown = [
            (column, fields)
            for column, fields in shown
            if column.title in kept or any(field.text not in silent for field in fields)
        ]
    rows = tuple(zip(*(fields for _, fields in shown), strict=True))
    return Table(name, caption, tuple(column for column, _ in shown), rows, main, folded)


def case_cols(heading: str = "group") -> tuple[Col[Any], Col[Any]]:
    """The columns group and case, for rows that begin with a group and its result."""
    return Col(heading, lambda row: row[0].place, shared=True), Col("case", lambda row: row[1].mode)


def with_figures(table: Table, members: Iterable[Member]) -> Table:
    """Adds to a table of these cases, a row each, the figures whose specs name it, if any case has them."""
    wanted = in_table(table.name)
    figures = [Figures(*member) for member in members] if wanted else []
    known = [spec for spec in wanted if any(figure[spec].value is not None for figure in figures)]
    rows = (
        (*row, *(Field(figure[spec].shown, figure[spec].value) for spec in known))
        for row, figure in zip(table.rows, figures, strict=True)
    )
    return replace(table, columns=(*table.columns, *map(column_of, known)), rows=tuple(rows)) if known else table


def in_table(name: str) -> list[MetricSpec]:
    return [spec for spec in METRICS.values() if spec.table == name]


def column_of(spec: MetricSpec) -> Column:
    return figure_col(spec, lambda _: None).column


def figure_col(spec: MetricSpec, of: Callable[[T], Content]) -> Col[T]:
    return Col(figure_words(spec), of, number=True, unit=spec.unit, hint=spec.description)


def other_tables(panel: Panel) -> Iterator[Table]:
    for name in together((spec.table, spec) for spec in METRICS.values() if spec.table not in ("", *TABLES)):
        cases = table(name, figure_words(name), case_cols(), panel.members)
        made = with_figures(cases, panel.members)
        if len(made.columns) > len(cases.columns):
            yield made
