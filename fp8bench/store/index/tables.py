"""The figures of a commit in one place as a table: a row of numbers for each figure, and the texts and cells apart.

Commits that measured the same cells share a layout, which is read once. The tables of all commits together are lines:
the rows of each trend in order. Trends are made of lines when they are asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
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
    """Returns the known home that a run's is the same as; adds it where there is none."""
    for home in homes:
        if own.is_same(home):
            return home
    homes.append(own)
    return own


def figure_of(tracked: TrackedRun, point: Point) -> Figure:
    return Figure(
        tracked.commit, _commit_date(tracked), point.version, point.runs, len(point.samples), *_value_of(point),
        point.hasty, point.status, point.reason, point.under,
    )  # fmt: skip


def _value_of(point: Point) -> tuple[float | None, float | None, float | None]:
    """Returns the median of a point's samples, and the ends of its interval."""
    value, stats = cell(point.samples)
    if stats is None or stats.repeat < 2 or not (math.isfinite(stats.ci_99_a) and math.isfinite(stats.ci_99_b)):
        return value, None, None
    return value, stats.ci_99_a, stats.ci_99_b


def _commit_date(tracked: TrackedRun) -> int | None:
    date = tracked.run.environment.get("commit_date")
    return date if isinstance(date, int) else None


@lru_cache
def _places(values: tuple[Scalar, ...]) -> dict[Scalar, int]:
    return {value: place for place, value in reversed(tuple(enumerate(values)))}


def order(trend: Trend, rank: int) -> tuple[object, ...]:
    """Sorts by machine and interpreter, suite, metric as its suite declares them, cell as the grid does."""
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

_MOST_LAYOUTS = 50  # that are remembered: neighbouring commits mostly share theirs
Rows = NDArray[np.void]
Numbers = NDArray[np.int64]
Flags = NDArray[np.uint8]


@dataclass(frozen=True)
class PlaceShape:
    """What many places share: a layout, the machine, the interpreter, the texts that numbers in rows stand for, and
    the number of rows."""

    layout: bytes
    home: Home
    machine: dict[str, Any]
    versions: tuple[str, ...]
    unders: tuple[Conditions, ...]
    reasons: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class MeasuredPlaces:
    """Where commits were measured, in the order of the commits' first runs.

    For each place there is the number of its shape, its first row, commit, the commit's date, and the starts of its
    oldest run (in ms since 1970) and of its newest.
    """

    rows: Rows
    shapes: Sequence[PlaceShape]
    shape: Numbers
    first: Numbers
    commits: Sequence[str]
    dates: Sequence[int | None]
    began: Sequence[float]
    newest: Sequence[str]

    @cached_property
    def count(self) -> int:
        counts = np.array([shape.count for shape in self.shapes], np.int64)
        return int(counts[self.shape].sum()) if len(counts) else 0

    @cached_property
    def homes(self) -> list[Home]:
        homes: list[Home] = []
        for home in dict.fromkeys(self.shapes[number].home for number in dict.fromkeys(self.shape.tolist())):
            home_of(home, homes)
        return homes


@dataclass(frozen=True)
class FigureTable:
    """The figures of a place: its texts (`said`), its layout, and a row for each cell of the layout."""

    said: dict[str, Any]
    layout: bytes
    rows: Rows

    def __reduce__(self) -> tuple[object, ...]:
        return _table, (self.said, self.layout, self.rows.tobytes())  # pickling the dtype would take longer than that


def _table(said: dict[str, Any], layout: bytes, rows: bytes) -> FigureTable:
    return FigureTable(said, layout, np.frombuffer(rows, ROW))


