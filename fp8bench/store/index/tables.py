"""What a commit has come to in one place as a table: a row of numbers a figure, texts once, the cells apart.

Commits that measured the same cells have the same layout, which is read once for all of them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8bench.model import Cell, Conditions, Figure, Point, Scalar, Series, Status, Trend
from fp8bench.store.asv.identity import Home
from fp8bench.store.asv.rows import cell
from fp8bench.store.commit_runs import TrackedRun, series_of_runs
from fp8bench.store.points import merged


@dataclass(frozen=True)
class Trends:
    """What a store holds: trends, of how many runs and commits, and how many runs were left out, and why."""

    trends: tuple[Trend, ...]
    runs: int
    commits: int
    left: Counter[str]


class Placed(NamedTuple):
    """What a commit has come to on one machine under one interpreter.

    `figures` are those of the cells of `series`, which they name by its place there, and `samples` what they are of.
    `began` is when the oldest of its
    runs was started, in ms since 1970, and `newest` when the newest was, as that says it. The interpreter goes by the
    oldest run's name.
    """

    commit: str
    date: int | None
    began: float
    newest: str
    machine: Mapping[str, Scalar | None]
    home: Home
    series: tuple[Series, ...]
    figures: tuple[tuple[int, Cell, Figure], ...]
    samples: tuple[tuple[float, ...], ...]


def home_of(own: Home, homes: list[Home]) -> Home:
    """Where a run belongs, among those that are known, which it joins: bin/python and bin/python3 are one."""
    for home in homes:
        if own.is_same(home):
            return home
    homes.append(own)
    return own


def placed(members: Sequence[TrackedRun]) -> Placed:
    """What the runs of one commit, machine and interpreter come to, oldest first."""
    series = series_of_runs(members)
    ranks = {one.name: rank for rank, one in enumerate(series)}
    points = merged([point for tracked in members for point in tracked.content.points], series)
    date = members[0].run.environment.get("commit_date")
    return Placed(
        members[0].commit, date if isinstance(date, int) else None, members[0].order[0] * 1000,
        members[-1].run.started, members[-1].identity.machine, members[0].identity.home, tuple(series),
        tuple((ranks[name], values, figure_of(members[0], point)) for (name, values), point in points.items()),
        tuple(point.samples for point in points.values()),
    )  # fmt: skip


def figure_of(tracked: TrackedRun, point: Point) -> Figure:
    """What a point says of its commit, or of the files that a run was made with."""
    date = tracked.run.environment.get("commit_date")
    value, stats = cell(point.samples)
    low, high = (stats.ci_99_a, stats.ci_99_b) if stats is not None else (-math.inf, math.inf)
    known = math.isfinite(low) and math.isfinite(high) and len(point.samples) > 1
    return Figure(
        tracked.commit, date if isinstance(date, int) else None, point.version, point.runs, len(point.samples), value,
        low if known else None, high if known else None, point.hasty, point.status, point.reason, point.under,
    )  # fmt: skip


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
class Table:
    """A place's figures: what is said of it, its layout as text, and a row for each cell of the layout."""

    said: dict[str, Any]
    layout: bytes
    rows: Rows

    @property
    def home(self) -> Home:
        """Where the figures were measured."""
        return Home(str(self.said["machine"]["machine"]), self.said["python"], self.said["interpreter"])


def table_of(place: Placed) -> Table:
    """A place as a table."""
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
        for _, _, figure in place.figures
    ]  # fmt: skip
    said = {
        "commit": place.commit, "date": place.date, "began": place.began, "newest": place.newest,
        "machine": dict(place.machine), "python": place.home.python,
        "interpreter": place.home.interpreter, "versions": list(versions), "unders": list(unders),
        "reasons": list(reasons),
    }  # fmt: skip
    return Table(said, _layout(place), np.array(rows, dtype=ROW))


def _layout(place: Placed) -> bytes:
    series = [
        [one.name, one.workload, one.metric, one.unit, one.param_names, one.params, one.version] for one in place.series
    ]
    return json.dumps([series, [[rank, cell] for rank, cell, _ in place.figures]], separators=(",", ":")).encode()


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
    """The texts of a table's rows."""
    unders = said["unders"]
    if not isinstance(unders, tuple):
        unders = tuple(tuple((name, value) for name, value in under) for under in unders)
    return Texts(said["commit"], said["date"], tuple(said["versions"]), unders, tuple(said["reasons"]))


def figure_at(row: Sequence[Any], texts: Texts) -> Figure:
    """The figure that a row stands for."""
    value, low, high, runs, samples, version, under, reason, flags = row
    known = flags & _INTERVAL
    return Figure(
        texts.commit, texts.date, texts.versions[version], runs, samples, value if flags & _VALUE else None,
        low if known else None, high if known else None, bool(flags & _HASTY), _STATUSES[flags // _STATUS_FACTOR],
        texts.reasons[reason], texts.unders[under],
    )  # fmt: skip


def has_number(flags: Flags) -> NDArray[np.bool_]:
    """Which rows have a value."""
    return (flags & _VALUE).astype(np.bool_)


def is_whole(flags: Flags) -> NDArray[np.bool_]:
    """Which rows have a value that is not a hasty one's."""
    return has_number(flags) & ~(flags & _HASTY).astype(np.bool_)


def tells(flags: Flags) -> NDArray[np.bool_]:
    """Which rows have a value, or are of a case that failed."""
    failed: NDArray[np.bool_] = flags // _STATUS_FACTOR == _FAILED
    return has_number(flags) | failed
