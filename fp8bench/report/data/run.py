"""A run for other programs: tidy or wide rows as CSV, or all of it as one JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fp8bench.model import Finding, Record, Run
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.report.data.break_even import break_even_rows
from fp8bench.report.data.plain import csv_text, json_line
from fp8bench.report.data.tidy import columns_of, rows, widened
from fp8bench.report.panels import Figures, panels_of


def as_csv(run: Run, findings: Mapping[str, Finding], wide: bool = False) -> str:
    """The whole table; numbers with all their digits, nothing for what is not known."""
    return all_as_csv([(run, findings)], wide)


def all_as_csv(pairs: Sequence[tuple[Run, Mapping[str, Finding]]], wide: bool = False) -> str:
    """The rows of several runs below each other: tidy ones, or one a case if they are to be wide."""
    tidy = [row for run, findings in pairs for row in rows(run, findings)]
    return csv_text(*widened(tidy)) if wide else csv_text(_together([columns_of(run) for run, _ in pairs]), tidy)


def as_json(run: Run, findings: Mapping[str, Finding]) -> str:
    """All that its file holds, beside each record what its samples say and the figures of its step, and where
    precisions begin to pay; infinities and NaN are text."""
    header = {field.name: encode(getattr(run, field.name)) for field in fields(run) if field.name != "records"}
    metrics = {
        result.record.case.id: {
            name: encode(one.value) for name, one in Figures(group, result).items() if one.value is not None
        }
        for panel in panels_of(run, findings)
        for group, result in panel.members
    }
    records = [
        _record(one, findings.get(one.case.id)) | {"metrics": metrics[one.case.id]} for one in run.records
    ]
    sweeps = [{**row._asdict(), "held": dict(row.held)} for row in break_even_rows(run, findings)]
    return json_line({"schema": SCHEMA, **header, "records": records, "break_even": sweeps})


def _together(columns: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The columns of all; parameters stand in the middle, whichever run they are of."""
    if not columns:
        return ()
    shared = [name for name in columns[0] if not name.startswith("param_")]
    place = shared.index("params") + 1
    names = dict.fromkeys(name for one in columns for name in one if name.startswith("param_"))
    return (*shared[:place], *names, *shared[place:])


def _record(record: Record, finding: Finding | None) -> dict[str, Any]:
    """A record with its finding, whose case is the record's."""
    said = finding and {**encode(finding), "verdict_words": finding.verdict_words}
    return {**encode(record), "finding": said and {name: value for name, value in said.items() if name != "case"}}
