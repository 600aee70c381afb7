"""A run or a duel for other programs: tidy or wide rows as CSV, or all of it as one JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fp8bench.analysis.compare.duel_verdicts import comparisons
from fp8bench.model import Finding, Record, Run
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.model.duel import Duel
from fp8bench.report.data.break_even import break_even_rows
from fp8bench.report.data.plain import csv_text, json_line
from fp8bench.report.data.tidy import columns_of, rows, widened


def as_csv(run: Run, findings: Mapping[str, Finding], wide: bool = False) -> str:
    """The whole table; numbers with all their digits, nothing for what is not known."""
    return all_as_csv([(run, findings)], wide)


def all_as_csv(pairs: Sequence[tuple[Run, Mapping[str, Finding]]], wide: bool = False) -> str:
    """The rows of several runs below each other: tidy ones, or one a case if they are to be wide."""
    tidy = [row for run, findings in pairs for row in rows(run, findings)]
    return csv_text(*widened(tidy)) if wide else csv_text(_together([columns_of(run) for run, _ in pairs]), tidy)


def as_json(run: Run, findings: Mapping[str, Finding]) -> str:
    """All that its file holds, beside each record what its samples say, and where precisions begin to pay; infinities
    and NaN are text."""
    header = {field.name: encode(getattr(run, field.name)) for field in fields(run) if field.name != "records"}
    records = [_record(record, findings.get(record.case.id)) for record in run.records]
    sweeps = [{**row._asdict(), "held": dict(row.held)} for row in break_even_rows(run, findings)]
    return json_line({"schema": SCHEMA, **header, "records": records, "break_even": sweeps})


def duel_as_json(duel: Duel) -> str:
    """All that its file holds, and what its samples say."""
    return json_line({"schema": SCHEMA, **encode(duel), "comparisons": encode(comparisons(duel))})


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
