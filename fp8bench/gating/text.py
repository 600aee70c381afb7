"""A gate's verdict for a person: on a terminal, and as Markdown under a build."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fp8bench.gating.judging import Judged, Outcome
from fp8bench.gating.verdict import Verdict
from fp8bench.gating.words import limit
from fp8bench.report import markdown
from fp8bench.report.comparisons import label_legend, ratio, setting_of, value
from fp8bench.report.elements import Column as PageColumn
from fp8bench.report.elements import Element, Field, Items, Page, Part, Table, Text
from fp8bench.report.elements import Tone as PageTone
from fp8bench.report.layout import INDENT, Column, Paint, Row, SectionRow, Tone, painter, table, wrap

WIDTH = 100
# GitHub shows a mebibyte of a step's summary at most.
MOST_ROWS = 200
_SHOWN = (Outcome.FAILED, Outcome.REGRESSION, Outcome.TO_CONFIRM, Outcome.CLEARED, Outcome.BETTER)
_TITLES = {
    Outcome.FAILED: "Failed", Outcome.REGRESSION: "Regressions",
    Outcome.TO_CONFIRM: "To confirm: suspected, and not enough to fail",
    Outcome.CLEARED: "Cleared: suspected, and not so when measured again", Outcome.BETTER: "Better",
}  # fmt: skip
_TONES = {
    Outcome.FAILED: Tone.BAD,
    Outcome.REGRESSION: Tone.BAD,
    Outcome.TO_CONFIRM: Tone.DOUBT,
    Outcome.BETTER: Tone.GOOD,
}
_PAGE_TONES = {
    Outcome.FAILED: PageTone.BAD, Outcome.REGRESSION: PageTone.BAD, Outcome.TO_CONFIRM: PageTone.DOUBT,
    Outcome.BETTER: PageTone.GOOD,
}  # fmt: skip
_COLUMNS = (
    Column("figure"), Column("A", right=True), Column("B", right=True), Column("B / A"), Column("verdict"),
    Column("again"), Column("worse is"),
)  # fmt: skip
AGAIN = "again: the same ratio when measured once more, in a fresh process"
WORSE = "worse is: beyond both, the share and the difference"


def render(verdict: Verdict, color: bool = False, width: int = WIDTH) -> str:
    """What failed, what is worse, what is in doubt and what is better; the rest is counted."""
    paint = painter(color)
    paragraphs = [list(_head(verdict, width, paint))]
    shown = [one for name in _SHOWN for one in verdict.of(name)]
    if shown:
        paragraphs.append(table(_COLUMNS, list(_rows(shown)), width, paint))
        legend = [*([AGAIN] if any(one.again for one in shown) else []), WORSE, *_labels(shown)]
        paragraphs.append(["how to read this", *(line for one in legend for line in wrap(one, width, INDENT, INDENT))])
    unsure = [f"{why} ({count})" for why, count in doubts(verdict).items()]
    if unsure:
        paragraphs.append(["unsure, because", *(line for one in unsure for line in wrap(one, width, INDENT, INDENT))])
    if verdict.notes:
        paragraphs.append(["notes", *(line for one in verdict.notes for line in wrap(f"- {one}", width, hang=INDENT))])
    return "\n\n".join("\n".join(lines) for lines in paragraphs)


def doubts(verdict: Verdict) -> dict[str, int]:
    """Why figures could not be judged, and how many for each reason: they fail nothing, and are not fine."""
    return dict(Counter(one.why for one in verdict.of(Outcome.UNSURE) if one.why))


def as_markdown(verdict: Verdict) -> str:
    """The same as a page."""
    parts = [
        Part(name.value.replace(" ", "-"), _TITLES[name], tuple(_page_elements(name, found)))
        for name in _SHOWN if (found := verdict.of(name))
    ]  # fmt: skip
    if verdict.problem:
        parts.append(Part("problem", "Why", (Text(verdict.problem, PageTone.BAD),)))
    unsure = tuple(Text(f"{why} ({count})") for why, count in doubts(verdict).items())
    if unsure:
        parts.append(Part("unsure", "Unsure, because", (Items(unsure),)))
    if verdict.notes:
        parts.append(Part("notes", "Notes", (Items(tuple(map(Text, verdict.notes[:MOST_ROWS]))),)))
    if not parts:
        parts.append(Part("fine", "Everything else", (Text("Nothing is worse, and nothing better."),)))
    shown = [one for name in _SHOWN for one in verdict.of(name)]
    footer = [AGAIN, WORSE, *_labels(shown)] if shown else []
    return markdown.render(
        Page(f"fp8bench gate: {verdict.headline}", verdict.title, tuple(parts), footer, (("judged", verdict.counts),))
    )


def _head(verdict: Verdict, width: int, paint: Paint) -> Iterator[str]:
    yield from wrap(verdict.title, width, hang=INDENT)
    tone = Tone.BAD if verdict.exit_code else Tone.GOOD
    yield paint(f"{verdict.headline}", tone)
    if verdict.problem:
        yield from wrap(verdict.problem, width, hang=INDENT)
    if verdict.judged:
        yield from wrap(verdict.counts, width, hang=INDENT)


def _rows(shown: Sequence[Judged]) -> Iterator[Row | SectionRow]:
    before = ""
    for one in shown:
        setting, mode = setting_of(one.comparison.case)
        if setting != before:
            yield SectionRow(f"{INDENT}{setting}")
            before = setting
        cells = (f"{mode} {one.comparison.metric}", *_cells(one))
        tone = _TONES.get(one.outcome)
        yield Row(cells, {} if tone is None else {"verdict": tone}, (one.why,) if one.why else ())


def _cells(one: Judged) -> tuple[str, ...]:
    found, again = one.comparison, one.again
    return (
        value(found, found.before), value(found, found.after), ratio(found.ratio),
        one.outcome.value, ratio(again.ratio if again is not None else None), limit(one),
    )  # fmt: skip


def _page_elements(name: Outcome, found: Sequence[Judged]) -> Iterator[Element]:
    titles = ("case", "figure", *(column.title for column in _COLUMNS[1:]), "why")
    rows = tuple(_fields(one) for one in found[:MOST_ROWS])
    caption = f"{len(found)} figure{'s' * (len(found) != 1)}"
    yield Table(name.value.replace(" ", "-"), caption, tuple(map(PageColumn, titles)), rows)
    if len(found) > MOST_ROWS:
        yield Text(f"and {len(found) - MOST_ROWS} more")


def _fields(one: Judged) -> tuple[Field, ...]:
    cells = _cells(one)
    tone = _PAGE_TONES.get(one.outcome, PageTone.PLAIN)
    fields = [Field(cell, tone=tone if cell == one.outcome.value else PageTone.PLAIN) for cell in cells]
    why = "; ".join(filter(None, (", ".join(one.comparison.labels), one.why)))
    return (Field(one.comparison.case), Field(one.comparison.metric), *fields, Field(why))


def _labels(shown: Iterable[Judged]) -> list[str]:
    return label_legend(look for one in shown for look in (one.comparison, one.again) if look is not None)
