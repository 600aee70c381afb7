"""A gate's verdict as a page: on a terminal, and under a build as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fp8bench.analysis.gate.judging import Judged, Outcome, Verdict
from fp8bench.analysis.gate.sight import Sight, Sights
from fp8bench.errors import EXIT_OK
from fp8bench.report.elements import Column, Element, Field, Page, Part, Table, Text, Tone
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words import sights as words
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


_SEEN = (
    "could have seen: the smallest slow-down that is told from chance in both looks; fails: and is beyond its threshold"
)
_MOST_WARNED = 5


def page_of(verdict: Verdict, every: bool = False) -> Page:
    """What failed, what is worse, what is in doubt and what is better; the rest is counted.

    What could have been seen is a line, and of `every` figure a table.
    """
    parts = [_part(name, title, found) for name, title in _TITLES.items() if (found := verdict.of(name))]
    if verdict.problem:
        tone = Tone.BAD if verdict.code != EXIT_OK else Tone.DOUBT
        parts.append(Part("problem", "Why", (Text(verdict.problem, tone),)))
    unsure = Counter(one.why for one in verdict.of(Outcome.UNSURE) if one.why)
    parts += list_of("unsure", "Unsure, because", (f"{why} ({count})" for why, count in unsure.items()))
    told = words.warnings(verdict.sights, _MOST_WARNED) if verdict.sights.required else ()
    parts += list_of("notes", "Notes", (f"- {one}" for one in (*told, *verdict.notes[:MOST_ROWS])))
    if not parts:
        parts.append(Part("fine", "Everything else", (Text("Nothing is worse, and nothing better."),)))
    shown = [one for name in _TITLES for one in verdict.of(name)]
    labels = label_legend(look for one in shown for look in (one.comparison, one.again) if look is not None)
    footer = [*([_AGAIN] if any(one.again for one in shown) else []), _WORSE, *labels] if shown else []
    facts = [("judged", verdict.counts)] if verdict.judged else []
    if verdict.sights.figures:
        facts.append(("could have seen", words.summary(verdict.sights)))
        parts += [_sights(verdict.sights)] if every else []
        footer.append(_SEEN)
    return Page(f"fp8bench gate: {verdict.headline}", verdict.title, tuple(parts), footer, tuple(facts))


def _sights(sights: Sights) -> Part:
    """A row a figure, the most blind first."""
    columns = (
        Column("setting", shared=True), Column("figure"), Column("seen"), Column("fails"), Column("threshold"),
    )  # fmt: skip
    title = f"What could have been seen in {100 * sights.power:.3g} of 100 builds"
    shown = tuple(map(_sight, sights.figures[:MOST_ROWS]))
    return Part("sights", title, (Table("sights", "", columns, shown),))


def _sight(one: Sight) -> tuple[Field, ...]:
    setting, mode = setting_of(one.case)
    tone = Tone.PLAIN if one.enough else Tone.DOUBT
    return (
        Field(setting), Field(f"{mode} {one.metric}"), Field(words.seen(one), tone=tone), Field(words.share(one.fails)),
        Field(words.share(one.threshold)),
    )  # fmt: skip


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
