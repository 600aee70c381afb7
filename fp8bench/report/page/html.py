"""Renders a page as one HTML file that loads nothing, because it contains its style, script and drawings.

The template escapes every text. The content security policy only allows the page's own style, and the script with the
right hash, so that injected markup could neither run nor load anything.

Each page begins with a card, a short form of its answer. The index of a store's reports is made of these cards,
without reading any run.
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
from fp8bench.model.codec import MalformedValueError, decode, encode
from fp8bench.report.columns import Col, ColumnList, table
from fp8bench.report.data.plain import json_line
from fp8bench.report.elements import (
    AnyChart,
    Chart,
    Column,
    Element,
    Field,
    Page,
    Part,
    Table,
    Text,
    TextList,
    Tone,
)
from fp8bench.report.page.charts import numbers_table
from fp8bench.report.page.drawing.draw import draw_chart_as_svg
from fp8bench.report.page.drawing.scale import FORBIDDEN_CHARACTERS
from fp8bench.report.words.naming import many, shorten_line

if TYPE_CHECKING:
    import jinja2


class _HtmlTable(NamedTuple):
    id: str
    table: Table
    columns: tuple[tuple[Column, bool], ...]


class _PageBlock(NamedTuple):
    element: Element
    id: str = ""
    sheet: _HtmlTable | None = None
    drawing: str = ""


def render(page: Page) -> str:
    # The content security policy allows only a script with this hash, so that no other script runs.
    script = _read_asset("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = load_template().render(
        page=page,
        card=json_line(encode(make_page_card(page))).strip(),
        parts=_list_parts_with_ids(page, draw_chart_as_svg),
        style=_read_asset("style.css") + _read_asset("drawing", "charts.css"),
        script=script,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
    )
    # Jinja escapes markup, but keeps characters that HTML forbids.
    return FORBIDDEN_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text).lstrip()


@cache
def load_template() -> jinja2.Template:
    import jinja2

    # Jinja escapes every text that the template prints. A missing name is an error instead of an empty string.
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    jinja_filters: dict[str, Callable[..., str]] = {
        "sort_value": _field_sort_key,
        "kind": lambda element: type(element).__name__,
        "marked": _sentence_html,
    }
    environment.filters |= jinja_filters
    return environment.from_string(_read_asset("page.html.j2"))


@cache
def _read_asset(*names: str) -> str:
    return files("fp8bench.report.page").joinpath(*names).read_text(encoding="utf-8")


def list_charts(page: Page) -> dict[str, AnyChart]:
    """Returns the page's charts by id."""
    charts_by_id: dict[str, AnyChart] = {}
    for _, _, blocks in _list_parts_with_ids(page, lambda chart: ""):
        charts_by_id |= {block.id: block.element for block in blocks if isinstance(block.element, Chart)}
    return charts_by_id


def _list_parts_with_ids(page: Page, draw: Callable[[AnyChart], str]) -> list[tuple[str, Part, tuple[_PageBlock, ...]]]:
    ids = _UniqueHtmlIds()
    return [(ids.make_unique_id(part.name), part, tuple(_make_page_blocks(part, ids, draw))) for part in page.parts]


class _UniqueHtmlIds:
    """Makes the HTML ids of a page unique."""

    def __init__(self) -> None:
        self._taken_ids = {"content", "contents", "tip"}

    def make_unique_id(self, name: str) -> str:
        base_id = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "part"
        candidate_html_id = base_id
        suffix = 1
        while candidate_html_id in self._taken_ids:
            suffix += 1
            candidate_html_id = f"{base_id}-{suffix}"
        self._taken_ids.add(candidate_html_id)
        return candidate_html_id


def _make_page_blocks(part: Part, ids: _UniqueHtmlIds, draw: Callable[[AnyChart], str]) -> Iterator[_PageBlock]:
    for element in part.elements:
        if isinstance(element, Table):
            html_element_id = ids.make_unique_id(element.name)
            yield _PageBlock(element, html_element_id, _make_html_table(element, html_element_id))
        elif isinstance(element, Chart):
            html_element_id = ids.make_unique_id(element.name)
            numbers_html = _make_html_table(numbers_table(element), ids.make_unique_id(f"{html_element_id}-numbers"))
            # Begin each id within the drawing with the id of the chart, so that it is unique on the page.
            yield _PageBlock(element, html_element_id, numbers_html, draw(replace(element, name=html_element_id)))
        else:
            yield _PageBlock(element)


def _make_html_table(table: Table, anchor: str) -> _HtmlTable:
    """Adds to a table what the HTML template needs: its anchor, and whether each column sorts by numbers."""
    columns = [
        (column, column.number or any(row[index].value is not None for row in table.rows))
        for index, column in enumerate(table.columns)
    ]
    return _HtmlTable(anchor, table, tuple(columns))


