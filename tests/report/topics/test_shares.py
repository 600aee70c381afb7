"""Composition of a step, and the converted share of a model: from hand-made values."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.analysis.findings import findings
from fp8bench.analysis.tapes import list_step_shares
from fp8bench.model import Run, Share, ShareKind, Shares
from fp8bench.model.step import Coverage, HeldProduct, Holder, OtherProduct
from fp8bench.report.terminal.layout import render
from fp8bench.report.topics.shares import step_shares_page
from tests.materials import built, part
from tests.runs import gemm, render_whole, transformer
from tests.told_before import Told, as_before

PARTS = (
    Share(ShareKind.GEMM, "blocks.0.mlp.up", False, 4e-3, 2),
    Share(ShareKind.GEMM, "patches", True, 1e-3, 1, "conv"),
    Share(ShareKind.CAST, "blocks.0.mlp.up", True, 2e-3, 2),
    Share(ShareKind.OPTIMIZER, "", False, 1e-3, 9),
    Share(ShareKind.UNKNOWN, "blocks.0", False, 5e-4, 3, "mine::kernel"),
)


@as_before
def test_shares_of_a_step() -> Told:
    run, findings = transformer()
    shared = replace(run, records=tuple(replace(record, shares=Shares(PARTS, 10e-3)) for record in run.records))
    yield (
        "each kind of work and each module",
        render(step_shares_page(shared, list_step_shares(shared, findings)), 160, False, False),
    )


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
