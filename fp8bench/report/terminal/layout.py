"""Elements as lines of plain text that fit the width: paragraphs, lists, tables, and colour if wanted.

Text is laid out before it is coloured, so colour shifts no column. Tables have no boxes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from fp8bench import units
from fp8bench.report.elements import (
    Code,
    Column,
    Element,
    Facts,
    Field,
    Items,
    Page,
    Part,
    Table,
    Text,
    Tone,
    printable,
)

MIN_WIDTH = 40
INDENT = "  "
GAP = "  "
_EXPLAIN = "--explain says how to read this"
# If the first column has less room, the last columns move below their rows.
_LEAST_NAME = 8
_COLORS = {Tone.GOOD: "green", Tone.BAD: "red", Tone.DOUBT: "yellow", Tone.STRONG: "bold"}

Paint = Callable[[str, Tone], str]


def painter(color: bool) -> Paint:
    if not color:
        return lambda text, tone: text
    from rich.color import ColorSystem
    from rich.style import Style

    styles = {tone: Style.parse(name) for tone, name in _COLORS.items()}
    return lambda text, tone: styles[tone].render(text, color_system=ColorSystem.STANDARD) if tone in styles else text


class _Wrapper(textwrap.TextWrapper):
    """Breaks a case's name that is too long for a line after a comma."""

    def _split(self, text: str) -> list[str]:
        room = self.width - len(self.subsequent_indent)
        parts: list[str] = []
        for chunk in super()._split(text):
            parts += re.findall("[^,]*,|[^,]+", chunk) if len(chunk) > room else [chunk]
        return parts


def wrap(text: str, width: int, indent: str = "", hang: str = "") -> list[str]:
    """The text in lines of at most `width`; the first begins with `indent`, the others also with `hang`."""
    clean = printable(text)
    wrapper = _Wrapper(width, initial_indent=indent, subsequent_indent=indent + hang, break_on_hyphens=False)
    return wrapper.wrap(clean) or [indent.rstrip()]


def list_of(name: str, title: str, sentences: Iterable[str]) -> list[Part]:
    texts = tuple(map(Text, sentences))
    return [Part(name, title, (Items(texts),))] if texts else []


def render(page: Page, width: int = 100, color: bool = False, explain: bool = True) -> str:
    width, paint = max(width, MIN_WIDTH), painter(color)
    head = [paint(line, Tone.STRONG) for line in wrap(page.title, width, hang=INDENT)] if page.title else []
    head += wrap(page.subtitle, width, hang=INDENT) if page.subtitle else []
    head += [line for name, what in page.facts for line in wrap(f"{name}: {what}", width, INDENT, INDENT)]
    legend = list_of("legend", "how to read this", page.footer)
    last = [part for part in page.parts if part.name == "summary"]
    hinted = bool(legend) and not explain and not any(part.tight for part in page.parts)
    if not explain:
        legend = [Part("legend", "", (Text(_EXPLAIN),))] if hinted and last else []
    parts = [*(part for part in page.parts if part not in last), *legend, *last]
    paragraphs = [head, *(block for part in parts for block in _part(part, width, paint))]
    text = "\n\n".join("\n".join(lines) for lines in paragraphs if lines) + "\n"
    return f"{text}{_EXPLAIN}\n" if hinted and not last else text


def _part(part: Part, width: int, paint: Paint) -> Iterator[list[str]]:
    block = [paint(line, Tone.STRONG) for line in wrap(part.title, width, hang=INDENT)] if part.title else []
    indent = INDENT if part.title and not part.tight else ""
    block += wrap(part.lead, width, indent, INDENT) if part.lead else []
    for place, element in enumerate(part.elements):
        if isinstance(element, Table):
            if not part.tight and (place or part.lead or element.caption):  # else it stands right under the heading
                yield block
                block = []
            tone = Tone.STRONG if part.tight else Tone.PLAIN
            block += (
                [paint(line, tone) for line in wrap(element.caption, width, hang=INDENT)] if element.caption else []
            )
        block += _lines(element, width, paint, indent)
    yield block


