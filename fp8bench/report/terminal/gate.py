"""A gate's verdict as a page: on a terminal, and under a build as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fp8bench.analysis.gate.judging import Judged, Outcome, Verdict
from fp8bench.report.elements import Column, Element, Field, Page, Part, Table, Text, Tone
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.comparisons import label_legend, limit, setting_of, signed, value

# GitHub shows a mebibyte of a step's summary at most.
MOST_ROWS = 200
_TITLES = {
    Outcome.FAILED: "Failed", Outcome.REGRESSION: "Regressions",
    Outcome.TO_CONFIRM: "To confirm: suspected, and not enough to fail",
    Outcome.CLEARED: "Cleared: suspected, and not so when measured again", Outcome.BETTER: "Better",
}  # fmt: skip
_TONES = {
    Outcome.FAILED: Tone.BAD, Outcome.REGRESSION: Tone.BAD, Outcome.TO_CONFIRM: Tone.DOUBT, Outcome.BETTER: Tone.GOOD,
}  # fmt: skip
_AGAIN = "again: the same change when measured once more, in a fresh process"
_WORSE = "worse is: beyond both, the share and the difference"


def page_of(verdict: Verdict) -> Page:
    """What failed, what is worse, what is in doubt and what is better; the rest is counted."""
    parts = [_part(name, title, found) for name, title in _TITLES.items() if (found := verdict.of(name))]
    if verdict.problem:
        parts.append(Part("problem", "Why", (Text(verdict.problem, Tone.BAD),)))
    unsure = Counter(one.why for one in verdict.of(Outcome.UNSURE) if one.why)
    parts += list_of("unsure", "Unsure, because", (f"{why} ({count})" for why, count in unsure.items()))
    parts += list_of("notes", "Notes", (f"- {one}" for one in verdict.notes[:MOST_ROWS]))
    if not parts:
        parts.append(Part("fine", "Everything else", (Text("Nothing is worse, and nothing better."),)))
    shown = [one for name in _TITLES for one in verdict.of(name)]
    labels = label_legend(look for one in shown for look in (one.comparison, one.again) if look is not None)
    footer = [*([_AGAIN] if any(one.again for one in shown) else []), _WORSE, *labels] if shown else []
    facts = (("judged", verdict.counts),) if verdict.judged else ()
    return Page(f"fp8bench gate: {verdict.headline}", verdict.title, tuple(parts), footer, facts)


def _part(name: Outcome, title: str, found: Sequence[Judged]) -> Part:
    columns = (
        Column("setting", shared=True), Column("figure"), Column("A", number=True), Column("B", number=True),
        Column("change"), Column("again"), Column("worse is"), Column("verdict"), Column("why", below=True),
    )  # fmt: skip
    elements: list[Element] = [Table(name.replace(" ", "-"), "", columns, tuple(map(_fields, found[:MOST_ROWS])))]
    if len(found) > MOST_ROWS:
        elements.append(Text(f"and {len(found) - MOST_ROWS} more"))
    return Part(name.replace(" ", "-"), title, tuple(elements))


def _fields(one: Judged) -> tuple[Field, ...]:
    found, again = one.comparison, one.again
    setting, mode = setting_of(found.case)
    return (
        Field(setting), Field(f"{mode} {found.metric}"), Field(value(found, found.before)),
        Field(value(found, found.after)), Field(signed(found.ratio)), Field(signed(again.ratio if again else None)),
        Field(limit(one)), Field(one.outcome.value, tone=_TONES.get(one.outcome, Tone.PLAIN)), Field(one.why),
    )  # fmt: skip
