"""A run for other programs: tidy or wide rows as CSV, or all of it as one JSON document.

Tidy rows are one for each case, phase and metric, and one for each size at which a precision begins to pay; wide rows
are one for each case. docs/outputs.md describes the columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from fp8bench.analysis.metric import Metric
from fp8bench.model import Finding, Provenance, Record, Run, Scalar, specs
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.model.specs import ENERGY, STEP, TIME, Rank, spec_of
from fp8bench.report.case_status import emulated
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import printable
from fp8bench.report.panels import Figures, Result, metrics_within, panels_of, show_params
from fp8bench.report.topics.break_even import BreakEvenRow, break_even_rows
from fp8bench.units import RATIO

Cell = Scalar | None
TidyRow = dict[str, Cell]
# The columns: first what the row is about, ...
_CASE_COLUMNS = (
    "run", "started_utc", "case", "suite", "suite_version", "device", "device_name", "precision", "mode",
    "reference_mode", "level", "status", "reason", "params",
)  # fmt: skip
# ... then one for each parameter, then the figure. New columns go to the end, so that the others stay.
_FIGURE_COLUMNS = (
    "phase", "kind", "role", "metric", "unit", "median_in_unit", "best_in_unit", "spread", "ratio_to_reference",
    "ratio_low", "ratio_high", "ratio_confidence", "ratio_of_medians", "noise_floor", "n_rounds", "n_samples",
    "provenance", "verdict", "labels", "why", "energy_source", "label_reasons", "speedup",
    "speedup_low", "speedup_high", "speedup_mean", "speedup_mean_low", "speedup_mean_high", "would_see_one_in",
    "axis", "size_low", "size_high", "energy_validity", "power_limit_W", "rank", "failed_rank", "failed_phase",
    "low_in_unit", "high_in_unit",
)  # fmt: skip
# Columns of a single figure. The others are in the row of the step's time, which says what became of the case.
_OF_A_FIGURE = (
    "phase", "kind", "role", "metric", "unit", "median_in_unit", "best_in_unit", "n_rounds", "n_samples", "provenance",
    "labels", "energy_source", "axis", "size_low", "size_high", "energy_validity", "power_limit_W", "rank",
    "low_in_unit", "high_in_unit",
)  # fmt: skip


def columns_of(*runs: Run) -> tuple[str, ...]:
    """The columns of the rows of some runs, with one for each parameter of their cases."""
    names = dict.fromkeys(name for run in runs for record in run.records for name, _ in record.case.params)
    return (*_CASE_COLUMNS, *(f"param_{name}" for name in names), *_FIGURE_COLUMNS)


def rows(run: Run, findings: Mapping[str, Finding]) -> list[TidyRow]:
    """All rows, in the order of the plan. Each has every column, with None for what it does not have."""
    empty: TidyRow = dict.fromkeys(columns_of(run))
    names = {facts.key: facts.name for facts in run.devices}
    heads: TidyRow = {"run": Path(run.path).stem or run.id, "started_utc": run.started}
    tidy = []
    for panel in panels_of(run, findings):
        for group, result in panel.members:
            named = {"device_name": names.get(result.record.case.device)}
            about = empty | heads | _about(result.record, panel.reference) | named
            # The row of the step's time comes first, and says what became of the case.
            first, *others = (metric for metric in metrics_within(group, result) if metric.rank is not Rank.RESTATED)
            tidy += [about | _row(first) | _of_the_case(result), *(about | _row(metric) for metric in others)]
    for row in break_even_rows(run, findings):
        tidy.append(empty | heads | {"device_name": names.get(row.device)} | _crossing(row))
    # Texts are one line, and None if empty: the CSV has the same.
    return [
        {name: _line(cell) or None if isinstance(cell, str) else cell for name, cell in row.items()} for row in tidy
    ]


def _crossing(row: BreakEvenRow) -> TidyRow:
    """A size between those that were measured, which belongs to no case."""
    return {
        "suite": row.suite, "device": row.device, "mode": row.mode, "reference_mode": row.against,
        "params": show_params(row.held), **{f"param_{name}": value for name, value in row.held},
        "metric": specs.BREAK_EVEN.name, "unit": "count", "median_in_unit": row.size, "axis": row.axis,
        "size_low": row.low, "size_high": row.high, "ratio_confidence": row.confidence,
        "provenance": Provenance.DERIVED.value, "verdict": row.pays, "why": row.remarks,
    }  # fmt: skip


@lru_cache(maxsize=4096)  # most texts stand in every row of their case
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
        "phase": metric.phase, "kind": kind, "role": role, "metric": metric.name, "unit": metric.unit,
        "median_in_unit": metric.value, "best_in_unit": metric.best, "n_rounds": metric.rounds,
        "n_samples": metric.count, "provenance": metric.provenance and metric.provenance.value,
        "verdict": metric.verdict, "labels": " ".join(metric.labels), "why": metric.why,
        "energy_source": metric.source, "rank": metric.of_rank,
    }  # fmt: skip
    if metric.bounds is not None:
        row["low_in_unit"], row["high_in_unit"] = metric.bounds
    if metric.energy is not None:
        row["energy_validity"] = metric.energy.validity
        row["power_limit_W"] = " ".join(f"{watts:g}" for watts in metric.energy.power_limits)
    ratio = metric.interval
    if ratio is None:
        return row
    row["ratio_to_reference"] = ratio.point
    if ratio.level < 1:  # an exact one has no ends
        row |= {"ratio_low": ratio.low, "ratio_high": ratio.high, "ratio_confidence": ratio.level or None}
    if metric.name == TIME and 0 < ratio.point < math.inf:
        speed = ratio.inverse
        row |= {"speedup": speed.point, "speedup_low": speed.low, "speedup_high": speed.high}
    return row


def _of_the_case(result: Result) -> TidyRow:
    finding = result.finding
    if finding is None or finding.best_seconds is None:
        return {}
    mean: TidyRow = {}
    if finding.typical is not None and not emulated(result):
        speed = finding.typical.inverse
        mean = {"speedup_mean": speed.point, "speedup_mean_low": speed.low, "speedup_mean_high": speed.high}
        mean["would_see_one_in"] = finding.rarest
    return mean | {
        "spread": finding.spread, "noise_floor": finding.floor,
        "ratio_of_medians": None if emulated(result) or finding.ratio is None else finding.median_ratio,
        "label_reasons": "; ".join(f"{label}: {reason}" for label, reason in finding.label_reasons),
    }  # fmt: skip


def widened(tidy: Iterable[Mapping[str, Cell]]) -> tuple[tuple[str, ...], list[TidyRow]]:
    """Columns and rows. A phase's figures are called '<phase>_<metric>', and their columns end in the unit."""
    cases: dict[tuple[Cell, Cell], TidyRow] = {}
    for row in tidy:
        if row["metric"] == specs.BREAK_EVEN:  # belongs to no case
            continue
        wide = cases.setdefault((row["run"], row["case"]), {})
        if row["metric"] == TIME and row["phase"] == STEP:
            figures = {name: cell for name, cell in row.items() if name not in _OF_A_FIGURE or name == "labels"}
            wide.update({name: cell for name, cell in figures.items() if name not in wide})
        wide.update(_columns_of_figure(row))
        if row["metric"] == ENERGY and row["phase"] == STEP:
            wide.update({"energy_source": row["energy_source"], "energy_why": row["why"]})
            wide.update({name: row[name] for name in ("energy_validity", "power_limit_W")})
    # First what names the case, then figures in the order in which cases have them.
    columns = tuple(dict.fromkeys(name for wide in cases.values() for name in wide))
    return columns, [{name: wide.get(name) for name in columns} for wide in cases.values()]


