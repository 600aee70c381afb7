"""How figures went from commit to commit, read from the truth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from fp8bench.history.asv_rows import cell
from fp8bench.identity import same_interpreter
from fp8bench.model import Cell, Course, Figure, Point, Status
from fp8bench.points import merged
from fp8bench.telling import by_place, files_by_commit, hear
from fp8bench.view import Told, series_told


@dataclass(frozen=True)
class Courses:
    """What a store holds: courses, of how many runs and commits, and how many runs were left out, and why."""

    courses: tuple[Course, ...]
    runs: int
    commits: int
    left: Counter[str]


class _Home(NamedTuple):
    """A machine and an interpreter, by the name it was first called."""

    machine: str
    python: str


@dataclass
class _Line:
    """A course that is being read: its newest shape, its rank among the metrics, figures with when they belong."""

    course: Course
    rank: int
    newest: str = ""
    figures: list[tuple[float, Figure]] = field(default_factory=list)


def read_courses(store: Path, wanted: Callable[[str], bool], most: int | None = None) -> Courses:
    """All courses whose name is wanted, sorted. Cells that never had a number and never failed have none.

    With `most` they are those of so many newest runs.
    """
    lines: dict[tuple[_Home, str, Cell], _Line] = {}
    homes: list[_Home] = []
    left: Counter[str] = Counter()
    runs = commits = 0
    for paths in files_by_commit(store, most).values():
        heard = hear(paths)
        left.update(one.why for one in heard.left)
        runs += len(heard.told)
        commits += bool(heard.told)
        for members in by_place(heard.told):
            home = _home(members[0], homes)
            for rank, course, figure in _figures(members, home, wanted):
                line = lines.setdefault((home, course.series.name, course.cell), _Line(course, rank))
                started = members[-1].run.started
                if started > line.newest:
                    line.course, line.rank, line.newest = course, rank, started
                line.figures.append((_when(members[0], figure), figure))
    found = sorted((line for line in lines.values() if _tells(line)), key=_order)
    return Courses(tuple(map(_in_order, found)), runs, commits, left)


def _home(told: Told, homes: list[_Home]) -> _Home:
    """Where a run belongs: bin/python and bin/python3 are one."""
    own = _Home(told.place.machine, told.place.python)
    for home in homes:
        alike = home.python == own.python or same_interpreter(home.python, own.python)
        if home.machine == own.machine and alike:
            return home
    homes.append(own)
    return own


def _figures(
    members: Sequence[Told], home: _Home, wanted: Callable[[str], bool]
) -> Iterator[tuple[int, Course, Figure]]:
    """What a commit came to in each cell, the course that it belongs to, and the rank of its series."""
    series = {one.name: (rank, one) for rank, one in enumerate(series_told(members))}
    points = [point for told in members for point in told.content.points]
    by_cell: dict[tuple[str, Cell], list[Point]] = {}
    for point in points:
        by_cell.setdefault((point.series, point.cell), []).append(point)
    for key, point in merged(points, series_told(members)).items():
        rank, one = series[point.series]
        course = Course(one, point.cell, members[-1].identity.machine, home.python, ())
        if wanted(course.name):
            yield rank, course, figure_of(members[0], point, _runs_of(point, by_cell[key]))


def _runs_of(point: Point, points: Sequence[Point]) -> int:
    """How many runs a merged point was made of."""
    alike = [one for one in points if one.version == point.version]
    if not point.samples:
        return len(alike)
    return sum(bool(one.samples) and (one.hasty, one.under) == (point.hasty, point.under) for one in alike)


def figure_of(told: Told, point: Point, runs: int) -> Figure:
    """What a point says of its commit, or of the files that a run was made with; `runs` went into it."""
    commit, date = told.commit, told.run.environment.get("commit_date")
    figure = Figure(
        commit, date if isinstance(date, int) else None, point.version, runs, len(point.samples), None,
        hasty=point.hasty, status=point.status, reason=point.reason, under=point.under,
    )  # fmt: skip
    if not point.samples:
        return figure
    value, stats = cell(point.samples)
    low, high = (stats.ci_99_a, stats.ci_99_b) if stats is not None else (-math.inf, math.inf)
    known = math.isfinite(low) and math.isfinite(high) and len(point.samples) > 1
    return replace(figure, value=value, low=low if known else None, high=high if known else None)


def _when(first: Told, figure: Figure) -> float:
    """The commit's date in ms; when it was first measured where that is not known."""
    return figure.date if figure.date is not None else datetime.fromisoformat(first.run.started).timestamp() * 1000


def _in_order(line: _Line) -> Course:
    return replace(line.course, figures=tuple(one for _, one in sorted(line.figures, key=lambda pair: pair[0])))


def _tells(line: _Line) -> bool:
    return any(one.value is not None or one.status is Status.FAILED for _, one in line.figures)


def _order(line: _Line) -> tuple[object, ...]:
    """Machine and interpreter, suite, metric as its suite declares them, cell as the grid does."""
    course = line.course
    place = [values.index(value) for values, value in zip(course.series.params, course.cell, strict=True)]
    return course.machine["machine"], course.python, course.series.workload, line.rank, place
