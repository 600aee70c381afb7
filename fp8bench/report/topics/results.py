"""All cases in one table, short for a terminal and whole on the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fp8bench import units
from fp8bench.analysis.metric import Metric
from fp8bench.model import Finding
from fp8bench.model.specs import DEVICE_PEAK_MEMORY, ENERGY, PEAK_MEMORY, REPLAY, TIME, MetricSpec
from fp8bench.report import case_status
from fp8bench.report.columns import Col, figure_col, in_table, other_tables, table, with_figures
from fp8bench.report.elements import Element, Field, Table, Text, Tone
from fp8bench.report.page.section import Entry, Material, number, section
from fp8bench.report.panels import (
    Figures,
    NamedCase,
    Panel,
    Result,
    ResultGroup,
    floor_of,
    shared_params,
    show_params,
    together,
)
from fp8bench.report.topics.tensors import about_tensors
from fp8bench.report.words import legend
from fp8bench.report.words.naming import attention_of, cache_of, replays_of

_COST = "the cost of emulation, not of the precision"
# Columns that every table has.
_NAMES = {"precision", "verdict"}
# The first columns of a terminal's tables.
CASE: tuple[Col[NamedCase], ...] = (
    Col("case", lambda row: row.result.mode),
    Col("verdict", lambda row: case_status.status_words(row.result), tone=lambda row: case_status.tone_of(row.result)),
    Col("speed-up", lambda row: case_status.show_speed_up(row.result) or None,
        tone=lambda row: case_status.tone_of(row.result)),
    Col("best", lambda row: row.figures[TIME].best, number=True, unit="s"),
    Col("replayed", lambda row: row.figures[REPLAY].best, number=True, unit="s"),
)  # fmt: skip


def main_table(panel: Panel) -> Table:
    floors = "  noise floor (A/A): " if len(panel.groups) > 1 else ""
    cols: list[Col[NamedCase]] = [
        Col("group", lambda row: floors and f"{row.place}{floors}{noise_floor(row.group)}", shared=True),
        *CASE,
        Col("error", lambda row: row.figures[row.group.error].value, number=True, show=units.relative_error),
        Col("spread", lambda row: row.result.spread, number=True, show=units.percent),
        Col("throughput", lambda row: row.figures.rate.shown, number=True),
        Col("labels", lambda row: "\n".join(_doubts(row)), below=True, tone=lambda row: Tone.DOUBT),
    ]
    kept = {"group", "case", "verdict", "best", "spread", "labels"}
    return with_figures(table("cases", "", cols, panel.members, kept=kept), panel.members)


def _doubts(row: NamedCase) -> Iterator[str]:
    finding, labels = row.result.finding, ", ".join(case_status.named_labels(row.result))
    if labels and row.result.record.is_ok:
        yield f"labels: {labels}"
    if finding and finding.judged and finding.why:
        yield finding.why


def noise_floor(group: ResultGroup) -> str:
    """'+-0.6%', or a range if cases measured apart have their own; and why measuring ended."""
    reasons = dict.fromkeys(result.record.stopped for result in group.results if result.record.stopped)
    return "; ".join(filter(None, (floor_of(group.results) or "not measured", " / ".join(reasons))))


@dataclass(frozen=True)
class _ShownCase:
    entry: Entry
    panel: Panel
    result: Result
    setting: str
    figures: Figures

    @property
    def finding(self) -> Finding | None:
        return self.result.finding

    def figure(self, name: str, best: bool = False) -> Field:
        metric = self.figures[name]
        return self.shown(replace(metric, value=metric.best) if best else metric)

    def shown(self, metric: Metric) -> Field:
        hint = _COST if case_status.emulated(self.result) else ""
        return number(metric.value, metric.spec.shown, case_status.cost_tone(self.result), hint)


@section("results", "Results", 30)
def results_section(material: Material) -> Iterator[Element]:
    """Speed-up: above 1x is faster; 'perhaps': a label casts doubt on it. Best: a step that nothing disturbs, with a
    hot cache unless it says cache=. Emulated cases are right in numbers and have no speed: their time and memory are
    what emulating costs.
    """
    cases = [case for case in _cases(material) if not about_tensors(case[1])]
    if cases:
        by_suite = together((panel.case.workload, case.group.case.params) for _, panel, case in cases)
        # Parameters that all cases of a suite share, on any device and in any run.
        shared = {suite: shared_params([*dict.fromkeys(every)]) for suite, every in by_suite.items()}
        rows = [
            _ShownCase(entry, panel, case.result, own or units.NONE, case.figures)
            for entry, panel, case in cases
            for own in [show_params(pair for pair in case.group.case.params if pair not in shared[panel.case.workload])]
        ]
        yield _table(rows, material.alone)
        words = "; ".join(f"{suite} {show_params(params)}" for suite, params in shared.items() if params)
        yield from [Text(f"The same in every row: {words}.")] if words else []
        panels = {id(panel): panel for _, panel, _ in cases}  # not by value: that reads all samples
        for panel in panels.values():
            yield from other_tables(panel)
    elif not any(_cases(material)):
        yield Text("There are no cases.", Tone.DOUBT)


def _cases(material: Material) -> Iterator[tuple[Entry, Panel, NamedCase]]:
    return ((entry, panel, case) for entry, panel in material.panels() for case in panel.members)


def _table(rows: Sequence[_ShownCase], alone: bool) -> Table:
    several = {
        "run": not alone,
        "device": len({row.panel.case.device for row in rows}) > 1,
        "suite": len({row.panel.case.workload for row in rows}) > 1,
    }
    cols = [*_columns(rows), *(_of_spec(spec) for spec in in_table("cases"))]
    shown = [col for col in cols if several.get(col.heading, True)]
    return table("results-table", "All cases", shown, rows, main=True, kept=_NAMES)


def _columns(rows: Sequence[_ShownCase]) -> Iterator[Col[_ShownCase]]:
    metrics = (row.figures.rate for row in rows)
    rates = {rate.unit for rate in metrics if rate.value is not None}
    errors = together((metric, row.panel.case.workload) for row in rows if (metric := row.panel.error))
    yield Col("precision", lambda row: row.result.mode)
    yield Col("run", lambda row: row.entry.label)
    yield Col("device", lambda row: row.panel.case.device)
    yield Col("suite", lambda row: row.panel.case.workload)
    yield Col("setting", _setting, hint="what tells a group of cases from the others; hover for all parameters")
    yield Col("verdict", lambda row: Field(case_status.status_words(row.result), tone=case_status.tone_of(row.result),
              hint=_why(row.result)), hint=legend.VERDICT.removeprefix("verdict: "))  # fmt: skip
    yield Col("speed-up", lambda row: number(speed.point if (speed := case_status.speed_up(row.result)) else None,
              units.speed_up, case_status.tone_of(row.result)), number=True, unit="x",
              hint="step time of the reference / that of the case: above 1x is faster")  # fmt: skip
    yield Col("interval", _interval, number=True, unit="x", hint="of the speed-up; sorts by width: the surest first")
    words = ", ".join(f"{metric} ({', '.join(dict.fromkeys(suites))})" for metric, suites in errors.items())
    yield Col("error", lambda row: number(row.figures[row.panel.error].value, units.relative_error,
              hint=row.panel.error), number=True, hint=words)  # fmt: skip
    yield _of_spec(PEAK_MEMORY)
    yield figure_col(DEVICE_PEAK_MEMORY, lambda row: row.figure(DEVICE_PEAK_MEMORY) if case_status.emulated(row.result)
                     else Field(units.NONE))  # fmt: skip
    yield _of_spec(ENERGY)
    yield Col("labels", lambda row: Field(", ".join(case_status.named_labels(row.result)), hint="; ".join(
              case_status.meaning(label, row.result) for label in row.result.labels)),
              hint="reasons for doubt, and what else one should know")  # fmt: skip
    words = legend.BEST.partition(";")[0].partition(": ")[2]
    yield Col("best", lambda row: row.figure(TIME, best=True), number=True, unit="s", hint=words)
    yield figure_col(REPLAY, lambda row: replace(row.figure(REPLAY, best=True), hint=replays_of(row.result.record)))
    yield Col(
        "spread",
        lambda row: row.result.spread,
        number=True,
        show=units.percent,
        hint="distance of the quartiles / median, over all calls",
    )
    unit = rates.pop() if len(rates) == 1 else ""
    yield Col("throughput", lambda row: row.shown(row.figures.rate), number=True, unit=unit, hint="of the best case")
    yield Col("how", lambda row: Field(row.result.record.support.level.value, tone=case_status.cost_tone(row.result),
              hint=row.result.record.support.reason),
              hint="native: the hardware does it; emulated: right in numbers, without a speed; refused")  # fmt: skip
    yield Col(
        "attention",
        lambda row: attention_of(row.result.record),
        hint="which of torch's kernels computed it, as an untimed step showed",
    )


def _of_spec(spec: MetricSpec) -> Col[_ShownCase]:
    return figure_col(spec, partial(_ShownCase.figure, name=spec))


def _setting(row: _ShownCase) -> Field:
    record = row.result.record
    words = filter(None, (show_params(record.case.params), cache_of(record, row.entry.run.devices)))
    return Field(row.setting, hint="; ".join(words))


def _interval(row: _ShownCase) -> Field:
    speed = case_status.speed_up(row.result)
    return Field(units.NONE) if speed is None else number(speed.half_width, lambda _: case_status.bounds(speed))


def _why(result: Result) -> str:
    if not result.record.is_ok:
        return result.record.reason
    return "; ".join(part for part in (*case_status.doubts(result), result.record.detail) if part)
