"""Pages of claims, answers and checked folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fp8bench import units
from fp8bench.features.claim.values import Answer, CheckedAnswer, Claim, ClaimAnswer, ClaimKind, Standing
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Facts, Field, Page, Part, Text, Tone

_TONES = {
    Answer.CONFIRMED: Tone.GOOD,
    Answer.WITHIN: Tone.GOOD,
    Answer.REFUTED: Tone.BAD,
    Answer.CANNOT_TELL: Tone.DOUBT,
    Answer.OTHER_CONDITIONS: Tone.DOUBT,
}
_STANDINGS = {Standing.HOLDS: Tone.GOOD, Standing.FAILS: Tone.BAD, Standing.UNKNOWN: Tone.DOUBT}
# Units that are shown with a prefix, as in TFLOP/s.
_WITH_PREFIX = ("FLOP/s", "B", "B/s", "s", "J", "tok/s")
_RELATIONS = {"<": "less than ", "<=": "at most ", ">": "more than ", ">=": "at least "}


def number_words(value: float, unit: str) -> str:
    """Formats a figure in the unit of its row; a `share` as percent."""
    if unit == "share":
        return f"{100 * value:.3g}%"
    if unit in _WITH_PREFIX:
        return units.describe(value, unit)
    number = f"{value:,.0f}" if value == round(value) else f"{value:.4g}"
    return f"{number} {unit}".rstrip()


def claimed_words(claim: Claim) -> str:
    """Describes what the sentence claims of its figure: 'at least 2 x', or 'about 2 x: 1.8 x to 2.2 x'."""
    bounds = " to ".join(number_words(bound, claim.unit) for bound in claim.bound)
    if claim.tolerance:
        accepted = " to ".join(number_words(end, claim.unit) for end in claim.range)
        return f"about {bounds}: {accepted}"
    return f"{_RELATIONS.get(claim.relation, '')}{bounds}"


def figure_words(answer: ClaimAnswer) -> str:
    """Formats the figure with its interval, '-' without one."""
    if answer.value is None:
        return units.NONE
    unit = answer.claim.unit
    words = number_words(answer.value, unit)
    if answer.low is None or answer.high is None or answer.low == answer.high:
        return words
    return f"{words} ({number_words(answer.low, unit)} to {number_words(answer.high, unit)})"


def page_of_answer(answer: ClaimAnswer) -> Page:
    claim, source = answer.claim, answer.claim.source
    pairs = [("answer", answer.answer.value)]
    if claim.kind is not ClaimKind.ALL_OF:
        figure = figure_words(answer) if answer.value is not None else ""
        pairs += [("figure", figure), ("the sentence says", claimed_words(claim))]
    pairs += [
        ("why", answer.why),
        ("to decide it", answer.remedy),
        ("note", claim.note),
        ("measured by", f"fp8bench {claim.run}" if claim.run else ""),
        ("runs", ", ".join(answer.runs)),
        ("source", f"{source.title}, {source.publisher} {source.year}, {source.address}"),
    ]
    facts = Facts(tuple((name, words) for name, words in pairs if words))
    return Page(claim.sentence, "", (Part("answer", "", (facts,)),))


def page_of_answers(answers: Sequence[ClaimAnswer]) -> Page:
    counts = Counter(answer.answer for answer in answers)
    summary = ", ".join(f"{count} {answer.value}" for answer, count in counts.items())
    rows = table("answers", "", _ANSWERS, answers)
    more = Text("`fp8bench claim ID` explains one of them.")
    return Page(f"{len(answers)} claims: {summary}", "", (Part("answers", "", (rows, more)),))


def _explain(answer: ClaimAnswer) -> str:
    """Returns the figure, or why it is missing; next to a published figure also the conditions of both."""
    if answer.answer is Answer.CANNOT_TELL or answer.value is None:
        return answer.why
    words = figure_words(answer)
    return f"{words}; published {claimed_words(answer.claim)}; {answer.why}" if answer.claim.published else words


_ANSWERS: tuple[Col[ClaimAnswer], ...] = (
    Col("sentence", lambda answer: answer.claim.sentence),
    Col("answer", lambda answer: Field(answer.answer.value, tone=_TONES.get(answer.answer, Tone.PLAIN))),
    Col("claim", lambda answer: f"{answer.claim.id}: {_explain(answer)}", below=True),
)


def page_of_catalogue(claims: Iterable[Claim]) -> Page:
    cols = Col[Claim]("claim", lambda claim: claim.id), Col[Claim]("sentence", lambda claim: claim.sentence)
    rows = table("catalogue", "", cols, claims)
    words = "`fp8bench claim ID` answers one, `fp8bench claim --all --cpu` all that a CPU can decide."
    return Page("Claims that fp8bench can decide", "", (Part("catalogue", "", (rows, Text(words))),))


def page_of_check(folder: str, checked: Sequence[CheckedAnswer]) -> Page:
    """Lists the answers that do not hold, or cannot be judged; the title counts the rest."""
    cols: tuple[Col[CheckedAnswer], ...] = (
        Col("claim", lambda answer: answer.id),
        Col("stored answer", lambda answer: Field(answer.standing.value, tone=_STANDINGS[answer.standing])),
        Col("why", lambda answer: answer.why),
    )
    failing = [answer for answer in checked if answer.standing is not Standing.HOLDS]
    rows = (table("checked", "", cols, failing),) if failing else ()
    title = f"{folder}: {len(checked) - len(failing)} of {len(checked)} stored answers hold"
    limits = (
        "This finds accidents: flipped bytes, dropped rows, edited bounds, swapped runs. Somebody who computes every "
        "digest again can still deceive."
    )
    return Page(title, "", (Part("checked", "", (*rows, Text(limits))),))
