"""The tables of all commits put together: the rows of each course in order, and courses made of them when asked for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8bench.course import Home, home_of, order
from fp8bench.index.tables import (
    ROW,
    Rows,
    Table,
    Texts,
    figures_of,
    has_number,
    is_whole,
    read_layout,
    read_texts,
    tells,
)
from fp8bench.model import Cell, Course, Ending, Figure, Series
from fp8bench.stats import Floats

Places = NDArray[np.int64]
Layout = tuple[tuple[Series, ...], tuple[tuple[int, Cell], ...]]


@dataclass(frozen=True)
class Line:
    """A course as rows: those from `first` to before `end` of all, in the order of commits. It has no figures yet."""

    course: Course
    first: int
    end: int


class Comparable(NamedTuple):
    """Figures of a line that compare: their places in it, and their values."""

    places: Places
    values: Floats


@dataclass(frozen=True)
class Lines:
    """All lines, sorted as courses are; all rows, and of each the table from whose texts it takes its words.

    `alike` is one number for each version with conditions.
    """

    lines: tuple[Line, ...]
    rows: Rows
    tables: Places
    texts: tuple[Texts, ...]
    alike: Places

    def course(self, line: Line) -> Course:
        """A line with all of its figures."""
        return replace(line.course, figures=self._figures(np.arange(line.first, line.end)))

    def ending(self, line: Line) -> Ending:
        """How a line ends."""
        numbered = line.first + np.flatnonzero(has_number(self.rows["flags"][line.first : line.end]))
        before = numbered[numbered < line.end - 1][-1:]
        *found, last = self._figures(np.append(before, line.end - 1))
        return Ending(line.course, last, found[0] if found else None, len(numbered))

    def comparable(self, line: Line) -> list[Comparable]:
        """Its figures by version and conditions, as far as they are numbers of whole measurements."""
        rows = self.rows[line.first : line.end]
        places = np.flatnonzero(is_whole(rows["flags"]) & np.isfinite(rows["value"]))
        alike = self.alike[line.first : line.end][places]
        return [
            Comparable(places[alike == one], rows["value"][places[alike == one]])
            for one in dict.fromkeys(alike.tolist())
        ]

    def _figures(self, places: Places) -> tuple[Figure, ...]:
        return figures_of(self.rows[places], [self.texts[table] for table in self.tables[places].tolist()])


@dataclass
class _Reading:
    """Tables that are being put together: lines by home, series and cell, and for each table the lines of its rows."""

    homes: list[Home] = field(default_factory=list)
    keys: dict[tuple[Home, str, Cell], int] = field(default_factory=dict)
    layouts: dict[bytes, Layout] = field(default_factory=dict)
    places: dict[tuple[Home, bytes], Places] = field(default_factory=dict)

    def home(self, table: Table) -> Home:
        return home_of(Home(str(table.said["machine"]["machine"]), table.said["python"]), self.homes)

    def layout(self, table: Table) -> Layout:
        if table.layout not in self.layouts:
            self.layouts[table.layout] = read_layout(table.layout)
        return self.layouts[table.layout]

    def lines(self, table: Table) -> Places:
        """The line that each row of a table belongs to."""
        home = self.home(table)
        found = self.places.get((home, table.layout))
        if found is None:
            series, cells = self.layout(table)
            keys = [(home, series[rank].name, cell) for rank, cell in cells]
            found = np.array([self.keys.setdefault(key, len(self.keys)) for key in keys], np.int64)
            self.places[home, table.layout] = found
        return found


def lines_of(tables: Iterable[Table]) -> Lines:
    """Lines out of the tables of all commits, which come in the order of the commits' first runs."""
    known = list(tables)
    reading = _Reading()
    lines = [reading.lines(table) for table in known]
    if not reading.keys:
        nothing = np.zeros(0, np.int64)
        return Lines((), np.zeros(0, ROW), nothing, (), nothing)
    lengths = [len(one) for one in lines]
    owners = np.concatenate(lines)
    when = np.repeat([_when(table) for table in known], lengths)
    in_order = np.lexsort((when, owners))  # stable: of one moment the earlier commit is first
    rows = np.concatenate([table.rows for table in known])[in_order]
    bounds = np.concatenate(([0], np.cumsum(np.bincount(owners))))
    telling = np.logical_or.reduceat(tells(rows["flags"]), bounds[:-1])
    shapes = _newest(known, lines, len(reading.keys))
    found: list[tuple[int, Line]] = []
    for place, (home, _, _) in enumerate(reading.keys):
        if telling[place]:
            table, row = shapes[place].tolist()
            series, cells = reading.layout(known[table])
            rank, cell = cells[row]
            course = Course(series[rank], cell, known[table].said["machine"], home.python, ())
            found.append((rank, Line(course, int(bounds[place]), int(bounds[place + 1]))))
    found.sort(key=lambda pair: order(pair[1].course, pair[0]))
    owned = np.repeat(np.arange(len(known)), lengths)[in_order]
    texts = tuple(read_texts(table.said) for table in known)
    return Lines(tuple(line for _, line in found), rows, owned, texts, _alike(rows, owned, texts))


def _when(table: Table) -> float:
    date = table.said["date"]
    return float(date if date is not None else table.said["began"])


def _newest(tables: list[Table], lines: list[Places], count: int) -> Places:
    """For each line the table that its newest run made, and its row there: they say what it is called and made of."""
    found = np.zeros((count, 2), np.int64)
    for place in sorted(range(len(tables)), key=lambda one: (tables[one].said["newest"], -one)):
        found[lines[place], 0] = place
        found[lines[place], 1] = np.arange(len(lines[place]))
    return found


def _alike(rows: Rows, tables: Places, texts: Sequence[Texts]) -> Places:
    """For each row a number that it shares with all rows of its version that were measured under its conditions."""
    versions = _numbered([one.versions for one in texts], rows["version"], tables)
    unders = _numbered([one.unders for one in texts], rows["under"], tables)
    found: Places = versions * (1 + unders.max(initial=0)) + unders
    return found


def _numbered(words: Sequence[Sequence[Hashable]], places: Places, tables: Places) -> Places:
    """A number for each word that rows name by its place among those of their table."""
    numbers: dict[Hashable, int] = {}
    known = np.array([numbers.setdefault(word, len(numbers)) for of_table in words for word in of_table], np.int64)
    begins = np.cumsum([0, *(len(of_table) for of_table in words)])
    found: Places = known[begins[tables] + places]
    return found
