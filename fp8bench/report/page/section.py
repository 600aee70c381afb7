"""The material of a report, its sections, and the page that they form.

Material is runs with their findings, and a label for each. A section turns it into elements and knows no output format.
It is a decorated function in the module of its topic (fp8bench/report/topics), or in a feature's module `section`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from fp8bench.feature_list import feature_parts
from fp8bench.model import Run
from fp8bench.report import topics
from fp8bench.report.case_status import cost_tone
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Chart, Element, Elements, Field, Page, Part, Table, Text
from fp8bench.report.page.charts import numbers_table, worth_drawing
from fp8bench.report.panels import CaseValue, FindingsById, NamedCase, Panel, Result, join_parts, panels_of
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

V = TypeVar("V")
Builder = Callable[["Material"], Elements]
# The most rows of a table with several rows per case.
MOST_ROWS = 300


@dataclass(frozen=True)
class Section:
    """A section of the report: `elements` yields what there is to show of a material, possibly nothing.

    `rank` is its position on the page. If it `repeats`, its charts show what is in the main table. `lead` is shown
    under the title, unless all elements are texts.
    """

    name: str
    title: str
    rank: int
    elements: Builder
    lead: str | Callable[[Material], str] = ""
    repeats: bool = False

    def build(self, material: Material) -> Part | None:
        elements = tuple(self.elements(material))
        if not elements:
            return None
        lead = ""
        if not all(isinstance(element, Text) for element in elements):
            lead = self.lead if isinstance(self.lead, str) else self.lead(material)
        return Part(self.name, self.title, elements, lead)


_sections: dict[str, Section] = {}


def section(
    name: str, title: str, rank: int, lead: str | Callable[[Material], str] = "", repeats: bool = False
) -> Callable[[Builder], Builder]:
    """Registers a function as a section, whose docstring is the lead if no other is named."""

    def register(elements: Builder) -> Builder:
        words = lead or " ".join((elements.__doc__ or "").split())
        _sections[name] = Section(name, title, rank, elements, words, repeats)
        return elements

    return register


def sections() -> dict[str, Section]:
    for module in pkgutil.iter_modules(topics.__path__):
        importlib.import_module(f"{topics.__name__}.{module.name}")
    # Features register theirs as their modules are imported.
    list(feature_parts("section"))
    return {section.name: section for section in sorted(_sections.values(), key=lambda section: section.rank)}


def _case_field(row: CaseValue[Any]) -> Field:
    """'fp8 (emulated), m=256 n=256': names a row's case, the precision first."""
    words = join_parts(mark_emulated(row.case, row.case.mode), row.case.place)
    return Field(words, tone=cost_tone(row.case))


PRECISION: Col[CaseValue[Any]] = Col("precision", _case_field)


def mark_emulated(result: Result, words: str) -> str:
    return f"{words} (emulated)" if result.is_emulated else words


def table_of_cases(
    name: str, caption: str, cols: Sequence[Col[CaseValue[V]]], cases: Iterable[tuple[NamedCase, Sequence[V]]]
) -> Elements:
    """Yields a table with several rows for each case, and a sentence on the cases that do not fit into MOST_ROWS."""
    rows: list[CaseValue[V]] = []
    hidden = []
    for case, values in cases:
        if rows and len(rows) + len(values) > MOST_ROWS:
            hidden.append(case.name)
        else:
            rows += [CaseValue(case, value) for value in values]
    if rows:
        yield table(name, caption, cols, rows, required={col.heading for col in cols[:2]})
    if hidden:
        yield Text(f"{caption}: the table has no room for {join_words(hidden)}; the run's file has them.")


def parts_of(material: Material) -> tuple[Part, ...]:
    parts = []
    for section in sections().values():
        part = section.build(material)
        elements = tuple(_replace_small_charts(part, section.repeats)) if part else ()
        if part and elements:
            parts.append(replace(part, elements=elements))
    return tuple(parts)


def _replace_small_charts(part: Part, repeats: bool) -> Elements:
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
    """Returns the whole report, which does not depend on where or when it is rendered."""
    runs = [entry.run for entry in material.entries]
    command = "; ".join(run.command for run in runs)
    return Page(_title(runs), _subtitle(material), parts_of(material), command=command)


