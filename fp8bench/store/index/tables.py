"""What a commit has come to in one place as a table: a row of numbers a figure, texts once, the cells apart.

Commits that measured the same cells have the same layout, which is read once for all of them. The tables of all commits
put together are lines: the rows of each trend in order, of which trends are made when they are asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8bench.analysis.stats import Floats
from fp8bench.model import Cell, Conditions, Ending, Figure, Point, Scalar, Series, Status, Trend, trend_name
from fp8bench.store.asv.identity import Home
from fp8bench.store.asv.rows import cell
from fp8bench.store.commit_runs import TrackedRun, commit_points, series_of_runs


def home_of(own: Home, homes: list[Home]) -> Home:
    """Where a run belongs, among those that are known, which it joins: bin/python and bin/python3 are one."""
    for home in homes:
        if own.is_same(home):
            return home
    homes.append(own)
    return own


def figure_of(tracked: TrackedRun, point: Point) -> Figure:
    """What a point says of its commit, or of the files that a run was made with."""
    value, stats = cell(point.samples)
    low, high = (stats.ci_99_a, stats.ci_99_b) if stats is not None else (-math.inf, math.inf)
    known = math.isfinite(low) and math.isfinite(high) and len(point.samples) > 1
    return Figure(
        tracked.commit, _commit_date(tracked), point.version, point.runs, len(point.samples), value,
        low if known else None, high if known else None, point.hasty, point.status, point.reason, point.under,
    )  # fmt: skip


def _commit_date(tracked: TrackedRun) -> int | None:
    date = tracked.run.environment.get("commit_date")
    return date if isinstance(date, int) else None


@lru_cache
def _places(values: tuple[Scalar, ...]) -> dict[Scalar, int]:
    return {value: place for place, value in reversed(tuple(enumerate(values)))}


def order(trend: Trend, rank: int) -> tuple[object, ...]:
    """Machine and interpreter, suite, metric as its suite declares them, cell as the grid does."""
    place = [_places(values)[value] for values, value in zip(trend.series.params, trend.cell, strict=True)]
    return trend.machine["machine"], trend.python, trend.series.workload, rank, place


ROW = np.dtype(
    [
        ("value", "<f8"), ("low", "<f8"), ("high", "<f8"), ("runs", "<u4"), ("samples", "<u4"), ("version", "<u2"),
        ("under", "<u2"), ("reason", "<u2"), ("flags", "u1"),
    ]
)  # fmt: skip
_VALUE, _INTERVAL, _HASTY = 1, 2, 4
_STATUSES = tuple(Status)
_STATUS_FACTOR = 8
_FAILED = _STATUSES.index(Status.FAILED)

Rows = NDArray[np.void]
Flags = NDArray[np.uint8]


@dataclass(frozen=True)
class Texts:
    """What the numbers in a row stand for, but for the figures themselves."""

    commit: str
    date: int | None
    versions: tuple[str, ...]
    unders: tuple[Conditions, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class FigureTable:
    """A place's figures: what is said of it, its layout as text, and a row for each cell of the layout."""

    said: dict[str, Any]
    layout: bytes
    rows: Rows

    @property
    def home(self) -> Home:
        return Home(str(self.said["machine"]["machine"]), self.said["python"], self.said["interpreter"])


def table_of(members: Sequence[TrackedRun]) -> FigureTable:
    """What the runs of one commit, machine and interpreter come to, oldest first: a row for each of `commit_points`.

    `began` is when the oldest run was started, in ms since 1970, and `newest` when the newest was, as that says it. The
    interpreter goes by the oldest run's name.
    """
    oldest, newest = members[0], members[-1]
    points = commit_points(members)
    figures = [figure_of(oldest, point) for point in points.values()]
    versions: dict[str, int] = {}
    unders: dict[Conditions, int] = {}
    reasons: dict[str, int] = {}
    rows = [
        (
            *(0.0 if one is None else one for one in (figure.value, figure.low, figure.high)),
            figure.runs, figure.samples, versions.setdefault(figure.version, len(versions)),
            unders.setdefault(figure.under, len(unders)), reasons.setdefault(figure.reason, len(reasons)),
            _VALUE * (figure.value is not None) + _INTERVAL * (figure.low is not None) + _HASTY * figure.hasty
            + _STATUS_FACTOR * _STATUSES.index(figure.status),
        )
        for figure in figures
    ]  # fmt: skip
    said = {
        "commit": oldest.commit, "date": _commit_date(oldest), "began": oldest.order[0] * 1000,
        "newest": newest.run.started, "machine": dict(newest.identity.machine),
        "python": oldest.identity.home.python, "interpreter": oldest.identity.home.interpreter,
        "versions": list(versions), "unders": list(unders), "reasons": list(reasons),
    }  # fmt: skip
    return FigureTable(said, _layout(series_of_runs(members), points), np.array(rows, dtype=ROW))


