"""A table is a list of columns over items: each has a heading, and a function for its field of an item.

Figures get columns in the tables that their specs name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Generic, TypeVar

from fp8bench import units
from fp8bench.model.specs import METRICS, MetricSpec
from fp8bench.report.elements import Column, Field, Table, Tables, Tone
from fp8bench.report.panels import Cases, Panel
from fp8bench.report.words.naming import figure_words

T = TypeVar("T")
# A number is formatted by the column's `show` or unit, and sorts by its value; None is a dash.
Content = Field | str | float | None
# Tables that also have other columns.
TABLES = ("cases", "sustained", "energy", "capacity")


@dataclass(frozen=True)
class Col(Generic[T]):
    """A column: `of` is an attribute of the items, as 'case.mode', or a function of one; `tone` gives its tone.

    The column is left out unless `when`. One with a unit or with `show` has numbers.
    """

    heading: str
    of: str | Callable[[T], Content]
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
        is_number = self.number or self.unit != "" or self.show is not None
        return Column(self.heading, is_number, self.hint, self.unit, self.shared, self.below)

    def field(self, item: T) -> Field:
        content: Content = attrgetter(self.of)(item) if isinstance(self.of, str) else self.of(item)
        if isinstance(content, Field):
            return content
        if content is None:
            return Field(units.NONE)
        tone = self.tone(item) if self.tone is not None else Tone.PLAIN
        if isinstance(content, str):
            return Field(content, tone=tone)
        # NaN has a text and no value: nothing sorts by it.
        text = self.show(content) if self.show else units.describe(content, self.unit)
        return Field(text, None if math.isnan(content) else content, tone)


Cols = list[Col[T]]


def table(
    name: str,
    caption: str,
    cols: Sequence[Col[T]],
    items: Iterable[T],
    *,
    main: bool = False,
    folded: bool = False,
    required: Collection[str] | None = None,
) -> Table:
    """Makes a table with a row for each item. With `required`, other columns are left out if all their fields are empty
    or dashes."""
    items = list(items)
    columns = []
    fields_by_column = []
    for col in cols:
        if not col.when:
            continue
        fields = [col.field(item) for item in items]
        # A column of dashes would only push the others off a narrow terminal.
        is_empty = all(field.text in ("", units.NONE) for field in fields)
        if required is None or col.heading in required or not is_empty:
            columns.append(col.column)
            fields_by_column.append(fields)
    rows = tuple(zip(*fields_by_column, strict=True))
    return Table(name, caption, tuple(columns), rows, main, folded)


def case_cols(heading: str = "group", path: str = "case.") -> tuple[Col[Any], Col[Any]]:
    """Returns the columns group and case; `path` leads from a row to its case."""
    return Col(heading, f"{path}place", shared=True), Col("case", f"{path}mode")


def with_figures(table: Table, cases: Cases) -> Table:
    """Adds to a table of these cases, one per row, the figures whose specs name it, if any case has them."""
    # A new metric needs no change here: its row in specs names the table.
    specs = in_table(table.name)
    if not specs:
        return table
    columns = list(table.columns)
    rows = [list(row) for row in table.rows]
    for spec in specs:
        metrics = [case.figures[spec] for case in cases]
        if all(metric.value is None for metric in metrics):
            continue
        columns.append(figure_col(spec, "").column)
        for row, metric in zip(rows, metrics, strict=True):
            row.append(Field(metric.shown, metric.value))
    return replace(table, columns=tuple(columns), rows=tuple(map(tuple, rows)))


def in_table(name: str) -> list[MetricSpec]:
    return [spec for spec in METRICS.values() if spec.table == name]


def figure_col(spec: MetricSpec, of: str | Callable[[T], Content], tone: Callable[[T], Tone] | None = None) -> Col[T]:
    return Col(figure_words(spec), of, show=spec.to_text, unit=spec.unit, tone=tone, hint=spec.description)


def other_tables(panel: Panel) -> Tables:
    """Yields a table for each name that specs use and no other table has."""
    names = dict.fromkeys(spec.table for spec in METRICS.values())
    # Some tables exist for the figures of one feature alone.
    for name in names:
        if name in ("", *TABLES):
            continue
        cases = table(name, figure_words(name), case_cols(path=""), panel.members)
        extended = with_figures(cases, panel.members)
        if len(extended.columns) > len(cases.columns):
            yield extended
