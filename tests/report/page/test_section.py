"""The page: its title, what stands under it, its parts in order, and nothing of who renders it."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Environment, Scalar
from fp8bench.report.page.section import page_of, sections
from tests.materials import Made, material, nothing, skipped
from tests.runs import case, gemm, judged, run_of


def under(made: Made, **facts: Scalar | None) -> Made:
    return replace(made[0], environment=Environment(facts)), made[1]


def test_many_suites_are_counted() -> None:
    run, findings = gemm()
    records = [replace(run.records[0], case=case(f"suite{number}", "fp32", {})) for number in range(10)]
    assert page_of(material((run_of(records), findings))).title == "10 suites on AMD EPYC 7B13"
    assert page_of(material((run_of(records[:4]), findings))).title.startswith("suite0, suite1, suite2, suite3 on ")


def test_a_long_name_does_not_fill_the_page() -> None:
    run, findings = gemm()
    records = [replace(run.records[0], case=case("x" * 300, "fp32", {}))]
    assert page_of(material((run_of(records), findings))).title == f"{'x' * 57}... on AMD EPYC 7B13"


def test_more_runs_than_one_reads_are_counted() -> None:
    run, findings = gemm()
    page = page_of(material(*((replace(run, id=f"r{number}"), findings) for number in range(10))))
    assert page.subtitle == "10 runs: r0; r1; r2; r3; r4; r5; r6; r7; 2 more"


def test_parts_come_in_the_order_of_their_ranks() -> None:
    names = [part.name for part in page_of(material(gemm())).parts]
    assert names[:3] == ["verdict", "results", "speedup"] and names[-1] == "environment"
    assert names == [name for name in sections() if name in names]


def test_what_is_lost_or_was_never_there_is_said() -> None:
    run, findings = gemm()
    lost = page_of(material((replace(run, started="", command="", devices=(), id=""), findings)))
    assert lost.title == "gemm on cpu" and lost.subtitle == "the header of the run's file is lost"
    assert lost.footer[0].startswith("Run without an id")
    for made in (nothing(), skipped()):
        assert page_of(material(made)).parts
    assert page_of(material(nothing())).title == "A report without cases"
    empty = page_of(material())
    assert empty.subtitle == "0 runs" and [part.name for part in empty.parts] == ["verdict", "results"]


def test_the_same_runs_give_the_same_page() -> None:
    assert page_of(material(gemm(), judged())) == page_of(material(gemm(), judged()))