def _title(runs: Sequence[Run]) -> str:
    suites: dict[str, None] = {}
    devices: dict[str, None] = {}
    for run in runs:
        suites |= dict.fromkeys(shorten_line(name, _LONGEST_NAME) for name in suites_of(run))
        devices |= dict.fromkeys(shorten_line(name, _LONGEST_NAME) for name in devices_of(run))
    named = ", ".join(suites) if len(suites) <= _MOST_SUITES else many(len(suites), "suite")
    return join_parts(named, join_words(devices, _MOST_DEVICES), by=" on ") or "A report without cases"


def _subtitle(material: Material) -> str:
    if material.alone:
        run = material.entries[0].run
        commit = commit_of(run)
        parts = join_parts(when(run), f"commit {commit}" if commit else "", fact(run, "machine"))
        return parts or "the header of the run's file is lost"
    labels = [entry.label for entry in material.entries]
    number = many(len(labels), "run")
    if len(labels) > _MOST_LABELS:
        labels[_MOST_LABELS:] = [f"{len(labels) - _MOST_LABELS} more"]
    return join_parts(number, "; ".join(labels), by=": ")


LONGEST_LABEL = 40
_LABEL_SUITES = 3


@dataclass(frozen=True)
class Entry:
    """A run of a report. `label` distinguishes it ('cuda:0', 'a1b2c3d4', 'box 2'); '' for a single run."""

    run: Run
    findings: FindingsById
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
        for entry in self.entries:
            for panel in entry.panels:
                yield entry, panel


def material_of(runs: Sequence[Run], findings: Sequence[FindingsById], store: Path | None = None) -> Material:
    entries = zip(runs, findings, labels_of(runs), strict=True)
    return Material(tuple(Entry(*fields) for fields in entries), store)


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Returns the shortest words that distinguish the runs, '' for a single run.

    Facts are tried in the order in which they explain differences, then the ids.
    """
    if len(runs) < 2:
        return [""] * len(runs)
    # The first fact that all runs have and that differs between them.
    for source in _SOURCES:
        labels = [shorten_line(source(run), LONGEST_LABEL) for run in runs]
        if all(labels) and len({*labels}) == len(runs):
            return labels
    ids = [run.id or "run" for run in runs]
    numbers = [ids[: place + 1].count(name) for place, name in enumerate(ids)]
    return [f"{name} ({number})" if ids.count(name) > 1 else name for name, number in zip(ids, numbers, strict=True)]


_SOURCES: tuple[Callable[[Run], str], ...] = (
    lambda run: ", ".join(devices_of(run)),
    lambda run: fact(run, "commit")[:COMMIT_LETTERS],
    lambda run: fact(run, "machine"),
    lambda run: f"torch {fact(run, 'torch')}" if fact(run, "torch") else "",
    lambda run: ", ".join(names) if len(names := suites_of(run)) <= _LABEL_SUITES else many(len(names), "suite"),
    lambda run: ",".join(dict.fromkeys(record.case.mode for record in run.records)),
)


def titled_panels(material: Material) -> Iterator[tuple[str, Panel]]:
    """Yields panels with the suite, the device if there are several, and the run; with the reference if these are the
    same of several panels."""
    titles: list[str] = []
    panels: list[Panel] = []
    for entry in material.entries:
        has_devices = len({panel.device for panel in entry.panels}) > 1
        label = f", {entry.label}" if entry.label and not material.alone else ""
        titles += [f"{panel.suite}{f' on {panel.device}' * has_devices}{label}" for panel in entry.panels]
        panels += entry.panels
    counts = Counter(titles)
    for title, panel in zip(titles, panels, strict=True):
        is_unique = counts[title] == 1 or not panel.reference
        yield title if is_unique else f"{title} against {panel.reference}", panel


def name_tables(elements: Iterable[Element], suffix: object, title: str) -> Elements:
    """Gives a terminal's tables the names and captions that they have on a page, among those of other panels."""
    for element in elements:
        if isinstance(element, Table):
            yield replace(element, name=f"{element.name}-{suffix}", caption=f"{title}: {element.caption}")
        else:
            yield element
