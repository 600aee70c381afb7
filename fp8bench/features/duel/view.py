"""Renders a duel: its sides, a table of times, the values that differ, and a legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.verdicts import FINAL_LEVEL, SAME_BAND, VERDICT_BAND
from fp8bench.features.duel.values import CaseResult, Duel
from fp8bench.features.duel.verdicts import CLEAR_DIFFERENCE, compare_case_sides, judge_case
from fp8bench.features.duel.verdicts import comparisons as comparisons_of
from fp8bench.model import Comparison, Direction, Status
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.model.specs import TIME
from fp8bench.report.columns import Col, table
from fp8bench.report.comparisons import (
    DIRECTION_TONES,
    describe_direction,
    describe_direction_counts,
    explain_labels,
    show_change,
    value,
)
from fp8bench.report.elements import Element, Field, Page, Part, Text, Tone
from fp8bench.report.panels import format_case_params, together
from fp8bench.report.terminal.layout import make_list_part
from fp8bench.report.words.naming import join_words, many

_CHANGE_LEGEND = (
    f"change: relative change of the time from A to B, with its {units.percent(FINAL_LEVEL, 0)} interval; below 0, B "
    "is faster. A side is the mean of the faster three fifths of its processes, each by its best case"
)
_TIME_LEGEND = "A, B: the time of a step, without slow-downs that a session had on both sides"
_PROCESS_SPREAD_LEGEND = (
    "apart: how much slower the slowest process of a side was than its fastest, with the same code; the interval "
    "includes this"
)
_VERDICT_LEGEND = (
    f"verdict: worse (slower) or better (faster) if the interval lies outside +-{units.percent(VERDICT_BAND)}, same "
    f"if it lies within +-{units.percent(SAME_BAND, 0)}, else cannot tell; without an interval (fewer than three "
    f"sessions), only changes beyond {units.percent(CLEAR_DIFFERENCE, 0)} that exceed those between processes of one "
    "side get a verdict"
)


_CaseComparison = tuple[CaseResult, Comparison]


def render_page(duel: Duel) -> Page:
    result_comparisons = []
    for result in duel.results:
        result_comparisons += [(result, comparison) for comparison in compare_case_sides(result)]
    time_figures = [figure for figure in result_comparisons if figure[1].metric == TIME]
    times_element: Element = (
        table("times", "", _DUEL_TIME_COLUMNS, time_figures) if time_figures else Text("Nothing was measured.")
    )
    parts = [Part("times", "", (times_element,)), Part("values", "", tuple(_list_values(result_comparisons)))]
    parts += make_list_part("notes", "notes", _collect_notes(duel, result_comparisons))
    legend = (
        _TIME_LEGEND,
        _CHANGE_LEGEND,
        _PROCESS_SPREAD_LEGEND,
        _VERDICT_LEGEND,
        *explain_labels(comparison for _, comparison in result_comparisons),
    )
    title = f"duel {duel.request.suite}: B against A, {many(duel.sessions, 'session')} of two processes a side"
    facts = []
    for side in (duel.before, duel.after):  # for example 'v1 (3fa9c2d1), Python 3.11.7, torch 2.13.0, /usr/bin/python'
        environment = side.environment.facts
        software_text = (
            f"Python {environment.get('python')}, torch {environment.get('torch')}, fp8bench "
            f"{environment.get('fp8bench')}"
        )
        facts.append((side.name, f"{side.title}, {software_text}, {side.python}"))
    return Page(
        title,
        "",
        (*parts, Part("summary", "", tuple(_describe_duel_ending(duel)))),
        legend if time_figures else (),
        tuple(facts),
    )


def _format_setting(figure: _CaseComparison) -> str:
    case = figure[0].after.case
    return " ".join(text for text in (case.workload, format_case_params(case.params), "on", case.device) if text)


def _format_mode(figure: _CaseComparison) -> str:
    record = figure[0].after
    return f"{record.case.mode} (emulated)" if record.support.is_emulated else record.case.mode


def _choose_tone(figure: _CaseComparison) -> Tone:
    return DIRECTION_TONES.get(figure[1].direction, Tone.PLAIN)


def _format_verdict(figure: _CaseComparison) -> Field:
    result, comparison = figure
    side_statuses = (result.before.status, result.after.status)
    # A failed side has no time to compare with.
    if Status.FAILED in side_statuses:
        return Field("FAILED", tone=Tone.BAD)
    verdict_text = "skipped" if Status.SKIPPED in side_statuses else describe_direction(comparison)
    return Field(verdict_text, tone=_choose_tone(figure))


def _format_spread(figure: _CaseComparison) -> str:
    verdict = judge_case(figure[0])
    return units.percent(verdict.process_spread) if verdict is not None else units.NONE


_SIDE_COLUMNS: tuple[Col[_CaseComparison], ...] = (
    Col("A", lambda figure: value(figure[1], figure[1].before), number=True),
    Col("B", lambda figure: value(figure[1], figure[1].after), number=True),
)
_DUEL_TIME_COLUMNS: tuple[Col[_CaseComparison], ...] = (
    Col("setting", _format_setting, shared=True),
    Col("case", _format_mode),
    *_SIDE_COLUMNS,
    Col("verdict", _format_verdict),
    Col("change", lambda figure: show_change(figure[1].ratio)),
    Col("apart", _format_spread, number=True),
    Col("labels", lambda figure: ", ".join(figure[1].labels)),
)
_FIGURE_VALUE_COLUMNS: tuple[Col[_CaseComparison], ...] = (
    Col("case", _format_mode),
    Col("figure", lambda figure: figure[1].metric),
    *_SIDE_COLUMNS,
    Col("change", lambda figure: show_change(figure[1].ratio), tone=_choose_tone),
)


def _list_values(figures: Sequence[_CaseComparison]) -> Iterator[Element]:
    values = [figure for figure in figures if figure[1].metric != TIME]
    # Hundreds of equal values would hide the few different ones, so equal values are only counted.
    differing_figures = [
        figure for figure in values if figure[1].direction is not Direction.SAME and figure[1].ratio is not None
    ]
    if values:
        title = f"values (errors, memory): {describe_direction_counts(comparison for _, comparison in values)}"
        yield table("values", title, _FIGURE_VALUE_COLUMNS, differing_figures) if differing_figures else Text(title)


def _collect_notes(duel: Duel, figures: Sequence[_CaseComparison]) -> list[str]:
    reasons = [
        (comparison.why, comparison.case if comparison.metric == TIME else f"{comparison.case} {comparison.metric}")
        for _, comparison in figures
        if comparison.why
    ]
    # Records may have remarks even if no figure differs between the sides.
    for result in duel.results:
        side_records = result.before, result.after
        reasons += [(record.detail, record.case.id) for record in side_records if record.is_ok and record.detail]
    return [f"{join_words(about, 3)}: {reason}" for reason, about in together(reasons).items()]


def _describe_duel_ending(duel: Duel) -> Iterator[Text]:
    yield from (Text(f"note: {note}") for note in duel.notes)
    yield from (Text(f"trouble: {trouble}", Tone.DOUBT) for trouble in duel.troubles)
    if unmeasured_case_count := len(duel.cases) - len(duel.results):
        yield Text(f"{unmeasured_case_count} of {len(duel.cases)} cases were not measured")
    # Report how many cases lack sessions, because their intervals are wider for that reason, not by noise.
    shortened_case_count = sum(
        0 < len(result.sessions) < duel.sessions and not result.has_failed for result in duel.results
    )
    if shortened_case_count:
        yield Text(f"{shortened_case_count} of {len(duel.cases)} cases have fewer sessions than planned")
    yield Text(f"stored in {duel.path}" if duel.path else "this duel was not stored")


def encode_duel(duel: Duel) -> dict[str, object]:
    return {"schema": SCHEMA, **encode(duel), "comparisons": encode(comparisons_of(duel))}
