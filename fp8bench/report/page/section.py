"""The material of a report, its sections, and the page that they make.

Material is runs with their findings, and a label for each. A section turns it into elements
and knows no output format. It is a decorated function in the module of its topic (fp8bench/report/topics), or in a
feature's module `section`.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from fp8bench import units
from fp8bench.feature_list import feature_parts
from fp8bench.model import Finding, Run
from fp8bench.report import topics
from fp8bench.report.case_status import cost_tone, is_emulated
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Chart, Element, Field, Page, Part, Table, Text, Tone
from fp8bench.report.page.charts import numbers_table, worth_drawing
from fp8bench.report.panels import NamedCase, Panel, Result, panels_of
from fp8bench.report.words.naming import (
    COMMIT_LETTERS,
    commit_of,
    devices_of,
    fact,
    join_words,
    many,
    shorten_line,
    suites_of,
    when,
)

T = TypeVar("T")
N = TypeVar("N", bound=float)
Elements = Callable[["Material"], Iterator[Element]]
# The most rows of a table with several rows a case.
MOST_ROWS = 300


@dataclass(frozen=True)
class Section:
    """A part of the report: `elements` yields what there is to show of a material, perhaps nothing.

    `rank` is its position on the page. The charts of one that `repeats` show what stands in the main table. `lead`
    stands under the title, and is left out if all elements are texts.
    """

    name: str
    title: str
    rank: int
    elements: Elements
    lead: str | Callable[[Material], str] = ""
    repeats: bool = False

    def build(self, material: Material) -> Part | None:
        elements = tuple(self.elements(material))
        if not elements:
            return None
        lead = self.lead if isinstance(self.lead, str) else self.lead(material)
        return Part(
            self.name, self.title, elements, "" if all(isinstance(element, Text) for element in elements) else lead
        )


_sections: dict[str, Section] = {}


def section(
    name: str, title: str, rank: int, lead: str | Callable[[Material], str] = "", repeats: bool = False
) -> Callable[[Elements], Elements]:
    def register(elements: Elements) -> Elements:
        said = lead or " ".join((elements.__doc__ or "").split())
        _sections[name] = Section(name, title, rank, elements, said, repeats)
        return elements

    return register


def sections() -> dict[str, Section]:
    for module in pkgutil.iter_modules(topics.__path__):
        importlib.import_module(f"{topics.__name__}.{module.name}")
    list(feature_parts("section"))
    return {section.name: section for section in sorted(_sections.values(), key=lambda section: section.rank)}


def case_field(case: NamedCase) -> Field:
    """'fp8 (emulated), m=256 n=256': names a row's case, the precision first."""
    words, tone = mark_emulated(case.result, case.result.mode)
    return Field(", ".join(filter(None, (words, case.place))), tone=tone)


# For rows that begin with their case.
PRECISION: Col[Any] = Col("precision", lambda row: case_field(row[0]), hint="and what tells its case from the others")


def mark_emulated(result: Result, words: str) -> tuple[str, Tone]:
    """The words, marked and grey if the result is emulated."""
    return f"{words} (emulated)" if is_emulated(result) else words, cost_tone(result)


def number(
    value: N | None, show: Callable[[N], str] = units.significant, tone: Tone = Tone.PLAIN, hint: str = ""
) -> Field:
    if value is None:
        return Field(units.NONE)
    return Field(show(value), None if math.isnan(value) else value, tone, hint)


def table_of_cases(
    name: str, title: str, words: str, cols: Sequence[Col[T]], cases: Iterable[tuple[str, Sequence[T]]], beyond: str
) -> Iterator[Element]:
    """A table with several rows a case. Cases that find no room, beyond the first, are named below."""
    rows: list[T] = []
    left_out = []
    for case, own in cases:
        if rows and len(rows) + len(own) > MOST_ROWS:
            left_out.append(case)
        else:
            rows += own
    if rows:
        yield table(name, f"{title}: {words}", cols, rows, kept={col.heading for col in cols[:2]})
    if left_out:
        yield Text(f"{title}: not shown, for want of room: {join_words(left_out)}. {beyond}")


def parts_of(material: Material) -> tuple[Part, ...]:
    built = ((section, section.build(material)) for section in sections().values())
    settled = [
        replace(part, elements=tuple(_replace_small_charts(part, section.repeats))) for section, part in built if part
    ]
    return tuple(part for part in settled if part.elements)


def _replace_small_charts(part: Part, repeats: bool) -> Iterator[Element]:
    """Turns charts with little to see into tables, or leaves them out if those stand above; folds long tables."""
    for element in part.elements:
        if isinstance(element, Table) and not element.main and len(element.rows) > _MOST_OPEN:
            yield replace(element, folded=True)
        elif not isinstance(element, Chart) or worth_drawing(element):
            yield element
        elif not repeats:
            yield Text(element.description)
            yield replace(numbers_table(element), caption=element.title, folded=element.folded)


