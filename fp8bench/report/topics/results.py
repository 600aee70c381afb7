"""All cases in one table, short for a terminal and whole on the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.model import Params
from fp8bench.model.specs import DEVICE_PEAK_MEMORY, ENERGY, PEAK_MEMORY, REPLAY, MetricSpec
from fp8bench.report.case_status import cost_tone, named_labels, show_speed, speed_up, status_words, tone_of
from fp8bench.report.columns import Col, Cols, figure_col, in_table, other_tables, table, with_figures
from fp8bench.report.elements import Elements, Field, Items, Table, Text, Tone, items_of
from fp8bench.report.page.section import Material, section
from fp8bench.report.panels import (
    Cases,
    CaseValue,
    NamedCase,
    Panel,
    ResultGroup,
    describe_params,
    floor_of,
    join_parts,
    shared_params,
)
from fp8bench.report.topics.answers import LONGEST_REASON, find_answer, verdict_word
from fp8bench.report.topics.tensors import about_tensors
from fp8bench.report.words import legend
from fp8bench.report.words.naming import figure_words, shorten_line

# A table of more cases can be filtered and sorted.
_MOST_UNFILTERED = 8
# The most cases with a sentence on earlier runs.
_MOST_COMPARED = 6
# A case, and its name among all rows of the page's table.
_Row = CaseValue[str]


def main_table(panel: Panel) -> Table:
    floors = "  noise floor (A/A): " if len(panel.groups) > 1 else ""
    cols: Cols[NamedCase] = [
        Col("group", lambda case: floors and f"{case.place}{floors}{noise_floor(case.group)}", shared=True),
        Col("case", "mode"),
        Col("verdict", status_words, tone=tone_of),
        Col("speed-up", lambda case: show_speed(speed_up(case)) or None, tone=tone_of),
        Col("best", "best", unit="s"),
        Col("replayed", lambda case: case.figures[REPLAY].best, unit="s"),
        Col("error", "error", show=units.relative_error),
        Col("spread", "spread", show=units.percent),
        Col("throughput", "figures.rate.shown", number=True),
        Col("labels", lambda case: "\n".join(_doubts(case)), below=True, tone=lambda _: Tone.DOUBT),
    ]
    required = {"group", "case", "verdict", "best", "spread", "labels"}
    return with_figures(table("cases", "", cols, panel.members, required=required), panel.members)


def _doubts(case: NamedCase) -> Iterator[str]:
    finding = case.finding
    labels = ", ".join(named_labels(case))
    if labels and case.is_ok:
        yield f"labels: {labels}"
    if finding and finding.is_judged and finding.why:
        yield finding.why


def noise_floor(group: ResultGroup) -> str:
    """'+-0.6%', or a range if some cases were measured separately; and why measuring ended."""
    reasons = dict.fromkeys(result.record.stopped for result in group.results if result.record.stopped)
    return join_parts(floor_of(group.results) or "not measured", " / ".join(reasons), by="; ")


@section("results", "Results", 30)
def results_section(material: Material) -> Elements:
    """A line for each case, with the reason for its verdict. A step is the best case: undisturbed, with a hot
    cache unless cache= is set. The time of an emulated case is the cost of emulating.
    """
    panels = [(entry, panel) for entry, panel in material.panels() if not about_tensors(panel)]
    if not panels:
        if not any(entry.panels for entry in material.entries):
            yield Text("This report has no cases.", Tone.DOUBT)
        return
    # 1. Parameters that all cases of a suite share, on any device and in any run.
    params_by_suite: dict[str, list[Params]] = {}
    for _, panel in panels:
        params_by_suite.setdefault(panel.suite, []).extend(group.case.params for group in panel.groups)
    shared = {suite: shared_params(params) for suite, params in params_by_suite.items()}
    # 2. A row for each case, named by its precision and what differs between rows.
    has_devices = len({panel.device for _, panel in panels}) > 1
    rows = []
    for entry, panel in panels:
        suite = panel.suite if len(shared) > 1 else ""
        device = panel.device if has_devices else ""
        label = "" if material.alone or entry.label == suite else entry.label
        for case in panel.members:
            setting = describe_params(pair for pair in case.group.case.params if pair not in shared[panel.suite])
            rows.append(CaseValue(case, join_parts(case.mode, f"{suite} {setting}".strip(), device, label)))
    cases = [row.case for row in rows]
    # 3. The answers, then all other figures.
    # A short table needs no filter above it.
    is_main = len(rows) > _MOST_UNFILTERED
    yield table("results-table", "All cases", _answer_columns(), rows, main=is_main, required={"case", "verdict"})
    yield from _compare_with_earlier(cases, material)
    details = list(_detail_columns(cases))
    yield table("details", "More figures of every case", details, rows, folded=True, required={"case"})
    words = "; ".join(f"{suite}: {describe_params(params)}" for suite, params in shared.items() if params)
    if words:
        yield Text(f"The same in every row: {words}.")
    for _, panel in panels:
        yield from other_tables(panel)


def _compare_with_earlier(cases: Cases, material: Material) -> Iterator[Items]:
    """Yields 'fp8: the last 5 runs took 31.9 ms to 33.0 ms, this one 32.5 ms' for each case with earlier runs."""
    sentences = []
    for case in cases:
        earlier = material.earlier.get(case.record.case.id)
        if earlier and case.best is not None and not case.is_emulated:
            runs = f"the last {len(earlier)} runs of this case took" if len(earlier) > 1 else "the run before took"
            step = units.seconds(case.best)
            span = units.span(earlier, units.seconds)
            sentences.append(f"{case.name}: {runs} {span} a step, this one {step}")
    yield from items_of(sentences[:_MOST_COMPARED])


def _cost(row: _Row) -> Tone:
    return cost_tone(row.case)


def _answer_columns() -> list[Col[_Row]]:
    """Returns the answer for each case, in the words of the terminal."""
    return [
        Col("case", "value"),
        Col("verdict", _verdict, tone=lambda row: tone_of(row.case), hint=legend.VERDICT.removeprefix("verdict: ")),
        Col("speed-up", _speed, unit="x"),
        Col("a step", "case.best", unit="s", tone=_cost),
        Col("why, and at what cost", lambda row: _explain(row.case), below=True),
    ]


def _verdict(row: _Row) -> str:
    if row.case.is_reference:
        return status_words(row.case)
    return verdict_word(row.case)


def _speed(row: _Row) -> Field | None:
    speed = speed_up(row.case)
    if speed is None:
        return None
    return Field(show_speed(speed), speed.point, tone_of(row.case))


def _explain(case: NamedCase) -> str:
    """Returns the reason, the costs and the doubts of a case; of a reference its doubts alone."""
    words: list[str] = []
    costs: Sequence[str] = ()
    if not case.is_reference or not case.is_ok:
        answer = find_answer([case])
        no_speed = "" if speed_up(case) is not None else answer.figure
        words += [answer.reason, no_speed]
        costs = answer.costs
    labels = ", ".join(named_labels(case)) if case.is_ok else ""
    words += [case.finding.why if case.finding else "", *costs, f"labels: {labels}" if labels else ""]
    if case.is_ok:
        words.append(case.record.detail)
    return shorten_line(join_parts(*words, by="; "), LONGEST_REASON)


def _detail_columns(cases: Cases) -> Iterator[Col[_Row]]:
    yield Col("case", "value")
    errors = {case.group.error for case in cases if case.error is not None}
    error = figure_words(errors.pop()) if len(errors) == 1 else "error"
    yield Col(error, "case.error", show=units.relative_error, hint="against the reference that the suite names")
    yield _figure_col(PEAK_MEMORY)
    yield figure_col(DEVICE_PEAK_MEMORY, _device_peak, _cost)
    yield _figure_col(ENERGY)
    yield figure_col(REPLAY, lambda row: row.case.figures[REPLAY].best, _cost)
    hint = "distance of the quartiles / median, over all calls"
    yield Col("spread", "case.spread", show=units.percent, hint=hint)
    # One unit for the column, if all cases count the same work.
    rates = {rate.unit for case in cases if (rate := case.figures.rate).value is not None}
    unit = rates.pop() if len(rates) == 1 else ""
    yield Col("throughput", _throughput, number=True, unit=unit, hint="of the best case")
    hint = "native: by the hardware; emulated: the error is real, ignore time and memory; refused: not possible here"
    yield Col("how", "case.record.support.level.value", tone=_cost, hint=hint)
    yield from map(_figure_col, in_table("cases"))


def _device_peak(row: _Row) -> float | None:
    if row.case.is_emulated:
        return row.case.figures[DEVICE_PEAK_MEMORY].value
    return None


def _throughput(row: _Row) -> Field | None:
    rate = row.case.figures.rate
    return Field(rate.shown, rate.value, cost_tone(row.case)) if rate.value is not None else None


def _figure_col(spec: MetricSpec) -> Col[_Row]:
    return figure_col(spec, lambda row: row.case.figures[spec].value, _cost)
