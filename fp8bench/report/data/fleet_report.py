"""A fleet's machines beside each other, for programs."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench.analysis.fleet.found import FleetReport
from fp8bench.model.codec import encode
from fp8bench.report.data.plain import csv_text, json_line

CASE_COLUMNS = ("kind", "machine", "case", "seconds", "change", "score", "odd", "named_for")


def as_json(report: FleetReport) -> str:
    """Everything."""
    return json_line(encode(report))


def as_csv(report: FleetReport) -> str:
    """A row for each case on each machine, with '' as the case for the middle over all of them."""
    return csv_text(CASE_COLUMNS, list(case_rows(report)))


def named_for(report: FleetReport) -> dict[str, str]:
    """What each machine that is named is named for, in words with commas."""
    named: dict[str, dict[str, None]] = {}
    for alarm in report.alarms:
        named.setdefault(alarm.machine, {})[alarm.what.value] = None
    return {machine: ", ".join(words) for machine, words in named.items()}


def case_rows(report: FleetReport) -> Iterator[dict[str, object]]:
    """Of every case on every machine, and of its middle over all cases."""
    named = named_for(report)
    for figure in report.figures:
        for machine in sorted({*figure.seconds, *figure.deviations}):
            one = figure.deviations.get(machine)
            yield {
                "kind": figure.kind, "machine": machine, "case": figure.case, "seconds": figure.seconds.get(machine),
                "change": one.change if one else None, "score": one.score if one else None,
                "odd": one.odd if one else None, "named_for": named.get(machine, ""),
            }  # fmt: skip
