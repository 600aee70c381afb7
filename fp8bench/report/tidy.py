"""A run as tidy rows: one for each case, phase and metric. docs/outputs.md says what the columns hold."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from fp8bench.analysis.phase_medians import phase_medians
from fp8bench.model import UNATTRIBUTED, Finding, Label, Level, Provenance, Record, Run, Timing, Verdict
from fp8bench.report.blocks import Result, ResultGroup, panels_of, show_params
from fp8bench.report.capacity_rows import capacity_rows
from fp8bench.report.energy_rows import energy_rows
from fp8bench.report.memory_rows import memory_rows
from fp8bench.report.tidy_row import STEP as STEP
from fp8bench.report.tidy_row import TidyRow as TidyRow

# What every row has: first what it is about, ...
_CASE_COLUMNS = (
    "run", "started_utc", "case", "suite", "suite_version", "device", "device_name", "precision", "mode",
    "reference_mode", "level", "status", "reason", "params",
)  # fmt: skip
# ... then one column a parameter, then what it says. A new column goes to the end, so that those before it stay.
_FIGURE_COLUMNS = (
    "phase", "kind", "role", "metric", "unit", "median_in_unit", "best_in_unit", "spread", "ratio_to_reference",
    "ratio_low", "ratio_high", "ratio_confidence", "ratio_of_medians", "noise_floor", "n_rounds", "n_samples",
    "provenance", "verdict", "labels", "why", "energy_source", "label_reasons",
)  # fmt: skip


def columns_of(run: Run) -> tuple[str, ...]:
    """The columns of a run's rows, in order: those of every run, and one for each parameter of its cases."""
    names = dict.fromkeys(name for record in run.records for name, _ in record.case.params)
    return (*_CASE_COLUMNS, *(f"param_{name}" for name in names), *_FIGURE_COLUMNS)


def rows(run: Run, findings: Mapping[str, Finding]) -> list[TidyRow]:
    """All rows, in the order of the plan; each has every column, None where it has nothing to say there."""
    empty: TidyRow = dict.fromkeys(columns_of(run))
    names = {facts.key: facts.name for facts in run.devices}
    heads: TidyRow = {"run": Path(run.path).stem or run.id, "started_utc": run.started}
    found = []
    for panel in panels_of(run, findings):
        for group in panel.groups:
            for result in group.results:
                named = {"device_name": names.get(result.record.case.device)}
                about = heads | _about(result.record, panel.reference) | named
                found += [_cleaned(empty | about | figures) for figures in _figures(group, result)]
    return found


def _cleaned(row: TidyRow) -> TidyRow:
    """One line a text, and nothing for an empty one, so that a reader of the CSV finds the same."""
    return {name: _one_line(cell) or None if isinstance(cell, str) else cell for name, cell in row.items()}


@lru_cache(maxsize=4096)  # most texts stand in every row of their case
def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text).strip()


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
    return about | {f"param_{name}": value for name, value in case.params}


def _figures(group: ResultGroup, result: Result) -> Iterator[TidyRow]:
    """What is known of one case: the step's time first, which a case without one has too, with its reason."""
    yield _step_time(result)
    yield from _phase_times(result)
    yield from _throughputs(result)
    for one in result.record.measurements:
        yield {
            "phase": one.phase or STEP,
            "metric": one.metric,
            "unit": one.unit,
            "median_in_unit": statistics.median(one.samples) if one.samples else None,
            "n_samples": len(one.samples),
            "provenance": one.provenance.value,
        }
    yield from energy_rows(group, result)
    yield from memory_rows(result)
    yield from capacity_rows(group, result)
    yield from _data(result.record)


