"""The tables of all commits put together: the rows of each trend in order, and trends made of them when asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8bench.analysis.stats import Floats
from fp8bench.model import Cell, Ending, Figure, Series, Trend, trend_name
from fp8bench.store.asv.identity import Home
from fp8bench.store.index.tables import (
    ROW,
    Rows,
    Table,
    Texts,
    figure_at,
    has_number,
    home_of,
    is_whole,
    order,
    read_layout,
    read_texts,
    tells,
)

Places = NDArray[np.int64]
# So many lines have numbers of 16 bits.
_SMALL = 1 << 16
Layout = tuple[tuple[Series, ...], tuple[tuple[int, Cell], ...]]


@dataclass(frozen=True)
class Line:
    """A trend as rows: those from `first` to before `end` of all, in the order of commits. It has no figures yet.

    `rank` is its series' place among those of its suite.
    """

    trend: Trend
    rank: int
    first: int
    end: int

    @property
    def order(self) -> tuple[object, ...]:
        """Where it stands among all."""
        return order(self.trend, self.rank)


class Comparable(NamedTuple):
    """Figures of a line that compare: their places in it, and their values."""

    places: Places
    values: Floats


@dataclass(frozen=True)
class Lines:
    """All lines, sorted as trends are; all rows, and of each the table from whose texts it takes its words.

    `alike` is one number for each version with conditions.
    """

    lines: tuple[Line, ...]
    rows: Rows
    tables: Places
    texts: tuple[Texts, ...]
    alike: Places

    def trend(self, line: Line) -> Trend:
        """A line with all of its figures."""
        return replace(line.trend, figures=self._figures(np.arange(line.first, line.end)))

    def ending(self, line: Line) -> Ending:
        """How a line ends."""
        numbered = line.first + np.flatnonzero(has_number(self.rows["flags"][line.first : line.end]))
        before = numbered[numbered < line.end - 1][-1:]
        *found, last = self._figures(np.append(before, line.end - 1))
        return Ending(line.trend, last, found[0] if found else None, len(numbered))

    def comparable(self, line: Line) -> list[Comparable]:
        """Its figures by version and conditions, as far as they are numbers of whole measurements."""
        places = np.flatnonzero(self._whole[line.first : line.end])
        values = self._values[line.first : line.end][places]
        alike = self.alike[line.first : line.end][places]
        if len(places) and (alike == alike[0]).all():
            return [Comparable(places, values)]
        return [Comparable(places[alike == one], values[alike == one]) for one in dict.fromkeys(alike.tolist())]

    @cached_property
    def _values(self) -> Floats:
        return np.ascontiguousarray(self.rows["value"])

    @cached_property
    def _whole(self) -> NDArray[np.bool_]:
        """Which rows are numbers of whole measurements."""
        found: NDArray[np.bool_] = is_whole(self.rows["flags"]) & np.isfinite(self._values)
        return found

    def _figures(self, places: Places) -> tuple[Figure, ...]:
        texts = (self.texts[table] for table in self.tables[places].tolist())
        return tuple(map(figure_at, self.rows[places].tolist(), texts))


class _Part(NamedTuple):
    """The rows of a table that are wanted, by their places, and the line that each of them belongs to."""

    places: Places
    lines: Places


@dataclass
class _Reading:
    """Tables that are being put together: lines by home, series and cell, as far as their names are wanted."""

    wanted: Callable[[str], bool]
    homes: list[Home] = field(default_factory=list)
    keys: dict[tuple[Home, str, Cell], int] = field(default_factory=dict)
    layouts: dict[bytes, Layout] = field(default_factory=dict)
    parts: dict[tuple[Home, bytes], _Part] = field(default_factory=dict)

    def layout(self, table: Table) -> Layout:
        if table.layout not in self.layouts:
            self.layouts[table.layout] = read_layout(table.layout)
        return self.layouts[table.layout]

    def part(self, table: Table) -> _Part:
        home = home_of(table.home, self.homes)
        found = self.parts.get((home, table.layout))
        if found is None:
            series, cells = self.layout(table)
            names = enumerate(trend_name(series[rank].name, cell) for rank, cell in cells)
            places = [place for place, name in names if self.wanted(name)]
            keys = [(home, series[cells[place][0]].name, cells[place][1]) for place in places]
            lines = [self.keys.setdefault(key, len(self.keys)) for key in keys]
            found = self.parts[home, table.layout] = _Part(np.array(places, np.int64), np.array(lines, np.int64))
        return found


def names_in(tables: Iterable[Table]) -> set[str]:
    """The names of all lines."""
    telling: dict[bytes, NDArray[np.bool_]] = {}
    for table in tables:
        rows = tells(table.rows["flags"])
        telling[table.layout] = rows | telling[table.layout] if table.layout in telling else rows
    found: set[str] = set()
    for layout, rows in telling.items():
        series, cells = read_layout(layout)
        found |= {trend_name(series[rank].name, cell) for (rank, cell), tell in zip(cells, rows, strict=True) if tell}
    return found


def lines_of(tables: Sequence[Table], wanted: Callable[[str], bool], homes: Sequence[Home] = ()) -> Lines:
    """The wanted lines out of the tables of all commits, which come in the order of the commits' first runs.

    `homes` are those that are known, in their order; a table's own joins them.
    """
    reading = _Reading(wanted, list(homes))
    parts = [reading.part(table) for table in tables]
    if not reading.keys:
        nothing = np.zeros(0, np.int64)
        return Lines((), np.zeros(0, ROW), nothing, (), nothing)
    dates = [one.said["date"] if one.said["date"] is not None else one.said["began"] for one in tables]
    by_date = sorted(range(len(tables)), key=dates.__getitem__)  # of one moment the earlier commit first
    owners = np.concatenate([parts[place].lines for place in by_date])
    small = owners.astype(np.uint16) if len(reading.keys) <= _SMALL else owners  # which are sorted ten times as fast
    in_order = np.argsort(small, kind="stable")
    rows = np.concatenate([_rows(tables[place], parts[place]) for place in by_date]).take(in_order).view(ROW)
    owned = np.repeat(by_date, [len(parts[place].lines) for place in by_date])[in_order]
    bounds = np.concatenate(([0], np.cumsum(np.bincount(owners))))
    texts = tuple(read_texts(table.said) for table in tables)
    lines = tuple(_lines(reading, tables, parts, bounds, np.logical_or.reduceat(tells(rows["flags"]), bounds[:-1])))
    return Lines(lines, rows, owned, texts, _alike(rows, owned, texts))


def _rows(table: Table, part: _Part) -> Rows:
    """The wanted rows as so many bytes each: numpy would copy field by field."""
    whole = table.rows.view(f"V{ROW.itemsize}")
    found: Rows = whole if len(part.places) == len(whole) else whole[part.places]
    return found


def _lines(
    reading: _Reading, tables: Sequence[Table], parts: Sequence[_Part], bounds: Places, telling: NDArray[np.bool_]
) -> list[Line]:
    """The lines that tell something, sorted as trends are, each as its newest run has it."""
    newest = np.zeros((len(reading.keys), 2), np.int64)
    last: dict[int, int] = {}  # of tables with the same lines
    for place in sorted(range(len(tables)), key=lambda place: (tables[place].said["newest"], -place), reverse=True):
        last.setdefault(id(parts[place]), place)
    for place in reversed(last.values()):
        newest[parts[place].lines] = np.stack([np.full_like(parts[place].places, place), parts[place].places], axis=1)
    found: list[Line] = []
    for (home, _, _), (place, row), first, end, tell in zip(
        reading.keys, newest.tolist(), bounds.tolist(), bounds[1:].tolist(), telling.tolist(), strict=False
    ):
        if tell:
            series, cells = reading.layout(tables[place])
            rank, cell = cells[row]
            trend = Trend(series[rank], cell, tables[place].said["machine"], home.python, ())
            found.append(Line(trend, rank, first, end))
    return sorted(found, key=lambda line: line.order)


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
    if len(numbers) == 1:
        return np.zeros(len(places), np.int64)
    begins = np.cumsum([0, *(len(of_table) for of_table in words)])
    found: Places = known[begins[tables] + places]
    return found
