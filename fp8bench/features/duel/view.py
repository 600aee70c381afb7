"""Shows a duel: its sides, a table of times, the values that differ, and how to read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.verdicts import BAND, FINAL_LEVEL, SAME
from fp8bench.features.duel.values import CaseResult, Duel
from fp8bench.features.duel.verdicts import BELIEVED, compare_case, judge_case
from fp8bench.features.duel.verdicts import comparisons as comparisons_of
from fp8bench.model import Comparison, Direction, Status
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.model.specs import TIME
from fp8bench.report.columns import Col, table
from fp8bench.report.comparisons import TONES, count_directions, direction, label_legend, show_change, value
from fp8bench.report.elements import Element, Field, Page, Part, Text, Tone
from fp8bench.report.panels import show_params, together
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.naming import join_words, many

_HOW_RATIO = (
    f"change: of the time from A to B, below 0 is faster, with its {units.percent(FINAL_LEVEL, 0)} interval; a side is "
    "the faster three fifths of its processes, each by its best case"
)
_HOW_TIME = (
    "A, B: the time of a step, without what slowed a session on both sides; the change is that from A to B as shown"
)
_HOW_APART = (
    "apart: how much slower a side's slowest process was than its fastest, which run the same code; the interval "
    "allows for it"
)
_HOW_VERDICT = (
    f"verdict: worse (slower) or better (faster) if the interval lies outside +-{units.percent(BAND)}, same if it lies "
    f"within +-{units.percent(SAME, 0)}, else cannot tell; without an interval (fewer than three sessions), only "
    f"changes beyond {units.percent(BELIEVED, 0)} that exceed those between processes of one side have a verdict"
)


# A case with one of its comparisons.
_Figure = tuple[CaseResult, Comparison]


def page_of(duel: Duel) -> Page:
    figures: list[_Figure] = []
    for result in duel.results:
        figures += [(result, comparison) for comparison in compare_case(result)]
    times = [figure for figure in figures if figure[1].metric == TIME]
    shown: Element = table("times", "", _TIMES, times) if times else Text("Nothing was measured.")
    parts = [Part("times", "", (shown,)), Part("values", "", tuple(_values(figures)))]
    parts += list_of("notes", "notes", _notes(duel, figures))
    legend = (_HOW_TIME, _HOW_RATIO, _HOW_APART, _HOW_VERDICT, *label_legend(comparison for _, comparison in figures))
    title = f"duel {duel.request.suite}: B against A, {many(duel.sessions, 'session')} of two processes a side"
    facts = []
    for side in (duel.before, duel.after):  # 'v1 (3fa9c2d1), Python 3.11.7, torch 2.13.0, /usr/bin/python'
        found = side.environment.facts
        software = f"Python {found.get('python')}, torch {found.get('torch')}, fp8bench {found.get('fp8bench')}"
        facts.append((side.name, f"{side.title}, {software}, {side.python}"))
    return Page(title, "", (*parts, Part("summary", "", tuple(_ending(duel)))), legend if times else (), tuple(facts))


def _setting(figure: _Figure) -> str:
    case = figure[0].after.case
    return " ".join(part for part in (case.workload, show_params(case.params), "on", case.device) if part)


def _name(figure: _Figure) -> str:
    record = figure[0].after
    return f"{record.case.mode} (emulated)" if record.support.is_emulated else record.case.mode


def _tone(figure: _Figure) -> Tone:
    return TONES.get(figure[1].direction, Tone.PLAIN)


def _verdict(figure: _Figure) -> Field:
    result, comparison = figure
    statuses = (result.before.status, result.after.status)
    # Without a number on one side there is nothing to compare.
    if Status.FAILED in statuses:
        return Field("FAILED", tone=Tone.BAD)
    word = "skipped" if Status.SKIPPED in statuses else direction(comparison)
    return Field(word, tone=_tone(figure))


def _apart(figure: _Figure) -> str:
    verdict = judge_case(figure[0])
    return units.percent(verdict.apart) if verdict is not None else units.NONE


_SIDES: tuple[Col[_Figure], ...] = (
    Col("A", lambda figure: value(figure[1], figure[1].before), number=True),
    Col("B", lambda figure: value(figure[1], figure[1].after), number=True),
)
_TIMES: tuple[Col[_Figure], ...] = (
    Col("setting", _setting, shared=True),
    Col("case", _name),
    *_SIDES,
    Col("verdict", _verdict),
    Col("change", lambda figure: show_change(figure[1].ratio)),
    Col("apart", _apart, number=True),
    Col("labels", lambda figure: ", ".join(figure[1].labels)),
)
_VALUES: tuple[Col[_Figure], ...] = (
    Col("case", _name),
    Col("figure", lambda figure: figure[1].metric),
    *_SIDES,
    Col("change", lambda figure: show_change(figure[1].ratio), tone=_tone),
)


def _values(figures: Sequence[_Figure]) -> Iterator[Element]:
    values = [figure for figure in figures if figure[1].metric != TIME]
    # Hundreds of equal values would hide the few that differ, so equal ones are only counted.
    apart = [figure for figure in values if figure[1].direction is not Direction.SAME and figure[1].ratio is not None]
    if values:
        title = f"values (errors, memory): {count_directions(comparison for _, comparison in values)}"
        yield table("values", title, _VALUES, apart) if apart else Text(title)


def _notes(duel: Duel, figures: Sequence[_Figure]) -> list[str]:
    reasons = [
        (comparison.why, comparison.case if comparison.metric == TIME else f"{comparison.case} {comparison.metric}")
        for _, comparison in figures
        if comparison.why
    ]
    # A record's remarks are shown even if its figures agree.
    for result in duel.results:
        pair = result.before, result.after
        reasons += [(record.detail, record.case.id) for record in pair if record.is_ok and record.detail]
    return [f"{join_words(about, 3)}: {reason}" for reason, about in together(reasons).items()]


def _ending(duel: Duel) -> Iterator[Text]:
    yield from (Text(f"note: {note}") for note in duel.notes)
    yield from (Text(f"trouble: {trouble}", Tone.DOUBT) for trouble in duel.troubles)
    if missing := len(duel.cases) - len(duel.results):
        yield Text(f"{missing} of {len(duel.cases)} cases were not measured")
    # Fewer sessions make wider intervals, which a reader should not mistake for noise.
    short = sum(0 < len(result.sessions) < duel.sessions and not result.failed for result in duel.results)
    if short:
        yield Text(f"{short} of {len(duel.cases)} cases have fewer sessions than were planned")
    yield Text(f"stored in {duel.path}" if duel.path else "this duel was not stored")


def value_of(duel: Duel) -> dict[str, object]:
    return {"schema": SCHEMA, **encode(duel), "comparisons": encode(comparisons_of(duel))}
