"""What a report is made from: runs with their findings, and the history of their cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from fp8bench.model import Finding, Run
from fp8bench.report.blocks import Panel, panels_of


@dataclass(frozen=True)
class Entry:
    """One run of a report. `label` tells it from the others ('cuda:0', 'a1b2c3d4', 'box 2'); '' where it is alone."""

    run: Run
    findings: Mapping[str, Finding]
    label: str = ""

    @cached_property
    def panels(self) -> tuple[Panel, ...]:
        """What every section reads, made once."""
        return panels_of(self.run, self.findings)


@dataclass(frozen=True)
class PastFigure:
    """What one commit has come to: the median of its samples with their interval.

    `when` is the commit's date in words; `order` puts those of several series into one row. A `hasty` figure is of a
    few rounds only. `unkept` is that of a run at hand whose files differed from the commit.
    """

    when: str
    commit: str
    value: float
    low: float | None
    high: float | None
    samples: int
    hasty: bool = False
    unkept: bool = False
    order: float = 0.0


@dataclass(frozen=True)
class PastSeries:
    """The history of one case's metric on one machine, oldest first.

    `unit` is an axis's ('s', 'B', 'x', '' for a relative error) or a metric's ('%', 'dB'). `place` are the parameters
    that tell the case from its suite's others. `incomparable` counts figures of other versions of the suite, which are
    left out.
    """

    name: str
    unit: str
    figures: tuple[PastFigure, ...]
    suite: str = ""
    metric: str = ""
    precision: str = ""
    place: str = ""
    machine: str = ""
    emulated: bool = False
    incomparable: int = 0


@dataclass(frozen=True)
class Material:
    """Runs side by side, in the order they were named; most reports have one."""

    entries: tuple[Entry, ...]
    past: tuple[PastSeries, ...] = ()

    @property
    def alone(self) -> bool:
        return len(self.entries) == 1

    def panels(self) -> Iterator[tuple[Entry, Panel]]:
        """Every panel of every run."""
        for entry in self.entries:
            for panel in entry.panels:
                yield entry, panel
