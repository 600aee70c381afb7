"""Tapes for programs: one JSON document, or a row an operator and the shapes that it was called with."""

from __future__ import annotations

from collections.abc import Sequence

from fp8bench.analysis.tapes import Taped
from fp8bench.model.codec import encode
from fp8bench.report.data.plain import csv_text, json_line

_COLUMNS = (
    "setting", "tape", "phase", "operator", "backward", "inputs", "outputs", "calls", "flops", "bytes", "path",
    "launches",
)  # fmt: skip


def as_json(taped: Sequence[Taped]) -> str:
    """Every tape with its sums by phase and its operators."""
    return json_line({"tapes": [encode(one) for one in taped]})


def as_csv(taped: Sequence[Taped]) -> str:
    """FLOPs, bytes and launches are those of one call; FLOPs are empty where nobody knows them."""
    rows = [
        {
            **encode(operator), "setting": one.setting, "tape": one.name, "inputs": " ".join(operator.inputs),
            "outputs": " ".join(operator.outputs),
        }
        for one in taped if one.tape is not None for operator in one.tape.operators
    ]  # fmt: skip
    return csv_text(_COLUMNS, rows)
