"""The tidy rows of the largest batch that fits."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench.model import Provenance
from fp8bench.report.blocks import Result, ResultGroup
from fp8bench.report.capacities import beyond, share_within
from fp8bench.report.tidy_row import STEP, TidyRow


def capacity_rows(group: ResultGroup, result: Result) -> Iterator[TidyRow]:
    """Nothing where nobody asked; without an answer one row with the reason."""
    found = result.record.capacity
    if found is None:
        return
    common: TidyRow = {"phase": STEP, "provenance": Provenance.MEASURED.value}
    share = share_within(group, result)
    yield common | {
        "metric": "max_batch", "unit": "count", "median_in_unit": _number(found.batch), "why": beyond(found),
        "ratio_to_reference": share,
    }  # fmt: skip
    others = (
        ("max_batch_tokens", "count", found.tokens or None),
        ("max_batch_memory", "B", found.peak),
        ("max_batch_limit", "B", found.limit),
    )
    for metric, unit, value in others:
        if value is not None:
            yield common | {"metric": metric, "unit": unit, "median_in_unit": _number(value)}


def _number(value: int | None) -> float | None:
    return None if value is None else float(value)
