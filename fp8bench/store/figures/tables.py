"""Stores the figures of a commit on one machine as a table, with a row of numbers for each measured cell of each
series.

Properties that several figures share are stored once, as `FigureFacts`. Tables with the same series and cells share a
`Layout`.
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
from fp8bench.store.asv.identity import MachineInterpreter
from fp8bench.store.asv.rows import summarize_samples
from fp8bench.store.commit_runs import TrackedRun, collect_series, merge_commit_points

# The numbers of one figure. `facts` is an index into the table's list of FigureFacts.
ROW = np.dtype([("value", "<f8"), ("low", "<f8"), ("high", "<f8"), ("facts", "<u4")])
_MAX_CACHED_LAYOUTS = 50  # few are enough, because neighbouring commits mostly have the same layout

FigureRows = NDArray[np.void]


class FigureFacts(NamedTuple):
    """All properties of a figure except its commit and its numbers. Many figures have equal facts."""

    version: str
    runs: int
    samples: int
    has_value: bool
    has_interval: bool
    hasty: bool
    status: Status
    reason: str
    under: Conditions


class HistoryPlace(NamedTuple):
    """A commit that was measured on one machine and interpreter.

    `date` is the date of the commit, and `began` the start of its oldest run, both in ms since 1970. `newest` is the
    start of its newest run as a text.
    """

    commit: str
    date: int | None
    began: float
    newest: str
    machine: dict[str, Any]
    python: str
    interpreter: str

    @property
    def home(self) -> MachineInterpreter:
        return MachineInterpreter(str(self.machine["machine"]), self.python, self.interpreter)

    @property
    def moment(self) -> float:
        return self.began if self.date is None else self.date


class FigureTable(NamedTuple):
    """The figures of one commit on one machine and interpreter, in encoded form. `layout` and each of the `facts` are
    JSON texts. `rows` are the bytes of an array with the dtype ROW.
    """

    place: HistoryPlace
    layout: str
    facts: tuple[str, ...]
    rows: bytes | memoryview


class Layout(NamedTuple):
    """The series of a table, and the content of each row: `cells` has the index of its series and its cell."""

    series: tuple[Series, ...]
    cells: tuple[tuple[int, Cell], ...]


def make_table(members: Sequence[TrackedRun]) -> FigureTable:
    """Returns the table of figures for runs of one commit, machine and interpreter. The runs must be sorted oldest
    first. The path of the interpreter is that of the oldest run.
    """
    oldest, newest = members[0], members[-1]
    points = merge_commit_points(members)
    index_by_key: dict[Hashable, int] = {}
    facts: list[FigureFacts] = []
    rows = [_make_row(point, index_by_key, facts) for point in points.values()]
    place = HistoryPlace(
        oldest.commit,
        commit_date(oldest),
        oldest.sort_key[0] * 1000,
        newest.run.started,
        dict(newest.identity.machine),
        oldest.identity.home.python,
        oldest.identity.home.interpreter,
    )
    layout = _encode_layout(tuple(collect_series(members)), tuple(points))
    return FigureTable(place, layout, tuple(map(json.dumps, facts)), np.array(rows, dtype=ROW).tobytes())


def _make_row(
    point: Point, index_by_key: dict[Hashable, int], facts: list[FigureFacts]
) -> tuple[float, float, float, int]:
    value, low, high = median_with_interval(point)
    properties = (
        point.version,
        point.runs,
        len(point.samples),
        value is not None,
        low is not None,
        point.hasty,
        point.status,
        point.reason,
    )
    # Measuring conditions are long and many points share them, so each is hashed only once.
    conditions_index = index_by_key.get(id(point.under))
    if conditions_index is None:
        conditions_index = index_by_key[id(point.under)] = index_by_key.setdefault(point.under, len(index_by_key))
    figure_facts_index = index_by_key.setdefault((*properties, conditions_index), len(facts))
    if figure_facts_index == len(facts):
        facts.append(FigureFacts(*properties, point.under))
    # `has_value` and `has_interval` show which zeros stand for missing numbers.
    return value or 0.0, low or 0.0, high or 0.0, figure_facts_index


def read_facts(text: str) -> FigureFacts:
    facts = FigureFacts._make(json.loads(text))
    return facts._replace(status=Status(facts.status), under=tuple((name, fact) for name, fact in facts.under))


def median_with_interval(point: Point) -> tuple[float | None, float | None, float | None]:
    """Returns the median of a point's samples and the two ends of its confidence interval. Each is None if there are
    too few samples.
    """
    value, stats = summarize_samples(point.samples)
    if stats is None or stats.repeat < 2 or not (math.isfinite(stats.ci_99_a) and math.isfinite(stats.ci_99_b)):
        return value, None, None
    return value, stats.ci_99_a, stats.ci_99_b


def commit_date(tracked: TrackedRun) -> int | None:
    date = tracked.run.environment.get("commit_date")
    return date if isinstance(date, int) else None


@lru_cache(maxsize=_MAX_CACHED_LAYOUTS)  # cells have only strings and integers: 1 == 1.0, but their JSON differs
def _encode_layout(series: tuple[Series, ...], points: tuple[tuple[str, Cell], ...]) -> str:
    index_by_name = {metric.name: series_index for series_index, metric in enumerate(series)}
    series_values = [list(vars(metric).values()) for metric in series]
    return json.dumps(
        [series_values, [[index_by_name[name], values] for name, values in points]], separators=(",", ":")
    )


@lru_cache(maxsize=_MAX_CACHED_LAYOUTS)
def read_layout(text: str) -> Layout:
    series, cells = json.loads(text)
    return Layout(
        tuple(map(_decode_series, series)), tuple((series_index, tuple(values)) for series_index, values in cells)
    )


def _decode_series(values: Sequence[Any]) -> Series:
    name, workload, metric, unit, names, params, version = values
    return Series(name, workload, metric, unit, tuple(names), tuple(map(tuple, params)), version)