def _sentence_html(text: str) -> str:
    """Escapes a sentence, and turns text `between backticks` into HTML code elements."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _field_sort_key(field: Field) -> str:
    """Returns the number by which the page's script sorts a field, in JavaScript syntax. Returns '' if the script
    sorts by the text.
    """
    if field.value is None or math.isnan(field.value):
        return ""
    # Write infinity in JavaScript's spelling, because JavaScript would sort 'inf' as text.
    if math.isinf(field.value):
        return "Infinity" if field.value > 0 else "-Infinity"
    exact_number_text = repr(float(field.value)).removesuffix(".0")
    # Without a key, the script sorts by the text, which is the same number here.
    return "" if exact_number_text == field.text else exact_number_text


# A report's card (its entry in a list of reports) is within this many bytes from the start of its page.
CARD_BYTES = 16384
# The index lists at most this many reports, the newest ones.
MAX_REPORTS = 500
# With these limits, a report's card fits into CARD_BYTES after HTML escaping, even if the report has many runs.
_MAX_CARD_ANSWERS = 12
_MAX_CARD_ANSWER_LENGTH = 240
_REPORT_CARD_TAG = re.compile(r'<meta name="fp8bench" content="([^"]*)">')
_FOLDER_TIME_STAMP_PATTERN = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)")


@dataclass(frozen=True)
class CardVerdictLine:
    """A line of a card: a precision (`about`) and the verdict on it (`word`). If `about` is '', `word` is a sentence
    of the report.
    """

    about: str
    word: str


@dataclass(frozen=True)
class ReportCard:
    """A short form of a report, for one line in a list of reports."""

    kind: str
    title: str
    subtitle: str
    answers: tuple[CardVerdictLine, ...]
    remark: str = ""


@dataclass(frozen=True)
class ListedReport:
    """A card with the folder of its report. `when` is the start of the run, as '2026-11-26 06:38', if the name of the
    folder has it. Otherwise it is the time when the report was written.
    """

    card: ReportCard
    folder: str
    when: str


def make_page_card(page: Page) -> ReportCard:
    # The card shows the answers in the first list or table that has some, otherwise the first text.
    elements = sorted(page.parts[0].elements if page.parts else (), key=lambda element: isinstance(element, Text))
    card_answers = next(filter(None, map(_make_card_answers, elements)), ())
    return ReportCard(page.kind, page.title, page.subtitle, card_answers[:_MAX_CARD_ANSWERS], page.remark)


def _make_card_answers(element: Element) -> tuple[CardVerdictLine, ...]:
    """Returns the short answers in an element for the report's card (its entry in a list of reports): the verdict in
    each row of a table, the text before the first semicolon of each list item, or a whole text.
    """
    match element:
        case Table():
            answer_column_titles = ("case", "arm", "verdict")
            card_column_indices = [
                index for index, column in enumerate(element.columns) if column.title in answer_column_titles
            ]
            # A table of answers has a verdict and the name of a case or an arm.
            if len(card_column_indices) < 2:
                return ()
            pairs = [(row[card_column_indices[0]].text, row[card_column_indices[1]].text) for row in element.rows]
            return tuple(CardVerdictLine(about, word) for about, word in pairs if word not in ("", units.NONE))
        case Text():
            return (CardVerdictLine("", shorten_line(element.text, _MAX_CARD_ANSWER_LENGTH)),)
        case TextList():
            # In an answer, the costs and the reason follow the first semicolon. A list of reports has no room for them.
            first_clauses = [item.text.partition(";")[0] for item in element.items]
            return tuple(CardVerdictLine("", shorten_line(clause, _MAX_CARD_ANSWER_LENGTH)) for clause in first_clauses)
    return ()


def read_page_card(page_start: str) -> ReportCard | None:
    """Parses the card (the short form of a report) at the start of a page. Returns None if it is missing or invalid."""
    match = _REPORT_CARD_TAG.search(page_start)
    try:
        if match:
            return decode(ReportCard, json.loads(html.unescape(match[1])))
        return None
    # The page may be damaged or come from another program. JSON that is nested too deeply raises RecursionError.
    except (ValueError, RecursionError, MalformedValueError):
        return None


def format_folder_time(folder: str) -> str:
    match = _FOLDER_TIME_STAMP_PATTERN.match(folder)
    return "{}-{}-{} {}:{}".format(*match.groups()) if match else ""


def index_page(reports: Iterable[ListedReport], num_unlisted: int = 0) -> Page:
    """Returns the page that lists reports, in the order in which they are given."""
    listed_reports = list(reports)

    def make_title_field(report: ListedReport) -> Field:
        return Field(report.card.title, link=f"{quote(report.folder)}/report.html")

    def join_answers(report: ListedReport) -> str:
        text = "; ".join([f"{answer.about} {answer.word}".strip() for answer in report.card.answers]) or units.NONE
        return f"{text} ({report.card.remark})" if report.card.remark else text

    cols: ColumnList[ListedReport] = [
        Col("date (UTC)", "when"),
        Col("report", make_title_field),
        Col("of", "card.kind"),
        Col("answer", join_answers),
        # The subtitle of a single run begins with its start, which the first column already shows.
        Col("where", lambda report: report.card.subtitle.partition(" UTC, ")[2] or report.card.subtitle),
    ]
    required_headings = {"date (UTC)", "report"}
    elements: list[Element] = [
        table(
            "reports",
            many(len(listed_reports), "report"),
            cols,
            listed_reports,
            main=True,
            required_headings=required_headings,
        )
    ]
    if num_unlisted:
        elements.append(Text(f"Not listed: {many(num_unlisted, 'older report')} in the same folder.", Tone.DOUBT))
    return Page("Reports", "", (Part("reports", "All reports, newest first", tuple(elements)),), kind="index")
