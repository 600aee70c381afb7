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
    """What one commit (or run without one) has come to: the median of its samples with their interval."""

    when: str
    commit: str
    value: float
    low: float | None
    high: float | None
    samples: int


@dataclass(frozen=True)
class PastSeries:
    """The history of one case's metric on one machine, oldest first."""

    name: str
    unit: str
    figures: tuple[PastFigure, ...]


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