def _step_time(result: Result) -> TidyRow:
    finding = result.finding
    row: TidyRow = {"phase": STEP, "metric": "time", "unit": "s"}
    if finding is None or finding.best_seconds is None:
        return row | {"verdict": finding.verdict.value if finding else None, "why": finding.why if finding else None}
    emulated = result.record.support.level is Level.EMULATED
    row |= {
        "median_in_unit": finding.median_seconds,
        "best_in_unit": finding.best_seconds,
        "spread": finding.spread,
        "noise_floor": finding.floor,
        "provenance": Provenance.MEASURED.value,
        "verdict": (Verdict.EMULATED if emulated else finding.verdict).value,
        "labels": " ".join(finding.labels),
        "label_reasons": "; ".join(f"{label}: {reason}" for label, reason in finding.label_reasons),
        "why": "; ".join(filter(None, (finding.why, result.reason(Label.EAGER_QUANTISER)))),
        **_counts(result.record.timing),
    }
    if finding.ratio is not None and not emulated:  # whatever is known of it, the time of an emulation is no speed
        row |= {
            "ratio_to_reference": finding.ratio.point,
            "ratio_low": finding.ratio.low,
            "ratio_high": finding.ratio.high,
            "ratio_confidence": finding.ratio.level,
            "ratio_of_medians": finding.median_ratio,
        }
    return row


def _counts(timing: Timing | None) -> TidyRow:
    return {"n_rounds": timing.num_rounds, "n_samples": timing.num_calls} if timing is not None else {}


def _phase_times(result: Result) -> Iterator[TidyRow]:
    """Time of each phase the step has, and its share; best cases sum to the step's."""
    finding, timing = result.finding, result.record.timing
    if finding is None or not finding.best_seconds or timing is None:
        return
    medians = phase_medians(timing)
    for phase, best in finding.phases:
        if phase not in medians and phase != UNATTRIBUTED:
            continue
        seconds, share = medians.get(phase, (0.0, 0.0))
        labels = {*finding.labels, *([Label.BELOW_FLOOR] if phase in finding.below_floor else [])}
        common: TidyRow = {
            "phase": phase,
            "labels": " ".join(one for one in Label if one in labels),
            **_counts(result.record.timing),
        }
        yield common | {
            "metric": "time", "unit": "s", "median_in_unit": seconds, "best_in_unit": best,
            "provenance": Provenance.MEASURED.value,
        }  # fmt: skip
        yield common | {
            "metric": "share_of_step", "unit": "ratio", "median_in_unit": share,
            "best_in_unit": best / finding.best_seconds, "provenance": Provenance.DERIVED.value,
        }  # fmt: skip


def _throughputs(result: Result) -> Iterator[TidyRow]:
    """What is done in a second, by each count of work; nothing for emulations, which have no speed."""
    finding, work = result.finding, result.record.work
    if finding is None or not finding.best_seconds or result.record.support.level is Level.EMULATED:
        return
    done = (("tokens", work.tokens, "tok/s"), ("flops", work.flops, "FLOP/s"), ("bytes", work.bytes, "B/s"))
    for name, count, unit in done:
        if count:
            yield {
                "phase": STEP,
                "metric": f"{name}_per_second",
                "unit": unit,
                "median_in_unit": count / finding.median_seconds if finding.median_seconds else None,
                "best_in_unit": count / finding.best_seconds,
                "provenance": Provenance.DERIVED.value,
                "labels": " ".join(finding.labels),
                **_counts(result.record.timing),
            }


def _data(record: Record) -> Iterator[TidyRow]:
    """What the data are made of, before any scaling."""
    for one in record.statistics:
        figures = [("values", "count", float(one.count)), ("amax", "", one.amax)]
        for name, above, vanishing in one.outside:
            figures += [(f"share_above_{name}", "ratio", above), (f"share_vanishing_{name}", "ratio", vanishing)]
        for metric, unit, value in figures:
            yield {
                "kind": one.kind,
                "role": one.role,
                "metric": metric,
                "unit": unit,
                "median_in_unit": value,
                "n_samples": one.count,
                "provenance": Provenance.MEASURED.value,
            }