def table_of(members: Sequence[TrackedRun]) -> FigureTable:
    """Returns the table of the runs of one place, oldest first: a row for each of `commit_points`.

    In its texts `began` is the start of the oldest run in ms since 1970, `newest` that of the newest as written there.
    The interpreter has the oldest run's name for it.
    """
    oldest, newest = members[0], members[-1]
    points = commit_points(members)
    versions: dict[str, int] = {}
    unders: dict[Conditions, int] = {}
    under_of: dict[int, int] = {}  # by id(), since many points share the same long conditions
    reasons: dict[str, int] = {}
    rows = []
    for point in points.values():
        value, low, high = _value_of(point)
        if (under := under_of.get(id(point.under))) is None:
            under = under_of[id(point.under)] = unders.setdefault(point.under, len(unders))
        known = _VALUE * (value is not None) + _INTERVAL * (low is not None) + _HASTY * point.hasty
        rows.append((
            *(0.0 if number is None else number for number in (value, low, high)), point.runs, len(point.samples),
            versions.setdefault(point.version, len(versions)), under,
            reasons.setdefault(point.reason, len(reasons)), known + _STATUS_FACTOR * _STATUSES.index(point.status),
        ))  # fmt: skip
    said = {
        "commit": oldest.commit, "date": _commit_date(oldest), "began": oldest.order[0] * 1000,
        "newest": newest.run.started, "machine": dict(newest.identity.machine),
        "python": oldest.identity.home.python, "interpreter": oldest.identity.home.interpreter,
        "versions": list(versions), "unders": list(unders), "reasons": list(reasons),
    }  # fmt: skip
    return FigureTable(said, _layout(tuple(series_of_runs(members)), tuple(points)), np.array(rows, dtype=ROW))


@lru_cache(maxsize=_MOST_LAYOUTS)  # cells have texts and whole numbers alone, of which equal ones are written alike
def _layout(series: tuple[Series, ...], points: tuple[tuple[str, Cell], ...]) -> bytes:
    ranks = {metric.name: rank for rank, metric in enumerate(series)}
    plain = [
        [metric.name, metric.workload, metric.metric, metric.unit, metric.param_names, metric.params, metric.version]
        for metric in series
    ]
    return json.dumps([plain, [[ranks[name], cell] for name, cell in points]], separators=(",", ":")).encode()


@lru_cache(maxsize=_MOST_LAYOUTS)
def read_layout(text: bytes) -> tuple[tuple[Series, ...], tuple[tuple[int, Cell], ...]]:
    """Returns the series, and for each row the index of its series and its cell."""
    series, cells = json.loads(text)
    return (
        tuple(
            Series(name, workload, metric, unit, tuple(names), tuple(map(tuple, params)), version)
            for name, workload, metric, unit, names, params, version in series
        ),
        tuple((rank, tuple(cell)) for rank, cell in cells),
    )


