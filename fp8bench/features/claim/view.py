"""Renders claims, their answers, and the check of a folder of stored answers as pages."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence

from fp8bench import units
from fp8bench.features.claim.values import (
    AnswerCheckOutcome,
    CheckedAnswer,
    Claim,
    ClaimAnswer,
    ClaimKind,
    ClaimOutcome,
)
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Field, NameValuePairs, Page, Part, Text, Tone

_CLAIM_ANSWER_TONES = {
    ClaimOutcome.CONFIRMED: Tone.GOOD,
    ClaimOutcome.WITHIN_RANGE: Tone.GOOD,
    ClaimOutcome.REFUTED: Tone.BAD,
    ClaimOutcome.CANNOT_TELL: Tone.DOUBT,
    ClaimOutcome.OTHER_CONDITIONS: Tone.DOUBT,
}
_STANDING_TONES = {
    AnswerCheckOutcome.ANSWER_HOLDS: Tone.GOOD,
    AnswerCheckOutcome.ANSWER_FAILS: Tone.BAD,
    AnswerCheckOutcome.CANNOT_JUDGE: Tone.DOUBT,
}
# Units that are shown with a prefix, such as TFLOP/s.
_PREFIXED_UNITS = ("FLOP/s", "B", "B/s", "s", "J", "tok/s")
_TEXT_BY_RELATION = {"<": "less than ", "<=": "at most ", ">": "more than ", ">=": "at least "}


def format_figure(value: float, unit: str) -> str:
    """Formats a figure in the unit of its claim. A `share` is shown as percent."""
    if unit == "share":
        return f"{100 * value:.3g}%"
    if unit in _PREFIXED_UNITS:
        return units.describe(value, unit)
    number_text = f"{value:,.0f}" if value == round(value) else f"{value:.4g}"
    return f"{number_text} {unit}".rstrip()


def describe_claimed_values(claim: Claim) -> str:
    """Describes the values that a sentence claims, such as 'at least 2 x', or 'about 2 x: 1.8 x to 2.2 x'."""
    bounds_text = " to ".join(format_figure(bound, claim.unit) for bound in claim.bound)
    if claim.tolerance:
        accepted_range_text = " to ".join(format_figure(end, claim.unit) for end in claim.range)
        return f"about {bounds_text}: {accepted_range_text}"
    return f"{_TEXT_BY_RELATION.get(claim.relation, '')}{bounds_text}"


def format_answer_figure(answer: ClaimAnswer) -> str:
    """Formats the figure of an answer with its interval; '-' without a figure."""
    if answer.value is None:
        return units.NONE
    unit = answer.claim.unit
    value_text = format_figure(answer.value, unit)
    if answer.low is None or answer.high is None or answer.low == answer.high:
        return value_text
    return f"{value_text} ({format_figure(answer.low, unit)} to {format_figure(answer.high, unit)})"


def render_claim_answer(answer: ClaimAnswer) -> Page:
    claim = answer.claim
    source = answer.claim.source
    name_text_pairs = [("answer", answer.answer.value)]
    if claim.kind is not ClaimKind.ALL_OF:
        figure_text = format_answer_figure(answer) if answer.value is not None else ""
        name_text_pairs += [("figure", figure_text), ("claimed", describe_claimed_values(claim))]
    name_text_pairs += [
        ("why", answer.why),
        ("to decide it", answer.remedy),
        ("note", claim.note),
        ("measured by", f"fp8bench {claim.run}" if claim.run else ""),
        ("runs", ", ".join(answer.runs)),
        ("source", f"{source.title}, {source.publisher} {source.year}, {source.address}"),
    ]
    facts = NameValuePairs(tuple((name, words) for name, words in name_text_pairs if words))
    return Page(claim.sentence, "", (Part("answer", "", (facts,)),))


def render_answers(answers: Sequence[ClaimAnswer], file: str = "") -> Page:
    """Lists the answers to claims of a `file`, or of the catalogue."""
    counts = Counter(answer.answer for answer in answers)
    summary = ", ".join(f"{count} {answer.value}" for answer, count in counts.items())
    rows = table("answers", "", _ANSWER_COLUMNS, answers)
    command = shlex.join(["fp8bench", "claim", *([file] if file else []), answers[0].claim.id])
    hint = Text(f"`{command}` explains one answer.")
    return Page(f"{len(answers)} claims: {summary}", "", (Part("answers", "", (rows, hint)),))


def _explain_claim_answer(answer: ClaimAnswer) -> str:
    """Returns the figure of an answer, or why it is missing. If the claim has a published figure, also returns the
    conditions of both measurements.
    """
    if answer.value is None:
        return answer.why
    figure_text = format_answer_figure(answer)
    if answer.answer is ClaimOutcome.CANNOT_TELL:
        return f"{figure_text}; {answer.why}"
    return (
        f"{figure_text}; published {describe_claimed_values(answer.claim)}; {answer.why}"
        if answer.claim.published
        else figure_text
    )


_ANSWER_COLUMNS: tuple[Col[ClaimAnswer], ...] = (
    Col("sentence", lambda answer: answer.claim.sentence),
    Col("answer", lambda answer: Field(answer.answer.value, tone=_CLAIM_ANSWER_TONES.get(answer.answer, Tone.PLAIN))),
    Col("claim", lambda answer: f"{answer.claim.id}: {_explain_claim_answer(answer)}", below=True),
)


def render_catalogue(claims: Iterable[Claim]) -> Page:
    columns = Col[Claim]("claim", lambda claim: claim.id), Col[Claim]("sentence", lambda claim: claim.sentence)
    rows = table("catalogue", "", columns, claims)
    hint = "`fp8bench claim ID` answers one claim, `fp8bench claim --all --cpu` all claims that a CPU can decide."
    return Page("Claims that fp8bench can decide", "", (Part("catalogue", "", (rows, Text(hint))),))


def render_checked_answers(folder: str, checked_answers: Sequence[CheckedAnswer]) -> Page:
    """Lists the stored answers that do not hold or cannot be judged. The title counts those that hold."""
    columns: tuple[Col[CheckedAnswer], ...] = (
        Col("claim", lambda answer: answer.id),
        Col("stored answer", lambda answer: Field(answer.standing.value, tone=_STANDING_TONES[answer.standing])),
        Col("why", lambda answer: answer.why),
    )
    failed_answers = [answer for answer in checked_answers if answer.standing is not AnswerCheckOutcome.ANSWER_HOLDS]
    rows = (table("checked", "", columns, failed_answers),) if failed_answers else ()
    title = f"{folder}: {len(checked_answers) - len(failed_answers)} of {len(checked_answers)} stored answers hold"
    claim_limits_text = (
        "This check finds accidents: flipped bytes, dropped rows, edited bounds, exchanged runs. It does not find "
        "a forgery with new digests."
    )
    return Page(title, "", (Part("checked", "", (*rows, Text(claim_limits_text))),))
