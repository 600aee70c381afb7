"""Arranges the tables of all commits as a history. A `Line` of the history is one cell of a series over all commits.

Tables with the same layout and machine are stacked in a `Block`, which has a column for each cell. A line joins the
columns that one or several blocks have for its cell.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8bench.analysis.stats import FloatArray
from fp8bench.model import Cell, Ending, Figure, Scalar, Status, Trend, trend_name
from fp8bench.store.asv.identity import AsvIdentity, MachineInterpreter
from fp8bench.store.figures.tables import (
    ROW,
    FigureFacts,
    FigureRows,
    FigureTable,
    HistoryPlace,
    Layout,
    read_facts,
    read_layout,
)

IntegerArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def find_or_add_machine_home(new_home: MachineInterpreter, homes: list[MachineInterpreter]) -> MachineInterpreter:
    """Returns the first entry of `homes` with the same machine and interpreter as the new home. Without such an entry,
    adds the new home and returns it.
    """
    for home in homes:
        if new_home.is_same_interpreter(home):
            return home
    homes.append(new_home)
    return new_home


@lru_cache
def _map_values_to_indices(values: tuple[Scalar, ...]) -> dict[Scalar, int]:
    # If values are equal, the first one determines the index.
    return {value: index for index, value in reversed(tuple(enumerate(values)))}


def trend_sort_key(trend: Trend, series_index: int) -> tuple[object, ...]:
    """Returns a key that sorts trends by machine, interpreter, suite, metric and cell. `series_index` is the position
    of the metric among those that the suite declares. Cells have the order of the grid.
    """
    cell_value_indices = [
        _map_values_to_indices(values)[value] for values, value in zip(trend.series.params, trend.cell, strict=True)
    ]
    return trend.machine["machine"], trend.python, trend.series.workload, series_index, cell_value_indices


class HistoryFacts:
    """The distinct `FigureFacts` of a history. Each array has one entry for each `FigureFacts`."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.facts: list[FigureFacts] = list(map(read_facts, texts))
        self.has_value = self._make_flags(lambda facts: facts.has_value)
        self.has_information = self._make_flags(lambda facts: facts.has_value or facts.status is Status.FAILED)
        self.is_complete = self._make_flags(lambda facts: facts.has_value and not facts.hasty)
        groups: dict[object, int] = {}
        numbers = [groups.setdefault((facts.version, facts.under), len(groups)) for facts in self.facts]
        # Figures can be compared with each other if their facts have the same group number.
        self.group = np.array(numbers, np.int64)

    def _make_flags(self, has_property: Callable[[FigureFacts], bool]) -> BoolArray:
        return np.array(list(map(has_property, self.facts)), bool)


class ComparableFigures(NamedTuple):
    """Figures of a trend that can be compared with each other: the indices of their rows in the `Line` (`places`), and
    their values.
    """

    places: IntegerArray
    values: FloatArray


@dataclass(frozen=True)
class Line:
    """A trend whose figures are stored as rows of numbers, in the order of commits.

    The commit of row i is `places[place_indices[i]]`. `series_index` is the index of the line's series among the series
    of its suite.
    """

    trend: Trend
    series_index: int
    place_indices: IntegerArray
    rows: FigureRows
    places: Sequence[HistoryPlace]
    facts: HistoryFacts

    def make_trend(self) -> Trend:
        return replace(self.trend, figures=self._make_figures(range(len(self.rows))))

    @property
    def ending(self) -> Ending:
        # The last figure may be a failure. It is compared with the last earlier figure that has a value.
        rows_with_value = np.flatnonzero(self.facts.has_value[self.rows["facts"]])
        last_index = len(self.rows) - 1
        *earlier_figures, newest = self._make_figures(
            [*rows_with_value[rows_with_value < last_index][-1:].tolist(), last_index]
        )
        return Ending(self.trend, newest, earlier_figures[0] if earlier_figures else None, len(rows_with_value))

    @property
    def comparable(self) -> list[ComparableFigures]:
        """The figures of complete measurements, in groups. Figures of one group can be compared with each other. Values
        may be infinite or NaN.
        """
        facts = self.rows["facts"]
        complete_row_indices = np.flatnonzero(self.facts.is_complete[facts])
        values, groups = self.rows["value"][complete_row_indices], self.facts.group[facts[complete_row_indices]]
        return [
            ComparableFigures(complete_row_indices[groups == key], values[groups == key])
            for key in dict.fromkeys(groups.tolist())
        ]

    def _make_figures(self, row_indices: Sequence[int]) -> tuple[Figure, ...]:
        row_places = [self.places[index] for index in self.place_indices[row_indices].tolist()]
        return tuple(map(self._make_figure, row_places, self.rows[row_indices].tolist()))

    def _make_figure(self, place: HistoryPlace, row: tuple[float, float, float, int]) -> Figure:
        value, low, high, index = row
        facts = self.facts.facts[index]
        return Figure(
            place.commit,
            place.date,
            facts.version,
            facts.runs,
            facts.samples,
            value if facts.has_value else None,
            low if facts.has_interval else None,
            high if facts.has_interval else None,
            facts.hasty,
            facts.status,
            facts.reason,
            facts.under,
        )


