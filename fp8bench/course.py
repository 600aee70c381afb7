"""How figures went from commit to commit, read from the truth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from fp8bench.history.asv_rows import cell
from fp8bench.identity import same_interpreter
from fp8bench.model import Cell, Course, Figure, Point, Scalar, Series, Status, course_name
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


class Home(NamedTuple):
    """A machine and an interpreter, by the name it was first called."""

    machine: str
    python: str


class Placed(NamedTuple):
    """What a commit has come to on one machine under one interpreter.

    `figures` are those of the cells of `series`, which they name by its place there. `began` is when the oldest of its
    runs was started, in ms since 1970, and `newest` when the newest was, as that says it. The interpreter goes by the
    oldest run's name.
    """

    commit: str
    date: int | None
    began: float
    newest: str
    machine: Mapping[str, Scalar | None]
    python: str
    series: tuple[Series, ...]
    figures: tuple[tuple[int, Cell, Figure], ...]

    @property
    def when(self) -> float:
        """The commit's date in ms since 1970; when it was first measured where that is not known."""
        return self.date if self.date is not None else self.began

    @property
    def home(self) -> Home:
        return Home(str(self.machine["machine"]), self.python)


@dataclass
class _Line:
    """A course that is being read: its newest shape, its rank among the metrics, figures with when they belong."""

    course: Course
    rank: int
    newest: str = ""
    figures: list[tuple[float, Figure]] = field(default_factory=list)


def read_courses(store: Path, wanted: Callable[[str], bool]) -> Courses:
    """All courses whose name is wanted, sorted. Cells that never had a number and never failed have none.

    Every run is read; `index.opening` says the same from what was written down of them.
    """
    lines: dict[tuple[Home, str, Cell], _Line] = {}
    homes: list[Home] = []
    left: Counter[str] = Counter()
    runs = commits = 0
    for paths in files_by_commit(store).values():
        heard = hear(paths)
        left.update(one.why for one in heard.left)
        runs += len(heard.told)
        commits += bool(heard.told)
        for members in by_place(heard.told):
            place = placed(members, wanted)
            home = home_of(place.home, homes)
            for rank, values, figure in place.figures:
                course = Course(place.series[rank], values, place.machine, home.python, ())
                line = lines.setdefault((home, course.series.name, values), _Line(course, rank))
                if place.newest > line.newest:
                    line.course, line.rank, line.newest = course, rank, place.newest
                line.figures.append((place.when, figure))
    found = sorted((line for line in lines.values() if _tells(line)), key=lambda one: order(one.course, one.rank))
    return Courses(tuple(map(_in_order, found)), runs, commits, left)


def home_of(own: Home, homes: list[Home]) -> Home:
    """Where a run belongs, among those that are known, which it joins: bin/python and bin/python3 are one."""
    for home in homes:
        alike = home.python == own.python or same_interpreter(home.python, own.python)
        if home.machine == own.machine and alike:
            return home
    homes.append(own)
    return own


def placed(members: Sequence[Told], wanted: Callable[[str], bool]) -> Placed:
    """What the runs of one commit, machine and interpreter come to, oldest first, in the courses that are wanted."""
    series = series_told(members)
    ranks = {one.name: rank for rank, one in enumerate(series)}
    points = [point for told in members for point in told.content.points]
    by_cell: dict[tuple[str, Cell], list[Point]] = {}
    for point in points:
        by_cell.setdefault((point.series, point.cell), []).append(point)
    date = members[0].run.environment.get("commit_date")
    return Placed(
        members[0].commit, date if isinstance(date, int) else None, members[0].order[0] * 1000,
        members[-1].run.started, members[-1].identity.machine, members[0].identity.python, tuple(series),
        tuple(
            (ranks[name], values, figure_of(members[0], point, _runs_of(point, by_cell[name, values])))
            for (name, values), point in merged(points, series).items()
            if wanted(course_name(name, values))
        ),
    )  # fmt: skip


def _runs_of(point: Point, points: Sequence[Point]) -> int:
    """How many runs a merged point was made of."""
    alike = [one for one in points if one.version == point.version]
    if not point.samples:
        return len(alike)
    return sum(bool(one.samples) and (one.hasty, one.under) == (point.hasty, point.under) for one in alike)


def figure_of(told: Told, point: Point, runs: int) -> Figure:
    """What a point says of its commit, or of the files that a run was made with; `runs` went into it."""
    date = told.run.environment.get("commit_date")
    value, stats = cell(point.samples)
    low, high = (stats.ci_99_a, stats.ci_99_b) if stats is not None else (-math.inf, math.inf)
    known = math.isfinite(low) and math.isfinite(high) and len(point.samples) > 1
    return Figure(
        told.commit, date if isinstance(date, int) else None, point.version, runs, len(point.samples), value,
        low if known else None, high if known else None, point.hasty, point.status, point.reason, point.under,
    )  # fmt: skip


def _in_order(line: _Line) -> Course:
    return replace(line.course, figures=tuple(one for _, one in sorted(line.figures, key=lambda pair: pair[0])))


def _tells(line: _Line) -> bool:
    return any(one.value is not None or one.status is Status.FAILED for _, one in line.figures)


def order(course: Course, rank: int) -> tuple[object, ...]:
    """Machine and interpreter, suite, metric as its suite declares them, cell as the grid does."""
    place = [values.index(value) for values, value in zip(course.series.params, course.cell, strict=True)]
    return course.machine["machine"], course.python, course.series.workload, rank, place
