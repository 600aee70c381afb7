"""The tables of all commits as a history: a `Line` is one cell of a series from commit to commit.

Tables of one layout and machine are stacked in a `Block`. A line is a column of a block, or of several.
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

from fp8bench.analysis.stats import Floats
from fp8bench.model import Cell, Ending, Figure, Scalar, Status, Trend, trend_name
from fp8bench.store.asv.identity import Home, Identity
from fp8bench.store.figures.tables import ROW, FigureFacts, FigureTable, Layout, Place, Rows, read_facts, read_layout

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]


def home_of(new_home: Home, homes: list[Home]) -> Home:
    """Returns the same home from the list, or adds this one."""
    for home in homes:
        if new_home.is_same(home):
            return home
    homes.append(new_home)
    return new_home


@lru_cache
def _indices(values: tuple[Scalar, ...]) -> dict[Scalar, int]:
    return {value: index for index, value in reversed(tuple(enumerate(values)))}


def order(trend: Trend, rank: int) -> tuple[object, ...]:
    """Sorts by machine and interpreter, suite, metric as its suite declares them, cell as the grid does."""
    at = [_indices(values)[value] for values, value in zip(trend.series.params, trend.cell, strict=True)]
    return trend.machine["machine"], trend.python, trend.series.workload, rank, at


class AllFacts:
    """The facts of all figures, and what follows from each as arrays by index."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.facts: list[FigureFacts] = list(map(read_facts, texts))
        self.has_value = self._flags(lambda facts: facts.has_value)
        self.tells = self._flags(lambda facts: facts.has_value or facts.status is Status.FAILED)
        self.whole = self._flags(lambda facts: facts.has_value and not facts.hasty)
        groups: dict[object, int] = {}
        numbers = [groups.setdefault((facts.version, facts.under), len(groups)) for facts in self.facts]
        # Figures that compare have the same number.
        self.group = np.array(numbers, np.int64)

    def _flags(self, is_so: Callable[[FigureFacts], bool]) -> Flags:
        return np.array(list(map(is_so, self.facts)), bool)


class Comparable(NamedTuple):
    """Figures of a line that compare: their places in it, and their values."""

    places: Numbers
    values: Floats


@dataclass(frozen=True)
class Line:
    """A trend whose figures are still rows of numbers, in the order of commits; `at` are indices of `places`.

    `rank` is the index of its series among those of its suite.
    """

    trend: Trend
    rank: int
    at: Numbers
    rows: Rows
    places: Sequence[Place]
    facts: AllFacts

    def whole_trend(self) -> Trend:
        return replace(self.trend, figures=self._figures(range(len(self.rows))))

    @property
    def ending(self) -> Ending:
        numbered = np.flatnonzero(self.facts.has_value[self.rows["facts"]])
        last = len(self.rows) - 1
        *earlier, newest = self._figures([*numbered[numbered < last][-1:].tolist(), last])
        return Ending(self.trend, newest, earlier[0] if earlier else None, len(numbered))

    @property
    def comparable(self) -> list[Comparable]:
        """The figures of whole measurements, by version and conditions. Values may be infinite or NaN."""
        facts = self.rows["facts"]
        whole = np.flatnonzero(self.facts.whole[facts])
        values, groups = self.rows["value"][whole], self.facts.group[facts[whole]]
        return [Comparable(whole[groups == key], values[groups == key]) for key in dict.fromkeys(groups.tolist())]

    def _figures(self, which: Sequence[int]) -> tuple[Figure, ...]:
        places = [self.places[index] for index in self.at[which].tolist()]
        return tuple(map(self._figure, places, self.rows[which].tolist()))

    def _figure(self, place: Place, row: tuple[float, float, float, int]) -> Figure:
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
    """The tables of one layout on one machine, one below the other in the order of commits; `at` are indices of their
    places, and `newest` is the place of the newest run."""

    home: Home
    layout: Layout
    newest: Place
    at: Numbers
    rows: Rows

    @cached_property
    def names(self) -> list[str]:
        return [trend_name(self.layout.series[rank].name, values) for rank, values in self.layout.cells]


Column = tuple[Block, int]


