"""A comparison for programs: one JSON document, or CSV with a row a figure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fp8bench.analysis.compare.compare import Compared
from fp8bench.analysis.compare.sides import Side
from fp8bench.model import Comparison
from fp8bench.model.codec import encode
from fp8bench.report.data.plain import csv_text, json_line

COLUMNS = (
    "case", "suite", "metric", "unit", "direction", "evidence", "before", "after", "ratio", "low", "high", "level",
    "p_value", "labels", "why", "since", "until", "failed",
)  # fmt: skip


def as_json(compared: Compared) -> str:
    """The document on one line."""
    document = {
        "a": _side(compared.before),
        "b": _side(compared.after),
        "differing": encode(compared.differing),
        "comparisons": encode(compared.comparisons),
        "only_a": list(compared.only_before),
        "only_b": list(compared.only_after),
    }
    return json_line(document)


def _side(side: Side) -> dict[str, Any]:
    runs = [{"id": run.id, "started": run.started, "commit": run.environment.get("commit")} for run in side.runs]
    return {"name": side.name, "runs": runs}


def as_csv(comparisons: Iterable[Comparison]) -> str:
    """The rows under their column names; nothing stands for what is not known."""
    return csv_text(COLUMNS, (_row(one) for one in comparisons))


def _row(one: Comparison) -> dict[str, Any]:
    plain = encode(one)
    interval, _ = plain.pop("ratio") or {}, plain.pop("noise")
    ends = {"ratio": interval.get("point"), **{name: interval.get(name) for name in ("low", "high", "level")}}
    return {**plain, **ends, "labels": " ".join(one.labels), "failed": "yes" if one.failed else "no"}
