"""What a history is made of: series of points, a point for every run; what a commit came to; what is wrong with it.

And what a figure came to on two sides (two runs, interpreters or commits), with the changes that somebody has accepted:
lower is better there, always.
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
# Software, settings and device that something was measured under, by name.
Conditions = tuple[tuple[str, Scalar | None], ...]
# The condition of joules that makes them incomparable, and not only others.
ENERGY_SOURCE = "energy_source"


@dataclass(frozen=True)
class Series:
    """One metric of a workload over its declared grid: what asv calls a benchmark. Lower is better, always.

    `name` is asv's ('gemm.Gemm.track_time'). `params` are the values of each parameter, the dtype first; a cell is one
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
    """What one run says of one cell of a series: raw samples in the series' unit.

    OK without samples means that the case has no such number (an emulated one no speed); `reason` is that of a case
    that was skipped or failed. A `hasty` one comes from a few rounds, to see that something runs. Samples are put
    together with those measured `under` the same conditions only, of so many `runs`.
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
    """What a commit came to in one cell of a series: the median of the samples of `runs` runs, and asv's interval.

    `date` is that of the commit's author, in ms since 1970. `value` is None where there is no number; then `status` and
    `reason` say why. `low` and `high` are the ends of a 99% interval, None where samples are too few for one.
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
        """Where joules come from: those of different sources do not compare. None for anything else."""
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
        """As a person writes it: 'gemm.Gemm.track_time(bf16, 512)'."""
        return trend_name(self.series.name, self.cell)

    @property
    def measured(self) -> tuple[Figure, ...]:
        return tuple(figure for figure in self.figures if figure.value is not None)

    @property
    def ending(self) -> Ending:
        before = [figure for figure in self.figures[:-1] if figure.value is not None]
        return Ending(self, self.figures[-1], before[-1] if before else None, len(self.measured))


class Ending(NamedTuple):
    """How a trend ends: its last figure, the last one before it that has a number, and how many have one.

    Whoever asks for endings gets trends without figures.
    """

    trend: Trend
    last: Figure
    before: Figure | None
    points: int


def trend_name(series: str, cell: Cell) -> str:
    return f"{series}({', '.join(map(str, cell))})"


@dataclass(frozen=True)
class Fault:
    """Something about a file of a store that a person should know: where, what, and what to do about it.

    `broken` means that something is lost, wrong or hidden from its readers because of it; else it is worth knowing.
    """

    path: str
    what: str
    remedy: str
    broken: bool = True


class Direction(StrEnum):
    """Where a figure went from the first side to the second. NONE: there is nothing to compare, and `why` says why."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    UNSURE = "unsure"
    NONE = "none"


class Evidence(StrEnum):
    """How the two sides were measured, the most telling first: it decides what a gate may believe."""

    PAIRED = "paired"  # in the same rounds
    CROSS_RUN = "cross-run"  # at different times
    HISTORY = "history"  # a step in a series of commits


@dataclass(frozen=True)
class Noise:
    """How far a ratio's logarithm lies from the truth by chance: its standard deviation, by so many degrees of freedom.

    `before` and `after` are the runs of each side that it rests on, 0 in a duel. Without freedom the deviation is that
    within runs alone, and nobody knows how far runs lie apart.
    """

    error: float
    freedom: int
    before: int = 0
    after: int = 0


@dataclass(frozen=True)
class Comparison:
    """One figure of one case on both sides.

    `before` and `after` are in `unit`, None where that side has none; `ratio` is after over before with its interval.
    `p_value` is the chance of such a difference or a greater one if nothing had changed, None where nobody can say.
    `since` and `until` are the commits between which a step of a series lies, '' elsewhere. `failed` says that the case
    failed on the second side, where it had not on the first. `noise` is None where there is none, or nobody knows it.
    What other processes took may have made a time `others` times as long on one side.
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
    """A change of one cell of a series on one machine and under one interpreter.

    It lies after the commit `since` and not after `until`; the levels `before` and `after` it are in the series' unit.
    `when` is the time it was acknowledged, and `because` what was said of it.
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