def _figure_at(row: Sequence[Any], commit: str, date: int | None, shape: PlaceShape) -> Figure:
    value, low, high, runs, samples, version, under, reason, flags = row
    known = flags & _INTERVAL
    return Figure(
        commit, date, shape.versions[version], runs, samples, value if flags & _VALUE else None,
        low if known else None, high if known else None, bool(flags & _HASTY), _STATUSES[flags // _STATUS_FACTOR],
        shape.reasons[reason], shape.unders[under],
    )  # fmt: skip


def has_number(flags: Flags) -> NDArray[np.bool_]:
    return (flags & _VALUE).astype(np.bool_)


def is_whole(flags: Flags) -> NDArray[np.bool_]:
    """Which rows have a value that is not a hasty one's."""
    return has_number(flags) & ~(flags & _HASTY).astype(np.bool_)


def tells(flags: Flags) -> NDArray[np.bool_]:
    failed: NDArray[np.bool_] = flags // _STATUS_FACTOR == _FAILED
    return has_number(flags) | failed


Layout = tuple[tuple[Series, ...], tuple[tuple[int, Cell], ...]]


@dataclass(frozen=True)
class Line:
    """A trend as rows from `first` to before `end`, in the order of commits, still without figures.

    `rank` is the place of its series among those of its suite.
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

    places: Numbers
    values: Floats


@dataclass(frozen=True)
class TrendLines:
    """All lines, sorted as trends are. `rows` are numbers of rows in `places`, `owners` the place that each row is
    of."""

    places: MeasuredPlaces
    lines: tuple[Line, ...] = ()
    rows: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    owners: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))

    def trend(self, line: Line) -> Trend:
        return replace(line.trend, figures=self._figures(np.arange(line.first, line.end)))

    def ending(self, line: Line) -> Ending:
        numbered = line.first + np.flatnonzero(has_number(self._flags[line.first : line.end]))
        before = numbered[numbered < line.end - 1][-1:]
        *earlier, last = self._figures(np.append(before, line.end - 1))
        return Ending(line.trend, last, earlier[0] if earlier else None, len(numbered))

    def comparable(self, line: Line) -> list[Comparable]:
        """Returns its figures of whole measurements, by version and conditions. Values may be infinite or NaN."""
        places = np.flatnonzero(self._whole[line.first : line.end])
        values = self._values[line.first : line.end][places]
        alike = self._alike[line.first : line.end][places]
        if len(places) and (alike == alike[0]).all():
            return [Comparable(places, values)]
        return [
            Comparable(places[alike == number], values[alike == number]) for number in dict.fromkeys(alike.tolist())
        ]

    @cached_property
    def _flags(self) -> Flags:
        return self.places.rows["flags"][self.rows]

    @cached_property
    def _values(self) -> Floats:
        return self.places.rows["value"][self.rows]

    @cached_property
    def _whole(self) -> NDArray[np.bool_]:
        return is_whole(self._flags)

    @cached_property
    def _alike(self) -> Numbers:
        """For each row a number that all rows of its version and conditions share."""
        versions = self._numbered("version", [shape.versions for shape in self.places.shapes])
        unders = self._numbered("under", [shape.unders for shape in self.places.shapes])
        numbers: Numbers = versions * (1 + unders.max(initial=0)) + unders
        return numbers

    def _numbered(self, column: str, words: Sequence[Sequence[Hashable]]) -> Numbers:
        """Returns a number for each row's text, which the row names by its index among those of its shape."""
        numbers: dict[Hashable, int] = {}
        known = np.array([numbers.setdefault(word, len(numbers)) for own in words for word in own], np.int64)
        if len(numbers) == 1:
            return np.zeros(len(self.rows), np.int64)
        begins = np.cumsum([0, *map(len, words)])[self.places.shape]
        numbered: Numbers = known[begins[self.owners] + self.places.rows[column][self.rows]]
        return numbered

    def _figures(self, which: Numbers) -> tuple[Figure, ...]:
        places = self.places
        owners = self.owners[which].tolist()
        shapes = places.shape[self.owners[which]].tolist()
        return tuple(
            _figure_at(row, places.commits[owner], places.dates[owner], places.shapes[shape])
            for row, owner, shape in zip(places.rows[self.rows[which]].tolist(), owners, shapes, strict=True)
        )


class _LayoutRows(NamedTuple):
    """The positions of a layout's wanted rows in one home, and their lines' numbers, sorted by these."""

    layout: Layout
    positions: Numbers
    lines: Numbers


class _Gathered(NamedTuple):
    """Rows of wanted lines, sorted by line, and the place of each; where each line begins and the last ends, and
    which lines have a number or a failure. `keys` are the lines by home, series and cell, `parts` are by shapes."""

    keys: dict[tuple[Home, str, Cell], int]
    parts: dict[int, _LayoutRows]
    rows: Numbers
    owners: Numbers
    bounds: Numbers
    telling: NDArray[np.bool_]


def _layout_rows(
    home: Home, layout: Layout, wanted: Callable[[str], bool], keys: dict[tuple[Home, str, Cell], int]
) -> _LayoutRows:
    """Numbers the wanted lines of a layout that have no number yet."""
    series, cells = layout
    known = [(series[rank].name, cell) for rank, cell in cells]
    positions = [position for position, key in enumerate(known) if wanted(trend_name(*key))]
    lines = np.array([keys.setdefault((home, *known[position]), len(keys)) for position in positions], np.int64)
    order = np.argsort(lines)
    return _LayoutRows(layout, np.array(positions, np.int64)[order], lines[order])


def _gathered(places: MeasuredPlaces, wanted: Callable[[str], bool]) -> _Gathered | None:
    keys: dict[tuple[Home, str, Cell], int] = {}
    known: dict[tuple[Home, bytes], _LayoutRows] = {}
    by_shape: dict[int, _LayoutRows] = {}
    for number in dict.fromkeys(places.shape.tolist()):
        home, layout = home_of(places.shapes[number].home, places.homes), places.shapes[number].layout
        if (home, layout) not in known:
            known[home, layout] = _layout_rows(home, read_layout(layout), wanted, keys)
        by_shape[number] = known[home, layout]
    parts = list({id(part): part for part in by_shape.values() if len(part.lines)}.values())
    if not parts:
        return None
    count = len(places.commits)
    dates = [began if date is None else date for date, began in zip(places.dates, places.began, strict=True)]
    by_date = np.array(
        sorted(range(count), key=dates.__getitem__)
    )  # a stable sort: commits of one date keep their order
    rows, ordered = [], []
    lengths = np.zeros(len(keys), np.int64)
    for part in parts:
        own = np.array([number for number, other in by_shape.items() if other is part])
        ranks = np.flatnonzero(np.isin(places.shape[by_date], own))
        rows.append((part.positions[:, None] + places.first[by_date[ranks]]).ravel())
        ordered.append((part.lines[:, None] * count + ranks).ravel())  # they are sorted
        lengths[part.lines] += len(ranks)
    row, key = np.concatenate(rows), np.concatenate(ordered)
    if len(parts) > 1:
        order = np.argsort(key, kind="stable")
        row, key = row[order], key[order]
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    telling = np.logical_or.reduceat(tells(places.rows["flags"][row]), bounds[:-1])
    return _Gathered(keys, by_shape, row, by_date[key % count], bounds, telling)


def names_in(places: MeasuredPlaces, wanted: Callable[[str], bool]) -> set[str]:
    gathered = _gathered(places, wanted)
    if gathered is None:
        return set()
    keys = zip(gathered.keys, gathered.telling.tolist(), strict=True)
    return {trend_name(series, cell) for (_, series, cell), tell in keys if tell}


def lines_of(places: MeasuredPlaces, wanted: Callable[[str], bool]) -> TrendLines:
    gathered = _gathered(places, wanted)
    if gathered is None:
        return TrendLines(places)
    lines = sorted(_lines(places, gathered), key=lambda line: line.order)
    return TrendLines(places, tuple(lines), gathered.rows, gathered.owners)


def _lines(places: MeasuredPlaces, gathered: _Gathered) -> Iterator[Line]:
    """Yields the lines with a number or a failure; each has the definition of its newest run."""
    by_shape, bounds, telling = gathered.parts, gathered.bounds.tolist(), gathered.telling.tolist()
    newest: dict[int, int] = {}  # the place, by the part
    shapes = places.shape.tolist()
    for place, (shape, began) in enumerate(zip(shapes, places.newest, strict=True)):
        part = id(by_shape[shape])
        if part not in newest or began > places.newest[newest[part]]:
            newest[part] = place
    latest = np.zeros((len(gathered.keys), 2), np.int64)
    for place in sorted(newest.values(), key=lambda place: (places.newest[place], -place)):
        own = by_shape[shapes[place]]
        latest[own.lines] = np.stack([np.full_like(own.positions, place), own.positions], axis=1)
    for (home, _, _), (place, position), first, end, tell in zip(
        gathered.keys, latest.tolist(), bounds, bounds[1:], telling, strict=False
    ):
        if tell:
            series, cells = by_shape[shapes[place]].layout
            rank, cell = cells[position]
            trend = Trend(series[rank], cell, places.shapes[shapes[place]].machine, home.python, ())
            yield Line(trend, rank, first, end)