_MOST_OPEN = 24  # rows
_MOST_SUITES = 4
_MOST_DEVICES = 3
_MOST_LABELS = 8
_LONGEST_NAME = 60


def page_of(material: Material) -> Page:
    """The whole report; nothing in it depends on where or when it is rendered."""
    runs = [entry.run for entry in material.entries]
    command = "; ".join(run.command for run in runs)
    return Page(_title(runs), _subtitle(material), parts_of(material), command=command)


def _title(runs: Sequence[Run]) -> str:
    suites, devices = (
        list(dict.fromkeys(shorten_line(name, _LONGEST_NAME) for run in runs for name in names_of(run)))
        for names_of in (suites_of, devices_of)
    )
    named = ", ".join(suites) if len(suites) <= _MOST_SUITES else many(len(suites), "suite")
    return " on ".join(filter(None, (named, join_words(devices, _MOST_DEVICES)))) or "A report without cases"


def _subtitle(material: Material) -> str:
    if not material.alone:
        labels = [entry.label for entry in material.entries]
        more = [f"{len(labels) - _MOST_LABELS} more"] * (len(labels) > _MOST_LABELS)
        return ": ".join(filter(None, (many(len(labels), "run"), "; ".join([*labels[:_MOST_LABELS], *more]))))
    run = material.entries[0].run
    commit = commit_of(run)
    parts = (when(run), f"commit {commit}" if commit else "", fact(run, "machine"))
    return ", ".join(filter(None, parts)) or "the header of the run's file is lost"


LONGEST_LABEL = 40
_LABEL_SUITES = 3


@dataclass(frozen=True)
class Entry:
    """A run of a report. `label` tells it from the others ('cuda:0', 'a1b2c3d4', 'box 2'); '' if it is alone."""

    run: Run
    findings: Mapping[str, Finding]
    label: str = ""

    @cached_property
    def panels(self) -> tuple[Panel, ...]:
        return panels_of(self.run, self.findings)


@dataclass(frozen=True)
class Material:
    """Runs side by side, in the order they were named; most reports have one. `store` is where they lie.

    `earlier` has the best case of each case's step, by its id, in the last runs before the only one.
    """

    entries: tuple[Entry, ...]
    store: Path | None = None
    earlier: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        return len(self.entries) == 1

    def panels(self) -> Iterator[tuple[Entry, Panel]]:
        return ((entry, panel) for entry in self.entries for panel in entry.panels)


def material_of(
    runs: Sequence[Run],
    findings: Sequence[Mapping[str, Finding]],
    store: Path | None = None,
) -> Material:
    labelled = zip(runs, findings, labels_of(runs), strict=True)
    return Material(tuple(Entry(run, own, label) for run, own, label in labelled), store)


def labels_of(runs: Sequence[Run]) -> list[str]:
    """The shortest words that tell the runs apart, '' for a single run.

    Facts are tried in the order in which they explain differences, then the ids.
    """
    if len(runs) < 2:
        return [""] * len(runs)
    sources = [tuple(shorten_line(source(run), LONGEST_LABEL) for run in runs) for source in _SOURCES]
    chosen = [words for words in sources if all(words)]
    ids = [run.id or "run" for run in runs]
    numbered = tuple(
        f"{name} ({ids[: place + 1].count(name)})" if ids.count(name) > 1 else name for place, name in enumerate(ids)
    )
    return list(next((words for words in chosen if len(set(words)) == len(runs)), numbered))


_SOURCES: tuple[Callable[[Run], str], ...] = (
    lambda run: ", ".join(devices_of(run)),
    lambda run: fact(run, "commit")[:COMMIT_LETTERS],
    lambda run: fact(run, "machine"),
    lambda run: f"torch {fact(run, 'torch')}" if fact(run, "torch") else "",
    lambda run: ", ".join(names) if len(names := suites_of(run)) <= _LABEL_SUITES else many(len(names), "suite"),
    lambda run: ",".join(dict.fromkeys(record.case.mode for record in run.records)),
)


def titled_panels(material: Material) -> Iterator[tuple[str, Panel]]:
    panels, suites = list(material.panels()), []
    for entry, panel in panels:
        device = f" on {panel.case.device}" if len({other.case.device for other in entry.panels}) > 1 else ""
        label = f", {entry.label}" if entry.label and not material.alone else ""
        suites.append(f"{panel.case.workload}{device}{label}")
    counts = Counter(suites)
    for (_, panel), title in zip(panels, suites, strict=True):
        against = f" against {panel.reference}" if counts[title] > 1 and panel.reference else ""
        yield title + against, panel
