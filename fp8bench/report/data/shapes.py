"""The findings of a lint of shapes for programs: one JSON document, or CSV with a row for what each library says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fp8bench.analysis.shape_findings import Finding, Judgement, homeless
from fp8bench.report.data.plain import csv_text, json_line

COLUMNS = (
    "layer", "product", "m", "n", "k", "output", "layout", "mode", "device", "by", "outcome", "why",
    "padded_m", "padded_n", "padded_k", "more_flops", "more_bytes",
)  # fmt: skip


def as_json(source: str, findings: Sequence[Finding]) -> str:
    """The document on one line; `source` is the model or the file."""
    found = [
        {**_product(one), "torch": _judgement(one.torch), "transformer_engine": one.te and _judgement(one.te)}
        for one in findings
    ]
    return json_line({"source": source, "fits": not homeless(findings), "findings": found})


def as_csv(findings: Sequence[Finding]) -> str:
    """The rows under their column names; shares are shares, nothing stands for what is not."""
    return csv_text(COLUMNS, (row for one in findings for row in _rows(one)))


def _rows(one: Finding) -> Iterator[dict[str, object]]:
    for by, judgement in (("torch", one.torch), ("Transformer Engine", one.te)):
        if judgement is None:
            continue
        why = "; ".join(f"{objection.why} ({objection.source})" for objection in judgement.objections)
        row = {**_product(one), "by": by, "outcome": judgement.outcome.value, "why": why}
        if judgement.padded is not None:
            m, n, k = judgement.padded
            row |= {"padded_m": m, "padded_n": n, "padded_k": k}
            row |= {"more_flops": judgement.more_flops, "more_bytes": judgement.more_bytes}
        yield row


def _product(one: Finding) -> dict[str, object]:
    m, n, k = one.product.sides
    return {
        "layer": one.shape.name, "product": one.kind, "m": m, "n": n, "k": k, "output": one.product.output,
        "layout": "row" if one.product.row_major else "column", "mode": one.mode, "device": one.device.name,
    }  # fmt: skip


def _judgement(one: Judgement) -> dict[str, Any]:
    objections = [{"by": found.source.value, "why": found.why} for found in one.objections]
    costs = {"padded": one.padded, "more_flops": one.more_flops, "more_bytes": one.more_bytes}
    return {"outcome": one.outcome.value, "objections": objections, **costs}
