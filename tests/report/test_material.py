"""Material of reports: labels that distinguish runs, groups of a panel, and the page."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Environment, Run, Scalar
from fp8bench.report.page.section import label_runs, load_sections, make_report_material, report_page
from tests.materials import material, nothing, skipped
from tests.runs import case, gemm, judged, run_of, transformer
from tests.told_before import Told, as_before


def run(name: str = "1", device: str = "a GPU", **facts: Scalar | None) -> Run:
    made, _ = gemm()
    return replace(made, id=name, devices=(replace(made.devices[0], name=device),), environment=Environment(facts))


@as_before
def test_labels_of_runs() -> Told:
    first, one_device = gemm()[0], gemm()[0].devices
    suites = [replace(first.records[0], case=replace(first.records[0].case, workload=f"s{n}")) for n in range(4)]
    for claim, *runs in (
        ("none",),
        ("one alone", run()),
        ("devices", run(device="H200"), run(device="B200")),
        ("commits", run(commit="a" * 40), run(commit="b" * 40)),
        ("machines", run(machine="box 1"), run(machine="box 2")),
        ("versions of torch", run(torch="2.12.0"), run(torch="2.13.0")),
        ("suites", first, replace(transformer()[0], devices=one_device)),
        ("many suites", run_of(suites), run_of(suites[:3])),
        ("ids", run("1"), run("2")),
        ("ids and numbers", run("1"), run("1"), run("2")),
    ):
        yield claim, label_runs(runs)


@as_before
def test_titles_of_pages() -> Told:
    run, findings = gemm()
    ten = [replace(run.records[0], case=case(f"suite{number}", "fp32", {})) for number in range(10)]
    yield "many suites are counted", report_page(material((run_of(ten), findings))).title
    yield "four are named", report_page(material((run_of(ten[:4]), findings))).title
    long = [replace(run.records[0], case=case("x" * 300, "fp32", {}))]
    yield "a long name does not fill the page", report_page(material((run_of(long), findings))).title
    runs = ((replace(run, id=f"r{number}"), findings) for number in range(10))
    yield "more runs than one reads are counted", report_page(material(*runs)).subtitle
    lost = report_page(material((replace(run, started="", command="", devices=(), id=""), findings)))
    yield "what is lost is said", [lost.title, lost.subtitle]
    for claim, made in {"no case": (nothing(),), "no case that ran": (skipped(),), "no run": ()}.items():
        page = report_page(material(*made))
        yield f"of {claim} there is a page", [page.title, page.subtitle, *(part.name for part in page.parts[:2])]


def test_material_and_its_page_are_in_order_and_the_same_again() -> None:
    first, second = gemm(), transformer()
    entries = make_report_material([first[0], second[0]], [first[1], second[1]]).entries
    assert [(entry.run, dict(entry.findings)) for entry in entries] == [first, second]
    names = [part.name for part in report_page(material(gemm())).parts]
    assert names[:3] == ["verdict", "results", "advice"] and names[-1] == "environment"
    assert names == [name for name in load_sections() if name in names]
    assert report_page(material(gemm(), judged())) == report_page(material(gemm(), judged()))
