"""The section of shares, and the tables that the terminal has too, from values made by hand."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.analysis.tapes import parts_of
from fp8bench.model import Finding, Run, Share, ShareKind, Shares, SharesFrom
from fp8bench.report.terminal.layout import render
from fp8bench.report.topics.shares import page_of
from tests.runs import transformer

PARTS = (
    Share(ShareKind.GEMM, "blocks.0.mlp.up", False, 4e-3, 2),
    Share(ShareKind.GEMM, "patches", True, 1e-3, 1, "conv"),
    Share(ShareKind.CAST, "blocks.0.mlp.up", True, 2e-3, 2),
    Share(ShareKind.OPTIMIZER, "", False, 1e-3, 9),
    Share(ShareKind.UNKNOWN, "blocks.0", False, 5e-4, 3, "mine::kernel"),
)


def made(**changes: object) -> tuple[Run, dict[str, Finding]]:
    run, findings = transformer()
    shares = replace(Shares(PARTS, 10e-3), **changes)  # type: ignore[arg-type]
    records = tuple(replace(one, shares=shares) for one in run.records)
    return replace(run, records=records), findings


def test_of_a_compiled_step_no_module_is_told() -> None:
    """And what is fused into others' kernels is said, and not split."""
    parts = (Share(ShareKind.ELEMENTWISE, "", False, 1e-3, 4, "fused with cast"),)
    run, findings = made(parts=parts, of=SharesFrom.COMPILED, fused=4)
    text = render(page_of(run, parts_of(run, findings)), 160, False, False)
    assert "elementwise (fused with cast)" in text and "module" not in text.partition("compiled")[0]
    assert "casts are fused into 4 of its kernels" in text and "whose module nobody knows" in text
