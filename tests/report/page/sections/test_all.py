"""What holds for every section: whatever a run holds, a part is built, or nothing is said."""

from __future__ import annotations

import pytest
from hypothesis import given

from fp8bench.model import Finding, Run
from fp8bench.report.elements import Chart, Part, Table
from fp8bench.report.page.charts import numbers_table
from fp8bench.report.page.section import parts_of, sections
from tests.materials import LONG, Made, many, material, nothing, skipped, strange
from tests.runs import gemm, measured, transformer, wild_runs

NAMES = sorted(sections.names())
TABLES = {"skipped": skipped, "nothing": nothing, "strange": strange, "gemm": gemm, "measured": measured}


def check(found: Part) -> None:
    """Rows are as long as their columns, and every chart has the table of its numbers."""
    tables = [element for element in found.elements if isinstance(element, Table)]
    tables += [numbers_table(element) for element in found.elements if isinstance(element, Chart)]
    for table in tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert found.elements


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", sorted(TABLES))
def test_nothing_raises(name: str, kind: str) -> None:
    """Neither names that are markup, nor numbers that are none, nor a run without a case."""
    found = sections.get(name).build(material(TABLES[kind]()))
    if found is not None:
        check(found)


@given(made=wild_runs())
def test_wild_runs_build(made: tuple[Run, dict[str, Finding]]) -> None:
    """Any names, labels and numbers."""
    for name in NAMES:
        found = sections.get(name).build(material(made))
        if found is not None:
            check(found)


@pytest.mark.parametrize("name", NAMES)
def test_no_entries_at_all(name: str) -> None:
    """A report of no runs says nothing, or says so."""
    found = sections.get(name).build(material())
    if found is not None:
        check(found)


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_beside_each_other(name: str) -> None:
    """The same suites twice."""
    found = sections.get(name).build(material(measured(), strange()))
    if found is not None:
        check(found)


def test_names_stay_as_they_are() -> None:
    """Escaping is the renderer's: a section shortens nothing, and drops no letter."""
    phases = sections.get("phases").build(material(strange()))
    assert phases is not None and LONG in str(phases)


def test_ranks_differ_and_order_the_page() -> None:
    found = [part.name for part in parts_of(material(transformer()))]
    ranks = [sections.get(name).rank for name in found]
    assert ranks == sorted(set(ranks))


def test_two_thousand_cases_build() -> None:
    """What grows with the cases is rows, not charts."""
    made: Made = many(667)
    for name in NAMES:
        found = sections.get(name).build(material(made))
        charts = [element for element in found.elements if isinstance(element, Chart)] if found else []
        assert len(charts) <= 4
