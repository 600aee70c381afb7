"""Builds the page of a report from its sections.

The material of a report is one or more runs with their findings. A section turns material into elements, which
are the same for all output formats. Each section is a decorated function in a module of fp8bench/report/topics, or in
the module `section` of a feature.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from fp8bench.analysis.labels import describe_run_load
from fp8bench.feature_list import import_feature_modules
from fp8bench.model import Run
from fp8bench.report import topics
from fp8bench.report.case_status import choose_row_cost_tone
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Chart, Element, Elements, Page, Part, Table, Text
from fp8bench.report.page.charts import is_worth_drawing, numbers_table
from fp8bench.report.panels import CaseValue, FindingsById, NamedCase, Panel, Result, group_into_panels, join_parts
from fp8bench.report.words.naming import (
    COMMIT_LETTERS,
    describe_commit,
    environment_fact,
    format_run_start,
    join_words,
    list_devices,
    list_suites,
    many,
    shorten_line,
)

V = TypeVar("V")
BuildElements = Callable[["Material"], Elements]
# A table with several rows for each case has at most this many rows.
MAX_ROWS = 300


@dataclass(frozen=True)
class Section:
    """A section of the report. `elements` is a function that yields its content, such as tables and charts, or nothing.

    `rank` is the position on the page. `lead` is the paragraph under the title, which is left out if the content is
    only texts. `repeats` is True if the charts show numbers that the main table has as well.
    """

    name: str
    title: str
    rank: int
    elements: BuildElements
    lead: str | Callable[[Material], str] = ""
    repeats: bool = False

    def build_page_part(self, material: Material) -> Part | None:
        elements = tuple(self.elements(material))
        if not elements:
            return None
        lead_paragraph = ""
        if not all(isinstance(element, Text) for element in elements):
            lead_paragraph = self.lead if isinstance(self.lead, str) else self.lead(material)
        return Part(self.name, self.title, elements, lead_paragraph)


_section_by_name: dict[str, Section] = {}


def section(
    name: str, title: str, rank: int, lead: str | Callable[[Material], str] = "", repeats: bool = False
) -> Callable[[BuildElements], BuildElements]:
    """Registers a function as a section. Without `lead`, the paragraph under the title is the function's docstring."""

    def register(elements: BuildElements) -> BuildElements:
        section_lead_text = lead or " ".join((elements.__doc__ or "").split())
        _section_by_name[name] = Section(name, title, rank, elements, section_lead_text, repeats)
        return elements

    return register


def load_sections() -> dict[str, Section]:
    for module in pkgutil.iter_modules(topics.__path__):
        importlib.import_module(f"{topics.__name__}.{module.name}")
    # Importing the section modules of features registers their sections.
    list(import_feature_modules("section"))
    return {section.name: section for section in sorted(_section_by_name.values(), key=lambda section: section.rank)}


# A column with the precision and setting of a case, as 'fp8 (emulated), m=256 n=256'.
PRECISION_COLUMN: Col[CaseValue[Any]] = Col(
    "precision",
    lambda row: join_parts(mark_emulation(row.case, row.case.mode), row.case.setting_name),
    tone=choose_row_cost_tone,
)


def mark_emulation(result: Result, name: str) -> str:
    return f"{name} (emulated)" if result.is_emulated else name


def table_of_cases(
    name: str, caption: str, cols: Sequence[Col[CaseValue[V]]], cases: Iterable[tuple[NamedCase, Sequence[V]]]
) -> Elements:
    """Yields a table in which a case has a row for each of its values. If the rows of all cases would be more than
    MAX_ROWS, some cases are left out, and a sentence names them.
    """
    rows: list[CaseValue[V]] = []
    names_of_hidden_cases = []
    for case, values in cases:
        if rows and len(rows) + len(values) > MAX_ROWS:
            names_of_hidden_cases.append(case.name)
        else:
            rows += [CaseValue(case, value) for value in values]
    if rows:
        yield table(name, caption, cols, rows, required_headings={col.heading for col in cols[:2]})
    if names_of_hidden_cases:
        yield Text(
            f"{caption}: the table has no room for {join_words(names_of_hidden_cases)}; the run's file has them."
        )


def build_report_parts(material: Material) -> tuple[Part, ...]:
    parts = []
    for section in load_sections().values():
        report_part = section.build_page_part(material)
        elements = tuple(_simplify_part_elements(report_part, section.repeats)) if report_part else ()
        if report_part and elements:
            parts.append(replace(report_part, elements=elements))
    return tuple(parts)


def _simplify_part_elements(part: Part, repeats_table: bool) -> Elements:
    """Yields the elements of a part in a simpler form. A chart of few values becomes a table, or is dropped if the main
    table has its numbers (`repeats_table`). Long tables are folded.
    """
    for element in part.elements:
        if isinstance(element, Table) and not element.main and len(element.rows) > _MAX_UNFOLDED_ROWS:
            yield replace(element, folded=True)
        elif not isinstance(element, Chart) or is_worth_drawing(element):
            yield element
        elif not repeats_table:
            yield Text(element.description)
            yield replace(numbers_table(element), caption=element.title, folded=element.folded)


_MAX_UNFOLDED_ROWS = 24  # a table with more rows than this is folded
_MAX_SUITES_IN_TITLE = 4
_MAX_DEVICES_IN_TITLE = 3
_MAX_LABELS = 8
_MAX_NAME_LENGTH = 60


def report_page(material: Material) -> Page:
    """Returns the page of a report. The page does not depend on when or where it is rendered."""
    runs = [entry.run for entry in material.entries]
    noisy_run_remark = "noisy" if any(map(describe_run_load, runs)) else ""
    return Page(_make_page_title(runs), _page_subtitle(material), build_report_parts(material), remark=noisy_run_remark)


