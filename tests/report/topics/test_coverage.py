"""Coverage in words: shares, what is left and why, for the terminal and the page alike."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.analysis.findings import findings
from fp8bench.analysis.metrics import metrics_of
from fp8bench.model import Run
from fp8bench.model.step import Coverage, HeldProduct, Holder, OtherProduct
from fp8bench.report.elements import Items, Table, Text
from fp8bench.report.page.section import sections
from tests.materials import material
from tests.runs import gemm, render_whole

PRODUCT = HeldProduct(8, 16, 32)
HELD = Holder("up", "linear", (16, 32), (PRODUCT,), 6000, 1, True, native="M=8 is no multiple of 16")
HEAD = Holder("lm_head", "head", (16, 32), (PRODUCT,), 3000, 1, False, "left out by 'head'", "skipped")
OTHERS = (
    OtherProduct("bmm", "attention.0", 600, 2, "no weights"),
    OtherProduct("bmm", "attention.1", 400, 2, "no weights"),
    OtherProduct("mine::mul", "", None, 3, "nobody has a formula"),
)
COVERAGE = Coverage((HELD, HEAD), OTHERS, 10_000, "the loss that forward gives", ("steps are not alike",))


def profiled(coverage: Coverage | None = COVERAGE) -> Run:
    """The first case is the reference, which converts nothing; the others are alike."""
    run, _ = gemm()
    first, *others = run.records
    return replace(run, records=(first, *(replace(one, coverage=coverage) for one in others)))


def test_the_page_says_what_is_converted_and_what_not_and_why() -> None:
    run = profiled()
    part = sections()["coverage"].build(material((run, findings(run))))
    assert part is not None
    said, kinds, left, remarks = part.elements
    modes = ", ".join(dict.fromkeys(one.case.mode for one in run.records[1:]))
    assert isinstance(said, Text)
    assert said.text == f"60.0% of the FLOPs of a step's products are converted in {modes}: 6.00 kFLOP of 10.0 kFLOP."
    assert isinstance(kinds, Table) and isinstance(left, Table) and isinstance(remarks, Items)
    assert [[field.text for field in row] for row in kinds.rows] == [
        ["linear layers", "1", "6.00 k", "60.0%", "100.0%"],
        ["the head", "1", "3.00 k", "30.0%", "0.0%"],
        ["outside of layers", "-", "1.00 k", "10.0%", "0.0%"],
    ]
    assert [[field.text for field in row] for row in left.rows] == [
        ["lm_head", "30.0%", "left out by 'head'"],
        ["attention.0 and attention.1", "10.0%", "no weights"],
        ["mine::mul", "0.0%", "nobody has a formula"],
    ]
    assert [one.text for one in remarks.items] == [
        "steps are not alike",
        "backward begins from the loss that forward gives",
        "up: M=8 is no multiple of 16",
        "3 calls of operators without a formula are in no sum",
    ]


def test_the_terminal_begins_with_it() -> None:
    run = profiled()
    assert render_whole(run, findings(run)).startswith("coverage\n  60.0% of the FLOPs of a step's products")


def test_runs_of_suites_have_none() -> None:
    run = profiled(None)
    assert sections()["coverage"].build(material((run, findings(run)))) is None
    assert "coverage" not in render_whole(run, findings(run))


def test_rows_have_the_share() -> None:
    record = profiled().records[1]
    (metric,) = (one for one in metrics_of(record, None) if one.name == "share_of_flops_converted")
    assert (metric.value, metric.unit) == (0.6, "ratio")


def test_a_step_without_products_has_no_share() -> None:
    """And divides by nothing."""
    run = profiled(Coverage((replace(HELD, flops=0),)))
    assert "0.0% of the FLOPs" in render_whole(run, findings(run))
