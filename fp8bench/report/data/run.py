"""Exports a run for other programs: as CSV with one figure per row, or as one JSON document.

There is one row for each case, phase and metric. There is also one row for each break-even size, at which a precision
begins to be faster. docs/outputs.md describes the columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import chain, starmap
from pathlib import Path
from typing import Any

from fp8bench.analysis.metric import Metric
from fp8bench.model import Provenance, Record, Run, Scalar, specs
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.model.specs import TIME, Rank
from fp8bench.report.data.plain import PlainRows
from fp8bench.report.elements import printable
from fp8bench.report.panels import (
    FindingsById,
    NamedCase,
    Result,
    format_case_params,
    group_into_panels,
    list_cases,
    list_metrics,
)
from fp8bench.report.topics.break_even import BreakEvenRow, iterate_break_even_rows

Cell = Scalar | None
TidyCsvRow = dict[str, Cell]
# The first columns of the CSV, which describe the case of a row.
_CASE_COLUMNS = (
    "run",
    "started_utc",
    "case",
    "suite",
    "suite_version",
    "device",
    "device_name",
    "precision",
    "mode",
    "reference_mode",
    "level",
    "status",
    "reason",
    "params",
)
# The columns after those of the case and its parameters. New columns are appended, so that old columns keep their
# positions.
_FIGURE_COLUMNS = (
    "phase", "kind", "role", "metric", "unit", "median_in_unit", "best_in_unit", "spread", "ratio_to_reference",
    "ratio_low", "ratio_high", "ratio_confidence", "noise_floor", "n_rounds", "n_samples",
    "provenance", "verdict", "labels", "why", "energy_source", "label_reasons", "speedup",
    "speedup_low", "speedup_high",
    "axis", "size_low", "size_high", "energy_validity", "power_limit_W", "failed_rank", "failed_phase",
    "low_in_unit", "high_in_unit",
)  # fmt: skip


def csv_columns(*runs: Run) -> tuple[str, ...]:
    """Returns the CSV columns for some runs: the fixed columns, and one for each parameter of the runs' cases."""
    records = chain.from_iterable(run.records for run in runs)
    params = chain.from_iterable(record.case.params for record in records)
    return (*_CASE_COLUMNS, *dict.fromkeys(f"param_{name}" for name, _ in params), *_FIGURE_COLUMNS)


def tidy_rows(run: Run, findings: FindingsById) -> list[TidyCsvRow]:
    """Returns the CSV rows of a run in the order of its plan. Every row has every column. A missing value is None."""
    empty_csv_row: TidyCsvRow = dict.fromkeys(csv_columns(run))
    # A run that was not stored has no file name, so its id identifies it.
    empty_csv_row |= {"run": Path(run.path).stem or run.id, "started_utc": run.started}
    device_names = {facts.key: facts.name for facts in run.devices}
    rows = []
    for panel in group_into_panels(run, findings):
        for case in panel.named_cases:
            case_row_fields = empty_csv_row | _case_fields(case.record, panel.reference)
            case_row_fields["device_name"] = device_names.get(panel.device)
            # Leave out restated metrics: another row has their figure, and readers who sum rows would count it twice.
            metrics = [metric for metric in list_metrics(case) if metric.rank is not Rank.RESTATED]
            # The first row of a case has the time of its step, and the status of the case.
            rows.append(case_row_fields | _make_metric_fields(metrics[0]) | _finding_fields(case))
            rows += [case_row_fields | _make_metric_fields(metric) for metric in metrics[1:]]
    for row in iterate_break_even_rows(run, findings):
        rows.append(empty_csv_row | {"device_name": device_names.get(row.device)} | _break_even_fields(row))
    return [dict(zip(row, map(_clean_cell, row.values()), strict=True)) for row in rows]


def _clean_cell(cell: Cell) -> Cell:
    """Returns a text on one line, or None for an empty text. Other values are returned unchanged."""
    if isinstance(cell, str):
        return _clean_line(cell) or None
    return cell


def _break_even_fields(row: BreakEvenRow) -> TidyCsvRow:
    """Returns the CSV fields of a break-even size, at which a precision becomes faster or stops being faster."""
    return {
        "suite": row.suite,
        "device": row.device,
        "mode": row.mode,
        "reference_mode": row.against,
        "params": format_case_params(row.held),
        **{f"param_{name}": value for name, value in row.held},
        "metric": specs.BREAK_EVEN.name,
        "unit": "count",
        "median_in_unit": row.size,
        "axis": row.axis,
        "size_low": row.low,
        "size_high": row.high,
        "ratio_confidence": row.confidence,
        "provenance": Provenance.DERIVED.value,
        "verdict": row.pays,
        "why": row.remarks,
    }


