"""Files that a gate writes: JUnit (read by a second parser), Markdown, text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from junitparser import JUnitXml
from markdown_it import MarkdownIt

from fp8bench.features.gate.judging import GateOutcome, GateVerdict, JudgedFigure, judge_first_look
from fp8bench.features.gate.view import MAX_ROWS, render_junit, render_page
from fp8bench.model import Comparison, Direction, Evidence, Interval
from fp8bench.report.page import markdown
from fp8bench.report.terminal.layout import render


def judged(outcome: GateOutcome, case: str = "gemm[m=64]@cpu/bf16", why: str = "", **changes: object) -> JudgedFigure:
    change = Comparison(
        case,
        case.partition("[")[0],
        "time",
        "s",
        Direction.WORSE,
        Evidence.PAIRED,
        1e-3,
        1.2e-3,
        Interval(1.2, 1.18, 1.22, 0.99),
        1e-8,
        ("noisy",),
    )
    found = judge_first_look([replace(change, **changes)])[0]  # type: ignore[arg-type]
    return replace(found, outcome=outcome, why=why)


ALL = GateVerdict(
    "HEAD against HEAD~1",
    (*(judged(outcome, "gemm[m=64]@cpu/bf16", f"because {outcome}") for outcome in GateOutcome),
     *(judged(outcome, "mlp[m=64]@cpu/bf16", f"because {outcome}") for outcome in GateOutcome)),
    ("torch was 2.12 and is 2.13",),
)  # fmt: skip


def parsed(verdict: GateVerdict, tmp_path_factory: pytest.TempPathFactory) -> JUnitXml:
    file = tmp_path_factory.mktemp("junit") / "out.xml"
    file.write_text(render_junit(verdict), encoding="utf-8", errors="backslashreplace")
    return JUnitXml.fromfile(str(file))


def test_junit_reports_a_problem_as_an_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    xml = parsed(GateVerdict("", problem="no run", code=4), tmp_path_factory)
    assert (xml.tests, xml.errors) == (1, 1)
    assert next(iter(next(iter(xml)))).result[0].text == "no run"


@given(st.text(max_size=40), st.text(max_size=40))
def test_junit_escapes_any_text(tmp_path_factory: pytest.TempPathFactory, case: str, why: str) -> None:
    verdict = GateVerdict("", (judged(GateOutcome.REGRESSION, f"gemm[{case}]@cpu/bf16", why),), problem=why)
    assert parsed(verdict, tmp_path_factory).failures == 1
    markdown.render(render_page(verdict)).encode()
    render(render_page(verdict))


def test_markdown_lists_the_important_figures() -> None:
    page = MarkdownIt("commonmark").enable("table").render(markdown.render(render_page(ALL)))
    for title in (
        "2 failed and 2 regressions",
        "Regressions",
        "Suspected",
        "Cannot tell",
        "Cleared",
        "Better",
        "Cannot tell (not blocking)",
        "torch was",
    ):
        assert title in page
    many = GateVerdict("", tuple(judged(GateOutcome.REGRESSION, f"gemm[m={n}]@cpu/{'x' * 300}") for n in range(5000)))
    text = markdown.render(render_page(many))
    assert len(text.encode()) < 1 << 20 and f"and {5000 - MAX_ROWS} more" in text
