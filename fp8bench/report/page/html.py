"""A page as one HTML file that loads nothing: it contains style, script and drawings.

The template escapes everything from outside. The page's policy only allows its own style and the script whose hash it
names, so that even injected markup could neither run nor load anything. Every page begins with a card, a short form of
its answer. The index of a store's reports consists of these cards, without reading runs.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from fp8bench import units
from fp8bench.model.codec import Malformed, decode, encode
from fp8bench.report.columns import Col, Cols, table
from fp8bench.report.data.plain import json_line
from fp8bench.report.elements import (
    AnyChart,
    Chart,
    Column,
    Element,
    Field,
    Items,
    Page,
    Part,
    Table,
    Text,
    Tone,
)
from fp8bench.report.page.charts import numbers_table
from fp8bench.report.page.drawing.draw import draw
from fp8bench.report.page.drawing.scale import FORBIDDEN
from fp8bench.report.words.naming import many

if TYPE_CHECKING:
    import jinja2


class _Sheet(NamedTuple):
    id: str
    table: Table
    columns: tuple[tuple[Column, bool], ...]


class _PageBlock(NamedTuple):
    element: Element
    id: str = ""
    sheet: _Sheet | None = None
    drawing: str = ""


def render(page: Page) -> str:
    # The policy names the script by its hash, so that no other script runs.
    script = _asset("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = load_template().render(
        page=page,
        card=json_line(encode(card_of(page))).strip(),
        parts=_parts(page, draw),
        style=_asset("style.css") + _asset("drawing", "charts.css"),
        script=script,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
    )
    return FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text).lstrip()


@cache
def load_template() -> jinja2.Template:
    import jinja2

    # Escaping is on for everything that the template prints; a missing name is an error, not an empty string.
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters: dict[str, Callable[..., str]] = {
        "sort_value": _sort_value,
        "kind": lambda element: type(element).__name__,
        "marked": _set_code,
    }
    environment.filters |= filters
    return environment.from_string(_asset("page.html.j2"))


@cache
def _asset(*names: str) -> str:
    return files("fp8bench.report.page").joinpath(*names).read_text(encoding="utf-8")


def charts_of(page: Page) -> dict[str, AnyChart]:
    """Returns the page's charts by id."""
    charts: dict[str, AnyChart] = {}
    for _, _, blocks in _parts(page, lambda chart: ""):
        charts |= {block.id: block.element for block in blocks if isinstance(block.element, Chart)}
    return charts


def _parts(page: Page, draw: Callable[[AnyChart], str]) -> list[tuple[str, Part, tuple[_PageBlock, ...]]]:
    ids = _Ids()
    return [(ids.give(part.name), part, tuple(_blocks(part, ids, draw))) for part in page.parts]


class _Ids:
    """Makes the ids of a page unique."""

    def __init__(self) -> None:
        self._taken = {"content", "contents", "tip"}

    def give(self, name: str) -> str:
        word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "part"
        candidate = word
        number = 1
        while candidate in self._taken:
            number += 1
            candidate = f"{word}-{number}"
        self._taken.add(candidate)
        return candidate


def _blocks(part: Part, ids: _Ids, draw: Callable[[AnyChart], str]) -> Iterator[_PageBlock]:
    for element in part.elements:
        if isinstance(element, Table):
            anchor = ids.give(element.name)
            yield _PageBlock(element, anchor, _sheet(element, anchor))
        elif isinstance(element, Chart):
            anchor = ids.give(element.name)
            numbers = _sheet(numbers_table(element), ids.give(f"{anchor}-numbers"))
            # Ids within the drawing begin with the chart's id.
            yield _PageBlock(element, anchor, numbers, draw(replace(element, name=anchor)))
        else:
            yield _PageBlock(element)


def _sheet(table: Table, anchor: str) -> _Sheet:
    """Determines for each column whether it sorts by values."""
    columns = []
    for place, column in enumerate(table.columns):
        has_values = any(row[place].value is not None for row in table.rows)
        columns.append((column, column.number or has_values))
    return _Sheet(anchor, table, tuple(columns))


