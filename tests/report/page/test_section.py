"""The page: its title, what stands under it, its parts in order, and nothing of who renders it."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Environment, Scalar
from fp8bench.report.page.section import page_of, sections
from tests.materials import Made, material, nothing, skipped
from tests.runs import case, gemm, judged, run_of, transformer


def under(made: Made, **facts: Scalar | None) -> Made:
    return replace(made[0], environment=Environment(facts)), made[1]


def test_title_and_subtitle() -> None:
    page = page_of(material(under(gemm(), commit="0a1b2c3d4e", dirty=False, machine="box", torch="2.13.0", threads=1)))
    assert page.title == "gemm on AMD EPYC 7B13"
    assert page.subtitle == "2026-01-05 12:00 UTC, commit 0a1b2c3d, box"
    assert dict(page.facts) == {"cases": "8 measured, 3 skipped, 1 failed", "torch": "2.13.0", "threads": "1"}


def test_many_suites_are_counted() -> None:
    run, findings = gemm()
    records = [replace(run.records[0], case=case(f"suite{number}", "fp32", {})) for number in range(10)]
    assert page_of(material((run_of(records), findings))).title == "10 suites on AMD EPYC 7B13"
    assert page_of(material((run_of(records[:4]), findings))).title.startswith("suite0, suite1, suite2, suite3 on ")


def test_a_long_name_does_not_fill_the_page() -> None:
    run, findings = gemm()
    records = [replace(run.records[0], case=case("x" * 300, "fp32", {}))]
    assert page_of(material((run_of(records), findings))).title == f"{'x' * 57}... on AMD EPYC 7B13"


def test_a_gpu_says_its_memory() -> None:
    run, findings = gemm()
    gpu = replace(run.devices[0], kind="cuda", name="NVIDIA H200", memory_bytes=139 << 30)
    assert dict(page_of(material((replace(run, devices=(gpu,)), findings))).facts)["memory"] == "139 GiB"


def test_runs_side_by_side() -> None:
    page = page_of(material(gemm(), transformer()))
    assert page.title == "gemm, transformer on AMD EPYC 7B13"
    assert page.subtitle == "2 runs: gemm; transformer" and page.facts == () and len(page.footer) == 2


def test_more_runs_than_one_reads_are_counted() -> None:
    run, findings = gemm()
    page = page_of(material(*((replace(run, id=f"r{number}"), findings) for number in range(10))))
    assert page.subtitle == "10 runs: r0; r1; r2; r3; r4; r5; r6; r7; 2 more"


def test_parts_come_in_the_order_of_their_ranks() -> None:
    names = [part.name for part in page_of(material(gemm())).parts]
    assert names[:3] == ["verdict", "results", "speedup"] and names[-1] == "environment"
    assert names == [name for name in sections() if name in names]


def test_the_footer_is_the_run_s() -> None:
    assert page_of(material(under(transformer(), fp8bench="0.1.0"))).footer == (
        (
            "Run 20260105-120000, measured with fp8bench 0.1.0, schema 1, kept in "
            ".fp8bench/runs/box/20260105T120000Z-0a1b2c3d-7f.jsonl."
        ),
    )
    assert page_of(material(gemm())).footer == (
        "Run 20260105-120000, measured with an fp8bench that its file no longer names, schema 1, not stored.",
    )


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
