"""The figures of a commit on one machine as a table: a row of numbers for each series and cell that was measured.

Shared properties are stored once, as `FigureFacts`. Tables of the same series and cells share a layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8bench.model import Cell, Conditions, Point, Series, Status
from fp8bench.store.asv.identity import Home
from fp8bench.store.asv.rows import cell
from fp8bench.store.commit_runs import TrackedRun, commit_points, series_of_runs

# `facts` is the index of the figure's facts.
ROW = np.dtype([("value", "<f8"), ("low", "<f8"), ("high", "<f8"), ("facts", "<u4")])
_MOST_LAYOUTS = 50  # that are remembered: neighbouring commits mostly share theirs

Rows = NDArray[np.void]


class FigureFacts(NamedTuple):
    """All properties of a figure except its commit and its numbers."""

    version: str
    runs: int
    samples: int
    has_value: bool
    has_interval: bool
    hasty: bool
    status: Status
    reason: str
    under: Conditions


class Place(NamedTuple):
    """Where and when a commit was measured: its date and the start of its oldest run (ms since 1970), the start of its
    newest run as written there, and the machine."""

    commit: str
    date: int | None
    began: float
    newest: str
    machine: dict[str, Any]
    python: str
    interpreter: str

    @property
    def home(self) -> Home:
        return Home(str(self.machine["machine"]), self.python, self.interpreter)

    @property
    def moment(self) -> float:
        return self.began if self.date is None else self.date


class FigureTable(NamedTuple):
    """The figures of a place. `layout` and each of the `facts` are JSON."""

    place: Place
    layout: str
    facts: tuple[str, ...]
    rows: bytes | memoryview


class Layout(NamedTuple):
    """The series of a table, and for each of its rows the index of its series and its cell."""

    series: tuple[Series, ...]
    cells: tuple[tuple[int, Cell], ...]


def table_of(members: Sequence[TrackedRun]) -> FigureTable:
    """Returns the table of the runs of one place, oldest first. The interpreter has the oldest run's name for it."""
    oldest, newest = members[0], members[-1]
    points = commit_points(members)
    numbers: dict[Hashable, int] = {}
    facts: list[FigureFacts] = []
    rows = [_row(point, numbers, facts) for point in points.values()]
    place = Place(
        oldest.commit,
        commit_date(oldest),
        oldest.order[0] * 1000,
        newest.run.started,
        dict(newest.identity.machine),
        oldest.identity.home.python,
        oldest.identity.home.interpreter,
    )
    layout = _layout(tuple(series_of_runs(members)), tuple(points))
    return FigureTable(place, layout, tuple(map(json.dumps, facts)), np.array(rows, dtype=ROW).tobytes())


def _row(point: Point, numbers: dict[Hashable, int], facts: list[FigureFacts]) -> tuple[float, float, float, int]:
    value, low, high = value_of(point)
    plain = (
        point.version,
        point.runs,
        len(point.samples),
        value is not None,
        low is not None,
        point.hasty,
        point.status,
        point.reason,
    )
    # Conditions are long, and many points share the same: their hash is asked for once.
    under = numbers.get(id(point.under))
    if under is None:
        under = numbers[id(point.under)] = numbers.setdefault(point.under, len(numbers))
    number = numbers.setdefault((*plain, under), len(facts))
    if number == len(facts):
        facts.append(FigureFacts(*plain, point.under))
    return value or 0.0, low or 0.0, high or 0.0, number


def read_facts(text: str) -> FigureFacts:
    facts = FigureFacts._make(json.loads(text))
    return facts._replace(status=Status(facts.status), under=tuple((name, fact) for name, fact in facts.under))


def value_of(point: Point) -> tuple[float | None, float | None, float | None]:
    """Returns the median of a point's samples, and the ends of its interval."""
    value, stats = cell(point.samples)
    if stats is None or stats.repeat < 2 or not (math.isfinite(stats.ci_99_a) and math.isfinite(stats.ci_99_b)):
        return value, None, None
    return value, stats.ci_99_a, stats.ci_99_b


def commit_date(tracked: TrackedRun) -> int | None:
    date = tracked.run.environment.get("commit_date")
    return date if isinstance(date, int) else None


@lru_cache(maxsize=_MOST_LAYOUTS)  # cells have texts and whole numbers alone, of which equal ones are written alike
def _layout(series: tuple[Series, ...], points: tuple[tuple[str, Cell], ...]) -> str:
    ranks = {metric.name: rank for rank, metric in enumerate(series)}
    plain = [list(vars(metric).values()) for metric in series]
    return json.dumps([plain, [[ranks[name], values] for name, values in points]], separators=(",", ":"))


@lru_cache(maxsize=_MOST_LAYOUTS)
def read_layout(text: str) -> Layout:
    series, cells = json.loads(text)
    return Layout(tuple(map(_series, series)), tuple((rank, tuple(values)) for rank, values in cells))


def _series(plain: Sequence[Any]) -> Series:
    name, workload, metric, unit, names, params, version = plain
    return Series(name, workload, metric, unit, tuple(names), tuple(map(tuple, params)), version)
