"""Defines `Metric`, one figure of a case with its unit, direction, conditions and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from fp8bench import units
from fp8bench.model import Capacity, Finding, Interval, Label, Level, Provenance, Record, Series
from fp8bench.model.specs import RELATIVE_TIMES, STEP, Better, MetricSpec, Rank

ReadSamples = Callable[[], tuple[float, ...]]


class EnergyConditions(NamedTuple):
    """The validity of an energy figure, and the device's power limits in watts during the run."""

    energy_validity_text: str
    power_limits: tuple[float, ...]


@dataclass(frozen=True)
class Metric:
    """One figure of a case. `value` is the median of all samples, and `best` is the figure of the best case.

    `phase` is STEP for the whole step, and None for statistics of tensors, whose kind and role are `about`. `interval`
    is the ratio to the reference. Its level is 1 for an exact ratio, and 0 for the range of a few rounds. `cost` is
    True for a time of emulation, which does not show the speed of the precision. `rounds` and `count` are the numbers
    of rounds and of samples. `source` is the sensor of an energy figure, or ''. `samples` returns the values for the
    history, one per round or window. `bounds` is the interval of `value`.
    """

    spec: MetricSpec
    value: float | None = None
    best: float | None = None
    phase: str | None = STEP
    about: tuple[str, str] | None = None
    interval: Interval | None = None
    provenance: Provenance | None = Provenance.DERIVED
    cost: bool = False
    rounds: int | None = None
    count: int | None = None
    verdict: str = ""
    why: str = ""
    labels: tuple[Label, ...] = ()
    source: str = ""
    energy: EnergyConditions | None = None
    bounds: tuple[float, float] | None = None
    samples: ReadSamples = field(default=tuple, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def unit(self) -> str:
        return self.spec.unit

    @property
    def better(self) -> Better:
        return self.spec.better

    @property
    def rank(self) -> Rank:
        return self.spec.rank

    @property
    def noisy(self) -> bool:
        return self.spec.noisy

    @property
    def shown(self) -> str:
        return self.spec.format_value(self.value)


class Reference(NamedTuple):
    """The record that a case is compared with, and the labels of that record."""

    record: Record
    labels: tuple[Label, ...] = ()


class MetricSources(NamedTuple):
    """The sources from which a case's metrics are computed.

    Metrics of best cases need `finding`. `steps` is a function that returns the samples of a step's time.
    `sample_counts` has the numbers of rounds and calls.
    """

    record: Record
    finding: Finding | None = None
    reference: Reference | None = None
    steps: ReadSamples = tuple
    sample_counts: Mapping[str, Any] = MappingProxyType({})

    @property
    def base(self) -> Record | None:
        return self.reference.record if self.reference is not None else None

    @property
    def is_emulated(self) -> bool:
        return self.record.support.is_emulated


def get_series_unit(series: Series) -> str:
    """Returns the unit in which a series is displayed. asv stores some units under other names."""
    return "x" if series.metric in RELATIVE_TIMES else units.get_unit_symbol(series.unit)


def capacity_ratio(record: Record, reference: Record | None) -> float | None:
    """Returns the case's largest batch divided by the reference's. Returns None for the reference, or if either batch
    is unknown.

    Emulated precisions have no ratio, because they store their values in wider formats.
    """
    if reference is None or reference is record or Level.EMULATED in (record.support.level, reference.support.level):
        return None
    if record.capacity is None or record.capacity.batch is None:
        return None
    reference_batch = reference.capacity.batch if reference.capacity is not None else None
    return record.capacity.batch / reference_batch if reference_batch else None


def explain_batch_limit(capacity: Capacity) -> str:
    """Returns the next larger batch and why it does not fit, like '377: tensors need 1.63 MiB more', or why this batch
    is unknown.
    """
    if capacity.batch is not None and capacity.beyond is None:
        return "none: the suite allows no larger batch"
    return f"{capacity.beyond}: {capacity.why}" if capacity.beyond is not None else capacity.why