def _shorten_name(name: str) -> str:
    return shorten_line(name, _MAX_NAME_LENGTH)


def _make_page_title(runs: Sequence[Run]) -> str:
    suites = dict.fromkeys(map(_shorten_name, chain.from_iterable(map(list_suites, runs))))
    devices = dict.fromkeys(map(_shorten_name, chain.from_iterable(map(list_devices, runs))))
    suites_text = ", ".join(suites) if len(suites) <= _MAX_SUITES_IN_TITLE else many(len(suites), "suite")
    return (
        join_parts(suites_text, join_words(devices, _MAX_DEVICES_IN_TITLE), separator=" on ")
        or "A report without cases"
    )


def _page_subtitle(material: Material) -> str:
    if material.is_single_run:
        run = material.entries[0].run
        commit = describe_commit(run)
        run_origin_text = join_parts(
            format_run_start(run), f"commit {commit}" if commit else "", environment_fact(run, "machine")
        )
        return run_origin_text or "the header of the run's file is lost"
    labels = [f"{entry.label} ({format_run_start(entry.run)[:10]})" for entry in material.entries]
    runs_text = many(len(labels), "run")
    if len(labels) > _MAX_LABELS:
        labels[_MAX_LABELS:] = [f"{len(labels) - _MAX_LABELS} more"]
    return join_parts(runs_text, "; ".join(labels), separator=": ")


MAX_LABEL_LENGTH = 40
_MAX_SUITES_IN_LABEL = 3


@dataclass(frozen=True)
class LabelledRun:
    """A run of a report. `label` distinguishes it from the other runs of the report, as 'cuda:0' or 'a1b2c3d4'. It is
    '' for a single run.
    """

    run: Run
    findings: FindingsById
    label: str = ""

    @cached_property
    def panels(self) -> tuple[Panel, ...]:
        return group_into_panels(self.run, self.findings)

    @cached_property
    def timed_panels(self) -> list[Panel]:
        return [panel for panel in self.panels if panel.is_timed]


@dataclass(frozen=True)
class Material:
    """The runs of a report, in the order in which the user named them. Most reports have one run. `store` is the
    folder of the runs.

    For a report of one run, `earlier` has the best-case seconds of each case in earlier runs, by case id.
    """

    entries: tuple[LabelledRun, ...]
    store: Path | None = None
    earlier: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def is_single_run(self) -> bool:
        return len(self.entries) == 1

    def panels(self) -> Iterator[tuple[LabelledRun, Panel]]:
        for entry in self.entries:
            for panel in entry.panels:
                yield entry, panel


def make_report_material(runs: Sequence[Run], findings: Sequence[FindingsById], store: Path | None = None) -> Material:
    entries = zip(runs, findings, label_runs(runs), strict=True)
    return Material(tuple(LabelledRun(*fields) for fields in entries), store)


def label_runs(runs: Sequence[Run]) -> list[str]:
    """Returns a short label for each run, or '' for a single run.

    The labels are the values of the first property that is different for each run, such as the device, commit or
    machine. Otherwise the labels are the ids of the runs.
    """
    if len(runs) < 2:
        return [""] * len(runs)
    for describe_run in _LABEL_SOURCES:
        labels = [shorten_line(describe_run(run), MAX_LABEL_LENGTH) for run in runs]
        if all(labels) and len({*labels}) == len(runs):
            return labels
    ids = [run.id or "run" for run in runs]
    occurrence_numbers = [ids[: index + 1].count(name) for index, name in enumerate(ids)]
    return [
        f"{name} ({occurrence})" if ids.count(name) > 1 else name
        for name, occurrence in zip(ids, occurrence_numbers, strict=True)
    ]


_LABEL_SOURCES: tuple[Callable[[Run], str], ...] = (
    lambda run: ", ".join(list_devices(run)),
    lambda run: environment_fact(run, "commit")[:COMMIT_LETTERS],
    lambda run: environment_fact(run, "machine"),
    lambda run: f"torch {environment_fact(run, 'torch')}" if environment_fact(run, "torch") else "",
    lambda run: (
        ", ".join(names) if len(names := list_suites(run)) <= _MAX_SUITES_IN_LABEL else many(len(names), "suite")
    ),
    lambda run: ",".join(dict.fromkeys(record.case.mode for record in run.records)),
)


def timed_panels(material: Material) -> Iterator[tuple[str, Panel]]:
    return ((title, panel) for title, panel in iterate_titled_panels(material) if panel.is_timed)


def iterate_titled_panels(material: Material) -> Iterator[tuple[str, Panel]]:
    """Yields each panel with its title: the suite, and the device and the run if there are several.

    Panels that would have equal titles also name their reference.
    """
    titled_panels: list[tuple[str, Panel]] = []
    for entry in material.entries:
        has_devices = len({panel.device for panel in entry.panels}) > 1
        suffix = f", {entry.label}" if entry.label and not material.is_single_run else ""
        titled_panels += [
            (f"{panel.suite}{f' on {panel.device}' * has_devices}{suffix}", panel) for panel in entry.panels
        ]
    panel_count_by_title = Counter(title for title, _ in titled_panels)
    for title, panel in titled_panels:
        is_title_sufficient = panel_count_by_title[title] == 1 or not panel.reference
        yield title if is_title_sufficient else f"{title} against {panel.reference}", panel


def make_table_names_unique(elements: Iterable[Element], suffix: object, title: str) -> Elements:
    """Yields the elements. The name of each table gets a suffix, which makes it unique. Each caption begins with the
    title.
    """
    for element in elements:
        if isinstance(element, Table):
            yield replace(element, name=f"{element.name}-{suffix}", caption=f"{title}: {element.caption}")
        else:
            yield element