@lru_cache(maxsize=4096)  # cached, because all rows of a case repeat most texts
def _clean_line(text: str) -> str:
    return printable(text).strip()


def _case_fields(record: Record, reference: str) -> TidyCsvRow:
    case = record.case
    case_row: TidyCsvRow = {
        "case": case.id,
        "suite": case.workload,
        "suite_version": case.version,
        "device": case.device,
        "precision": case.precision,
        "mode": case.mode,
        "reference_mode": reference,
        "level": record.support.level.value,
        "status": record.status.value,
        "reason": record.reason,
        "params": format_case_params(case.params),
    }
    if (failed_rank := record.failed_rank) is not None:
        case_row |= {"failed_rank": failed_rank.rank, "failed_phase": failed_rank.phase or failed_rank.request}
    return case_row | {f"param_{name}": value for name, value in case.params}


def _make_metric_fields(metric: Metric) -> TidyCsvRow:
    kind, role = metric.about or (None, None)
    row: TidyCsvRow = {
        "phase": metric.phase,
        "kind": kind,
        "role": role,
        "metric": metric.name,
        "unit": metric.unit,
        "median_in_unit": metric.value,
        "best_in_unit": metric.best,
        "n_rounds": metric.rounds,
        "n_samples": metric.count,
        "provenance": metric.provenance and metric.provenance.value,
        "verdict": metric.verdict,
        "labels": " ".join(metric.labels),
        "why": metric.why,
        "energy_source": metric.source,
    }
    if metric.bounds is not None:
        row["low_in_unit"], row["high_in_unit"] = metric.bounds
    if metric.energy is not None:
        row["energy_validity"] = metric.energy.energy_validity_text
        row["power_limit_W"] = " ".join(f"{watts:g}" for watts in metric.energy.power_limits)
    ratio = metric.interval
    if ratio is None:
        return row
    row["ratio_to_reference"] = ratio.point
    if ratio.level < 1:  # with a confidence of 1 the ratio is exact and has no bounds
        # A level of 0 marks the range of a few rounds, which has no confidence.
        row |= {"ratio_low": ratio.low, "ratio_high": ratio.high, "ratio_confidence": ratio.level or None}
    if metric.name == TIME and 0 < ratio.point < math.inf:
        speed = ratio.inverse
        row |= {"speedup": speed.point, "speedup_low": speed.low, "speedup_high": speed.high}
    return row


def _finding_fields(result: Result) -> TidyCsvRow:
    finding = result.finding
    label_reasons = "; ".join(f"{label}: {reason}" for label, reason in finding.label_reasons)
    return {"spread": finding.spread, "noise_floor": finding.floor, "label_reasons": label_reasons}


def run_rows(runs_with_findings: Sequence[tuple[Run, FindingsById]]) -> PlainRows:
    if not runs_with_findings:
        return (), ()
    all_rows = list(chain.from_iterable(starmap(tidy_rows, runs_with_findings)))
    return csv_columns(*(run for run, _ in runs_with_findings)), all_rows


def run_document(run: Run, findings: FindingsById) -> dict[str, Any]:
    """Returns the content of a run's file as one document. Each record also has its finding and metrics. The
    break-even sizes come last.
    """
    header = {field.name: encode(getattr(run, field.name)) for field in fields(run) if field.name != "records"}
    cases = list_cases(group_into_panels(run, findings))
    documents_by_case = {case.record.case.id: _result_document(case) for case in cases}
    records = [{**encode(record), **documents_by_case[record.case.id]} for record in run.records]
    break_even = [{**row._asdict(), "held": dict(row.held)} for row in iterate_break_even_rows(run, findings)]
    return {"schema": SCHEMA, **header, "records": records, "break_even": break_even}


def _result_document(case: NamedCase) -> dict[str, Any]:
    finding = {**encode(case.finding), "verdict_words": case.finding.verdict_words}
    # Drop fields that the document has in other places: the case is in the record, and times by phase are in the
    # metrics.
    finding.pop("case")
    finding.pop("typical", None)
    figures = {metric.name: metric.value if metric.best is None else metric.best for metric in case.figures.values()}
    metrics = {name: encode(value) for name, value in figures.items() if value is not None}
    return {"finding": finding, "metrics": metrics}
