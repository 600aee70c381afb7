"""Defines the data of a history: series of points (one point per run), figures of commits, and faults of stored files.

Also defines comparisons of a figure between two sides (runs, interpreters or commits), and acknowledged changes. In all
figures of a history, lower is better.
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
# The conditions of a measurement: facts about its software, settings and device, by name.
Conditions = tuple[tuple[str, Scalar | None], ...]
# The name of a condition: the source of energies. Energies from different sources cannot be compared.
ENERGY_SOURCE = "energy_source"


@dataclass(frozen=True)
class Series:
    """One metric of a workload for all combinations of its parameters.

    `name` is the name for asv, such as 'gemm.Gemm.track_time'. `params` are the values of each parameter, those of the
    dtype first. A cell of the series is one combination: one value of each parameter. Points of different versions
    cannot be compared.
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
    """The samples of one run for one cell of a series, in the unit of the series.

    A case with status OK has no samples if the metric does not apply to it: for example, an emulated case has no speed.
    `reason` is the reason why a case was skipped or failed. A `hasty` point comes from only a few rounds, as with
    --quick. `under` are the conditions of the measurement. Samples of several runs are pooled only if their conditions
    are equal, and `runs` counts the pooled runs.
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
    """The value of a commit in one cell of a series: the median over the samples of `runs` runs.

    `date` is the author date of the commit in ms since 1970. If `value` is None, `status` and `reason` explain why.
    `low` and `high` are the ends of a 99% interval; None if there are too few samples.
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
        """The source of the figure's energy; None if the figure is not an energy."""
        return dict(self.under).get(ENERGY_SOURCE)


@dataclass(frozen=True)
class Trend:
    """One cell of a series over commits, on one machine and with one interpreter.

    `machine` is asv's description of the machine, with its name under 'machine'. `figures` are ordered by the dates
    of their commits.
    """

    series: Series
    cell: Cell
    machine: Mapping[str, Scalar | None]
    python: str
    figures: tuple[Figure, ...]

    @property
    def name(self) -> str:
        """The name of the trend, such as 'gemm.Gemm.track_time(bf16, 512)'."""
        return trend_name(self.series.name, self.cell)

    @property
    def measured_figures(self) -> tuple[Figure, ...]:
        return tuple(figure for figure in self.figures if figure.value is not None)

    @property
    def ending(self) -> Ending:
        # Skip earlier figures without a number, such as those of failed builds.
        earlier_figures = [figure for figure in self.figures[:-1] if figure.value is not None]
        return Ending(
            self, self.figures[-1], earlier_figures[-1] if earlier_figures else None, len(self.measured_figures)
        )


class Ending(NamedTuple):
    """The end of a trend: its last figure, the last figure with a number before that one, and how many figures have a
    number.

    `trend.figures` may be empty, because making all figures of many trends takes long. `points` counts them anyway.
    """

    trend: Trend
    last: Figure
    before: Figure | None
    points: int


def trend_name(series: str, cell: Cell) -> str:
    return f"{series}({', '.join(map(str, cell))})"


@dataclass(frozen=True)
class Fault:
    """A fault of a file in a store, or a remark about a file: the file, what is wrong, and what to do.

    `broken` is True for a fault, which means that something is lost, wrong or not found by readers. `broken` is False
    for a remark.
    """

    path: str
    what: str
    remedy: str
    broken: bool = True


class Direction(StrEnum):
    """How a figure changes from the first side of a comparison to the second. DIFFERS: the sides were measured under
    different conditions, which `Comparison.why` names, so their ratio proves nothing. NONE: nothing can be compared,
    for the reason in `Comparison.why`.
    """

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    UNSURE = "cannot tell"
    DIFFERS = "differs"
    NONE = "none"


class Evidence(StrEnum):
    """How the two sides of a comparison were measured, the most reliable way first. A gate decides by this evidence."""

    PAIRED = "paired"  # both sides were measured in the same rounds
    CROSS_RUN = "cross-run"  # the sides were measured at different times
    HISTORY = "history"  # the sides are before and after a jump in a series of commits


@dataclass(frozen=True)
class Noise:
    """The standard error of the logarithm of a ratio, and its degrees of freedom.

    `before` and `after` are the numbers of runs on the first and second side, 0 in a duel (both sides measured in the
    same rounds). With 0 degrees of freedom, it is unknown how much runs differ, and `error` is only the error within
    runs.
    """

    error: float
    freedom: int
    before: int = 0
    after: int = 0


@dataclass(frozen=True)
class Comparison:
    """One figure of one case on both compared sides (runs, interpreters or commits).

    `before` and `after` are the values of the first and second side in `unit`, None if the side has no value. `ratio`
    is after / before. `p_value` is the probability of at least this difference if nothing had changed, None if unknown.
    If the figure is from a series, it changed after the commit `since` and at the latest with the commit `until`;
    otherwise both are ''. `failed` means that the case failed only on the second side. `noise` is None if unknown.
    `others` is the factor by which other processes may have lengthened the times of either side, so `ratio` may be too
    large or too small by this factor.
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
    """An acknowledged change of a series in one cell of its grid, on one machine and with one interpreter.

    The change happened after the commit `since` and at the latest with the commit `until`. `before` and `after` are
    the values before and after the change, in the unit of the series. `when` is the time of the acknowledgement, and
    `because` is its reason.
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
