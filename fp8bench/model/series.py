"""The values of a history: series of points, one per run; a commit's figures; changes; and faults of a store.

Also comparisons of a figure on two sides (runs, interpreters or commits), and acknowledged changes. Lower is better
everywhere here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from fp8bench.model.measured import Interval
from fp8bench.model.planned import Scalar
from fp8bench.model.words import Status

Cell = tuple[Scalar, ...]
# Software, settings and device of a measurement, by name.
Conditions = tuple[tuple[str, Scalar | None], ...]
# The condition without whose equality joules do not compare at all.
ENERGY_SOURCE = "energy_source"


@dataclass(frozen=True)
class Series:
    """One metric of a workload over its declared grid: what asv calls a benchmark.

    `name` is asv's ('gemm.Gemm.track_time'). `params` are the values of each parameter, the dtype first; a cell has one
    of each. Points of different versions do not compare.
    """

    name: str
    workload: str
    metric: str
    unit: str
    param_names: tuple[str, ...]
    params: tuple[tuple[Scalar, ...], ...]
    version: str


@dataclass(frozen=True)
class Point:
    """One run's samples for one cell of a series, in the series' unit.

    OK without samples means that the case has no such number (an emulated one no speed); `reason` is why a case was
    skipped or failed. A `hasty` one comes from a few rounds, as with --quick. Samples are pooled only with those
    measured `under` the same conditions; `runs` counts the pooled runs.
    """

    series: str
    cell: Cell
    version: str
    samples: tuple[float, ...]
    status: Status = Status.OK
    reason: str = ""
    hasty: bool = False
    under: Conditions = ()
    runs: int = field(default=1, compare=False)


@dataclass(frozen=True)
class Figure:
    """A commit's figure in one cell of a series: the median of the samples of `runs` runs, and asv's interval.

    `date` is the commit's author date, in ms since 1970. `value` is None without a number; then `status` and `reason`
    explain it. `low` and `high` are the ends of a 99% interval, None where samples are too few.
    """

    commit: str
    date: int | None
    version: str
    runs: int
    samples: int
    value: float | None
    low: float | None = None
    high: float | None = None
    hasty: bool = False
    status: Status = Status.OK
    reason: str = ""
    under: Conditions = ()

    @property
    def source(self) -> Scalar | None:
        """The source of joules, which only compare within one source; None for other figures."""
        return dict(self.under).get(ENERGY_SOURCE)


@dataclass(frozen=True)
class Trend:
    """One cell of a series from commit to commit, on one machine and under one interpreter.

    `machine` is what asv knows of the machine, its name under 'machine'. `figures` are in the order of their commits'
    dates.
    """

    series: Series
    cell: Cell
    machine: Mapping[str, Scalar | None]
    python: str
    figures: tuple[Figure, ...]

    @property
    def name(self) -> str:
        """For example 'gemm.Gemm.track_time(bf16, 512)'."""
        return trend_name(self.series.name, self.cell)

    @property
    def measured_figures(self) -> tuple[Figure, ...]:
        return tuple(figure for figure in self.figures if figure.value is not None)

    @property
    def ending(self) -> Ending:
        # Points without a figure, as of a build that failed, do not end a trend.
        earlier = [figure for figure in self.figures[:-1] if figure.value is not None]
        return Ending(self, self.figures[-1], earlier[-1] if earlier else None, len(self.measured_figures))


class Ending(NamedTuple):
    """The end of a trend: its last figure, the previous figure that has a number, and how many have one.

    In lists of endings the trends have no figures.
    """

    trend: Trend
    last: Figure
    before: Figure | None
    points: int


def trend_name(series: str, cell: Cell) -> str:
    return f"{series}({', '.join(map(str, cell))})"


@dataclass(frozen=True)
class Fault:
    """Something that a person should know about a file of a store: where, what, and what to do about it.

    `broken` means that something is lost, wrong or hidden from readers; else it is a remark.
    """

    path: str
    what: str
    remedy: str
    broken: bool = True


class Direction(StrEnum):
    """The direction of a figure from the first side to the second. DIFFERS: the sides were measured under different
    conditions, which `why` names, so that a ratio judges nothing. NONE: nothing can be compared, for the reason in
    `why`.
    """

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    UNSURE = "cannot tell"
    DIFFERS = "differs"
    NONE = "none"


class Evidence(StrEnum):
    """How the two sides were measured, the most reliable way first; a gate decides by it."""

    PAIRED = "paired"  # in the same rounds
    CROSS_RUN = "cross-run"  # at different times
    HISTORY = "history"  # a step in a series of commits


@dataclass(frozen=True)
class Noise:
    """The standard error of a ratio's logarithm, with its degrees of freedom.

    `before` and `after` are the runs of each side that it rests on, 0 in a duel. With no freedom it is the error within
    runs only, and how far runs lie apart is unknown.
    """

    error: float
    freedom: int
    before: int = 0
    after: int = 0


@dataclass(frozen=True)
class Comparison:
    """One figure of one case on both sides.

    `before` and `after` are in `unit`, None where that side has no value; `ratio` is after over before. `p_value` is
    the chance of such a difference or a greater one if nothing had changed, None where unknown. `since` and `until` are
    the commits between which a step of a series lies, '' elsewhere. `failed`: the case failed on the second side only.
    `noise` is None where unknown. Other processes may have made a time `others` times as long on one side.
    """

    case: str
    suite: str
    metric: str
    unit: str
    direction: Direction
    evidence: Evidence
    before: float | None = None
    after: float | None = None
    ratio: Interval | None = None
    p_value: float | None = None
    labels: tuple[str, ...] = ()
    why: str = ""
    since: str = ""
    until: str = ""
    failed: bool = False
    noise: Noise | None = None
    others: float = 1.0


@dataclass(frozen=True)
class Ack:
    """An acknowledged change of one cell of a series on one machine and under one interpreter.

    It lies after the commit `since` and not after `until`; `before` and `after` are levels in the series' unit. `when`
    it was acknowledged, and `because` of what.
    """

    id: str
    series: str
    cell: Cell
    machine: str
    python: str
    version: str
    direction: Direction
    since: str
    until: str
    before: float
    after: float
    when: str
    because: str = ""