@dataclass(frozen=True)
class History:
    """The figures of a store, how many runs and commits they are of, and how many runs were left out, by reason.

    `troubles` are sentences on run files that were refused, and on a cache that could not be written. `read` counts the
    runs that had to be read.
    """

    blocks: Sequence[Block]
    places: Sequence[Place]
    facts: AllFacts
    homes: Sequence[Home]
    runs: int
    commits: int
    left: Counter[str]
    read: int
    troubles: Sequence[str]

    @cached_property
    def names(self) -> list[str]:
        """The names of the trends, sorted; several machines may have trends of one name."""
        names: set[str] = set()
        for block, telling in zip(self.blocks, self._telling, strict=True):
            names.update(itertools.compress(block.names, telling))
        return sorted(names)

    @cached_property
    def _telling(self) -> list[list[bool]]:
        """For each column of each block whether there is a number or a failure in it."""
        return [self.facts.tells[block.rows["facts"]].any(axis=0).tolist() for block in self.blocks]

    @cached_property
    def lines(self) -> list[Line]:
        return self.select_lines(lambda _: True)

    def trends(self, is_wanted: Callable[[str], bool]) -> tuple[Trend, ...]:
        return tuple(line.whole_trend() for line in self.select_lines(is_wanted))

    def endings(self, is_wanted: Callable[[str], bool]) -> list[Ending]:
        """Returns how trends end, without their figures."""
        return [line.ending for line in self.select_lines(is_wanted)]

    def select_lines(self, is_wanted: Callable[[str], bool]) -> list[Line]:
        """Returns the lines with a wanted name and with a number or a failure, sorted as trends are."""
        # A cell may be in blocks of several layouts, and is listed if one of them has a figure.
        columns: dict[tuple[Home, str, Cell], list[Column]] = {}
        telling = set[tuple[Home, str, Cell]]()
        for block, tells in zip(self.blocks, self._telling, strict=True):
            for index, name in enumerate(block.names):
                if is_wanted(name):
                    rank, values = block.layout.cells[index]
                    key = block.home, block.layout.series[rank].name, values
                    columns.setdefault(key, []).append((block, index))
                    telling.update([key] if tells[index] else [])
        lines = [self._line(columns[key]) for key in telling]
        return sorted(lines, key=lambda line: order(line.trend, line.rank))

    def is_of(self, trend: Trend, identity: Identity) -> bool:
        """Whether a trend is of this machine and interpreter, whatever path the interpreter was called by."""
        home = home_of(identity.home, list(self.homes))
        return (home.machine, home.python) == (trend.machine.get("machine"), trend.python)

    def _line(self, columns: Sequence[Column]) -> Line:
        """The newest run defines the series and the machine."""
        block, index = max(columns, key=lambda column: column[0].newest.newest)
        rank, values = block.layout.cells[index]
        trend = Trend(block.layout.series[rank], values, block.newest.machine, block.home.python, ())
        # Columns of several blocks are merged by the dates of their commits.
        at, rows = block.at, block.rows[:, index]
        if len(columns) > 1:
            at = np.concatenate([part.at for part, _ in columns])
            by_date = np.argsort(at)
            at, rows = at[by_date], np.concatenate([part.rows[:, column] for part, column in columns])[by_date]
        return Line(trend, rank, at, rows, self.places, self.facts)


def history_of(tables: Sequence[FigureTable], *counts: Any) -> History:
    """Stacks tables, which are in the order of the commits' first runs, into blocks in the order of commits."""
    # 1. Machines and interpreters, in the order of their first runs.
    homes: list[Home] = []
    home_of_each = [home_of(table.place.home, homes) for table in tables]
    # 2. Tables of one layout and machine form a block, in the order of commits.
    by_date = sorted(range(len(tables)), key=lambda index: tables[index].place.moment)
    groups: dict[tuple[Home, str], list[tuple[int, FigureTable]]] = {}
    for at, index in enumerate(by_date):
        groups.setdefault((home_of_each[index], tables[index].layout), []).append((at, tables[index]))
    # 3. Facts of all tables have one numbering.
    numbers: dict[str, int] = {}
    blocks = [_block(home, members, numbers) for (home, _), members in groups.items()]
    return History(blocks, [tables[index].place for index in by_date], AllFacts(list(numbers)), homes, *counts)


def _block(home: Home, members: Sequence[tuple[int, FigureTable]], numbers: dict[str, int]) -> Block:
    newest = max((table.place for _, table in members), key=lambda place: place.newest)
    at = np.array([at for at, _ in members], np.int64)
    rows = np.stack(
        [_renumber_facts(table, numbers).view(np.uint8) for _, table in members]
    )  # as bytes, which is faster
    return Block(home, read_layout(members[0][1].layout), newest, at, rows.view(ROW))


def _renumber_facts(table: FigureTable, numbers: dict[str, int]) -> Rows:
    """Returns the rows of a table with the numbers that facts have among those of all tables."""
    rows = np.frombuffer(table.rows, ROW)
    facts = [numbers.setdefault(text, len(numbers)) for text in table.facts]
    if facts != list(range(len(facts))):
        rows = rows.copy()
        rows["facts"] = np.array(facts, np.uint32)[rows["facts"]]
    return rows
