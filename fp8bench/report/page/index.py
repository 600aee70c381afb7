"""The page of all reports of a store: what was measured, newest first, each with its answer and a link.

It is made of the cards that stand at the beginning of every report's page, so that no run has to be read for it.
"""

from __future__ import annotations

import html
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from fp8bench import units
from fp8bench.model.codec import Malformed, decode
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Element, Field, Items, Page, Part, Table, Text, Tone, Verdicts
from fp8bench.report.words.naming import many

# A card stands within so many bytes from the beginning of a page.
CARD_BYTES = 16384
# Older reports are not listed: their pages are where they were.
MOST_REPORTS = 500
MOST_DRAWN = 24
# With these a card, escaped, stays within CARD_BYTES: the commands of many runs side by side do not.
_MOST_ANSWERS, _LONGEST_ANSWER, _LONGEST_COMMAND = 12, 240, 1000
_CARD = re.compile(r'<meta name="fp8bench" content="([^"]*)">')
_NAMED_BY_TIME = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)")


@dataclass(frozen=True)
class Answer:
    """A word on a precision, and the speed-up behind it; a sentence where there are no such words."""

    about: str
    word: str
    value: float | None = None


@dataclass(frozen=True)
class Card:
    """What a report says of itself where there is room for a line."""

    kind: str
    title: str
    subtitle: str
    command: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Listed:
    """A card with the folder that its report lies in, and when that began: '2026-11-26 06:38', or ''."""

    card: Card
    folder: str
    when: str


def card_of(page: Page) -> Card:
    elements = page.parts[0].elements if page.parts else ()
    answers = next(filter(None, map(_answers, elements)), ())
    return Card(page.kind, page.title, page.subtitle, page.command[:_LONGEST_COMMAND], answers[:_MOST_ANSWERS])


def _answers(element: Element) -> tuple[Answer, ...]:
    """The words of a strip, the verdicts of a table, or the first sentence."""
    match element:
        case Verdicts():
            return tuple(Answer(label, fields[0].text, fields[0].value) for label, fields in element.rows)
        case Table():
            wanted = ("case", "arm", "verdict")
            places = [place for place, column in enumerate(element.columns) if column.title in wanted]
            told = [[row[place].text for place in places] for row in element.rows] if len(places) > 1 else []
            return tuple(Answer(about, word) for about, word, *_ in told if word not in ("", units.NONE))
        case Text():
            return (Answer("", element.text[:_LONGEST_ANSWER]),)
        case Items():
            return _answers(element.items[0])
    return ()


def read_card(beginning: str) -> Card | None:
    """The card in a page's beginning; None of a page without, which an older version wrote or somebody changed."""
    found = _CARD.search(beginning)
    try:
        return decode(Card, json.loads(html.unescape(found[1]))) if found else None
    except (ValueError, RecursionError, Malformed):
        return None


def began(folder: str) -> str:
    found = _NAMED_BY_TIME.match(folder)
    return f"{found[1]}-{found[2]}-{found[3]} {found[4]}:{found[5]}" if found else ""


def index_page(reports: Iterable[Listed], left_out: int = 0) -> Page:
    """Of reports, newest first. Behind a speed-up those are drawn that the same command came to before."""
    listed = list(reports)
    earlier: dict[tuple[str, ...], list[float]] = defaultdict(list)
    trends: dict[str, tuple[float, ...]] = {}
    for report in reversed(listed):
        card = report.card
        for answer in card.answers[:1]:
            if answer.value is not None:
                series = earlier[card.kind, card.title, card.command, answer.about]
                series.append(answer.value)
                trends[report.folder] = tuple(series[-MOST_DRAWN:])
    cols: list[Col[Listed]] = [
        Col("began (UTC)", lambda report: report.when or units.NONE),
        Col("report", lambda report: Field(
            report.card.title, hint=report.card.command, link=f"{quote(report.folder)}/report.html"
        )),
        Col("of", lambda report: report.card.kind),
        Col("answer", lambda report: ", ".join(map(_shown, report.card.answers)) or units.NONE),
        Col("speed-up", lambda report: _first(report, trends.get(report.folder, ())), number=True, unit="x",
            hint="of the first precision that is named; behind it those that the same command came to before"),
        Col("where", lambda report: report.card.subtitle.partition(" UTC, ")[2] or report.card.subtitle),
    ]  # fmt: skip
    shown = table("reports", many(len(listed), "report"), cols, listed, main=True, kept={"began (UTC)", "report"})
    older = [Text(f"{many(left_out, 'older report')} in the same folder: not listed.", Tone.DOUBT)] if left_out else []
    return Page("Reports", "", (Part("reports", "All reports, newest first", (shown, *older)),), kind="index")


def _shown(answer: Answer) -> str:
    return " ".join(filter(None, (answer.about, answer.word)))


def _first(report: Listed, trend: tuple[float, ...]) -> Field | None:
    value = report.card.answers[0].value if report.card.answers else None
    return None if value is None else Field(units.speed_up(value), value, trend=trend)