def _set_code(text: str) -> str:
    """Returns the sentence with text `between backticks` set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _sort_value(field: Field) -> str:
    """Returns the script's sort value in JavaScript syntax; '' if it is the text or unknown."""
    if field.value is None or math.isnan(field.value):
        return ""
    # JavaScript's spelling; 'inf' would sort as text.
    if math.isinf(field.value):
        if field.value > 0:
            return "Infinity"
        return "-Infinity"
    exact = repr(float(field.value)).removesuffix(".0")
    if exact == field.text:
        return ""
    return exact


# A card is within the first bytes of a page.
CARD_BYTES = 16384
# Older reports are not listed.
MOST_REPORTS = 500
# These keep an escaped card within CARD_BYTES: the commands of many runs would exceed it.
_MOST_ANSWERS = 12
_LONGEST_ANSWER = 240
_LONGEST_COMMAND = 1000
_CARD = re.compile(r'<meta name="fp8bench" content="([^"]*)">')
_NAMED_BY_TIME = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)")


@dataclass(frozen=True)
class CardAnswer:
    """The verdict on a precision; or a sentence, with '' as the precision."""

    about: str
    word: str


@dataclass(frozen=True)
class Card:
    """A report in one line of a list."""

    kind: str
    title: str
    subtitle: str
    command: str
    answers: tuple[CardAnswer, ...]


@dataclass(frozen=True)
class ListedReport:
    """A card with its report's folder, and when the report's run began: '2026-11-26 06:38', or ''."""

    card: Card
    folder: str
    when: str


def card_of(page: Page) -> Card:
    elements = page.parts[0].elements if page.parts else ()
    answers = next(filter(None, map(_answers, elements)), ())
    return Card(page.kind, page.title, page.subtitle, page.command[:_LONGEST_COMMAND], answers[:_MOST_ANSWERS])


def _answers(element: Element) -> tuple[CardAnswer, ...]:
    """Returns the verdicts of a table, or the first sentence."""
    match element:
        case Table():
            titles = ("case", "arm", "verdict")
            places = [place for place, column in enumerate(element.columns) if column.title in titles]
            if len(places) < 2:
                return ()
            pairs = [(row[places[0]].text, row[places[1]].text) for row in element.rows]
            return tuple(CardAnswer(about, word) for about, word in pairs if word not in ("", units.NONE))
        case Text():
            return (CardAnswer("", element.text[:_LONGEST_ANSWER]),)
        case Items():
            return _answers(element.items[0])
    return ()


def read_card(beginning: str) -> Card | None:
    """Returns the card at the beginning of a page, or None."""
    match = _CARD.search(beginning)
    try:
        if match:
            return decode(Card, json.loads(html.unescape(match[1])))
        return None
    except (ValueError, RecursionError, Malformed):
        return None


def began(folder: str) -> str:
    match = _NAMED_BY_TIME.match(folder)
    if match:
        return f"{match[1]}-{match[2]}-{match[3]} {match[4]}:{match[5]}"
    return ""


def index_page(reports: Iterable[ListedReport], left_out: int = 0) -> Page:
    """A page of reports, newest first."""
    listed = list(reports)

    def title(report: ListedReport) -> Field:
        return Field(report.card.title, link=f"{quote(report.folder)}/report.html")

    def answers(report: ListedReport) -> str | None:
        return ", ".join([f"{answer.about} {answer.word}".strip() for answer in report.card.answers]) or None

    cols: Cols[ListedReport] = [
        Col("began (UTC)", lambda report: report.when or None),
        Col("report", title),
        Col("of", lambda report: report.card.kind),
        Col("answer", answers),
        Col("where", lambda report: report.card.subtitle.partition(" UTC, ")[2] or report.card.subtitle),
    ]
    required = {"began (UTC)", "report"}
    elements: list[Element] = [
        table("reports", many(len(listed), "report"), cols, listed, main=True, required=required)
    ]
    if left_out:
        elements.append(Text(f"{many(left_out, 'older report')} in the same folder: not listed.", Tone.DOUBT))
    return Page("Reports", "", (Part("reports", "All reports, newest first", tuple(elements)),), kind="index")
