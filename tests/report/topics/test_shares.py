"""The section of shares, and the tables that the terminal has too, from values made by hand."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.analysis.tapes import parts_of
from fp8bench.model import Share, ShareKind, Shares, SharesFrom
from fp8bench.report.terminal.layout import render
from fp8bench.report.topics.shares import page_of
from tests.runs import transformer
from tests.told_before import Told, as_before

PARTS = (
    Share(ShareKind.GEMM, "blocks.0.mlp.up", False, 4e-3, 2),
    Share(ShareKind.GEMM, "patches", True, 1e-3, 1, "conv"),
    Share(ShareKind.CAST, "blocks.0.mlp.up", True, 2e-3, 2),
    Share(ShareKind.OPTIMIZER, "", False, 1e-3, 9),
    Share(ShareKind.UNKNOWN, "blocks.0", False, 5e-4, 3, "mine::kernel"),
)


@as_before
def test_shares_of_a_compiled_step() -> Told:
    fused = (Share(ShareKind.ELEMENTWISE, "", False, 1e-3, 4, "fused with cast"),)
    run, findings = transformer()
    for claim, shares in (
        ("each kind of work and each module", Shares(PARTS, 10e-3)),
        ("no module is told; what is fused is said", Shares(fused, 10e-3, of=SharesFrom.COMPILED, fused=4)),
    ):
        shared = replace(run, records=tuple(replace(record, shares=shares) for record in run.records))
        yield claim, render(page_of(shared, parts_of(shared, findings)), 160, False, False)
