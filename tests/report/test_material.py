"""Material of reports: labels that tell runs apart, groups of a panel, and the page that is made of them."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Environment, Run, Scalar
from fp8bench.report.page.section import LONGEST_LABEL, labels_of, material_of, page_of, sections
from fp8bench.report.panels import panels_of
from tests.materials import material, nothing, shapes, skipped
from tests.runs import case, gemm, judged, run_of, transformer
from tests.told_before import Told, as_before


def run(name: str = "1", device: str = "a GPU", **facts: Scalar | None) -> Run:
    made, _ = gemm()
    return replace(made, id=name, devices=(replace(made.devices[0], name=device),), environment=Environment(facts))


@as_before
def test_labels_of_runs() -> Told:
    first, one_device = gemm()[0], gemm()[0].devices
    suites = [replace(first.records[0], case=replace(first.records[0].case, workload=f"s{n}")) for n in range(4)]
    fewer = tuple(record for record in first.records if record.case.precision != "nvfp4")
    for claim, *runs in (
        ("none",),
        ("one alone", run()),
        ("devices", run(device="H200"), run(device="B200")),
        ("commits", run(commit="a" * 40), run(commit="b" * 40)),
        ("machines", run(machine="box 1"), run(machine="box 2")),
        ("versions of torch", run(torch="2.12.0"), run(torch="2.13.0")),
        ("suites", first, replace(transformer()[0], devices=one_device)),
        ("many suites", run_of(suites), run_of(suites[:3])),
        ("precisions", first, replace(first, records=fewer)),
        ("ids", run("1"), run("2")),
        ("ids and numbers", run("1"), run("1"), run("2")),
        ("numbers", run(""), run("")),
        ("where one does not know its commit, ids", run("1", commit="a" * 40), run("2")),
        ("past the cut nothing tells apart", run("1", device="x" * 300 + "1"), run("2", device="x" * 300 + "2")),
    ):
        yield claim, labels_of(runs)


def test_a_long_label_is_cut_and_still_tells_apart() -> None:
    first, second = labels_of([run(device="a" * 300), run(device="b" * 300)])
    assert len(first) == LONGEST_LABEL and first.endswith("...") and first != second


@as_before
def test_groups_of_a_panel() -> Told:
    for wanted in (
        ({"m": 16, "n": 8},),
        ({"m": 16, "n": 8}, {"m": 32, "n": 8}),
        ({"m": 16}, {"m": 16, "cache": "cold"}),
        ({"m": 16}, {"m": 32, "values": "ones"}, {"m": 32}),
        ({"m": 16, "cache": "cold"}, {"m": 32, "cache": "cold"}),
        ({"m": 16}, {"m": 16, "norm": "mlp"}),
    ):
        (panel,) = panels_of(*shapes(*wanted))
        yield f"{wanted} are told by what one has and others have not", [group.place for group in panel.groups]


@as_before
def test_titles_of_pages() -> Told:
    run, findings = gemm()
    ten = [replace(run.records[0], case=case(f"suite{number}", "fp32", {})) for number in range(10)]
    yield "many suites are counted", page_of(material((run_of(ten), findings))).title
    yield "four are named", page_of(material((run_of(ten[:4]), findings))).title
    long = [replace(run.records[0], case=case("x" * 300, "fp32", {}))]
    yield "a long name does not fill the page", page_of(material((run_of(long), findings))).title
    runs = ((replace(run, id=f"r{number}"), findings) for number in range(10))
    yield "more runs than one reads are counted", page_of(material(*runs)).subtitle
    lost = page_of(material((replace(run, started="", command="", devices=(), id=""), findings)))
    yield "what is lost is said", [lost.title, lost.subtitle]
    for claim, made in {"no case": (nothing(),), "no case that ran": (skipped(),), "no run": ()}.items():
        page = page_of(material(*made))
        yield f"of {claim} there is a page", [page.title, page.subtitle, *(part.name for part in page.parts[:2])]


def test_material_and_its_page_are_in_order_and_the_same_again() -> None:
    first, second = gemm(), transformer()
    entries = material_of([first[0], second[0]], [first[1], second[1]]).entries
    assert [(entry.run, dict(entry.findings)) for entry in entries] == [first, second]
    names = [part.name for part in page_of(material(gemm())).parts]
    assert names[:3] == ["verdict", "results", "speedup"] and names[-1] == "environment"
    assert names == [name for name in sections() if name in names]
    assert page_of(material(gemm(), judged())) == page_of(material(gemm(), judged()))
