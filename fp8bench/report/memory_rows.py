"""The tidy rows of a case's memory: what it is for, the highest points of phases, what others count."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench.model import Provenance
from fp8bench.report.blocks import Result
from fp8bench.report.memories import PEAK, use_of
from fp8bench.report.tidy_row import STEP, TidyRow


def memory_rows(result: Result) -> Iterator[TidyRow]:
    """Nothing where it was not measured. Where something of it could not be had, the reason stands in its row."""
    use = use_of(result.record)
    if use is None:
        return
    for role, size in use.roles:
        yield _row(STEP, f"memory_{role}", size, Provenance.DERIVED)
    for one in use.phases:
        yield _row(one.phase, PEAK, one.allocated)
        if one.reserved is not None:
            yield _row(one.phase, "reserved_memory", one.reserved)
    for metric, counted in (("reserved_memory", use.reserved), ("process_memory", use.process)):
        if counted is not None:
            yield _row(STEP, metric, counted)
    yield _row(STEP, "resident_memory", use.resident) | {"why": use.why}


def _row(phase: str, metric: str, size: int | None, provenance: Provenance = Provenance.MEASURED) -> TidyRow:
    known = {} if size is None else {"median_in_unit": float(size), "provenance": provenance.value}
    return {"phase": phase, "metric": metric, "unit": "B", **known}
