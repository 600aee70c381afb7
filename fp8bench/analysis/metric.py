"""One figure of a case: its unit, which way it becomes better, and what else a reader must know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from fp8bench import units
from fp8bench.model import RELATIVE, Capacity, Interval, Label, Level, Provenance, Record, Series, metric_names
from fp8bench.model.metric_names import RELATIVE_LOSS, OwnMetric

STEP = metric_names.STEP
TIME, ENERGY, MEMORY = OwnMetric.TIME, OwnMetric.ENERGY, OwnMetric.PEAK_MEMORY
# Of all calls, where the others are of the fastest ones.
# Of the device alone, without the host's launches.
REPLAY = OwnMetric.REPLAY_TIME
MEAN, RELATIVE_MEAN = OwnMetric.MEAN_TIME, OwnMetric.RELATIVE_MEAN_TIME
RATIOS = frozenset({RELATIVE, RELATIVE_MEAN})
# What a tape counts exactly of a step, in its unit: the same code gives the same number, and any other is news.
COUNTS: Mapping[str, str] = {OwnMetric.FLOPS: "FLOP", OwnMetric.MOVED_BYTES: "B", OwnMetric.LAUNCHES: "count"}
# Counts of Work that a time can be told per: the metric's name, and how many of them.
PER: Mapping[str, tuple[str, float]] = {
    "flops": (OwnMetric.SECONDS_PER_TFLOP, 1e12),
    "tokens": (OwnMetric.SECONDS_PER_MTOK, 1e6),
    "bytes": (OwnMetric.SECONDS_PER_GB, 1e9),
}
# Two builds of one program differ by as much for where their code and data lie.
BAND = 0.01
# Sums in another order move the mean loss of the suite learning by a third of it.
LOSS_BAND = 0.001
# What a clock or a sensor says is never the same twice.
_NOISY_UNITS = frozenset({"s", "J", "W"})
# Neither more nor less of these is better.
_NO_MATTER = frozenset({"utilisation_percent", "dynamic_range_octaves", "subnormal_percent"})


class Better(StrEnum):
    """Which way a figure becomes better."""

    LOWER = "lower"
    HIGHER = "higher"
    NONE = "none"


class Rank(StrEnum):
    """Who tells a figure: a DETAIL is a part of another figure or follows from one, and boards leave it out. What is
    RESTATED stands in another figure's row already, and is one of its own in the history and in comparisons alone."""

    MAIN = "main"
    DETAIL = "detail"
    RESTATED = "restated"


class EnergyConditions(NamedTuple):
    """What an energy is worth, in a word, and the power limits in watts that its device has had in the run."""

    validity: str
    power_limits: tuple[float, ...]


@dataclass(frozen=True)
class Metric:
    """One figure of a case. Values are in `unit`: `value` the middle of all samples, `best` that of a step undisturbed.

    `phase` is that of the step, STEP for all of it, None for what the data are made of (`about`: their kind and role).
    `interval` is over the reference's; its level is 1 for an exact ratio and 0 for a range without a confidence.
    `cost` says that it is what an emulation costs, and no figure of the precision. `samples` gives what the history
    keeps of it: one value a round or a window. `of_rank` is the process that it is of, where each of several has one,
    and `bounds` what `value` itself may be, where its rounds say that.
    """

    name: str
    unit: str
    value: float | None = None
    best: float | None = None
    phase: str | None = STEP
    about: tuple[str, str] | None = None
    interval: Interval | None = None
    provenance: Provenance | None = None
    better: Better = Better.LOWER
    rank: Rank = Rank.MAIN
    cost: bool = False
    rounds: int | None = None
    count: int | None = None
    verdict: str = ""
    why: str = ""
    labels: tuple[Label, ...] = ()
    source: str = ""
    energy: EnergyConditions | None = None
    of_rank: int | None = None
    bounds: tuple[float, float] | None = None
    samples: Callable[[], tuple[float, ...]] = field(default=tuple, compare=False, repr=False)

    @property
    def noisy(self) -> bool:
        """Whether the same code gives another number each time."""
        return self.unit in _NOISY_UNITS


class Reference(NamedTuple):
    """What a case is held against, with the labels of its finding."""

    record: Record
    labels: tuple[Label, ...] = ()


def least_change(name: str) -> float:
    """By what share a figure must have moved to have changed."""
    return 0.0 if name in COUNTS else LOSS_BAND if name == RELATIVE_LOSS else BAND


def better_of(name: str) -> Better:
    """Which way a number that a suite measures becomes better: of an error, memory and their like less is."""
    if name.endswith("_db") or name == OwnMetric.CEILING_RATE:
        return Better.HIGHER
    return Better.NONE if name in _NO_MATTER else Better.LOWER


def unit_of_series(series: Series) -> str:
    """The unit of a series' values as everywhere else; asv has words of its own for some, and for others none."""
    return "x" if series.metric in RATIOS else units.symbol(series.unit)


def capacity_ratio(record: Record, reference: Record | None) -> float | None:
    """How many times the reference's batch a case fits; None for the reference, and where either is no number.

    An emulated precision keeps its values in wider ones, on either side: what it fits says nothing.
    """
    if reference is None or reference is record or Level.EMULATED in (record.support.level, reference.support.level):
        return None
    own, base = record.capacity, reference.capacity
    if own is None or base is None or own.batch is None or not base.batch:
        return None
    return own.batch / base.batch


def why_no_larger(found: Capacity) -> str:
    """'377: tensors need 1.63 MiB more', or why there is no answer."""
    if found.batch is not None and found.beyond is None:
        return "none: the suite takes no more"
    return f"{found.beyond}: {found.why}" if found.beyond is not None else found.why
