"""A fleet's machines beside each other, for programs."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench.analysis.fleet.found import FleetReport
from fp8bench.model.codec import encode
from fp8bench.report.data.plain import csv_text, json_line

_COLUMNS = ("kind", "machine", "case", "seconds", "change", "score", "odd", "named_for")


def as_json(report: FleetReport) -> str:
    """Everything."""
    return json_line(encode(report))


def as_csv(report: FleetReport) -> str:
    """A row for each case on each machine, with '' as the case for the middle over all of them."""
    return csv_text(_COLUMNS, list(_rows(report)))


def _rows(report: FleetReport) -> Iterator[dict[str, object]]:
    named: dict[str, str] = {}
    for alarm in report.alarms:
        named[alarm.machine] = ", ".join(filter(None, (named.get(alarm.machine, ""), alarm.what.value)))
    for figure in report.figures:
        for machine in sorted({*figure.seconds, *figure.deviations}):
            one = figure.deviations.get(machine)
            yield {
                "kind": figure.kind, "machine": machine, "case": figure.case, "seconds": figure.seconds.get(machine),
                "change": one.change if one else None, "score": one.score if one else None,
                "odd": one.odd if one else None, "named_for": named.get(machine, ""),
            }  # fmt: skip
