"""Contract of every section of the report; new ones are included automatically."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import chain, product

from hypothesis import given, settings

from fp8bench.report.elements import Chart, Code, Element, NameValuePairs, Table, Text, TextList
from fp8bench.report.page.charts import numbers_table
from fp8bench.report.page.section import build_report_parts, load_sections, report_page
from tests.counts import counts, for_each
from tests.materials import LONG, many, material, nothing, shapes, skipped, strange
from tests.runs import Made, gemm, measured, transformer, wild_runs

SECTIONS = load_sections()
SHAPES = [{"m": m, "n": n, "k": 64} for m, n in product((1, 64), (64, 128))]
RUNS: dict[str, Callable[[], list[Made]]] = {
    "gemm": lambda: [gemm()],
    "transformer": lambda: [transformer()],
    "measured": lambda: [measured()],
    "shapes": lambda: [shapes(*SHAPES)],
    "strange": lambda: [strange()],
    "skipped": lambda: [skipped()],
    "nothing": lambda: [nothing()],
    "side by side": lambda: [gemm(), transformer(), measured(), gemm()],
    "beside a strange one": lambda: [measured(), strange()],
    "no runs": list,
}


def is_empty(element: Element) -> bool:
    """Whether the section shows nothing."""
    match element:
        case Text() | Code():
            return not element.text.strip()
        case TextList():
            return not element.items or not all(item.text.strip() for item in element.items)
        case NameValuePairs():
            return not element.pairs or not all(name and text for name, text in element.pairs)
        case Table():
            return not element.rows or not element.columns
        case _:
            return not element.title.strip() or not element.description.strip()


def check(*made: Made) -> None:
    """Asserts that a page of these runs meets the contract."""
    page = report_page(material(*made))
    assert page.title and page.subtitle and page.parts
    words = Counter(part.name for part in page.parts)
    assert words.keys() <= SECTIONS.keys()
    for part in page.parts:
        assert re.fullmatch(r"[a-z0-9-]+", part.name) and part.title and part.elements
        assert not [element for element in part.elements if is_empty(element)], part.name
        words.update(element.name for element in part.elements if isinstance(element, Chart | Table))
        tables = [element for element in part.elements if isinstance(element, Table)]
        for table in (*tables, *(numbers_table(element) for element in part.elements if isinstance(element, Chart))):
            assert all(len(row) == len(table.columns) for row in table.rows)
    elements = chain.from_iterable(part.elements for part in page.parts)
    mains = [element for element in elements if isinstance(element, Table) and element.main]
    assert len(mains) <= 1


@for_each("name", SECTIONS)
def test_a_section_has_a_name_and_a_title(name: str) -> None:
    section = SECTIONS[name]
    assert section.name == name and section.title and section.elements.__name__ == f"{name.replace('-', '_')}_section"


def test_ranks_are_each_taken_once() -> None:
    ranks = Counter(section.rank for section in SECTIONS.values())
    assert not [rank for rank, number in ranks.items() if number > 1]


@for_each("runs", RUNS)
def test_a_page_keeps_every_promise(runs: str) -> None:
    check(*RUNS[runs]())


def test_names_are_shown_unchanged() -> None:
    assert LONG in str(SECTIONS["phases"].build_page_part(material(strange())))


@counts(100, 2000)
def test_many_cases_build(count: int) -> None:
    for part in build_report_parts(material(many(count // 3))):
        assert sum(isinstance(element, Chart) for element in part.elements) <= 4


@settings(max_examples=12)
@given(made=wild_runs())
def test_a_page_is_built_for_any_run(made: Made) -> None:
    check(made)
