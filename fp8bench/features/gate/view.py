"""Shows a gate's verdict as a page, as JUnit XML for build servers, and for a duel as a comment on a pull request."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fp8bench import units
from fp8bench.analysis.verdicts import FINAL_LEVEL
from fp8bench.errors import EXIT_BASELINE, EXIT_FAILED, EXIT_OK, EXIT_REGRESSION
from fp8bench.features.duel.run import NO_CODE_LOADED_NOTE
from fp8bench.features.duel.values import CaseResult, Duel
from fp8bench.features.gate.judging import (
    DETECTION_PROBABILITY,
    UNTESTED_OUTCOMES,
    DetectionLimit,
    FigureKey,
    GateOutcome,
    GateVerdict,
    JudgedFigure,
)
from fp8bench.model import Comparison, Status
from fp8bench.model.specs import find_metric_spec
from fp8bench.report.columns import Col, table
from fp8bench.report.comparisons import explain_labels, show_change, split_case_id, value
from fp8bench.report.elements import Code, Element, Field, Page, Part, Table, Text, TextList, Tone, printable
from fp8bench.report.page import markdown
from fp8bench.report.panels import together
from fp8bench.report.terminal.layout import make_list_part
from fp8bench.report.words.naming import many, shorten_line

# The JUnit element of each outcome. Undecided figures that block the gate are errors. Outcomes without an element pass.
_JUNIT_TAGS = {
    GateOutcome.REGRESSION: "failure",
    GateOutcome.FAILED: "error",
    GateOutcome.SUSPECTED: "error",
    GateOutcome.CANNOT_TELL: "error",
    GateOutcome.NONE: "skipped",
    GateOutcome.IGNORED: "skipped",
}
_JUNIT_COUNTS = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def render_junit(verdict: GateVerdict) -> str:
    """Returns JUnit XML with a test for each figure, grouped by suite. If nothing could be judged, the document has
    one test in error, so that it is never empty.
    """
    document = ET.Element("testsuites", name="fp8bench gate")
    limits = {limit.key: limit for limit in verdict.sights}
    for name, judged in together((figure.comparison.suite, figure) for figure in verdict.judged).items():
        _add_test_suite(document, name, judged, limits)
    if verdict.problem:
        suite = ET.SubElement(document, "testsuite", name="gate")
        testcase_element = ET.SubElement(suite, "testcase", classname="gate", name="something to judge", time="0")
        ET.SubElement(testcase_element, "error", message=verdict.headline, type="problem").text = verdict.problem
    # XML does not allow control characters.
    for element in document.iter():
        element.text = _remove_control_characters(element.text or "")
        for name, text in element.items():
            element.set(name, _remove_control_characters(text))
    for element in (*document, document):
        element.set("tests", str(len(element.findall(".//testcase"))))
        for name, tag in _JUNIT_COUNTS.items():
            element.set(name, str(len(element.findall(f".//testcase/{tag}"))))
    ET.indent(document)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(document, encoding="unicode") + "\n"


def _add_test_suite(
    root: ET.Element, name: str, judged: Iterable[JudgedFigure], limits: Mapping[FigureKey, DetectionLimit]
) -> None:
    suite = ET.SubElement(root, "testsuite", name=name)
    for figure in judged:
        testcase_element = ET.SubElement(suite, "testcase", classname=name, name=_make_figure_title(figure), time="0")
        if figure.key in limits:
            properties_element = ET.SubElement(testcase_element, "properties")
            ET.SubElement(properties_element, "property", name=_SMALLEST_LABEL, value=limits[figure.key].smallest_text)
        junit_outcome_tag = _JUNIT_TAGS.get(figure.outcome)
        summary = _summarize_judged_figure(figure)
        test_details = "\n".join(_describe_looks(figure))
        if junit_outcome_tag == "skipped":
            ET.SubElement(testcase_element, junit_outcome_tag, message=figure.why or figure.outcome.value)
        elif junit_outcome_tag is not None:
            ET.SubElement(
                testcase_element, junit_outcome_tag, message=summary, type=figure.outcome.value
            ).text = test_details
        elif figure.outcome is not GateOutcome.WITHIN_THRESHOLD:
            ET.SubElement(testcase_element, "system-out").text = f"{summary}\n{test_details}"


def _make_figure_title(figure: JudgedFigure) -> str:
    return f"{figure.comparison.case} {figure.comparison.metric}"


def _summarize_judged_figure(figure: JudgedFigure) -> str:
    change = figure.comparison
    if figure.outcome is GateOutcome.FAILED:
        return f"{change.metric}: {figure.why or 'the case failed'}"
    return f"{change.metric}: {_format_change_values(change)}: {figure.outcome.value}"


def _describe_looks(figure: JudgedFigure) -> Iterator[str]:
    yield figure.comparison.case
    for name, look in (("first look", figure.comparison), ("second look", figure.again)):
        if look is not None and look.before is not None:
            chance_text = "" if look.p_value is None else f", p = {look.p_value:.1g}"
            labels = f" ({', '.join(look.labels)})" if look.labels else ""
            yield f"{name}: {_format_change_values(look)}, {look.evidence.value}{labels}{chance_text}"
    if figure.comparison.since or figure.comparison.until:
        yield f"between {figure.comparison.since[:12] or '?'} and {figure.comparison.until[:12] or '?'}"
    yield f"worse is: more than {show_threshold(figure)}"
    if figure.why:
        yield figure.why


def _format_change_values(change: Comparison) -> str:
    values = f"{value(change, change.before)} -> {value(change, change.after)}"
    return values if change.ratio is None else f"{values}, {show_change(change.ratio)}"


def _remove_control_characters(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


# GitHub shows at most a mebibyte of a step's summary.
MAX_ROWS = 200
_PART_TITLE_BY_OUTCOME = {
    GateOutcome.FAILED: "Failed", GateOutcome.REGRESSION: "Regressions",
    GateOutcome.SUSPECTED: "Suspected: neither confirmed nor ruled out",
    GateOutcome.CANNOT_TELL: "Cannot tell: a slow-down by the threshold would not have been found",
    GateOutcome.CLEARED: "Cleared: suspected, but not worse when measured again", GateOutcome.BETTER: "Better",
}  # fmt: skip
_OUTCOME_TONES = {
    GateOutcome.FAILED: Tone.BAD,
    GateOutcome.REGRESSION: Tone.BAD,
    GateOutcome.SUSPECTED: Tone.DOUBT,
    GateOutcome.CANNOT_TELL: Tone.DOUBT,
    GateOutcome.BETTER: Tone.GOOD,
}
_AGAIN_LEGEND = "again: the same change, re-measured in a fresh process"
_WORSE_LEGEND = "worse: beyond both thresholds, the share and the difference"
_SMALLEST_LABEL = "smallest slow-down"


def render_page(verdict: GateVerdict) -> Page:
    """Shows the figures that failed, became worse or better, or are undecided. All other figures are only counted."""
    # 1. List the figures that became worse, better or undecided, and count the others.
    parts = [
        _make_outcome_part(name, title, figures)
        for name, title in _PART_TITLE_BY_OUTCOME.items()
        if (figures := verdict.of(name))
    ]
    if verdict.problem:
        parts.append(Part("problem", "Why", (Text(verdict.problem, Tone.BAD),)))
    reasons = Counter(figure.why for figure in verdict.of(GateOutcome.OPEN) if figure.why)
    parts += make_list_part(
        "open", "Cannot tell (not blocking), because", (f"{why} ({many(n, 'figure')})" for why, n in reasons.items())
    )
    parts += make_list_part("notes", "Notes", (f"- {note}" for note in verdict.notes[:MAX_ROWS]))
    if not parts:
        parts.append(Part("fine", "Everything else", (Text("Nothing is worse, and nothing better."),)))
    # 2. Explain only the terms that the page shows.
    listed = verdict.of(*_PART_TITLE_BY_OUTCOME)
    second_looks = [figure.again for figure in listed if figure.again is not None]
    footer_texts = [_AGAIN_LEGEND] if second_looks else []
    if listed:
        footer_texts += [_WORSE_LEGEND, *explain_labels([*(figure.comparison for figure in listed), *second_looks])]
    facts = [("judged", verdict.counts)] if verdict.judged else []
    # 3. State the smallest detectable slow-down: without it, a pass means little.
    if verdict.sights:
        facts.append((_SMALLEST_LABEL, summarize_limits(verdict.sights)))
        detection_share_text = f"{100 * DETECTION_PROBABILITY:.3g} of 100 builds"
        footer_texts.append(
            f"{_SMALLEST_LABEL}: in {detection_share_text}, both measurements would have found one of this size"
        )
    return Page(f"fp8bench gate: {verdict.headline}", verdict.title, tuple(parts), footer_texts, tuple(facts))


def _show_value_before(figure: JudgedFigure) -> str:
    return value(figure.comparison, figure.comparison.before)


def _show_value_after(figure: JudgedFigure) -> str:
    return value(figure.comparison, figure.comparison.after)


def _format_first_change(figure: JudgedFigure) -> str:
    return show_change(figure.comparison.ratio)


def _make_outcome_part(outcome: GateOutcome, title: str, judged: Sequence[JudgedFigure]) -> Part:
    tone = _OUTCOME_TONES.get(outcome, Tone.PLAIN)
    cols: list[Col[JudgedFigure]] = [
        Col("setting", lambda figure: split_case_id(figure.comparison.case)[0], shared=True),
        Col("figure", lambda figure: f"{split_case_id(figure.comparison.case)[1]} {figure.comparison.metric}"),
        Col("A", _show_value_before, number=True),
        Col("B", _show_value_after, number=True),
        Col("change", _format_first_change),
        Col("again", lambda figure: show_change(figure.again.ratio if figure.again else None)),
        Col("worse is", show_threshold),
        Col("verdict", lambda figure: Field(figure.outcome.value, tone=tone)),
        Col("why", lambda figure: figure.why, below=True),
    ]
    name = outcome.replace(" ", "-")
    elements: list[Element] = [table(name, "", cols, judged[:MAX_ROWS])]
    if len(judged) > MAX_ROWS:
        elements.append(Text(f"and {len(judged) - MAX_ROWS} more"))
    return Part(name, title, tuple(elements))


def summarize_limits(limits: Sequence[DetectionLimit]) -> str:
    """Returns the worst detection limit, for example '+9.0% (worst of 40 figures: CASE time, threshold +5.0%)'."""
    worst_limit = limits[0]
    count = len(limits)
    worst_figure_text = f"{worst_limit.case} {worst_limit.metric}, threshold {units.change(1 + worst_limit.threshold)}"
    return f"{worst_limit.smallest_text} ({f'worst of {count} figures: ' if count > 1 else ''}{worst_figure_text})"


def show_threshold(figure: JudgedFigure) -> str:
    threshold = figure.threshold
    share_text = units.percent(threshold.relative)
    return f"{share_text} and {value(figure.comparison, threshold.smallest)}" if threshold.smallest else share_text


_MAX_COMMENT_ROWS, _MAX_COMMENT_REASONS = 7, 3


class ReviewStatus(StrEnum):
    """The outcome that a comment on a pull request shows first. If several outcomes apply, the member that is defined
    first is shown."""

    QUALITY_BLOCKED = "quality blocked"
    REGRESSION = "regression"
    INFRASTRUCTURE_ERROR = "infrastructure error"
    RECIPE_MISMATCH = "recipe mismatch"
    SUSPECTED = "suspected"
    CANNOT_TELL = "CANNOT TELL"
    PASS = "no regression"


# For each status: the exit code of the gate, and the text that follows the status in the headline. {threshold} is the
# largest threshold of a time. {quality} is the reason why the change is blocked: numerical results became worse,
# or a case fails only with the change (head).
CODE_AND_TEXT_BY_STATUS = {
    ReviewStatus.QUALITY_BLOCKED: (EXIT_REGRESSION, ": {quality}"),
    ReviewStatus.REGRESSION: (EXIT_REGRESSION, ": head is worse than base beyond a threshold"),
    ReviewStatus.INFRASTRUCTURE_ERROR: (EXIT_FAILED, ": the change could not be measured, and may be good or bad"),
    ReviewStatus.RECIPE_MISMATCH: (
        EXIT_BASELINE,
        ": base and head do not do the same work, so that figures do not compare",
    ),
    ReviewStatus.SUSPECTED: (EXIT_BASELINE, ": head may be worse, which is neither confirmed nor ruled out"),
    ReviewStatus.CANNOT_TELL: (EXIT_BASELINE, ": head may be slower by {threshold}, which this noise would hide"),
    ReviewStatus.PASS: (EXIT_OK, " above {threshold}"),
}


@dataclass(frozen=True)
class DuelReview:
    """The status of a reviewed duel, and a sentence for each reason (`reasons`)."""

    status: ReviewStatus
    reasons: tuple[str, ...] = ()
    threshold: str = ""
    quality: str = ""

    @property
    def headline(self) -> str:
        text = CODE_AND_TEXT_BY_STATUS[self.status][1]
        return f"{self.status}{text.format(threshold=self.threshold, quality=self.quality)}"


def review_duel(verdict: GateVerdict, duel: Duel) -> DuelReview:
    """Returns the most important status of a duel of base and head, with the reasons for it."""
    reasons_by_status: dict[ReviewStatus, list[str]] = {status: [] for status in ReviewStatus}
    unequal_status_by_case = {result.after.case.id: _find_status_of_unequal_sides(result) for result in duel.results}
    # 1. If base and head have different support levels in a case, their results are not comparable, so nothing else
    # is reported for this case.
    for result in duel.results:
        if (status := unequal_status_by_case[result.after.case.id]) is not None:
            support_levels_text = f"{result.before.support.level} on base, {result.after.support.level} on head"
            reason = result.after.reason or result.before.reason or support_levels_text
            reasons_by_status[status].append(f"{result.after.case.id}: {reason}")
    # 2. A worse numerical result is a problem of quality, and has a different status than a worse time.
    quality_problem_texts: list[str] = []
    for figure in verdict.of(GateOutcome.REGRESSION):
        is_numerical_result = find_metric_spec(figure.comparison.metric).of_workload
        status = ReviewStatus.QUALITY_BLOCKED if is_numerical_result else ReviewStatus.REGRESSION
        reasons_by_status[status].append(_summarize_change(figure))
        if is_numerical_result and not quality_problem_texts:
            quality_problem_texts.append("numbers became worse")
    if ReviewStatus.QUALITY_BLOCKED in unequal_status_by_case.values():
        quality_problem_texts.append("a case fails on head alone")
    # 3. Collect cases that failed, and duels that were impossible.
    for figure in verdict.of(GateOutcome.FAILED):
        if unequal_status_by_case.get(figure.comparison.case) is None:
            reasons_by_status[ReviewStatus.INFRASTRUCTURE_ERROR].append(f"{figure.comparison.case}: {figure.why}")
    if verdict.problem and not any(unequal_status_by_case.values()):
        reasons_by_status[ReviewStatus.INFRASTRUCTURE_ERROR].append(verdict.problem)
    if NO_CODE_LOADED_NOTE in duel.notes:
        reasons_by_status[ReviewStatus.RECIPE_MISMATCH].append(NO_CODE_LOADED_NOTE)
    # 4. Collect figures that the gate could not decide.
    for outcome, status in (
        (GateOutcome.SUSPECTED, ReviewStatus.SUSPECTED),
        (GateOutcome.CANNOT_TELL, ReviewStatus.CANNOT_TELL),
    ):
        reasons_by_status[status] += [f"{_summarize_change(figure)}: {figure.why}" for figure in verdict.of(outcome)]
    # The statuses are ordered by their importance. The first one that has a reason is chosen.
    status = next((status for status, reasons in reasons_by_status.items() if reasons), ReviewStatus.PASS)
    reasons = tuple(reasons_by_status[status])
    return DuelReview(status, reasons, _show_largest_threshold(verdict), " and ".join(quality_problem_texts))


def _show_largest_threshold(verdict: GateVerdict) -> str:
    """Returns the largest threshold of the noisy figures (such as times), as a percentage. The gate may pass smaller
    slow-downs. Without noisy figures, returns the largest threshold of all tested figures.
    """
    noisy_thresholds = [limit.threshold for limit in verdict.sights]
    tested_relative_thresholds = [
        figure.threshold.relative for figure in verdict.judged if figure.outcome not in UNTESTED_OUTCOMES
    ]
    return f"{100 * max(noisy_thresholds or tested_relative_thresholds, default=0.0):.3g}%"


def _find_status_of_unequal_sides(result: CaseResult) -> ReviewStatus | None:
    """Returns the status of a case that a side failed to measure, or that the sides support differently, else None. A
    failed record without detail means that the worker process died.
    """
    failed_records = [record for record in (result.before, result.after) if record.status is Status.FAILED]
    if len(failed_records) == 2 or any(not record.detail for record in failed_records):
        return ReviewStatus.INFRASTRUCTURE_ERROR
    if failed_records:
        return ReviewStatus.QUALITY_BLOCKED if result.after in failed_records else ReviewStatus.RECIPE_MISMATCH
    levels = {result.before.support.level, result.after.support.level}
    return None if (result.sessions or result.is_refused_by_both) and len(levels) == 1 else ReviewStatus.RECIPE_MISMATCH


def _summarize_change(figure: JudgedFigure) -> str:
    return f"{_make_figure_title(figure)}: {_format_first_change(figure)}"


def render_comment(review: DuelReview, verdict: GateVerdict | None, duel: Duel | None, command: str) -> str:
    """Returns a comment on a pull request in Markdown: the outcome, its main reason, the table of figures, then
    further reasons.
    """
    reasons = [shorten_line(reason, 300) for reason in review.reasons[:_MAX_COMMENT_REASONS]]
    if len(review.reasons) > len(reasons):
        reasons.append(f"and {len(review.reasons) - len(reasons)} more")
    elements: list[Element] = [Text(reason) for reason in reasons[:1]]
    if verdict is not None and verdict.sights and not reasons:
        elements.append(Text(f"{_SMALLEST_LABEL} that would have been found: {summarize_limits(verdict.sights)}"))
    further_reasons = TextList(tuple(map(Text, reasons[1:])))
    if duel is not None and verdict is not None:
        counts_and_sides_text = Text(f"{verdict.counts}. {_describe_duel_sides(duel)}")
        elements += [_figures_table(verdict), further_reasons, counts_and_sides_text]
    else:
        elements.append(further_reasons)
    elements.append(Code(command))
    return markdown.render(Page(f"fp8bench: {review.headline}", "", (Part("review", "", tuple(elements)),)))


def _describe_duel_sides(duel: Duel) -> str:
    devices = ", ".join(facts.key for facts in duel.after.devices)
    torch_text = f"torch {duel.after.environment.facts.get('torch')}"
    sides_text = f"Base {duel.before.title}, head {duel.after.title}"
    sentence = f"{sides_text}; {many(duel.sessions, 'session')} on {devices}, {torch_text}."
    return " ".join((sentence, *(f"Note: {note}." for note in duel.notes[:2])))


_URGENT_OUTCOMES = (GateOutcome.REGRESSION, GateOutcome.FAILED, GateOutcome.SUSPECTED, GateOutcome.CANNOT_TELL)


def _figures_table(verdict: GateVerdict) -> Table:
    limits = {limit.key: limit for limit in verdict.sights}
    ranks = {key: rank for rank, key in enumerate(limits)}
    figures = [figure for figure in verdict.judged if figure.comparison.ratio or figure.outcome in _URGENT_OUTCOMES]
    # Failures come first, because the comment shows only the first _MAX_COMMENT_ROWS rows.
    figures.sort(key=lambda figure: (figure.outcome not in _URGENT_OUTCOMES, ranks.get(figure.key, len(ranks))))

    def show_smallest_slow_down(figure: JudgedFigure) -> str:
        if figure.key in limits:
            return limits[figure.key].smallest_text
        return units.NONE if figure.comparison.ratio is None else "exact"

    cols: list[Col[JudgedFigure]] = [
        Col("figure", _make_figure_title),
        Col("base", _show_value_before, number=True),
        Col("head", _show_value_after, number=True),
        Col(f"change, {units.percent(FINAL_LEVEL, 0)} interval", _format_first_change),
        Col(_SMALLEST_LABEL, show_smallest_slow_down),
        Col("worse is", show_threshold),
        Col("verdict", lambda figure: figure.outcome.value),
    ]
    return table("figures", "", cols, figures[:_MAX_COMMENT_ROWS])
