"""Shows a gate's verdict: to people, to build servers as JUnit XML, and on a duel as a comment for a pull request."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fp8bench import units
from fp8bench.analysis.verdicts import FINAL_LEVEL
from fp8bench.errors import EXIT_BASELINE, EXIT_FAILED, EXIT_OK, EXIT_REGRESSION
from fp8bench.features.duel.run import IDLE
from fp8bench.features.duel.values import CaseResult, Duel
from fp8bench.features.gate.judging import (
    NOT_TESTED,
    POWER,
    GateOutcome,
    GateVerdict,
    JudgedFigure,
    Key,
    Sight,
)
from fp8bench.model import Comparison, Status
from fp8bench.model.specs import spec_of
from fp8bench.report.columns import Col, table
from fp8bench.report.comparisons import label_legend, setting_of, show_change, value
from fp8bench.report.elements import Code, Element, Items, Page, Part, Table, Text, Tone, printable
from fp8bench.report.page import markdown
from fp8bench.report.panels import together
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.naming import many, shorten_line

# The JUnit tag for each outcome. A test whose outcome is unknown does not pass.
_TAGS = {
    GateOutcome.REGRESSION: "failure",
    GateOutcome.FAILED: "error",
    GateOutcome.SUSPECTED: "error",
    GateOutcome.CANNOT_TELL: "error",
    GateOutcome.NONE: "skipped",
    GateOutcome.IGNORED: "skipped",
}
_COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def as_junit(verdict: GateVerdict) -> str:
    """Writes a test for each figure, in a test suite for each suite. If nothing could be judged, one test is in error:
    the document is never empty."""
    root = ET.Element("testsuites", name="fp8bench gate")
    sights = {sight.key: sight for sight in verdict.sights}
    for name, judged in together((figure.comparison.suite, figure) for figure in verdict.judged).items():
        _suite(root, name, judged, sights)
    if verdict.problem:
        suite = ET.SubElement(root, "testsuite", name="gate")
        test = ET.SubElement(suite, "testcase", classname="gate", name="something to judge", time="0")
        problem = ET.SubElement(test, "error", message=_text(verdict.headline), type="problem")
        problem.text = _text(verdict.problem)
    for place in (*root, root):
        place.set("tests", str(len(place.findall(".//testcase"))))
        for name, tag in _COUNTED.items():
            place.set(name, str(len(place.findall(f".//testcase/{tag}"))))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(root: ET.Element, name: str, judged: Iterable[JudgedFigure], sights: Mapping[Key, Sight]) -> None:
    suite = ET.SubElement(root, "testsuite", name=_text(name))
    for figure in judged:
        test = ET.SubElement(suite, "testcase", classname=_text(name), name=_text(_title(figure)), time="0")
        if figure.key in sights:
            properties = ET.SubElement(test, "properties")
            ET.SubElement(properties, "property", name=_SMALLEST, value=_text(sights[figure.key].share))
        tag = _TAGS.get(figure.outcome)
        if tag == "skipped":
            ET.SubElement(test, tag, message=_text(figure.why or figure.outcome.value))
        elif tag is not None:
            child = ET.SubElement(test, tag, message=_text(_sentence(figure)), type=figure.outcome.value)
            child.text = _text("\n".join(_detail(figure)))
        elif figure.outcome is not GateOutcome.FINE:
            ET.SubElement(test, "system-out").text = _text("\n".join((_sentence(figure), *_detail(figure))))


def _title(figure: JudgedFigure) -> str:
    return f"{figure.comparison.case} {figure.comparison.metric}"


def _sentence(figure: JudgedFigure) -> str:
    change = figure.comparison
    if figure.outcome is GateOutcome.FAILED:
        return f"{change.metric}: {figure.why or 'the case failed'}"
    return f"{change.metric}: {_both(change)}: {figure.outcome.value}"


def _detail(figure: JudgedFigure) -> Iterator[str]:
    yield figure.comparison.case
    for name, look in (("first look", figure.comparison), ("second look", figure.again)):
        if look is not None and look.before is not None:
            chance = "" if look.p_value is None else f", p = {look.p_value:.1g}"
            labels = f" ({', '.join(look.labels)})" if look.labels else ""
            yield f"{name}: {_both(look)}, {look.evidence.value}{labels}{chance}"
    if figure.comparison.since or figure.comparison.until:
        yield f"between {figure.comparison.since[:12] or '?'} and {figure.comparison.until[:12] or '?'}"
    yield f"worse is: more than {limit(figure)}"
    if figure.why:
        yield figure.why


def _both(change: Comparison) -> str:
    values = f"{value(change, change.before)} -> {value(change, change.after)}"
    return values if change.ratio is None else f"{values}, {show_change(change.ratio)}"


def _text(words: str) -> str:
    return "\n".join(map(printable, words.split("\n")))


# GitHub shows at most a mebibyte of a step's summary.
MOST_ROWS = 200
_TITLES = {
    GateOutcome.FAILED: "Failed", GateOutcome.REGRESSION: "Regressions",
    GateOutcome.SUSPECTED: "Suspected: neither confirmed nor shown to be absent",
    GateOutcome.CANNOT_TELL: "Cannot tell: slower by the threshold, it would not have been found",
    GateOutcome.CLEARED: "Cleared: suspected, and not so when measured again", GateOutcome.BETTER: "Better",
}  # fmt: skip
_TONES = {
    GateOutcome.FAILED: Tone.BAD,
    GateOutcome.REGRESSION: Tone.BAD,
    GateOutcome.SUSPECTED: Tone.DOUBT,
    GateOutcome.CANNOT_TELL: Tone.DOUBT,
    GateOutcome.BETTER: Tone.GOOD,
}
_AGAIN = "again: the same change, re-measured in a fresh process"
_WORSE = "worse is: beyond both, the share and the difference"
_SMALLEST = "smallest slow-down"


def page_of(verdict: GateVerdict) -> Page:
    """Shows what failed, what is worse, in doubt and better; the rest is counted. For detectable slow-downs it shows
    the worst."""
    # 1. Show only what needs attention; the rest is a count.
    parts = [_part(name, title, figures) for name, title in _TITLES.items() if (figures := verdict.of(name))]
    if verdict.problem:
        parts.append(Part("problem", "Why", (Text(verdict.problem, Tone.BAD),)))
    reasons = Counter(figure.why for figure in verdict.of(GateOutcome.OPEN) if figure.why)
    parts += list_of("open", "Cannot tell (not blocking), because", (f"{why} ({n})" for why, n in reasons.items()))
    parts += list_of("notes", "Notes", (f"- {note}" for note in verdict.notes[:MOST_ROWS]))
    if not parts:
        parts.append(Part("fine", "Everything else", (Text("Nothing is worse, and nothing better."),)))
    # 2. The legend explains only what is shown.
    shown = verdict.of(*_TITLES)
    looks = (*(figure.comparison for figure in shown), *(figure.again for figure in shown if figure.again is not None))
    labels = label_legend(looks)
    footer = [*([_AGAIN] if any(figure.again for figure in shown) else []), _WORSE, *labels] if shown else []
    facts = [("judged", verdict.counts)] if verdict.judged else []
    # 3. A pass states the smallest detectable slow-down, or it would mean little.
    if verdict.sights:
        facts.append((_SMALLEST, summary(verdict.sights)))
        builds = f"{100 * POWER:.3g} of 100 builds"
        footer.append(f"{_SMALLEST}: the smallest that this gate would have found in {builds}, by both looks")
    return Page(f"fp8bench gate: {verdict.headline}", verdict.title, tuple(parts), footer, tuple(facts))


def _part(outcome: GateOutcome, title: str, judged: Sequence[JudgedFigure]) -> Part:
    cols: list[Col[JudgedFigure]] = [
        Col("setting", lambda figure: setting_of(figure.comparison.case)[0], shared=True),
        Col("figure", lambda figure: f"{setting_of(figure.comparison.case)[1]} {figure.comparison.metric}"),
        Col("A", lambda figure: value(figure.comparison, figure.comparison.before), number=True),
        Col("B", lambda figure: value(figure.comparison, figure.comparison.after), number=True),
        Col("change", lambda figure: show_change(figure.comparison.ratio)),
        Col("again", lambda figure: show_change(figure.again.ratio if figure.again else None)),
        Col("worse is", limit),
        Col("verdict", lambda figure: figure.outcome.value, tone=lambda figure: _TONES.get(figure.outcome, Tone.PLAIN)),
        Col("why", lambda figure: figure.why, below=True),
    ]
    name = outcome.replace(" ", "-")
    rows, hidden = table(name, "", cols, judged[:MOST_ROWS]), len(judged) - MOST_ROWS
    return Part(name, title, (rows, Text(f"and {hidden} more")) if hidden > 0 else (rows,))


def summary(sights: Sequence[Sight]) -> str:
    """Returns for example '+9.0% (worst of 40 figures: CASE time, threshold +5.0%)'."""
    worst, count = sights[0], len(sights)
    whose = f"{worst.case} {worst.metric}, threshold {units.change(1 + worst.threshold)}"
    return f"{worst.share} ({f'worst of {count} figures: ' if count > 1 else ''}{whose})"


def limit(figure: JudgedFigure) -> str:
    threshold = figure.threshold
    smallest = value(figure.comparison, threshold.smallest) if threshold.smallest else ""
    return " and ".join(filter(None, (units.percent(threshold.relative), smallest)))


_MOST_ROWS, _MOST_WHYS = 7, 3


class ReviewStatus(StrEnum):
    """The words that a comment begins with; if several apply, the first one here wins."""

    QUALITY = "quality blocked"
    REGRESSION = "regression"
    INFRASTRUCTURE = "infrastructure error"
    MISMATCH = "recipe mismatch"
    SUSPECTED = "suspected"
    CANNOT_TELL = "CANNOT TELL"
    PASS = "no regression"


# The exit code of each status, and what follows its words in the headline; {threshold} is the largest of a time.
WORDS = {
    ReviewStatus.QUALITY: (EXIT_REGRESSION, ": numbers became worse, or a case fails on head alone"),
    ReviewStatus.REGRESSION: (EXIT_REGRESSION, ": head is worse than base beyond a threshold"),
    ReviewStatus.INFRASTRUCTURE: (EXIT_FAILED, ": the change could not be measured, and may be good or bad"),
    ReviewStatus.MISMATCH: (EXIT_BASELINE, ": base and head do not do the same work, so that figures do not compare"),
    ReviewStatus.SUSPECTED: (EXIT_BASELINE, ": head may be worse, which is neither confirmed nor shown to be absent"),
    ReviewStatus.CANNOT_TELL: (EXIT_BASELINE, ": head may be slower by {threshold}, unseen in this noise"),
    ReviewStatus.PASS: (EXIT_OK, " above {threshold}"),
}


@dataclass(frozen=True)
class Review:
    """The status, and a sentence for each reason."""

    status: ReviewStatus
    whys: tuple[str, ...] = ()
    threshold: str = ""

    @property
    def headline(self) -> str:
        return f"{self.status}{WORDS[self.status][1].format(threshold=self.threshold)}"


def review(verdict: GateVerdict, duel: Duel) -> Review:
    whys: dict[ReviewStatus, list[str]] = {status: [] for status in ReviewStatus}
    unlike = {result.after.case.id: _unlike(result) for result in duel.results}
    # 1. Different support levels on the two sides: nothing compares, so nothing else is reported.
    for result in duel.results:
        if (status := unlike[result.after.case.id]) is not None:
            levels = f"{result.before.support.level} on base, {result.after.support.level} on head"
            reason = result.after.reason or result.before.reason or levels
            whys[status].append(f"{result.after.case.id}: {reason}")
    # 2. Worse numbers have another status than worse times: they concern quality.
    for figure in verdict.of(GateOutcome.REGRESSION):
        of_numbers = spec_of(figure.comparison.metric).of_workload
        whys[ReviewStatus.QUALITY if of_numbers else ReviewStatus.REGRESSION].append(_change(figure))
    # 3. Cases without a number, and duels that were not possible.
    lost = [figure for figure in verdict.of(GateOutcome.FAILED) if unlike.get(figure.comparison.case) is None]
    whys[ReviewStatus.INFRASTRUCTURE] += [f"{figure.comparison.case}: {figure.why}" for figure in lost]
    whys[ReviewStatus.INFRASTRUCTURE] += [verdict.problem] if verdict.problem and not any(unlike.values()) else []
    whys[ReviewStatus.MISMATCH] += [note for note in duel.notes if note == IDLE]
    # 4. Undecided figures.
    for outcome, status in (
        (GateOutcome.SUSPECTED, ReviewStatus.SUSPECTED),
        (GateOutcome.CANNOT_TELL, ReviewStatus.CANNOT_TELL),
    ):
        whys[status] += [f"{_change(figure)}: {figure.why}" for figure in verdict.of(outcome)]
    # The first status with a reason wins: they are in order of weight.
    status = next((status for status, reasons in whys.items() if reasons), ReviewStatus.PASS)
    return Review(status, tuple(whys[status]), _largest_threshold(verdict))


def _largest_threshold(verdict: GateVerdict) -> str:
    """Returns the largest slow-down, as a share, that still passes; over all figures if no time was measured."""
    shares = [sight.threshold for sight in verdict.sights]
    shares = shares or [figure.threshold.relative for figure in verdict.judged if figure.outcome not in NOT_TESTED]
    return f"{100 * max(shares, default=0.0):.3g}%"


def _unlike(result: CaseResult) -> ReviewStatus | None:
    """Returns the status for a case that was not measured equally on both sides; None if it was. A lost worker leaves
    no detail."""
    failed = [record for record in (result.before, result.after) if record.status is Status.FAILED]
    if len(failed) == 2 or any(not record.detail for record in failed):
        return ReviewStatus.INFRASTRUCTURE
    if failed:
        return ReviewStatus.QUALITY if result.after in failed else ReviewStatus.MISMATCH
    levels = {result.before.support.level, result.after.support.level}
    return None if (result.sessions or result.refused_alike) and len(levels) == 1 else ReviewStatus.MISMATCH


def _change(figure: JudgedFigure) -> str:
    return f"{_title(figure)}: {show_change(figure.comparison.ratio)}"


def comment(reviewed: Review, verdict: GateVerdict | None, duel: Duel | None, command: str) -> str:
    """Returns Markdown: the outcome, the figure behind it, the table, then further remarks."""
    whys = [shorten_line(reason, 300) for reason in reviewed.whys[:_MOST_WHYS]]
    hidden = len(reviewed.whys) - len(whys)
    elements: list[Element] = [Text(reason) for reason in whys[:1]]
    if verdict is not None and verdict.sights and not whys:
        elements.append(Text(f"{_SMALLEST} that would have been found: {summary(verdict.sights)}"))
    if duel is not None and verdict is not None:
        elements.append(_figures(verdict))
    elements.append(Items(tuple(map(Text, (*whys[1:], *([f"and {hidden} more"] if hidden > 0 else []))))))
    if duel is not None and verdict is not None:
        elements.append(Text(f"{verdict.counts}. {_sides(duel)}"))
    return markdown.render(
        Page(f"fp8bench: {reviewed.headline}", "", (Part("review", "", (*elements, Code(command))),))
    )


def _sides(duel: Duel) -> str:
    devices = ", ".join(facts.key for facts in duel.after.devices)
    torch = f"torch {duel.after.environment.facts.get('torch')}"
    sides = f"Base {duel.before.title}, head {duel.after.title}"
    words = f"{sides}; {many(duel.sessions, 'session')} on {devices}, {torch}."
    return " ".join((words, *(f"Note: {note}." for note in duel.notes[:2])))


_FIRST = (GateOutcome.REGRESSION, GateOutcome.FAILED, GateOutcome.SUSPECTED, GateOutcome.CANNOT_TELL)


def _figures(verdict: GateVerdict) -> Table:
    sights = {sight.key: sight for sight in verdict.sights}
    places = {key: place for place, key in enumerate(sights)}
    figures = [figure for figure in verdict.judged if figure.comparison.ratio or figure.outcome in _FIRST]
    # Failures come first, regardless of their place: a table is truncated at its end.
    figures.sort(key=lambda figure: (figure.outcome not in _FIRST, places.get(figure.key, len(places))))

    def smallest(figure: JudgedFigure) -> str:
        if figure.key in sights:
            return sights[figure.key].share
        return units.NONE if figure.comparison.ratio is None else "exact"

    cols: list[Col[JudgedFigure]] = [
        Col("figure", _title),
        Col("base", lambda figure: value(figure.comparison, figure.comparison.before), number=True),
        Col("head", lambda figure: value(figure.comparison, figure.comparison.after), number=True),
        Col(f"change, {units.percent(FINAL_LEVEL, 0)} interval", lambda figure: show_change(figure.comparison.ratio)),
        Col(_SMALLEST, smallest),
        Col("worse is", limit),
        Col("verdict", lambda figure: figure.outcome.value),
    ]
    return table("figures", "", cols, figures[:_MOST_ROWS])
