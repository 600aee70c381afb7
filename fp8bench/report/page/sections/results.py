"""Every case in one table: the truth that the charts are drawn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8bench import units
from fp8bench.model import Params, Status
from fp8bench.report.case_status import (
    Standing,
    bounds,
    doubts,
    emulated,
    meaning,
    named_labels,
    speed_up,
    standing,
    status_words,
    tone_of,
)
from fp8bench.report.elements import Column, Field, Part, Table, Text, Tone
from fp8bench.report.energies import figures_of
from fp8bench.report.material import Entry, Material
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import Panel, Result, ResultGroup, shared_params, show_params
from fp8bench.report.tensor_panels import about_tensors
from fp8bench.report.terminal.tables import main_error, rate_of, show_rate, value_of
from fp8bench.report.words import legend

_PEAK = "peak_memory"
_COST = "the cost of emulation, not of the precision"
# What names a case stands in every table.
_NAMES = {"precision", "verdict"}


@dataclass(frozen=True)
class _Row:
    """A case with all that it stands under."""

    entry: Entry
    panel: Panel
    group: ResultGroup
    result: Result


@sections.register("results")
class Results(Section):
    """One row a case, those that were skipped or failed too."""

    name = "results"
    summary = "every case with its time, verdict, error and memory"
    rank = 30

    def build(self, material: Material) -> Part | None:
        panels = list(material.panels())
        rows = [
            _Row(entry, panel, group, result)
            for entry, panel in panels
            if not about_tensors(panel)
            for group in panel.groups
            for result in group.results
        ]
        if not panels:
            return Part(self.name, "Results", (Text("There are no cases.", Tone.DOUBT),))
        if not rows:
            return None
        shared = _shared(rows)
        words = "; ".join(f"{suite} {show_params(params)}" for suite, params in shared.items() if params)
        same = [Text(f"The same in every row: {words}.")] if words else []
        return Part(self.name, "Results", (_table(rows, material.alone, shared), *same), _lead(rows))


def _lead(rows: Sequence[_Row]) -> str:
    notes = ["Speed-up: above 1x is faster. Best: a step that nothing disturbs."]
    if any(standing(row.result) is Standing.DOUBTED for row in rows):
        notes.append("'Perhaps': a label casts doubt on it.")
    if any(emulated(row.result) for row in rows):
        notes.append("Emulated cases are right in numbers and have no speed: their time and memory are its cost.")
    return " ".join(notes)


def _shared(rows: Sequence[_Row]) -> dict[str, Params]:
    """What all cases of a suite have in common, on whatever device and in whatever run."""
    by_suite: dict[str, list[Params]] = {}
    for row in rows:
        by_suite.setdefault(row.panel.case.workload, []).append(row.group.case.params)
    return {suite: shared_params([*dict.fromkeys(every)]) for suite, every in by_suite.items()}


def _table(rows: Sequence[_Row], alone: bool, shared: Mapping[str, Params]) -> Table:
    """The columns that say something; suite, run and device only where there are several."""
    columns = _columns(rows)
    found = [_fields(row, shared[row.panel.case.workload]) for row in rows]
    silent = {name for name in columns if all(fields[name].text in ("", units.NONE) for fields in found)} - _NAMES
    silent |= {"run"} if alone else set()
    silent |= {name for name in ("suite", "device") if len({fields[name].text for fields in found}) == 1}
    shown = [name for name in columns if name not in silent]
    fields = tuple(tuple(one[name] for name in shown) for one in found)
    return Table("results-table", "All cases", tuple(columns[name] for name in shown), fields, main=True)


def _columns(rows: Sequence[_Row]) -> dict[str, Column]:
    return {
        "precision": Column("precision"),
        "run": Column("run"),
        "device": Column("device"),
        "suite": Column("suite"),
        "setting": Column("setting", hint="what tells a group of cases from the others; hover for all parameters"),
        "verdict": Column("verdict", hint=legend.VERDICT.removeprefix("verdict: ")),
        "ratio": Column(
            "speed-up", number=True, unit="x", hint="step time of the reference / that of the case: above 1x is faster"
        ),
        "interval": Column("interval", number=True, unit="x", hint="of the speed-up; sorts by width: the surest first"),
        "error": Column("error", number=True, hint=_errors(rows)),
        "memory": Column("peak memory", number=True, unit="B", hint="tensors, at the highest point of a step"),
        "energy": Column("energy", number=True, unit="J", hint="of a step, all that the device took while it ran"),
        "best": Column("best", number=True, unit="s", hint=_after_colon(legend.BEST.partition(";")[0])),
        "median": Column("median", number=True, unit="s", hint="of a step, over all calls"),
        "spread": Column("spread", number=True, hint="distance of the quartiles / median, over all calls"),
        "throughput": Column("throughput", number=True, unit=_one_unit(rows), hint="at the median"),
        "how": Column("how", hint="native: the hardware does it; emulated: right in numbers, without a speed; refused"),
        "labels": Column("labels", hint="reasons for doubt, and what else one should know"),
    }


def _after_colon(text: str) -> str:
    return text.partition(": ")[2]


def _one_unit(rows: Sequence[_Row]) -> str:
    """The unit of all throughputs, '' where suites count different things."""
    units_found = {rate[1] for row in rows if (rate := rate_of(row.result)) is not None}
    return units_found.pop() if len(units_found) == 1 else ""


def _errors(rows: Sequence[_Row]) -> str:
    """Which error it is: 'product_error (gemm), gradient_error (mlp, transformer)'; relative, 0 is exact."""
    suites: dict[str, dict[str, None]] = {}
    for row in rows:
        if metric := main_error(row.panel):
            suites.setdefault(metric, {})[row.panel.case.workload] = None
    return ", ".join(f"{metric} ({', '.join(found)})" for metric, found in suites.items())


def _fields(row: _Row, shared: Params) -> dict[str, Field]:
    result, record = row.result, row.result.record
    case, finding, tone = record.case, row.result.finding, tone_of(row.result)
    ratio = speed_up(result)
    point = ratio.point if ratio is not None else None
    cost = _COST if emulated(result) else ""
    times = Tone.DOUBT if cost else Tone.PLAIN
    median, spread = (finding.median_seconds, finding.spread) if finding else (None, None)
    error = value_of(record.measurement(main_error(row.panel)))
    peak = value_of(record.measurement(_PEAK))
    energy = figures_of(result)
    joules = energy.gross.middle if energy is not None else None
    return {
        "run": Field(row.entry.label),
        "suite": Field(case.workload),
        "setting": Field(
            show_params(pair for pair in case.params if pair not in shared) or units.NONE, hint=show_params(case.params)
        ),
        "device": Field(case.device),
        "precision": Field(case.mode),
        "how": Field(record.support.level.value, tone=times, hint=record.support.reason),
        "verdict": Field(status_words(result), tone=tone, hint=_why(result)),
        "ratio": _number(units.speed_up(point), point, tone),
        "interval": Field(units.NONE) if ratio is None else _number(bounds(ratio), ratio.half_width),
        "best": _number(units.seconds(result.best), result.best, times, cost),
        "median": _number(units.seconds(median), median, times, cost),
        "spread": _number(units.percent(spread), spread),
        "throughput": _number(show_rate(rate_of(result)), (rate_of(result) or (None,))[0]),
        "error": _number(units.relative_error(error), error, hint=main_error(row.panel)),
        "memory": _number(units.size(peak), peak, times, cost),
        "energy": _number(units.joules(joules), joules, times, cost),
        "labels": Field(", ".join(named_labels(result)), hint=_meanings(result)),
    }


def _number(text: str, value: float | None, tone: Tone = Tone.PLAIN, hint: str = "") -> Field:
    """A field that sorts by its number; what is no number sorts by nothing."""
    if value is None:
        return Field(text)
    return Field(text, None if math.isnan(value) else value, tone, hint)


def _why(result: Result) -> str:
    """The reason it was not measured, or is not to be trusted."""
    if result.record.status is not Status.OK:
        return result.record.reason
    return "; ".join(part for part in (*doubts(result), result.record.detail) if part)


def _meanings(result: Result) -> str:
    return "; ".join(meaning(label, result) for label in result.labels)
