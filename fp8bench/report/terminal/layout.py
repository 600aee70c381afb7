"""Elements as lines of plain text that fit the width: paragraphs, lists, tables, and colour if requested.

Text is laid out before it is coloured, so colour shifts no column. Tables have no boxes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

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
_EXPLAIN = "--explain describes how to read this"
# If the first column has less room, the last columns move below their rows.
_LEAST_NAME = 8
# ANSI codes of green, red, yellow and bold.
_COLORS = {Tone.GOOD: 32, Tone.BAD: 31, Tone.DOUBT: 33, Tone.STRONG: 1}

Paint = Callable[[str, Tone], str]


def painter(color: bool) -> Paint:
    if not color:
        return lambda text, tone: text

    def paint(text: str, tone: Tone) -> str:
        if tone in _COLORS and text:
            return f"\x1b[{_COLORS[tone]}m{text}\x1b[0m"
        return text

    return paint


class _Wrapper(textwrap.TextWrapper):
    """Breaks a long case name after a comma."""

    def _split(self, text: str) -> list[str]:
        room = self.width - len(self.subsequent_indent)
        parts: list[str] = []
        for chunk in super()._split(text):
            parts += re.findall("[^,]*,|[^,]+", chunk) if len(chunk) > room else [chunk]
        return parts


def wrap(text: str, width: int, indent: str = "", hang: str = "") -> list[str]:
    """Returns the text in lines of at most `width`; the first begins with `indent`, the others also with `hang`."""
    # Names and errors are untrusted, and must not control the terminal.
    clean = printable(text)
    wrapper = _Wrapper(width, initial_indent=indent, subsequent_indent=indent + hang, break_on_hyphens=False)
    return wrapper.wrap(clean) or [indent.rstrip()]


def list_of(name: str, title: str, sentences: Iterable[str]) -> list[Part]:
    texts = tuple(map(Text, sentences))
    if texts:
        return [Part(name, title, (Items(texts),))]
    return []


def render(page: Page, width: int = 100, color: bool = False, explain: bool = True) -> str:
    width = max(width, MIN_WIDTH)
    paint = painter(color)
    # 1. The head, in one paragraph.
    head = _paint_lines(page.title, Tone.STRONG, width, paint)
    if page.subtitle:
        head += wrap(page.subtitle, width, hang=INDENT)
    for name, fact in page.facts:
        head += wrap(f"{name}: {fact}", width, INDENT, INDENT)
    # 2. The parts; a summary is last, after the legend or the hint at it: the next step must be the last thing on the
    # screen.
    summary = [part for part in page.parts if part.name == "summary"]
    parts = [part for part in page.parts if part.name != "summary"]
    is_hinted = bool(page.footer) and not explain and not any(part.tight for part in page.parts)
    if explain:
        parts += list_of("legend", "how to read this", page.footer)
    elif is_hinted and summary:
        parts.append(Part("legend", "", (Text(_EXPLAIN),)))
    paragraphs = [head]
    for part in [*parts, *summary]:
        paragraphs += _part(part, width, paint)
    text = "\n\n".join("\n".join(lines) for lines in paragraphs if lines) + "\n"
    if is_hinted and not summary:
        return f"{text}{_EXPLAIN}\n"
    return text


def _paint_lines(text: str, tone: Tone, width: int, paint: Paint, indent: str = "") -> list[str]:
    """Returns the text in lines of that tone; none for ''."""
    if text:
        return [paint(line, tone) for line in wrap(text, width, indent, INDENT)]
    return []


def _part(part: Part, width: int, paint: Paint) -> Iterator[list[str]]:
    block = _paint_lines(part.title, Tone.STRONG, width, paint)
    indent = INDENT if part.title and not part.tight else ""
    if part.lead:
        block += wrap(part.lead, width, indent, INDENT)
    for place, element in enumerate(part.elements):
        if isinstance(element, Table):
            if not part.tight and (place or part.lead or element.caption):  # otherwise directly under the heading
                yield block
                block = []
            block += _paint_lines(element.caption, Tone.STRONG if part.tight else Tone.PLAIN, width, paint)
        block += _lines(element, width, paint, indent)
    yield block


def _lines(element: Element, width: int, paint: Paint, indent: str) -> list[str]:
    lines: list[str] = []
    match element:
        case Text():
            lines += [paint(line, element.tone) for line in wrap(element.text, width, indent, INDENT)]
        case Items():
            for item in element.items:
                lines += [paint(line, item.tone) for line in wrap(item.text, width, INDENT, INDENT)]
        case Facts():
            pairs = [f"{name}: {fact}" for name, fact in element.pairs]
            if not indent and len(GAP.join(pairs)) <= width:
                pairs = [GAP.join(pairs)]
            for pair in pairs:
                lines += wrap(pair, width, indent, INDENT)
        case Code():
            # A command to type, continued with a backslash.
            lines = wrap(element.text, width - 2, INDENT, INDENT)
            lines[:-1] = [f"{line} \\" for line in lines[:-1]]
        case Table():
            lines = _table(element, width, paint)
        case _:
            raise TypeError(f"a terminal draws no {type(element).__name__}: give its numbers as a Table")
    return lines


def _table(element: Table, width: int, paint: Paint) -> list[str]:
    """Formats a table: shared fields once above their rows, and a long name on a separate line.

    If that is not enough, the last columns leave the grid and follow each row as 'title: value'.
    """
    # 1. Choose the columns of the grid, and their widths.
    grid = [place for place, column in enumerate(element.columns) if not column.shared and not column.below]
    columns = [replace(element.columns[place], title=printable(element.columns[place].title)) for place in grid]
    rows = []
    widths = [len(column.title) for column in columns]
    for row in element.rows:
        fields = [replace(row[place], text=printable(row[place].text)) for place in grid]
        widths = [max(size, len(field.text)) for size, field in zip(widths, fields, strict=True)]
        rows.append(fields)
    num_shown = len(columns)
    while num_shown > 1 and _room_for_name(widths[:num_shown], width) < min(widths[0], _LEAST_NAME):
        num_shown -= 1
    room = _room_for_name(widths[:num_shown], width)
    names = [len(fields[0].text) for fields in rows]
    widths[0] = max([min(len(columns[0].title), room), *(size for size in names if size <= room)])
    # 2. Print the titles, then each row under the fields that it shares with its neighbours.
    titles = [Field(column.title[:size], tone=Tone.STRONG) for column, size in zip(columns, widths, strict=True)]
    lines = _row(titles[:num_shown], columns, widths, width, paint)
    shared_words = ""
    for row, fields in zip(element.rows, rows, strict=True):
        words = _join_shared(element.columns, row)
        if words and words != shared_words:
            lines += wrap(words, width, hang=INDENT)
        shared_words = words
        lines += _row(fields[:num_shown], columns, widths, width, paint)
        lines += _fold_columns(columns[num_shown:], fields[num_shown:], width)
        for column, field in zip(element.columns, row, strict=True):
            if column.below and field.text:
                for text in field.text.split("\n"):
                    lines += [paint(line, field.tone) for line in wrap(text, width, INDENT * 3, INDENT)]
    return lines


def _join_shared(columns: Sequence[Column], row: Sequence[Field]) -> str:
    texts = [field.text for column, field in zip(columns, row, strict=True) if column.shared]
    return "  ".join(filter(None, texts))


def _fold_columns(columns: Sequence[Column], fields: Sequence[Field], width: int) -> list[str]:
    pairs = []
    for column, field in zip(columns, fields, strict=True):
        if field.text not in ("", units.NONE):
            text = " ".join(field.text.split())
            pairs.append(f"{column.title}: {text}".removeprefix(": "))
    if pairs:
        return wrap("; ".join(pairs), width, INDENT * 3, INDENT)
    return []


def _room_for_name(widths: Sequence[int], width: int) -> int:
    return width - len(INDENT) - sum(len(GAP) + number for number in widths[1:])


def _row(
    fields: Sequence[Field], columns: Sequence[Column], widths: Sequence[int], width: int, paint: Paint
) -> list[str]:
    name = fields[0].text
    lines: list[str] = []
    # A long name gets a separate line, so that one row does not widen the column for all.
    if len(name) > widths[0]:
        lines += wrap(name, width, INDENT, INDENT)
        name = ""
    cells = [paint(name, fields[0].tone) + " " * (widths[0] - len(name))]
    for field, column, size in zip(fields[1:], columns[1:], widths[1:], strict=False):
        blanks = " " * (size - len(field.text))
        text = paint(field.text, field.tone)
        cells.append(blanks + text if column.number else text + blanks)
    line = (INDENT + GAP.join(cells)).rstrip()
    if line:
        return [*lines, line]
    return lines
