"""A run for other programs: tidy rows as CSV, or everything as one JSON document.

Tidy rows are one for each case, phase and metric, and one for each size at which a precision begins to pay.
docs/outputs.md describes the columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from fp8bench.analysis.metric import Metric
from fp8bench.model import Provenance, Record, Run, Scalar, specs
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.model.specs import TIME, Rank
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import printable
from fp8bench.report.panels import FindingsById, NamedCase, Result, metrics_within, panels_of, show_params
from fp8bench.report.topics.break_even import BreakEvenRow, break_even_rows

Cell = Scalar | None
TidyRow = dict[str, Cell]
# The columns: first the subject of the row, ...
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
# ... then one for each parameter, then the figure. New columns are appended, so that the others keep their places.
_FIGURE_COLUMNS = (
    "phase", "kind", "role", "metric", "unit", "median_in_unit", "best_in_unit", "spread", "ratio_to_reference",
    "ratio_low", "ratio_high", "ratio_confidence", "noise_floor", "n_rounds", "n_samples",
    "provenance", "verdict", "labels", "why", "energy_source", "label_reasons", "speedup",
    "speedup_low", "speedup_high",
    "axis", "size_low", "size_high", "energy_validity", "power_limit_W", "failed_rank", "failed_phase",
    "low_in_unit", "high_in_unit",
)  # fmt: skip


def columns_of(*runs: Run) -> tuple[str, ...]:
    """Returns the columns for the rows of some runs, with one for each parameter of their cases."""
    params: dict[str, Scalar] = {}
    for run in runs:
        for record in run.records:
            params |= dict(record.case.params)
    return (*_CASE_COLUMNS, *(f"param_{name}" for name in params), *_FIGURE_COLUMNS)


def rows(run: Run, findings: FindingsById) -> list[TidyRow]:
    """Returns all rows, in the order of the plan. Each has every column, with None for missing values."""
    empty: TidyRow = dict.fromkeys(columns_of(run))
    empty |= {"run": Path(run.path).stem or run.id, "started_utc": run.started}
    device_names = {facts.key: facts.name for facts in run.devices}
    tidy = []
    for panel in panels_of(run, findings):
        for case in panel.members:
            about = empty | _about(case.record, panel.reference)
            about["device_name"] = device_names.get(panel.device)
            # Summing rows would count a restated figure twice.
            metrics = [metric for metric in metrics_within(case) if metric.rank is not Rank.RESTATED]
            # The row of the step's time comes first, with the status of the case.
            tidy.append(about | _row(metrics[0]) | _of_the_case(case))
            tidy += [about | _row(metric) for metric in metrics[1:]]
    for row in break_even_rows(run, findings):
        tidy.append(empty | {"device_name": device_names.get(row.device)} | _crossing(row))
    return [dict(zip(row, map(_cell, row.values()), strict=True)) for row in tidy]


def _cell(cell: Cell) -> Cell:
    """Returns a text on one line, None if empty, like the CSV."""
    if isinstance(cell, str):
        return _line(cell) or None
    return cell


def _crossing(row: BreakEvenRow) -> TidyRow:
    """Returns a row for a size between measured ones, which does not belong to a case."""
    return {
        "suite": row.suite,
        "device": row.device,
        "mode": row.mode,
        "reference_mode": row.against,
        "params": show_params(row.held),
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


@lru_cache(maxsize=4096)  # most texts occur in every row of their case
def _line(text: str) -> str:
    return printable(text).strip()


def _about(record: Record, reference: str) -> TidyRow:
    case = record.case
    about: TidyRow = {
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
        "params": show_params(case.params),
    }
    if (failed := record.failed_rank) is not None:
        about |= {"failed_rank": failed.rank, "failed_phase": failed.phase or failed.request}
    return about | {f"param_{name}": value for name, value in case.params}


def _row(metric: Metric) -> TidyRow:
    kind, role = metric.about or (None, None)
    row: TidyRow = {
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
        row["energy_validity"] = metric.energy.validity
        row["power_limit_W"] = " ".join(f"{watts:g}" for watts in metric.energy.power_limits)
    ratio = metric.interval
    if ratio is None:
        return row
    row["ratio_to_reference"] = ratio.point
    if ratio.level < 1:  # an exact one has no bounds
        row |= {"ratio_low": ratio.low, "ratio_high": ratio.high, "ratio_confidence": ratio.level or None}
    if metric.name == TIME and 0 < ratio.point < math.inf:
        speed = ratio.inverse
        row |= {"speedup": speed.point, "speedup_low": speed.low, "speedup_high": speed.high}
    return row


def _of_the_case(result: Result) -> TidyRow:
    finding = result.finding
    if finding is None or finding.best_seconds is None:
        return {}
    reasons = "; ".join(f"{label}: {reason}" for label, reason in finding.label_reasons)
    return {"spread": finding.spread, "noise_floor": finding.floor, "label_reasons": reasons}


def run_rows(pairs: Sequence[tuple[Run, FindingsById]]) -> Rows:
    if not pairs:
        return (), ()
    tidy: list[TidyRow] = []
    for run, findings in pairs:
        tidy += rows(run, findings)
    return columns_of(*(run for run, _ in pairs)), tidy


def run_value(run: Run, findings: FindingsById) -> dict[str, Any]:
    """Returns everything in the run's file, with findings and figures for each record, and break-even sizes."""
    header = {field.name: encode(getattr(run, field.name)) for field in fields(run) if field.name != "records"}
    results: dict[str, dict[str, Any]] = {}
    for panel in panels_of(run, findings):
        results |= {case.record.case.id: _result_value(case) for case in panel.members}
    records = [{**encode(record), **results[record.case.id]} for record in run.records]
    sweeps = [{**row._asdict(), "held": dict(row.held)} for row in break_even_rows(run, findings)]
    return {"schema": SCHEMA, **header, "records": records, "break_even": sweeps}


def _result_value(case: NamedCase) -> dict[str, Any]:
    finding = None
    if case.finding:
        finding = {**encode(case.finding), "verdict_words": case.finding.verdict_words}
        # The record has the case already, and times by phase are figures.
        finding.pop("case", None)
        finding.pop("typical", None)
    figures = {}
    for metric in case.figures.values():
        value = metric.value if metric.best is None else metric.best
        if value is not None:
            figures[metric.name] = encode(value)
    return {"finding": finding, "metrics": figures}