@dataclass(frozen=True)
class Block:
    """The tables of one machine and interpreter that have the same layout, stacked in the order of commits.

    `place_indices` has the index of each table's commit in `History.places`. `newest_place` is the commit with the
    newest run.
    """

    home: MachineInterpreter
    layout: Layout
    newest_place: HistoryPlace
    place_indices: IntegerArray
    rows: FigureRows

    @cached_property
    def names(self) -> list[str]:
        return [trend_name(self.layout.series[series_index].name, values) for series_index, values in self.layout.cells]


Column = tuple[Block, int]


@dataclass(frozen=True)
class History:
    """The figures of a store, the numbers of runs and commits, and the number of left-out runs by reason.

    `troubles` are sentences about run files with the same id but different runs, and about a cache that could not be
    written. `read` is the number of runs whose figures were not cached, so that the run files had to be read.
    """

    blocks: Sequence[Block]
    places: Sequence[HistoryPlace]
    facts: HistoryFacts
    homes: Sequence[MachineInterpreter]
    runs: int
    commits: int
    skipped_run_reasons: Counter[str]
    read: int
    troubles: Sequence[str]

    @cached_property
    def names(self) -> list[str]:
        """The sorted names of the trends. Trends on different machines may have the same name."""
        names: set[str] = set()
        for block, has_information in zip(self.blocks, self._informative_column_flags, strict=True):
            names.update(itertools.compress(block.names, has_information))
        return sorted(names)

    @cached_property
    def _informative_column_flags(self) -> list[list[bool]]:
        """A flag for each column of each block: True if the column has a number or a failure."""
        return [self.facts.has_information[block.rows["facts"]].any(axis=0).tolist() for block in self.blocks]

    @cached_property
    def lines(self) -> list[Line]:
        return self.select_lines(lambda _: True)

    def trends(self, is_wanted: Callable[[str], bool]) -> tuple[Trend, ...]:
        return tuple(line.make_trend() for line in self.select_lines(is_wanted))

    def list_trend_endings(self, is_wanted: Callable[[str], bool]) -> list[Ending]:
        """Returns the last two figures of each trend whose name `is_wanted` accepts. Earlier ones are not decoded."""
        return [line.ending for line in self.select_lines(is_wanted)]

    def select_lines(self, is_wanted: Callable[[str], bool]) -> list[Line]:
        """Returns the lines whose names `is_wanted` accepts, sorted by `trend_sort_key`. Lines without any number or
        failure are left out.
        """
        # A cell may have columns in several blocks. Its line is listed if one column has a number or a failure.
        columns: dict[tuple[MachineInterpreter, str, Cell], list[Column]] = {}
        informative_line_keys = set[tuple[MachineInterpreter, str, Cell]]()
        for block, has_information in zip(self.blocks, self._informative_column_flags, strict=True):
            for index, name in enumerate(block.names):
                if is_wanted(name):
                    series_index, values = block.layout.cells[index]
                    key = block.home, block.layout.series[series_index].name, values
                    columns.setdefault(key, []).append((block, index))
                    informative_line_keys.update([key] if has_information[index] else [])
        lines = [self._make_history_line(columns[key]) for key in informative_line_keys]
        return sorted(lines, key=lambda line: trend_sort_key(line.trend, line.series_index))

    def is_trend_of(self, trend: Trend, identity: AsvIdentity) -> bool:
        """Returns whether a trend belongs to the machine and interpreter of `identity`. The path by which the
        interpreter was called does not matter.
        """
        home = find_or_add_machine_home(identity.home, list(self.homes))
        return (home.machine, home.python) == (trend.machine.get("machine"), trend.python)

    def _make_history_line(self, columns: Sequence[Column]) -> Line:
        """Joins the columns of a cell, from one or several blocks, into a line. The block with the newest run
        determines the series and the machine of the line.
        """
        block, index = max(columns, key=lambda column: column[0].newest_place.newest)
        series_index, values = block.layout.cells[index]
        trend = Trend(block.layout.series[series_index], values, block.newest_place.machine, block.home.python, ())
        # If the cell has columns in several blocks, join them in the order of commits.
        place_indices, rows = block.place_indices, block.rows[:, index]
        if len(columns) > 1:
            place_indices = np.concatenate([part.place_indices for part, _ in columns])
            commit_sort_indices = np.argsort(place_indices)
            place_indices, rows = (
                place_indices[commit_sort_indices],
                np.concatenate([part.rows[:, column] for part, column in columns])[commit_sort_indices],
            )
        return Line(trend, series_index, place_indices, rows, self.places, self.facts)


