"""Labels tell runs apart by the first thing that does."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Environment, Run, Scalar
from fp8bench.report.page.section import LONGEST_LABEL, labels_of, material_of
from tests.counts import for_each
from tests.runs import gemm, run_of, transformer


def run(name: str = "1", device: str = "a GPU", **facts: Scalar | None) -> Run:
    made, _ = gemm()
    return replace(made, id=name, devices=(replace(made.devices[0], name=device),), environment=Environment(facts))


@for_each(
    ("runs", "labels"),
    [
        ([], []),
        ([run()], [""]),
        ([run(device="H200"), run(device="B200")], ["H200", "B200"]),
        ([run(commit="a" * 40), run(commit="b" * 40)], ["a" * 8, "b" * 8]),
        ([run(machine="box 1"), run(machine="box 2")], ["box 1", "box 2"]),
        ([run(torch="2.12.0"), run(torch="2.13.0")], ["torch 2.12.0", "torch 2.13.0"]),
        ([gemm()[0], replace(transformer()[0], devices=gemm()[0].devices)], ["gemm", "transformer"]),
        ([run("1"), run("2")], ["1", "2"]),
        ([run("1"), run("1"), run("2")], ["1 (1)", "1 (2)", "2"]),
        ([run(""), run("")], ["run (1)", "run (2)"]),
        # One of them does not know: then it tells nothing apart.
        ([run("1", commit="a" * 40), run("2")], ["1", "2"]),
        # No single thing, but two of them.
        (
            [run(commit="a" * 8), run(commit="b" * 8), run(commit="a" * 8, device="other")],
            ["a GPU, aaaaaaaa", "a GPU, bbbbbbbb", "other, aaaaaaaa"],
        ),
    ],
)
def test_labels(runs: list[Run], labels: list[str]) -> None:
    assert labels_of(runs) == labels


def test_runs_of_one_suite_differ_by_their_precisions() -> None:
    first = gemm()[0]
    second = replace(first, records=tuple(one for one in first.records if one.case.precision != "nvfp4"))
    assert labels_of([first, second]) == ["fp32,bf16,fp8,nvfp4", "fp32,bf16,fp8"]


def test_many_suites_are_counted() -> None:
    first = gemm()[0]
    each = [
        replace(first.records[0], case=replace(first.records[0].case, workload=f"s{number}")) for number in range(4)
    ]
    assert labels_of([run_of(each), run_of(each[:3])]) == ["4 suites", "s0, s1, s2"]


def test_a_long_label_is_cut_and_still_tells_apart() -> None:
    """Names that differ past the cut do not tell apart what is left of them."""
    alike = [run("1", device="x" * 300 + "1"), run("2", device="x" * 300 + "2")]
    assert labels_of(alike) == ["1", "2"]
    first, second = labels_of([run(device="a" * 300), run(device="b" * 300)])
    assert len(first) == LONGEST_LABEL and first.endswith("...") and first != second


def test_material() -> None:
    first, second = gemm(), transformer()
    material = material_of([first[0], second[0]], [first[1], second[1]])
    assert [entry.run for entry in material.entries] == [first[0], second[0]]
    assert [dict(entry.findings) for entry in material.entries] == [first[1], second[1]]
    assert material_of([first[0]], [first[1]]).entries[0].label == ""
