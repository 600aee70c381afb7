"""What a report is made from: runs with their findings, a label for each, and the history of their cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from types import MappingProxyType

from fp8bench.model import Finding, Run
from fp8bench.report.panels import Panel, panels_of
from fp8bench.report.words.naming import COMMIT_LETTERS, devices_of, fact, many, shortened, suites_of

LONGEST_LABEL = 40
_MOST_SUITES = 3


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
    """Runs side by side, in the order they were named; most reports have one.

    `gathered` is what sections have read of the store beside them, by their names.
    """

    entries: tuple[Entry, ...]
    past: tuple[PastSeries, ...] = ()
    gathered: Mapping[str, object] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        return len(self.entries) == 1

    def panels(self) -> Iterator[tuple[Entry, Panel]]:
        return ((entry, panel) for entry in self.entries for panel in entry.panels)


def material_of(
    runs: Sequence[Run],
    findings: Sequence[Mapping[str, Finding]],
    past: tuple[PastSeries, ...] = (),
    gathered: Mapping[str, object] = MappingProxyType({}),
) -> Material:
    labelled = zip(runs, findings, labels_of(runs), strict=True)
    return Material(tuple(Entry(run, found, label) for run, found, label in labelled), past, gathered)


def labels_of(runs: Sequence[Run]) -> list[str]:
    """The shortest words that tell the runs apart, '' for one that is alone.

    What differs is tried in the order in which it explains numbers: one thing, then two of them, then the id, which
    always differs unless a run is named twice.
    """
    if len(runs) < 2:
        return [""] * len(runs)
    sources = [tuple(shortened(source(run), LONGEST_LABEL) for run in runs) for source in _SOURCES]
    chosen = [words for words in sources if all(words)]
    pairs = [
        tuple(f"{one}, {other}" for one, other in zip(*two, strict=True))
        for two in combinations([words for words in chosen if len(set(words)) > 1], 2)
    ]
    ids = tuple(run.id or "run" for run in runs)
    return list(next((words for words in (*chosen, *pairs) if len(set(words)) == len(runs)), _numbered(ids)))


def _suites(run: Run) -> str:
    found = suites_of(run)
    return ", ".join(found) if len(found) <= _MOST_SUITES else many(len(found), "suite")


_SOURCES: tuple[Callable[[Run], str], ...] = (
    lambda run: ", ".join(devices_of(run)),
    lambda run: fact(run, "commit")[:COMMIT_LETTERS],
    lambda run: fact(run, "machine"),
    lambda run: f"torch {fact(run, 'torch')}" if fact(run, "torch") else "",
    _suites,
    lambda run: ",".join(dict.fromkeys(record.case.mode for record in run.records)),
)


def _numbered(words: Sequence[str]) -> tuple[str, ...]:
    numbers = (words[: place + 1].count(word) for place, word in enumerate(words))
    return tuple(f"{word} ({n})" if words.count(word) > 1 else word for word, n in zip(words, numbers, strict=True))


def titled_panels(material: Material) -> Iterator[tuple[str, Panel]]:
    """Every panel under a short title: the suite, and device, run and reference where those tell it from others."""
    panels = list(material.panels())
    suites = [_title(material, entry, panel) for entry, panel in panels]
    counts = Counter(suites)
    for (_, panel), title in zip(panels, suites, strict=True):
        against = f" against {panel.reference}" if counts[title] > 1 and panel.reference else ""
        yield title + against, panel


def _title(material: Material, entry: Entry, panel: Panel) -> str:
    words = panel.case.workload
    if len({one.case.device for one in entry.panels}) > 1:
        words += f" on {panel.case.device}"
    return words if material.alone or not entry.label else f"{words}, {entry.label}"