def make_figure_history(tables: Sequence[FigureTable], *counts: Any) -> History:
    """Builds the history from tables, which must be in the order of their commits' first runs. `counts` become the last
    fields of `History`, from `runs` to `troubles`.
    """
    # 1. Collect machines and interpreters in the order of their first runs.
    homes: list[MachineInterpreter] = []
    table_homes = [find_or_add_machine_home(table.place.home, homes) for table in tables]
    # 2. Group tables with the same layout and machine into blocks, in the order of commits.
    sorted_table_indices = sorted(range(len(tables)), key=lambda index: tables[index].place.moment)
    groups: dict[tuple[MachineInterpreter, str], list[tuple[int, FigureTable]]] = {}
    for position, index in enumerate(sorted_table_indices):
        groups.setdefault((table_homes[index], tables[index].layout), []).append((position, tables[index]))
    # 3. Give equal facts the same number in all tables.
    number_by_fact: dict[str, int] = {}
    blocks = [_make_table_block(home, members, number_by_fact) for (home, _), members in groups.items()]
    return History(
        blocks,
        [tables[index].place for index in sorted_table_indices],
        HistoryFacts(list(number_by_fact)),
        homes,
        *counts,
    )


def _make_table_block(
    home: MachineInterpreter, members: Sequence[tuple[int, FigureTable]], fact_numbers: dict[str, int]
) -> Block:
    newest_table_place = max((table.place for _, table in members), key=lambda place: place.newest)
    place_indices = np.array([place_indices for place_indices, _ in members], np.int64)
    rows = np.stack(
        [_renumber_table_facts(table, fact_numbers).view(np.uint8) for _, table in members]
    )  # stacking bytes is faster than stacking rows
    return Block(home, read_layout(members[0][1].layout), newest_table_place, place_indices, rows.view(ROW))


def _renumber_table_facts(table: FigureTable, fact_numbers: dict[str, int]) -> FigureRows:
    """Returns the rows of a table with facts numbered among the facts of all tables. `fact_numbers` maps the text of
    facts to this number. New facts are added to it.
    """
    rows = np.frombuffer(table.rows, ROW)
    facts = [fact_numbers.setdefault(text, len(fact_numbers)) for text in table.facts]
    # np.frombuffer returns a read-only array, so copy it if numbers change.
    if facts != list(range(len(facts))):
        rows = rows.copy()
        rows["facts"] = np.array(facts, np.uint32)[rows["facts"]]
    return rows
