"""Builds tables from columns. Each column has a heading, and a function that returns its field for an item. The spec
of a metric names the table in which the metric has a column.
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
from fp8bench.report.words.naming import make_figure_heading

T = TypeVar("T")
# The content of a field. A number is formatted by the column, and the table sorts by its value. None is shown as a
# dash.
FieldContent = Field | str | float | None
# Modules in `topics` build these tables. `make_metric_tables` builds all other tables that specs of metrics name.
TABLES_WITH_OWN_COLUMNS = ("cases", "sustained", "energy", "capacity")


@dataclass(frozen=True)
class Col(Generic[T]):
    """A column of a table. `of` returns the field of an item. It is a function, or the dotted path of an attribute, as
    'case.mode'.

    `tone` returns the tone of a field. A column with `unit` or `show` has numbers. If `when` is False, the table leaves
    the column out. `Column` explains `hint`, `shared` and `below`.
    """

    heading: str
    of: str | Callable[[T], FieldContent]
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
        content: FieldContent = attrgetter(self.of)(item) if isinstance(self.of, str) else self.of(item)
        if isinstance(content, Field):
            return content
        if content is None:
            return Field(units.NONE)
        tone = self.tone(item) if self.tone is not None else Tone.PLAIN
        if isinstance(content, str):
            return Field(content, tone=tone)
        # NaN is shown as text, but has no value by which the table could sort.
        text = self.show(content) if self.show else units.describe(content, self.unit)
        return Field(text, None if math.isnan(content) else content, tone)


ColumnList = list[Col[T]]


def table(
    name: str,
    caption: str,
    cols: Sequence[Col[T]],
    items: Iterable[T],
    *,
    main: bool = False,
    folded: bool = False,
    required_headings: Collection[str] | None = None,
) -> Table:
    """Makes a table with one row for each item. `Table` explains `main` and `folded`.

    A column without texts (or only dashes) is left out if `required_headings` is given and lacks its heading. It is
    always left out if it is `shared`, because it has no text to print above its rows.
    """
    items = list(items)
    columns = []
    fields_by_column = []
    for col in cols:
        if not col.when:
            continue
        fields = [col.field(item) for item in items]
        # A column that has only dashes would push useful columns off a narrow terminal.
        is_column_empty = all(field.text in ("", units.NONE) for field in fields)
        is_shown_if_empty = not col.column.shared and (required_headings is None or col.heading in required_headings)
        if is_shown_if_empty or not is_column_empty:
            columns.append(col.column)
            fields_by_column.append(fields)
    rows = tuple(zip(*fields_by_column, strict=True))
    return Table(name, caption, tuple(columns), rows, main, folded)


def case_columns(heading: str = "group", case_path: str = "case.") -> tuple[Col[Any], Col[Any]]:
    """Returns the columns "group" and "case". `case_path` is the attribute path from a row to its case, as 'case.'."""
    return Col(heading, f"{case_path}setting_name", shared=True), Col("case", f"{case_path}mode")


def add_figure_columns(table: Table, cases: Cases) -> Table:
    """Returns the table with an additional column for each metric that declares this table in its spec. Metrics that no
    case has are left out.

    The table must have one row for each of `cases`, in the same order.
    """
    # A new metric is shown if its spec names the table, without any change here.
    metric_specs = list_table_metric_specs(table.name)
    if not metric_specs:
        return table
    columns = list(table.columns)
    rows = [list(row) for row in table.rows]
    for spec in metric_specs:
        figures = [case.figures[spec] for case in cases]
        if all(figure.value is None for figure in figures):
            continue
        # The fields are made below, so the column needs no function that returns them.
        columns.append(figure_column(spec, get_value="").column)
        for row, figure in zip(rows, figures, strict=True):
            row.append(Field(figure.shown, figure.value))
    return replace(table, columns=tuple(columns), rows=tuple(map(tuple, rows)))


def list_table_metric_specs(name: str) -> list[MetricSpec]:
    return [spec for spec in METRICS.values() if spec.table == name]


def figure_column(
    spec: MetricSpec, get_value: str | Callable[[T], FieldContent], tone: Callable[[T], Tone] | None = None
) -> Col[T]:
    return Col(
        make_figure_heading(spec), get_value, show=spec.format_value, unit=spec.unit, tone=tone, hint=spec.description
    )


def make_case_figure_column(spec: MetricSpec, tone: Callable[[Any], Tone] | None = None) -> Col[Any]:
    """Returns a column with a metric of each row's case. The rows have an attribute `case`."""
    return figure_column(spec, lambda row: row.case.figures[spec].value, tone)


def make_metric_tables(panel: Panel) -> Tables:
    """Yields a table of cases for each table that metrics name and no module in `topics` builds. A table is left out if
    no case of the panel has one of its metrics.
    """
    # Drop repeated names, because several metrics may name the same table.
    names = dict.fromkeys(spec.table for spec in METRICS.values())
    for name in names:
        if name in ("", *TABLES_WITH_OWN_COLUMNS):
            continue
        # The caption is the name of the table in words. The function for headings of metrics also makes it.
        cases_table = table(name, make_figure_heading(name), case_columns(case_path=""), panel.named_cases)
        table_with_metrics = add_figure_columns(cases_table, panel.named_cases)
        if len(table_with_metrics.columns) > len(cases_table.columns):
            yield table_with_metrics
