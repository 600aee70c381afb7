"""A duel as text: who fought, a table of times, the values that differ, and how to read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.verdicts import BAND, FINAL_LEVEL, SAME
from fp8bench.features.duel.values import CaseResult, Duel
from fp8bench.features.duel.verdicts import BELIEVED, compared, judged
from fp8bench.features.duel.verdicts import comparisons as comparisons_of
from fp8bench.model import Comparison, Direction, Level, Status
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.model.specs import TIME
from fp8bench.report.comparisons import TONES, counted, direction, label_legend, signed, value
from fp8bench.report.elements import Column, Element, Field, Page, Part, Table, Text, Tone
from fp8bench.report.panels import show_params, together
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.naming import many

_TIMES = (
    Column("setting", shared=True), Column("case"), Column("A", number=True), Column("B", number=True),
    Column("verdict"), Column("change"), Column("apart", number=True), Column("labels"),
)  # fmt: skip
_VALUES = (
    Column("case"), Column("figure"), Column("A", number=True), Column("B", number=True), Column("change"),
)  # fmt: skip
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
    f"within +-{units.percent(SAME, 0)}, else unsure; without an interval (fewer than three sessions), only what "
    f"lies beyond {units.percent(BELIEVED, 0)}, and further apart than processes of one side, is told"
)
_LEGEND = (_HOW_TIME, _HOW_RATIO, _HOW_APART, _HOW_VERDICT)


def page_of(duel: Duel) -> Page:
    found = [(result, list(compared(result))) for result in duel.results]
    times: Element = Table("times", "", _TIMES, tuple(_times(found))) if found else Text("Nothing was measured.")
    parts = [Part("times", "", (times,)), Part("values", "", tuple(_values(found)))]
    parts += list_of("notes", "notes", _notes(found))
    sessions = many(duel.sessions, "session")
    legend = [*_LEGEND, *label_legend(comparison for _, comparisons in found for comparison in comparisons)]
    title = f"duel {duel.request.suite}: B against A, {sessions} of two processes a side"
    facts = []
    for side in (duel.before, duel.after):  # 'v1 (3fa9c2d1), Python 3.11.7, torch 2.13.0, /usr/bin/python'
        known = side.environment.facts
        software = f"Python {known.get('python')}, torch {known.get('torch')}, fp8bench {known.get('fp8bench')}"
        facts.append((side.name, f"{side.title}, {software}, {side.python}"))
    return Page(title, "", (*parts, Part("summary", "", tuple(_ending(duel)))), legend if found else (), tuple(facts))


_Found = Sequence[tuple[CaseResult, list[Comparison]]]


def _times(found: _Found) -> Iterator[tuple[Field, ...]]:
    for result, comparisons in found:
        case = result.after.case
        setting = " ".join(part for part in (case.workload, show_params(case.params), "on", case.device) if part)
        one = next(comparison for comparison in comparisons if comparison.metric == TIME)
        known = judged(result)
        apart = units.percent(known.apart) if known is not None else units.NONE
        statuses = (result.before.status, result.after.status)
        word = "FAILED" if Status.FAILED in statuses else "skipped" if Status.SKIPPED in statuses else direction(one)
        tone = Tone.BAD if Status.FAILED in statuses else TONES.get(one.direction, Tone.PLAIN)
        yield (
            Field(setting), Field(_name(result)), Field(value(one, one.before)), Field(value(one, one.after)),
            Field(word, tone=tone), Field(signed(one.ratio)), Field(apart), Field(", ".join(one.labels)),
        )  # fmt: skip


def _name(result: CaseResult) -> str:
    case = result.after.case
    return f"{case.mode} (emulated)" if result.after.support.level is Level.EMULATED else case.mode


def _values(found: _Found) -> Iterator[Element]:
    values = [
        (result, comparison) for result, comparisons in found for comparison in comparisons if comparison.metric != TIME
    ]
    if not values:
        return
    apart = [
        (result, comparison)
        for result, comparison in values
        if comparison.direction is not Direction.SAME and comparison.ratio is not None
    ]
    rows = tuple(
        (Field(_name(result)), Field(comparison.metric), Field(value(comparison, comparison.before)),
         Field(value(comparison, comparison.after)),
         Field(signed(comparison.ratio), tone=TONES.get(comparison.direction, Tone.PLAIN)))
        for result, comparison in apart
    )  # fmt: skip
    title = f"values (errors, memory): {counted(comparison for _, comparison in values)}"
    yield Table("values", title, _VALUES, rows) if rows else Text(title)


def _notes(found: _Found) -> list[str]:
    said = []
    for result, comparisons in found:
        case = result.after.case.id
        said += [
            (comparison.why, case if comparison.metric == TIME else f"{case} {comparison.metric}")
            for comparison in comparisons
            if comparison.why
        ]
        records = (result.before, result.after)
        said += [(record.detail, case) for record in records if record.status is Status.OK and record.detail]
    alike = ((why, list(dict.fromkeys(about))) for why, about in together(said).items())
    return [f"{', '.join(names[:2])}{f' and {len(names) - 2} more' if len(names) > 2 else ''}: {why}"
            for why, names in alike]  # fmt: skip


def _ending(duel: Duel) -> Iterator[Text]:
    yield from (Text(f"note: {note}") for note in duel.notes)
    yield from (Text(f"trouble: {trouble}", Tone.DOUBT) for trouble in duel.troubles)
    missing = len(duel.cases) - len(duel.results)
    if missing:
        yield Text(f"{missing} of {len(duel.cases)} cases were not measured")
    short = sum(0 < len(result.sessions) < duel.sessions and not result.failed for result in duel.results)
    if short:
        yield Text(f"{short} of {len(duel.cases)} cases have fewer sessions than were planned")
    yield Text(f"stored in {duel.path}" if duel.path else "this duel was not stored")


def value_of(duel: Duel) -> dict[str, object]:
    return {"schema": SCHEMA, **encode(duel), "comparisons": encode(comparisons_of(duel))}
