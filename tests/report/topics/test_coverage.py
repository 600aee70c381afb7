"""Coverage in words: shares, what is left and why, for the terminal and the page alike."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.analysis.findings import findings
from fp8bench.analysis.metrics import metrics_of
from fp8bench.model import Run
from fp8bench.model.step import Coverage, HeldProduct, Holder, OtherProduct
from tests.materials import built, part
from tests.runs import gemm, render_whole
from tests.told_before import Told, as_before

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
    """Case 1 is the reference and converts nothing; the others share a coverage."""
    run, _ = gemm()
    first, *others = run.records
    return replace(run, records=(first, *(replace(other, coverage=coverage) for other in others)))


@as_before
def test_coverage() -> Told:
    run = profiled()
    yield "what is converted, what not and why", part("coverage", (run, findings(run)))
    bare = profiled(Coverage((replace(HELD, flops=0),)))
    yield "a step without products divides by nothing", render_whole(bare, findings(bare)).partition("\n\n")[0]
    without = profiled(None)
    yield "runs of suites have none", built("coverage", (without, findings(without)))


def test_rows_have_the_share() -> None:
    (metric,) = (
        record for record in metrics_of(profiled().records[1], None) if record.name == "share_of_flops_converted"
    )
    assert (metric.value, metric.unit) == (0.6, "ratio")
