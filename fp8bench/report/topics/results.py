"""All cases in one table, short for a terminal and whole on the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fp8bench import units
from fp8bench.analysis.metric import Metric
from fp8bench.model import Params
from fp8bench.model.specs import DEVICE_PEAK_MEMORY, ENERGY, PEAK_MEMORY, REPLAY, TIME, MetricSpec
from fp8bench.report import case_status
from fp8bench.report.columns import Col, figure_col, in_table, other_tables, table, with_figures
from fp8bench.report.elements import Elements, Field, Table, Text, Tone
from fp8bench.report.page.section import Entry, Material, number, section
from fp8bench.report.panels import (
    Figures,
    NamedCase,
    Panel,
    Result,
    ResultGroup,
    describe_params,
    floor_of,
    join_parts,
    shared_params,
)
from fp8bench.report.topics.answers import LONGEST_REASON, find_answer, verdict_word
from fp8bench.report.topics.tensors import about_tensors
from fp8bench.report.words import legend
from fp8bench.report.words.naming import figure_words, replays_of, shorten_line

# A table of more cases can be filtered and sorted.
_MOST_UNFILTERED = 8
_COST = "the cost of emulation, not of the precision"
# The first columns of a terminal's tables.
CASE: tuple[Col[NamedCase], ...] = (
    Col("case", lambda row: row.result.mode),
    Col("verdict", lambda row: case_status.status_words(row.result), tone=lambda row: case_status.tone_of(row.result)),
    Col("speed-up", lambda row: case_status.show_speed(case_status.speed_up(row.result)) or None,
        tone=lambda row: case_status.tone_of(row.result)),
    Col("best", lambda row: row.figures[TIME].best, unit="s"),
    Col("replayed", lambda row: row.figures[REPLAY].best, unit="s"),
)  # fmt: skip


def main_table(panel: Panel) -> Table:
    floors = "  noise floor (A/A): " if len(panel.groups) > 1 else ""
    cols: list[Col[NamedCase]] = [
        Col("group", lambda row: floors and f"{row.place}{floors}{noise_floor(row.group)}", shared=True),
        *CASE,
        Col("error", lambda row: row.figures[row.group.error].value, show=units.relative_error),
        Col("spread", lambda row: row.result.spread, show=units.percent),
        Col("throughput", lambda row: row.figures.rate.shown, number=True),
        Col("labels", lambda row: "\n".join(_doubts(row)), below=True, tone=lambda row: Tone.DOUBT),
    ]
    required = {"group", "case", "verdict", "best", "spread", "labels"}
    return with_figures(table("cases", "", cols, panel.members, required=required), panel.members)


def _doubts(row: NamedCase) -> Iterator[str]:
    finding = row.result.finding
    labels = ", ".join(case_status.named_labels(row.result))
    if labels and row.result.is_ok:
        yield f"labels: {labels}"
    if finding and finding.is_judged and finding.why:
        yield finding.why


def noise_floor(group: ResultGroup) -> str:
    """'+-0.6%', or a range if cases measured apart have their own; and why measuring ended."""
    reasons = dict.fromkeys(result.record.stopped for result in group.results if result.record.stopped)
    return join_parts(floor_of(group.results) or "not measured", " / ".join(reasons), by="; ")


@dataclass(frozen=True)
class _ShownCase:
    entry: Entry
    panel: Panel
    case: NamedCase
    setting: str

    @property
    def result(self) -> Result:
        return self.case.result

    @property
    def figures(self) -> Figures:
        return self.case.figures

    def figure(self, name: str, best: bool = False) -> Field:
        metric = self.figures[name]
        return self.to_field(replace(metric, value=metric.best) if best else metric)

    def to_field(self, metric: Metric) -> Field:
        hint = _COST if self.result.is_emulated else ""
        return number(metric.value, metric.spec.to_text, case_status.cost_tone(self.result), hint)


@section("results", "Results", 30)
def results_section(material: Material) -> Elements:
    """A line for each case, with the reason for its verdict. A step is the best case: one that nothing disturbs, with a
    hot cache unless it says cache=. The time of an emulated case is the cost of emulating.
    """
    panels = [(entry, panel) for entry, panel in material.panels() if not about_tensors(panel)]
    # 1. Parameters that all cases of a suite share, on any device and in any run.
    params_by_suite: dict[str, list[Params]] = {}
    for _, panel in panels:
        params_by_suite.setdefault(panel.suite, []).extend(group.case.params for group in panel.groups)
    shared = {suite: shared_params(params) for suite, params in params_by_suite.items()}
    # 2. A row for each case, with the parameters that differ.
    rows = []
    for entry, panel in panels:
        for case in panel.members:
            params = [pair for pair in case.group.case.params if pair not in shared[panel.suite]]
            rows.append(_ShownCase(entry, panel, case, describe_params(params)))
    # Suites of tensors have a section of their own.
    if not rows:
        if not any(entry.panels for entry in material.entries):
            yield Text("There are no cases.", Tone.DOUBT)
        return
    # 3. The answers, then all other figures.
    answers = list(_answer_columns(rows, material.alone))
    # A short table needs no filter above it.
    is_main = len(rows) > _MOST_UNFILTERED
    yield table("results-table", "All cases", answers, rows, main=is_main, required={"case", "verdict"})
    details = [*_detail_columns(rows, material.alone), *map(_of_spec, in_table("cases"))]
    yield table("details", "More figures of every case", details, rows, folded=True, required={"case"})
    words = "; ".join(f"{suite}: {describe_params(params)}" for suite, params in shared.items() if params)
    if words:
        yield Text(f"The same in every row: {words}.")
    for _, panel in panels:
        yield from other_tables(panel)


def _name_column(rows: Sequence[_ShownCase], alone: bool) -> Col[_ShownCase]:
    """The precision, and what tells the case from other rows: its suite, setting, device and run."""
    has_suites = len({row.case.suite for row in rows}) > 1
    has_devices = len({row.panel.device for row in rows}) > 1

    def name(row: _ShownCase) -> Field:
        # What all rows share is not repeated in each.
        suite = row.case.suite if has_suites else ""
        device = row.panel.device if has_devices else ""
        label = "" if alone or row.entry.label == suite else row.entry.label
        words = join_parts(row.case.mode, f"{suite} {row.setting}".strip(), device, label)
        return Field(words)

    return Col("case", name)


def _answer_columns(rows: Sequence[_ShownCase], alone: bool) -> Iterator[Col[_ShownCase]]:
    """Yields the answer for each case, in the words of the terminal."""
    yield _name_column(rows, alone)
    yield Col("verdict", _verdict, hint=legend.VERDICT.removeprefix("verdict: "))
    yield Col(
        "speed-up",
        _speed,
        unit="x",
    )
    yield Col(
        "a step",
        lambda row: row.figure(TIME, best=True),
        unit="s",
    )
    yield Col("why, and at what cost", _explain, below=True)


def _verdict(row: _ShownCase) -> Field:
    hint = "; ".join(case_status.meaning(label, row.result) for label in row.result.labels)
    word = case_status.status_words(row.result) if row.result.is_reference else verdict_word(row.result)
    return Field(word, tone=case_status.tone_of(row.result), hint=hint)


def _speed(row: _ShownCase) -> Field:
    speed = case_status.speed_up(row.result)
    if speed is None:
        return Field(units.NONE)
    return number(speed.point, lambda _: case_status.show_speed(speed), case_status.tone_of(row.result))


def _explain(row: _ShownCase) -> str:
    """Returns the reason, the costs and the doubts of a case; of a reference its doubts alone."""
    case = row.case
    words: list[str] = []
    costs: Sequence[str] = ()
    if not case.is_reference or not case.is_ok:
        answer = find_answer([case])
        no_speed = "" if case_status.speed_up(case.result) is not None else answer.figure
        words += [answer.reason, no_speed]
        costs = answer.costs
    labels = ", ".join(case_status.named_labels(case.result)) if case.is_ok else ""
    words += [case.finding.why if case.finding else "", *costs, f"labels: {labels}" if labels else ""]
    if case.is_ok:
        words.append(case.record.detail)
    return shorten_line(join_parts(*words, by="; "), LONGEST_REASON)


def _detail_columns(rows: Sequence[_ShownCase], alone: bool) -> Iterator[Col[_ShownCase]]:
    yield _name_column(rows, alone)
    yield Col("error", _error, number=True, hint="against the reference that the suite names; hover for which one")
    yield _of_spec(PEAK_MEMORY)
    yield figure_col(DEVICE_PEAK_MEMORY, _device_peak)
    yield _of_spec(ENERGY)
    yield figure_col(REPLAY, lambda row: replace(row.figure(REPLAY, best=True), hint=replays_of(row.result.record)))
    hint = "distance of the quartiles / median, over all calls"
    yield Col("spread", lambda row: row.result.spread, show=units.percent, hint=hint)
    # One unit for the column, if all cases count the same work.
    rates = {rate.unit for row in rows if (rate := row.figures.rate).value is not None}
    unit = rates.pop() if len(rates) == 1 else ""
    yield Col("throughput", lambda row: row.to_field(row.figures.rate), number=True, unit=unit, hint="of the best case")
    hint = "native: the hardware does it; emulated: right in numbers, without a speed; refused"
    yield Col("how", _support, hint=hint)


def _error(row: _ShownCase) -> Field:
    return number(row.figures[row.panel.error].value, units.relative_error, hint=figure_words(row.panel.error))


def _device_peak(row: _ShownCase) -> Field:
    if row.result.is_emulated:
        return row.figure(DEVICE_PEAK_MEMORY)
    return Field(units.NONE)


def _support(row: _ShownCase) -> Field:
    support = row.result.record.support
    return Field(support.level.value, tone=case_status.cost_tone(row.result), hint=support.reason)


def _of_spec(spec: MetricSpec) -> Col[_ShownCase]:
    return figure_col(spec, partial(_ShownCase.figure, name=spec))
