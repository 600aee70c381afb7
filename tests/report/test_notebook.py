"""A run in a notebook: short names, a table, a chart, and a line instead of pages of samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fp8bench
from fp8bench import api
from fp8bench.model import Case, Run
from fp8bench.report.notebook import short_names
from tests.runs import measured


@pytest.fixture(scope="module")
def run() -> api.Run:
    return fp8bench.load(measured()[0]).run  # type: ignore[return-value]


def case(mode: str, suite: str = "gemm", device: str = "cpu", **params: int) -> Case:
    return Case(suite, tuple(params.items()), mode, device)


@pytest.mark.parametrize(
    ("cases", "names"),
    [
        ([case("bf16", m=8), case("fp8", m=8)], ["bf16", "fp8"]),
        ([case("bf16", m=8, n=1), case("bf16", m=9, n=1)], ["bf16 m=8", "bf16 m=9"]),
        ([case("bf16", m=8), case("bf16", "cast", k=2)], ["bf16 gemm", "bf16 cast"]),
        ([case("bf16", m=8), case("bf16", device="cuda:0", m=8)], ["bf16 cpu", "bf16 cuda:0"]),
    ],
    ids=["the mode", "a parameter", "the suite", "the device"],
)
def test_names_hold_what_differs_within_the_run(cases: list[Case], names: list[str]) -> None:
    """And tell all of its cases apart."""
    assert short_names(cases) == dict(zip(names, (one.id for one in cases), strict=True))


def test_findings_are_read_by_short_names_ids_and_words(run: api.Run) -> None:
    """The same finding each way; what fits no case, or several, says which names there are."""
    findings = fp8bench.findings(run)
    assert len(findings) == len(run.records) and set(findings) == set(short_names([one.case for one in run.records]))
    for name, finding in findings.items():
        assert findings[finding.case.id] is finding and findings[f"{name} {finding.case.workload}"] is finding
        assert finding.case.id in findings
    assert "nothing" not in findings and findings.get("") is None
    with pytest.raises(KeyError, match=r"fits 0 cases\. Give one of: "):
        findings["nothing"]


def test_a_run_is_shown_on_a_line_as_a_table_and_as_a_chart(run: api.Run) -> None:
    """Every case is in the table; what a file names is no markup."""
    place = run.path or "not stored"
    assert repr(run) == f"<Run {run.id}: {run.request.suite}, {len(run.records)} cases, finished, {place}>"
    page = api.Run(**{**vars(run), "path": "<b>"})._repr_html_()
    assert page.count("<tr>") == 1 + len(run.records) and "<b>" not in page and "faster" in page
    (axes,) = run.plot().axes
    told = ("faster", "slower", "same", "unsure")
    found = fp8bench.findings(run).items()
    held = [name for name, one in found if one.verdict in told and one.ratio is not None]
    assert [label.get_text() for label in axes.get_yticklabels()] == [*reversed(held)]


def test_a_run_of_a_call_is_the_stored_value(run: api.Run) -> None:
    """Nothing is added to what is kept."""
    assert isinstance(run, Run) and isinstance(run, fp8bench.Run) and vars(run) == vars(measured()[0])
    assert isinstance(replace(run, path=""), fp8bench.Run)