def _lines(element: Element, width: int, paint: Paint, indent: str) -> list[str]:
    match element:
        case Text():
            return [paint(line, element.tone) for line in wrap(element.text, width, indent, INDENT)]
        case Items():
            return [paint(line, item.tone) for item in element.items for line in wrap(item.text, width, INDENT, INDENT)]
        case Facts():
            pairs = [f"{name}: {what}" for name, what in element.pairs]
            if not indent and len(in_one := GAP.join(pairs)) <= width:
                pairs = [in_one]
            return [line for pair in pairs for line in wrap(pair, width, indent, INDENT)]
        case Code():
            # Something to type, continued behind a backslash.
            *begun, last = wrap(element.text, width - 2, INDENT, INDENT)
            return [*(f"{line} \\" for line in begun), last]
        case Table():
            return _table(element, width, paint)
    raise TypeError(f"a terminal draws no {type(element).__name__}: give its numbers as a Table")


def _table(element: Table, width: int, paint: Paint) -> list[str]:
    """Prints what rows share once above them, and a name too long for the first column on its own line.

    If that is not enough, the last columns leave the grid and follow each row as 'title: value'.
    """
    grid = [place for place, column in enumerate(element.columns) if not column.shared and not column.below]
    columns = [replace(element.columns[place], title=printable(element.columns[place].title)) for place in grid]
    rows = [[replace(row[place], text=printable(row[place].text)) for place in grid] for row in element.rows]
    widths = [max([len(column.title), *(len(row[place].text) for row in rows)]) for place, column in enumerate(columns)]
    shown = len(columns)
    while shown > 1 and _room_for_name(widths[:shown], width) < min(widths[0], _LEAST_NAME):
        shown -= 1
    room = _room_for_name(widths[:shown], width)
    widths[0] = max([min(len(columns[0].title), room), *(len(row[0].text) for row in rows if len(row[0].text) <= room)])
    titles = [Field(column.title[:size], tone=Tone.STRONG) for column, size in zip(columns, widths, strict=True)]
    lines = _row(titles[:shown], columns, widths, width, paint)
    shared = [place for place, column in enumerate(element.columns) if column.shared]
    by_words = groupby(
        zip(element.rows, rows, strict=True),
        lambda pair: "  ".join(pair[0][place].text for place in shared if pair[0][place].text),
    )
    for words, alike in by_words:
        lines += wrap(words, width, hang=INDENT) if words else []
        for whole, row in alike:
            lines += _row(row[:shown], columns, widths, width, paint)
            lines += _fold_columns(columns[shown:], row[shown:], width)
            for column, field in zip(element.columns, whole, strict=True):
                texts = field.text.split("\n") if column.below and field.text else []
                lines += [paint(line, field.tone) for text in texts for line in wrap(text, width, INDENT * 3, INDENT)]
    return lines


def _fold_columns(columns: Sequence[Column], fields: Sequence[Field], width: int) -> list[str]:
    pairs = [
        f"{column.title}: {' '.join(field.text.split())}".removeprefix(": ")
        for column, field in zip(columns, fields, strict=True)
        if field.text not in ("", units.NONE)
    ]
    return wrap("; ".join(pairs), width, INDENT * 3, INDENT) if pairs else []


def _room_for_name(widths: Sequence[int], width: int) -> int:
    return width - len(INDENT) - sum(len(GAP) + number for number in widths[1:])


def _row(
    fields: Sequence[Field], columns: Sequence[Column], widths: Sequence[int], width: int, paint: Paint
) -> list[str]:
    name = fields[0].text
    above = wrap(name, width, INDENT, INDENT) if len(name) > widths[0] else []
    first = "" if above else name
    cells = [paint(first, fields[0].tone) + " " * (widths[0] - len(first))]
    for field, column, size in zip(fields[1:], columns[1:], widths[1:], strict=False):
        blanks, text = " " * (size - len(field.text)), paint(field.text, field.tone)
        cells.append(blanks + text if column.number else text + blanks)
    line = (INDENT + GAP.join(cells)).rstrip()
    return [*above, line] if line else above