def _layout(series: Sequence[Series], points: Iterable[tuple[str, Cell]]) -> bytes:
    ranks = {one.name: rank for rank, one in enumerate(series)}
    plain = [[one.name, one.workload, one.metric, one.unit, one.param_names, one.params, one.version] for one in series]
    return json.dumps([plain, [[ranks[name], cell] for name, cell in points]], separators=(",", ":")).encode()


def read_layout(text: bytes) -> tuple[tuple[Series, ...], tuple[tuple[int, Cell], ...]]:
    """Series, and the cell that each row is of with the place of its series among them."""
    series, cells = json.loads(text)
    return (
        tuple(
            Series(name, workload, metric, unit, tuple(names), tuple(map(tuple, params)), version)
            for name, workload, metric, unit, names, params, version in series
        ),
        tuple((rank, tuple(cell)) for rank, cell in cells),
    )


def read_texts(said: dict[str, Any]) -> Texts:
    unders = said["unders"]
    if not isinstance(unders, tuple):
        unders = tuple(tuple((name, value) for name, value in under) for under in unders)
    return Texts(said["commit"], said["date"], tuple(said["versions"]), unders, tuple(said["reasons"]))


def figure_at(row: Sequence[Any], texts: Texts) -> Figure:
    value, low, high, runs, samples, version, under, reason, flags = row
    known = flags & _INTERVAL
    return Figure(
        texts.commit, texts.date, texts.versions[version], runs, samples, value if flags & _VALUE else None,
        low if known else None, high if known else None, bool(flags & _HASTY), _STATUSES[flags // _STATUS_FACTOR],
        texts.reasons[reason], texts.unders[under],
    )  # fmt: skip


def has_number(flags: Flags) -> NDArray[np.bool_]:
    return (flags & _VALUE).astype(np.bool_)


def is_whole(flags: Flags) -> NDArray[np.bool_]:
    """Which rows have a value that is not a hasty one's."""
    return has_number(flags) & ~(flags & _HASTY).astype(np.bool_)


def tells(flags: Flags) -> NDArray[np.bool_]:
    """Which rows have a value, or are of a case that failed."""
    failed: NDArray[np.bool_] = flags // _STATUS_FACTOR == _FAILED
    return has_number(flags) | failed


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
        return order(self.trend, self.rank)


class Comparable(NamedTuple):
    """Figures of a line that compare: their places in it, and their values."""

    places: Places
    values: Floats


@dataclass(frozen=True)
class TrendLines:
    """All lines, sorted as trends are; all rows, and of each the table from whose texts it takes its words.

    `alike` is one number for each version with conditions.
    """

    lines: tuple[Line, ...]
    rows: Rows
    tables: Places
    texts: tuple[Texts, ...]
    alike: Places

    def trend(self, line: Line) -> Trend:
        return replace(line.trend, figures=self._figures(np.arange(line.first, line.end)))

    def ending(self, line: Line) -> Ending:
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
        found: NDArray[np.bool_] = is_whole(self.rows["flags"]) & np.isfinite(self._values)
        return found

    def _figures(self, places: Places) -> tuple[Figure, ...]:
        texts = (self.texts[table] for table in self.tables[places].tolist())
        return tuple(map(figure_at, self.rows[places].tolist(), texts))


class _TablePart(NamedTuple):
    """The rows of a table that are wanted, by their places, and the line that each of them belongs to."""

    places: Places
    lines: Places


@dataclass
class _TablesReading:
    """Tables that are being put together: lines by home, series and cell, as far as their names are wanted."""

    wanted: Callable[[str], bool]
    homes: list[Home] = field(default_factory=list)
    keys: dict[tuple[Home, str, Cell], int] = field(default_factory=dict)
    layouts: dict[bytes, Layout] = field(default_factory=dict)
    parts: dict[tuple[Home, bytes], _TablePart] = field(default_factory=dict)

    def layout(self, table: FigureTable) -> Layout:
        if table.layout not in self.layouts:
            self.layouts[table.layout] = read_layout(table.layout)
        return self.layouts[table.layout]

    def part(self, table: FigureTable) -> _TablePart:
        home = home_of(table.home, self.homes)
        found = self.parts.get((home, table.layout))
        if found is None:
            series, cells = self.layout(table)
            names = enumerate(trend_name(series[rank].name, cell) for rank, cell in cells)
            places = [place for place, name in names if self.wanted(name)]
            keys = [(home, series[cells[place][0]].name, cells[place][1]) for place in places]
            lines = [self.keys.setdefault(key, len(self.keys)) for key in keys]
            found = self.parts[home, table.layout] = _TablePart(np.array(places, np.int64), np.array(lines, np.int64))
        return found


def names_in(tables: Iterable[FigureTable]) -> set[str]:
    telling: dict[bytes, NDArray[np.bool_]] = {}
    for table in tables:
        rows = tells(table.rows["flags"])
        telling[table.layout] = rows | telling[table.layout] if table.layout in telling else rows
    found: set[str] = set()
    for layout, rows in telling.items():
        series, cells = read_layout(layout)
        found |= {trend_name(series[rank].name, cell) for (rank, cell), tell in zip(cells, rows, strict=True) if tell}
    return found


def lines_of(tables: Sequence[FigureTable], wanted: Callable[[str], bool], homes: Sequence[Home] = ()) -> TrendLines:
    """The wanted lines out of the tables of all commits, which come in the order of the commits' first runs.

    `homes` are those that are known, in their order; a table's own joins them.
    """
    reading = _TablesReading(wanted, list(homes))
    parts = [reading.part(table) for table in tables]
    if not reading.keys:
        nothing = np.zeros(0, np.int64)
        return TrendLines((), np.zeros(0, ROW), nothing, (), nothing)
    dates = [table.said["date"] if table.said["date"] is not None else table.said["began"] for table in tables]
    by_date = sorted(range(len(tables)), key=dates.__getitem__)  # of one moment the earlier commit first
    owners = np.concatenate([parts[place].lines for place in by_date])
    small = owners.astype(np.uint16) if len(reading.keys) <= _SMALL else owners  # which are sorted ten times as fast
    in_order = np.argsort(small, kind="stable")
    rows = np.concatenate([_rows(tables[place], parts[place]) for place in by_date]).take(in_order).view(ROW)
    owned = np.repeat(by_date, [len(parts[place].lines) for place in by_date])[in_order]
    bounds = np.concatenate(([0], np.cumsum(np.bincount(owners))))
    texts = tuple(read_texts(table.said) for table in tables)
    lines = tuple(_lines(reading, tables, parts, bounds, np.logical_or.reduceat(tells(rows["flags"]), bounds[:-1])))
    return TrendLines(lines, rows, owned, texts, _alike(rows, owned, texts))


def _rows(table: FigureTable, part: _TablePart) -> Rows:
    """The wanted rows as so many bytes each: numpy would copy field by field."""
    whole = table.rows.view(f"V{ROW.itemsize}")
    found: Rows = whole if len(part.places) == len(whole) else whole[part.places]
    return found


def _lines(
    reading: _TablesReading,
    tables: Sequence[FigureTable],
    parts: Sequence[_TablePart],
    bounds: Places,
    telling: NDArray[np.bool_],
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
    versions = _numbered([text.versions for text in texts], rows["version"], tables)
    unders = _numbered([text.unders for text in texts], rows["under"], tables)
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
