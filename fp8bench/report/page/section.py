"""The interface of a report's sections, their registry, and the page that they make.

A section turns material into elements, and knows no output format. It is a decorated class in the module of its topic
(fp8bench/report/topics), or the module `section` of a feature.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fp8bench import units
from fp8bench.model import Run
from fp8bench.model.codec import SCHEMA
from fp8bench.registry import Registry
from fp8bench.report.case_status import emulated
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Chart, Element, Field, Page, Part, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.page.charts import numbers_table, worth_drawing
from fp8bench.report.panels import Result
from fp8bench.report.words.naming import (
    NamedCase,
    commit_of,
    counts,
    devices_of,
    fact,
    listed,
    many,
    shortened,
    suites_of,
    when,
)

T = TypeVar("T")
N = TypeVar("N", bound=float)
# Of a table with several rows a case.
MOST_ROWS = 300


class Section(ABC):
    """`rank` orders sections from the top of the page down; one that `repeats` draws what stands in the main table.

    The `lead` says how to read what follows under the title; where there is but a sentence it has nothing to say.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    rank: ClassVar[int]
    lead: ClassVar[str] = ""
    repeats: ClassVar[bool] = False

    @abstractmethod
    def elements(self, material: Material) -> Iterable[Element]:
        """What there is to show of this material; nothing where the section has nothing to say."""

    def gathered(self, runs: Sequence[Run], store: Path) -> object | None:
        """What it reads of a store beside the runs of a report: the material's `gathered`, by the section's name."""
        return None

    def lead_of(self, material: Material) -> str:
        """Where the lead depends on what there is to show."""
        return self.lead

    def build(self, material: Material) -> Part | None:
        elements = tuple(self.elements(material))
        if not elements:
            return None
        lead = "" if all(isinstance(one, Text) for one in elements) else self.lead_of(material)
        return Part(self.name, self.title, elements, lead)


sections: Registry[Section] = Registry(
    "section", "fp8bench.report.topics", Section, ("name", "title", "rank"), part="section"
)


def case_field(case: NamedCase) -> Field:
    """'fp8 (emulated), m=256 n=256': what a row is of, the precision first as in every table."""
    words, tone = told(case.result, case.result.mode)
    return Field(", ".join(filter(None, (words, case.place))), tone=tone)


# Of rows whose first part is their case.
PRECISION: Col[Any] = Col("precision", lambda row: case_field(row[0]), hint="and what tells its case from the others")


def told(result: Result, words: str) -> tuple[str, Tone]:
    """The words and, of an emulation, that it is one, in grey."""
    return (f"{words} (emulated)", Tone.DOUBT) if emulated(result) else (words, Tone.PLAIN)


def number(
    value: N | None, show: Callable[[N], str] = units.significant, tone: Tone = Tone.PLAIN, hint: str = ""
) -> Field:
    if value is None:
        return Field(units.NONE)
    return Field(show(value), None if math.isnan(value) else value, tone, hint)


def table_of_cases(
    name: str, title: str, words: str, cols: Sequence[Col[T]], cases: Iterable[tuple[str, Sequence[T]]], beyond: str
) -> Iterator[Element]:
    """Several rows a case. Cases for which there is no room, the first one aside, are named with where they are."""
    rows: list[T] = []
    left_out = []
    for case, own in cases:
        if rows and len(rows) + len(own) > MOST_ROWS:
            left_out.append(case)
        else:
            rows += own
    if rows:
        yield table(name, f"{title}: {words}", cols, rows)
    if left_out:
        yield Text(f"{title}: not shown, for want of room: {listed(left_out)}. {beyond}")


def parts_of(material: Material) -> tuple[Part, ...]:
    ordered = sorted((sections.get(name) for name in sections.names()), key=lambda section: section.rank)
    built = ((section, section.build(material)) for section in ordered)
    settled = (replace(part, elements=tuple(_settled(part, section.repeats))) for section, part in built if part)
    return tuple(part for part in settled if part.elements)


def _settled(part: Part, repeats: bool) -> Iterator[Element]:
    """Charts of which there is next to nothing to see are tables of their numbers, or none where those stand above."""
    for element in part.elements:
        if not isinstance(element, Chart) or worth_drawing(element):
            yield element
        elif not repeats:
            yield Text(element.description)
            yield replace(numbers_table(element), caption=element.title, folded=element.folded)


_MOST_SUITES = 4
_MOST_DEVICES = 3
_MOST_LABELS = 8
_LONGEST_NAME = 60


def gather(runs: Sequence[Run], store: Path) -> dict[str, object]:
    found = {name: sections.get(name).gathered(runs, store) for name in sections.names()}
    return {name: one for name, one in found.items() if one is not None}


def page_of(material: Material) -> Page:
    """The whole report; nothing in it tells of the machine or the time at which it is rendered."""
    runs = [entry.run for entry in material.entries]
    return Page(_title(runs), _subtitle(material), parts_of(material), tuple(_footer(runs)), tuple(_facts(runs)))


def _title(runs: Sequence[Run]) -> str:
    """'gemm, transformer on NVIDIA H200'."""
    suites, devices = (
        list(dict.fromkeys(shortened(name, _LONGEST_NAME) for run in runs for name in names_of(run)))
        for names_of in (suites_of, devices_of)
    )
    named = ", ".join(suites) if len(suites) <= _MOST_SUITES else many(len(suites), "suite")
    where = listed(devices, _MOST_DEVICES)
    return " on ".join(part for part in (named, where) if part) or "A report without cases"


def _subtitle(material: Material) -> str:
    if not material.alone:
        labels = [entry.label for entry in material.entries]
        more = [f"{len(labels) - _MOST_LABELS} more"] if len(labels) > _MOST_LABELS else []
        return ": ".join(filter(None, (many(len(labels), "run"), "; ".join([*labels[:_MOST_LABELS], *more]))))
    run = material.entries[0].run
    commit = commit_of(run)
    parts = [when(run), f"commit {commit}" if commit else "", fact(run, "machine")]
    return ", ".join(part for part in parts if part) or "the header of the run's file is lost"


def _facts(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    if len(runs) != 1:
        return
    run = runs[0]
    pairs = (
        ("cases", counts(run)),
        ("torch", fact(run, "torch")),
        ("threads", fact(run, "threads")),
        ("memory", listed([units.size(one.memory_bytes) for one in run.devices if one.accelerated], _MOST_DEVICES)),
    )
    yield from ((name, text) for name, text in pairs if text)


def _footer(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        version = fact(run, "fp8bench")
        by = f"fp8bench {version}" if version else "an fp8bench that its file no longer names"
        kept = f", kept in {run.path}" if run.path else ", not stored"
        yield f"Run {run.id or 'without an id'}, measured with {by}, schema {SCHEMA}{kept}."
