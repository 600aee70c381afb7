"""A duel as text: who fought, a table of times, the values that differ, and how to read it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.two_sides import BELIEVED
from fp8bench.analysis.verdicts import BAND, FINAL_LEVEL, SAME
from fp8bench.comparing.figures import TIME
from fp8bench.dueling.duel import Bout, Duel, Side
from fp8bench.dueling.verdicts import compared, judged
from fp8bench.model import Comparison, Direction, Interval, Level, Status
from fp8bench.report.blocks import show_params
from fp8bench.report.comparisons import TONES, counted, direction, label_legend, ratio, value
from fp8bench.report.layout import INDENT, Column, Paint, Row, SectionRow, Tone, painter, table, wrap

WIDTH = 100
_TIMES = (
    Column("case"), Column("A", right=True), Column("B", right=True), Column("verdict"), Column("B / A"),
    Column("apart", right=True), Column("labels"),
)  # fmt: skip
_VALUES = (Column("case"), Column("figure"), Column("A", right=True), Column("B", right=True), Column("B / A"))
_HOW_RATIO = (
    f"B / A: time of B over time of A, below 1 is faster, with its {units.percent(FINAL_LEVEL, 0)} interval; a side is "
    "the faster three fifths of its processes, each by its best case"
)
_HOW_APART = (
    "apart: how much slower a side's slowest process was than its fastest, which run the same code; the interval "
    "allows for it"
)
_HOW_VERDICT = (
    f"verdict: worse (slower) or better (faster) if the interval lies outside +-{units.percent(BAND)}, same if it lies "
    f"within +-{units.percent(SAME, 0)}, else unsure; without an interval (fewer than three sittings), only what "
    f"lies beyond {units.percent(BELIEVED, 0)}, and further apart than processes of one side, is told"
)
_LEGEND = (_HOW_RATIO, _HOW_APART, _HOW_VERDICT)


def render(duel: Duel, color: bool = False, width: int = WIDTH) -> str:
    """All of it, a paragraph each."""
    paint = painter(color)
    found = [(bout, list(compared(bout))) for bout in duel.bouts]
    paragraphs = [
        list(_head(duel, width, paint)),
        table(_TIMES, list(_times(found)), width, paint) if found else ["Nothing was measured."],
        list(_values(found, width, paint)),
        list(_listed("notes", _notes(found), width)),
        list(_listed("how to read this", _legend(found), width)) if found else [],
        list(_ending(duel, width, paint)),
    ]
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def _head(duel: Duel, width: int, paint: Paint) -> Iterator[str]:
    title = f"duel {duel.request.suite}: B against A, {_sittings(duel)} of two processes a side"
    yield from (paint(line, Tone.STRONG) for line in wrap(title, width, hang=INDENT))
    for side in (duel.before, duel.after):
        yield from wrap(f"{side.name}: {_side(side)}", width, INDENT, INDENT)


def _sittings(duel: Duel) -> str:
    return f"{duel.sittings} sitting{'s' * (duel.sittings != 1)}"


def _side(side: Side) -> str:
    """'v1 (3fa9c2d1), Python 3.11.7, torch 2.13.0, /usr/bin/python'."""
    facts = side.environment.facts
    own = f"fp8bench {facts.get('fp8bench')}"
    return ", ".join((side.title, f"Python {facts.get('python')}", f"torch {facts.get('torch')}", own, side.python))


_Found = Sequence[tuple[Bout, list[Comparison]]]


def _times(found: _Found) -> Iterator[Row | SectionRow]:
    before = ""
    for bout, comparisons in found:
        case = bout.after.case
        if case.setting != before:
            yield SectionRow(
                " ".join(part for part in (case.workload, show_params(case.params), "on", case.device) if part)
            )
            before = case.setting
        one = next(one for one in comparisons if one.metric == TIME)
        known = judged(bout)
        apart = units.percent(known.apart) if known is not None else units.NONE
        cells = (
            _name(bout), value(one, one.before), value(one, one.after), _word(bout, one), _ratio(one.ratio), apart,
            ", ".join(one.labels),
        )  # fmt: skip
        tone = Tone.BAD if Status.FAILED in _statuses(bout) else TONES.get(one.direction)
        yield Row(cells, {} if tone is None else {"verdict": tone})


def _ratio(interval: Interval | None) -> str:
    """With the interval, where there is one."""
    if interval is not None and math.isinf(interval.high):
        return f"{units.ratio(interval.point)} [no interval]"
    return ratio(interval)


def _name(bout: Bout) -> str:
    case = bout.after.case
    return f"{case.mode} (emulated)" if bout.after.support.level is Level.EMULATED else case.mode


def _statuses(bout: Bout) -> tuple[Status, Status]:
    return bout.before.status, bout.after.status


def _word(bout: Bout, one: Comparison) -> str:
    if Status.FAILED in _statuses(bout):
        return "FAILED"
    return "skipped" if Status.SKIPPED in _statuses(bout) else direction(one)


def _values(found: _Found, width: int, paint: Paint) -> Iterator[str]:
    """Errors and memory: those that differ in a table, the rest by their number."""
    values = [(bout, one) for bout, comparisons in found for one in comparisons if one.metric != TIME]
    if not values:
        return
    yield from wrap(f"values (errors, memory): {counted(one for _, one in values)}", width, hang=INDENT)
    apart = [(bout, one) for bout, one in values if one.direction is not Direction.SAME and one.ratio is not None]
    rows = [
        Row(
            (_name(bout), one.metric, value(one, one.before), value(one, one.after), ratio(one.ratio)),
            {"B / A": TONES[one.direction]} if one.direction in TONES else {},
        )
        for bout, one in apart
    ]
    yield from table(_VALUES, rows, width, paint) if rows else ()


def _notes(found: _Found) -> list[str]:
    """Why figures have no verdict or a doubtful one, once for each reason, with what it is said of."""
    said: dict[str, list[str]] = {}
    for bout, comparisons in found:
        for one in comparisons:
            if one.why:
                about = bout.after.case.id if one.metric == TIME else f"{bout.after.case.id} {one.metric}"
                said.setdefault(one.why, []).append(about)
        for record in (bout.before, bout.after):
            if record.status is Status.OK and record.detail:
                said.setdefault(record.detail, []).append(bout.after.case.id)
    return [f"{_few(about)}: {why}" for why, about in said.items()]


def _few(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - 2} more" if len(unique) > 2 else ""
    return ", ".join(unique[:2]) + more


def _legend(found: _Found) -> list[str]:
    return [*_LEGEND, *label_legend(one for _, comparisons in found for one in comparisons)]


def _listed(title: str, lines: Sequence[str], width: int) -> Iterator[str]:
    if lines:
        yield title
        for line in lines:
            yield from wrap(line, width, INDENT, INDENT)


def _ending(duel: Duel, width: int, paint: Paint) -> Iterator[str]:
    for note in duel.notes:
        yield from wrap(f"note: {note}", width, hang=INDENT)
    for trouble in duel.troubles:
        yield from (paint(line, Tone.DOUBT) for line in wrap(f"trouble: {trouble}", width, hang=INDENT))
    missing = len(duel.cases) - len(duel.bouts)
    if missing:
        yield from wrap(f"{missing} of {len(duel.cases)} cases were not measured", width, hang=INDENT)
    short = sum(0 < len(one.sittings) < duel.sittings and not one.failed for one in duel.bouts)
    if short:
        yield from wrap(f"{short} of {len(duel.cases)} cases have fewer sittings than were planned", width, hang=INDENT)
    yield from wrap(f"stored in {duel.path}" if duel.path else "this duel was not stored", width, hang=INDENT)
