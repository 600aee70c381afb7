"""A gate's verdict on a duel as a comment of a pull request: one of six words, why, and a table, in 25 lines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from fp8bench import units
from fp8bench.analysis.verdicts import FINAL_LEVEL
from fp8bench.errors import EXIT_BASELINE, EXIT_FAILED, EXIT_OK, EXIT_REGRESSION
from fp8bench.features.duel.run import IDLE
from fp8bench.features.duel.values import AFTER, BEFORE, CaseResult, Duel
from fp8bench.features.gate.judging import GateOutcome, GateVerdict, JudgedFigure
from fp8bench.features.gate.view import limit, seen, sentence, share
from fp8bench.model import Status
from fp8bench.model.specs import spec_of
from fp8bench.report.columns import Col, table
from fp8bench.report.comparisons import signed, value
from fp8bench.report.elements import Code, Element, Items, Page, Part, Table, Text
from fp8bench.report.page import markdown
from fp8bench.report.words.naming import many, shortened

_MOST_ROWS, _MOST_WHYS = 7, 3


class ReviewStatus(StrEnum):
    """What a comment begins with; of several the first that is the case."""

    QUALITY = "quality blocked"
    REGRESSION = "regression"
    INFRASTRUCTURE = "infrastructure error"
    MISMATCH = "recipe mismatch"
    CALIBRATION = "calibration needed"
    PASS = "pass"


# Of each word the exit code, and what it means.
WORDS = {
    ReviewStatus.QUALITY: (EXIT_REGRESSION, "Numbers became worse, or a case fails on head alone"),
    ReviewStatus.REGRESSION: (EXIT_REGRESSION, "Head is worse than base beyond a threshold"),
    ReviewStatus.INFRASTRUCTURE: (EXIT_FAILED, "This says nothing about the change: it could not be measured"),
    ReviewStatus.MISMATCH: (EXIT_BASELINE, "Base and head do not do the same work: their figures do not compare"),
    ReviewStatus.CALIBRATION: (EXIT_BASELINE, "Nothing is surely worse, but a threshold could not have been seen here"),
    ReviewStatus.PASS: (EXIT_OK, "Nothing is worse by its threshold, and it would have been seen"),
}  # fmt: skip


@dataclass(frozen=True)
class Review:
    """The word, and the reasons for it, a sentence each."""

    status: ReviewStatus
    whys: tuple[str, ...] = ()


def review(verdict: GateVerdict, duel: Duel) -> Review:
    whys: dict[ReviewStatus, list[str]] = {status: [] for status in ReviewStatus}
    unlike = {result.after.case.id: _unlike(result) for result in duel.results}
    for result in duel.results:
        if (status := unlike[result.after.case.id]) is not None:
            why = result.after.reason or result.before.reason
            levels = f"{result.before.support.level} on base, {result.after.support.level} on head"
            whys[status].append(f"{result.after.case.id}: {why or levels}")
    for figure in verdict.of(GateOutcome.REGRESSION):
        of_numbers = spec_of(figure.comparison.metric).of_workload
        whys[ReviewStatus.QUALITY if of_numbers else ReviewStatus.REGRESSION].append(_change(figure))
    lost = [figure for figure in verdict.of(GateOutcome.FAILED) if unlike.get(figure.comparison.case) is None]
    whys[ReviewStatus.INFRASTRUCTURE] += [f"{figure.comparison.case}: {figure.why}" for figure in lost]
    whys[ReviewStatus.INFRASTRUCTURE] += [verdict.problem] if verdict.problem and not any(unlike.values()) else []
    whys[ReviewStatus.MISMATCH] += [note for note in duel.notes if note == IDLE]
    suspected = verdict.of(GateOutcome.TO_CONFIRM)
    whys[ReviewStatus.CALIBRATION] += [f"{_change(figure)}: {figure.why}" for figure in suspected]
    for sight in verdict.sights.blind:
        could = sentence(sight, verdict.sights.power)
        whys[ReviewStatus.CALIBRATION].append(f"{sight.case} {sight.metric} {could}; worse is {share(sight.threshold)}")
    return next(
        (Review(status, tuple(reasons)) for status, reasons in whys.items() if reasons), Review(ReviewStatus.PASS)
    )


def _unlike(result: CaseResult) -> ReviewStatus | None:
    """What a case stands for that was not measured alike on both sides.

    A worker that was lost leaves no trace of what raised.
    """
    failed = [record for record in (result.before, result.after) if record.status is Status.FAILED]
    if len(failed) == 2 or any(not record.detail for record in failed):
        return ReviewStatus.INFRASTRUCTURE
    if failed:
        return ReviewStatus.QUALITY if result.after in failed else ReviewStatus.MISMATCH
    refused_alike = all(f"side {name}: " in result.after.reason for name in (BEFORE, AFTER))
    levels = {result.before.support.level, result.after.support.level}
    return None if (result.sessions or refused_alike) and len(levels) == 1 else ReviewStatus.MISMATCH


def _change(figure: JudgedFigure) -> str:
    comparison = figure.comparison
    return f"{comparison.case} {comparison.metric}: {signed(comparison.ratio)}"


def comment(reviewed: Review, verdict: GateVerdict | None, duel: Duel | None, again: str) -> str:
    """The comment; without a duel it says why there is none. `again` is the command that repeats it."""
    whys = [shortened(why, 300) for why in reviewed.whys[:_MOST_WHYS]]
    whys += [f"and {len(reviewed.whys) - len(whys)} more"] if len(reviewed.whys) > len(whys) else []
    elements: list[Element] = [Text(f"{WORDS[reviewed.status][1]}."), Items(tuple(map(Text, whys)))]
    if duel is not None and verdict is not None:
        elements += [_figures(verdict), Text(f"{verdict.counts}. {_sides(duel)}")]
    return markdown.render(Page(f"fp8bench: {reviewed.status}", "", (Part("review", "", (*elements, Code(again))),)))


def _sides(duel: Duel) -> str:
    devices = ", ".join(facts.key for facts in duel.after.devices)
    torch = f"torch {duel.after.environment.facts.get('torch')}"
    words = (
        f"Base {duel.before.title}, head {duel.after.title}; {many(duel.sessions, 'session')} on {devices}, {torch}."
    )
    return " ".join((words, *(f"Note: {note}." for note in duel.notes[:2])))


_FIRST = (GateOutcome.REGRESSION, GateOutcome.FAILED, GateOutcome.TO_CONFIRM)


def _figures(verdict: GateVerdict) -> Table:
    sights = {(sight.case, sight.metric): sight for sight in verdict.sights.figures}
    places = {key: place for place, key in enumerate(sights)}
    figures = [figure for figure in verdict.judged if figure.comparison.ratio or figure.outcome in _FIRST]
    figures.sort(key=lambda figure: (figure.outcome not in _FIRST, places.get(figure.key, len(places))))

    def detectable(figure: JudgedFigure) -> str:
        if figure.key not in sights:
            return units.NONE if figure.comparison.ratio is None else "exact"
        return seen(sights[figure.key]) if math.isfinite(sights[figure.key].seen) else units.NONE

    cols: list[Col[JudgedFigure]] = [
        Col("figure", lambda figure: f"{figure.comparison.case} {figure.comparison.metric}"),
        Col("base", lambda figure: value(figure.comparison, figure.comparison.before), number=True),
        Col("head", lambda figure: value(figure.comparison, figure.comparison.after), number=True),
        Col(f"change, {units.percent(FINAL_LEVEL, 0)} interval", lambda figure: signed(figure.comparison.ratio)),
        Col("detectable", detectable),
        Col("worse is", limit),
        Col("verdict", lambda figure: figure.outcome.value),
    ]
    return table("figures", "", cols, figures[:_MOST_ROWS])
