"""Every case in one table, short for a terminal, and on the page the truth that the charts are drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fp8bench import units
from fp8bench.model import Params, Status
from fp8bench.model.specs import ENERGY, PEAK_MEMORY, REPLAY, TIME, MetricSpec
from fp8bench.report import case_status
from fp8bench.report.columns import column_of, in_table, other_tables, with_figures
from fp8bench.report.elements import Column, Element, Field, Table, Text, Tone
from fp8bench.report.material import Entry, Material
from fp8bench.report.page.section import Columns, Section, number, sections, table_of
from fp8bench.report.panels import (
    Figures,
    Panel,
    Result,
    ResultGroup,
    floor_of,
    main_error,
    shared_params,
    show_params,
    together,
)
from fp8bench.report.topics.tensors import about_tensors
from fp8bench.report.words import legend
from fp8bench.report.words.naming import attention_of, cache_of, replays_of
from fp8bench.report.words.speed import over_values

_COST = "the cost of emulation, not of the precision"
# What names a case stands in every table.
_NAMES = {"precision", "verdict"}


def main_table(panel: Panel) -> Table:
    """Case by case: verdict, speed-up, times, error, throughput. What has no room left is told last."""
    error = main_error(panel)
    columns = {
        "group": Column("group", shared=True), "case": Column("case"), "verdict": Column("verdict"),
        "speed-up": Column("speed-up"), "best": Column("best", number=True), "median": Column("median", number=True),
        "replayed": Column("replayed", number=True),
        "error": Column("error", number=True), "spread": Column("spread", number=True),
        "throughput": Column("throughput", number=True), "labels": Column("labels", below=True),
    }  # fmt: skip
    floors = len(panel.groups) > 1
    rows = [
        _main_fields(one, Figures(group, one), error)
        | {"group": Field(f"{panel.place(group)}  noise floor (A/A): {noise_floor(group)}" if floors else "")}
        for group, one in panel.members
    ]
    silent = {"speed-up", "throughput", "error", "replayed"} & {
        name for name in columns if all(row[name].text == units.NONE for row in rows)
    }
    shown = [name for name in columns if name not in silent]
    fields = tuple(tuple(row[name] for name in shown) for row in rows)
    return with_figures(Table("cases", "", tuple(columns[name] for name in shown), fields), panel.members)


def noise_floor(group: ResultGroup) -> str:
    """'+-0.6%', or the range where cases that sat apart have floors of their own; and why measuring ended."""
    reasons = dict.fromkeys(one.record.stopped for one in group.results if one.record.stopped)
    return "; ".join(filter(None, (floor_of(group.results) or "not measured", " / ".join(reasons))))


def _main_fields(result: Result, figures: Figures, error: str) -> dict[str, Field]:
    finding = result.finding
    known = result.record.status is Status.OK
    tone = Tone.STRONG if case_status.standing(result) is case_status.Standing.FAILED else case_status.tone_of(result)
    labels = ", ".join(case_status.named_labels(result)) if known else ""
    why = finding.why if finding and finding.judged else ""
    return {
        "case": Field(result.mode),
        "verdict": Field(case_status.status_words(result), tone=tone),
        "speed-up": Field(case_status.show_speed_up(result) or units.NONE, tone=tone),
        "best": Field(units.seconds(figures[TIME].best if known else None)),
        "median": Field(units.seconds(figures[TIME].value if known else None)),
        "replayed": Field(units.seconds(figures[REPLAY].best if known else None)),
        "error": Field(units.relative_error(figures[error].value)),
        "spread": Field(units.percent(finding.spread if finding and known else None)),
        "throughput": Field(figures.shown(figures.rate) if known else units.NONE),
        "labels": Field("\n".join(filter(None, (f"labels: {labels}" if labels else "", why)))),
    }


@dataclass(frozen=True)
class _Row:
    """A case with all that it stands under, and what its run says of its step."""

    entry: Entry
    panel: Panel
    result: Result
    setting: str
    figures: Figures

    def figure(self, name: str, best: bool = False) -> Field:
        """A figure of the step: its middle, or its best case."""
        metric = self.figures[name]
        tone, hint = (Tone.DOUBT, _COST) if case_status.emulated(self.result) else (Tone.PLAIN, "")
        value = metric.best if best else metric.value
        return number(value, metric.spec.shown, tone, hint)


@sections.register("results")
class Results(Section):
    """One row a case, those that were skipped or failed too."""

    name = "results"
    title = "Results"
    rank = 30

    def elements(self, material: Material) -> Iterator[Element]:
        cases = [case for case in _cases(material) if not about_tensors(case[1])]
        if cases:
            by_suite = together((panel.case.workload, group.case.params) for _, panel, group, _ in cases)
            # What all cases of a suite have in common, on whatever device and in whatever run.
            shared = {suite: shared_params([*dict.fromkeys(every)]) for suite, every in by_suite.items()}
            yield _table([_row(*case, shared[case[1].case.workload]) for case in cases], material.alone)
            words = "; ".join(f"{suite} {show_params(params)}" for suite, params in shared.items() if params)
            yield from [Text(f"The same in every row: {words}.")] if words else []
            panels = {id(panel): panel for _, panel, _, _ in cases}  # not by value: that reads all samples
            for panel in panels.values():
                yield from other_tables(panel)
                yield from (Text(f"{panel.case.workload}: {one}.") for one in over_values(panel))
        elif not any(_cases(material)):
            yield Text("There are no cases.", Tone.DOUBT)

    def lead_of(self, material: Material) -> str:
        results = [result for _, panel, _, result in _cases(material) if not about_tensors(panel)]
        notes = [
            "Speed-up: above 1x is faster. Best: a step that nothing disturbs, with a hot cache unless it says cache=."
        ]
        if any(case_status.standing(result) is case_status.Standing.DOUBTED for result in results):
            notes.append("'Perhaps': a label casts doubt on it.")
        if any(map(case_status.emulated, results)):
            notes.append("Emulated cases are right in numbers and have no speed: their time and memory are its cost.")
        return " ".join(notes)


def _cases(material: Material) -> Iterator[tuple[Entry, Panel, ResultGroup, Result]]:
    for entry, panel in material.panels():
        yield from ((entry, panel, group, result) for group, result in panel.members)


def _row(entry: Entry, panel: Panel, group: ResultGroup, result: Result, shared: Params) -> _Row:
    own = show_params(pair for pair in result.record.case.params if pair not in shared)
    return _Row(entry, panel, result, own or units.NONE, Figures(group, result))


def _table(rows: Sequence[_Row], alone: bool) -> Table:
    """The columns that say something; suite, run and device only where there are several."""
    several = {
        "run": not alone,
        "device": len({row.panel.case.device for row in rows}) > 1,
        "suite": len({row.panel.case.workload for row in rows}) > 1,
    }
    columns = [pair for pair in (*_columns(rows), *_of_specs(*in_table("cases"))) if several.get(pair[0].title, True)]
    return table_of("results-table", "All cases", columns, rows, _NAMES, main=True)


def _columns(rows: Sequence[_Row]) -> Columns[_Row]:
    found = (row.figures[row.figures.rate] for row in rows)
    rates = {rate.unit for rate in found if rate.value is not None}
    errors = together((metric, row.panel.case.workload) for row in rows if (metric := main_error(row.panel)))
    which = ", ".join(f"{metric} ({', '.join(dict.fromkeys(suites))})" for metric, suites in errors.items())
    return (
        (Column("precision"), lambda row: Field(row.result.mode)),
        (Column("run"), lambda row: Field(row.entry.label)),
        (Column("device"), lambda row: Field(row.panel.case.device)),
        (Column("suite"), lambda row: Field(row.panel.case.workload)),
        (Column("setting", hint="what tells a group of cases from the others; hover for all parameters"),
         _setting),
        (Column("verdict", hint=legend.VERDICT.removeprefix("verdict: ")),
         lambda row: Field(
             case_status.status_words(row.result), tone=case_status.tone_of(row.result), hint=_why(row.result))),
        (Column("speed-up", number=True, unit="x",
                hint="step time of the reference / that of the case: above 1x is faster"), _speed_up),
        (Column("interval", number=True, unit="x", hint="of the speed-up; sorts by width: the surest first"),
         _interval),
        (Column("over all calls", number=True, unit="x", hint="the speed-up by the mean over all calls"), _typical),
        (Column("error", number=True, hint=which), _error),
        *_of_specs(PEAK_MEMORY, ENERGY),
        (Column("best", number=True, unit="s", hint=legend.BEST.partition(";")[0].partition(": ")[2]),
         lambda row: row.figure(TIME, best=True)),
        (Column("median", number=True, unit="s", hint="of a step, over all calls"), lambda row: row.figure(TIME)),
        (column_of(REPLAY),
         lambda row: replace(row.figure(REPLAY, best=True), hint=replays_of(row.result.record))),
        (Column("spread", number=True, hint="distance of the quartiles / median, over all calls"),
         lambda row: number(row.result.finding.spread if row.result.finding else None, units.percent)),
        (Column("throughput", number=True, unit=rates.pop() if len(rates) == 1 else "", hint="at the median"),
         lambda row: row.figure(row.figures.rate)),
        (Column("how", hint="native: the hardware does it; emulated: right in numbers, without a speed; refused"),
         lambda row: Field(row.result.record.support.level.value, hint=row.result.record.support.reason,
                           tone=Tone.DOUBT if case_status.emulated(row.result) else Tone.PLAIN)),
        (Column("attention", hint="which of torch's kernels computed it, as an untimed step showed"),
         lambda row: Field(attention_of(row.result.record))),
        (Column("labels", hint="reasons for doubt, and what else one should know"),
         lambda row: Field(", ".join(case_status.named_labels(row.result)),
                           hint="; ".join(case_status.meaning(label, row.result) for label in row.result.labels))),
    )  # fmt: skip


def _of_specs(*figures: MetricSpec) -> Columns[_Row]:
    return [(column_of(spec), partial(_Row.figure, name=spec)) for spec in figures]


def _setting(row: _Row) -> Field:
    """What tells it from others; in the hint all of it, and how its cache came to be so."""
    record = row.result.record
    words = filter(None, (show_params(record.case.params), cache_of(record, row.entry.run.devices)))
    return Field(row.setting, hint="; ".join(words))


def _speed_up(row: _Row) -> Field:
    speed = case_status.speed_up(row.result)
    return number(speed.point if speed else None, units.speed_up, case_status.tone_of(row.result))


def _interval(row: _Row) -> Field:
    speed = case_status.speed_up(row.result)
    return Field(units.NONE) if speed is None else number(speed.half_width, lambda _: case_status.bounds(speed))


def _typical(row: _Row) -> Field:
    typical = case_status.inverse(row.result.finding.typical if row.result.finding else None)
    if typical is None or case_status.speed_up(row.result) is None:
        return Field(units.NONE)
    return number(typical.point, lambda _: case_status.show_speed(typical))


def _error(row: _Row) -> Field:
    """Right even where it is emulated."""
    metric = main_error(row.panel)
    return number(row.figures[metric].value, units.relative_error, hint=metric)


def _why(result: Result) -> str:
    """The reason it was not measured, or is not to be trusted."""
    if result.record.status is not Status.OK:
        return result.record.reason
    return "; ".join(part for part in (*case_status.doubts(result), result.record.detail) if part)