def _columns_of_figure(row: Mapping[str, Cell]) -> TidyRow:
    """One figure's best and median, or its value and bounds."""
    parts = [row["kind"], row["role"]] if row["phase"] is None else [None if row["phase"] == STEP else row["phase"]]
    of_rank = None if row["rank"] is None else str(row["rank"])
    name = "_".join(str(part) for part in (*parts, row["metric"], of_rank) if part)
    spec = spec_of(str(row["metric"]))
    named = row["unit"] in (None, "count", RATIO) or (spec.of_workload and row["unit"] == spec.unit)  # by its name
    unit = "" if named else "_" + str(row["unit"]).replace("/", "_per_")
    if row["low_in_unit"] is not None:
        ends = {f"{name}_{end}{unit}": row[f"{end}_in_unit"] for end in ("low", "high")}
        return {f"{name}{unit}": row["median_in_unit"], **ends}
    if row["best_in_unit"] is None:
        return {f"{name}{unit}": row["median_in_unit"]}
    return {f"{name}_best{unit}": row["best_in_unit"], f"{name}_median{unit}": row["median_in_unit"]}


def run_rows(pairs: Sequence[tuple[Run, Mapping[str, Finding]]], wide: bool = False) -> Rows:
    tidy = [row for run, findings in pairs for row in rows(run, findings)]
    return widened(tidy) if wide else (columns_of(*(run for run, _ in pairs)) if pairs else (), tidy)


def run_value(run: Run, findings: Mapping[str, Finding]) -> dict[str, Any]:
    """All that its file holds, with findings and figures for each record, and break-even sizes."""
    header = {field.name: encode(getattr(run, field.name)) for field in fields(run) if field.name != "records"}
    said = {}
    for group, result in (member for panel in panels_of(run, findings) for member in panel.members):
        told = result.finding and {**encode(result.finding), "verdict_words": result.finding.verdict_words}
        finding = told and {name: value for name, value in told.items() if name != "case"}
        figures = {
            name: encode(Figure.value) for name, Figure in Figures(group, result).items() if Figure.value is not None
        }
        said[result.record.case.id] = {"finding": finding, "metrics": figures}
    records = [{**encode(record), **said[record.case.id]} for record in run.records]
    sweeps = [{**row._asdict(), "held": dict(row.held)} for row in break_even_rows(run, findings)]
    return {"schema": SCHEMA, **header, "records": records, "break_even": sweeps}
