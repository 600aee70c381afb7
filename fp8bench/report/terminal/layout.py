"""Renders elements as plain text that fits a width: paragraphs, lists and tables without boxes, in colour on request.

Text is laid out before it is coloured, so that colour codes do not shift columns.
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
    Field,
    NameValuePairs,
    Page,
    Part,
    Table,
    Text,
    TextList,
    Tone,
    printable,
)

MIN_TERMINAL_WIDTH = 40
INDENT = "  "
GAP = "  "
_EXPLAIN_HINT = "--explain describes how to read this"
# The last columns of a table are printed below their rows if the first column would otherwise be narrower than this.
_MIN_NAME_WIDTH = 8
# The ANSI codes of green, red, yellow and bold.
_ANSI_COLORS = {Tone.GOOD: 32, Tone.BAD: 31, Tone.DOUBT: 33, Tone.STRONG: 1}

PaintText = Callable[[str, Tone], str]


def make_text_painter(color: bool) -> PaintText:
    if not color:
        return lambda text, tone: text

    def paint(text: str, tone: Tone) -> str:
        if tone in _ANSI_COLORS and text:
            return f"\x1b[{_ANSI_COLORS[tone]}m{text}\x1b[0m"
        return text

    return paint


class _TextWrapper(textwrap.TextWrapper):
    """Wraps text like textwrap, but may also break a long case name after a comma."""

    def _split(self, text: str) -> list[str]:
        line_width = self.width - len(self.subsequent_indent)
        parts: list[str] = []
        for chunk in super()._split(text):
            parts += re.findall("[^,]*,|[^,]+", chunk) if len(chunk) > line_width else [chunk]
        return parts


def wrap(text: str, width: int, indent: str = "", hang: str = "") -> list[str]:
    """Wraps a text into lines of at most `width` characters.

    All lines begin with `indent`. All lines but the first also begin with `hang`.
    """
    # Names and error texts are untrusted, and must not control the terminal.
    printable_text = printable(text)
    # Breaking on hyphens would split options such as --dry-run.
    text_wrapper = _TextWrapper(width, initial_indent=indent, subsequent_indent=indent + hang, break_on_hyphens=False)
    return text_wrapper.wrap(printable_text) or [indent.rstrip()]


def make_list_part(name: str, title: str, sentences: Iterable[str]) -> list[Part]:
    texts = tuple(map(Text, sentences))
    return [Part(name, title, (TextList(texts),))] if texts else []


def render(page: Page, width: int = 100, color: bool = False, explain: bool = True) -> str:
    width = max(width, MIN_TERMINAL_WIDTH)
    paint_text = make_text_painter(color)
    # 1. Print title, subtitle and facts as one paragraph.
    header_lines = _wrap_colored_text(page.title, Tone.STRONG, width, paint_text)
    if page.subtitle:
        header_lines += wrap(page.subtitle, width, hang=INDENT)
    for name, fact in page.facts:
        header_lines += wrap(f"{name}: {fact}", width, INDENT, INDENT)
    # 2. Print the parts. The summary comes last, after the legend, so that what to do next is the last line on the
    # screen.
    summary_parts = [part for part in page.parts if part.name == "summary"]
    parts = [part for part in page.parts if part.name != "summary"]
    shows_explain_hint = bool(page.footer) and not explain and not any(part.tight for part in page.parts)
    if explain:
        parts += make_list_part("legend", "how to read this", page.footer)
    elif shows_explain_hint and summary_parts:
        parts.append(Part("legend", "", (Text(_EXPLAIN_HINT),)))
    blocks = [header_lines]
    for part in [*parts, *summary_parts]:
        blocks += _render_part_blocks(part, width, paint_text)
    text = "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"
    return f"{text}{_EXPLAIN_HINT}\n" if shows_explain_hint and not summary_parts else text


def _wrap_colored_text(text: str, tone: Tone, width: int, paint: PaintText, indent: str = "") -> list[str]:
    """Wraps a text and colours each line in the tone. An empty text gives no lines."""
    return [paint(line, tone) for line in wrap(text, width, indent, INDENT)] if text else []


def _render_part_blocks(part: Part, width: int, paint: PaintText) -> Iterator[list[str]]:
    block = _wrap_colored_text(part.title, Tone.STRONG, width, paint)
    indent = INDENT if part.title and not part.tight else ""
    if part.lead:
        block += wrap(part.lead, width, indent, INDENT)
    for index, element in enumerate(part.elements):
        if isinstance(element, Table):
            # A blank line precedes a table, unless the part is tight, or the table has no caption and directly
            # follows the heading.
            if not part.tight and (index or part.lead or element.caption):
                yield block
                block = []
            block += _wrap_colored_text(element.caption, Tone.STRONG if part.tight else Tone.PLAIN, width, paint)
        block += _element_lines(element, width, paint, indent)
    yield block


def _element_lines(element: Element, width: int, paint: PaintText, indent: str) -> list[str]:
    lines: list[str] = []
    match element:
        case Text():
            lines = _wrap_colored_text(element.text, element.tone, width, paint, indent)
        case TextList():
            for item in element.items:
                lines += _wrap_colored_text(item.text, item.tone, width, paint, INDENT)
        case NameValuePairs():
            fact_texts = [f"{name}: {fact}" for name, fact in element.pairs]
            if not indent and len(GAP.join(fact_texts)) <= width:
                fact_texts = [GAP.join(fact_texts)]
            for pair in fact_texts:
                lines += wrap(pair, width, indent, INDENT)
        case Code():
            # Continue a long command with a backslash, so that it can be pasted.
            lines = wrap(element.text, width - 2, INDENT, INDENT)
            lines[:-1] = [f"{line} \\" for line in lines[:-1]]
        case Table():
            lines = _table_lines(element, width, paint)
        case _:
            raise TypeError(f"a terminal draws no {type(element).__name__}: give its numbers as a Table")
    return lines


def _table_lines(element: Table, width: int, paint: PaintText) -> list[str]:
    """Formats a table. If neighbouring rows have the same text in a shared column, this text is printed once, above
    these rows.

    If a table is too wide even without shared columns, its last columns are printed below each row as 'title: value'.
    """
    # 1. Choose the columns that are printed side by side, and their widths.
    side_by_side_columns = [
        index for index, column in enumerate(element.columns) if not column.shared and not column.below
    ]
    columns = [
        replace(element.columns[index], title=printable(element.columns[index].title)) for index in side_by_side_columns
    ]
    rows = []
    column_widths = [len(column.title) for column in columns]
    for row in element.rows:
        fields = [replace(row[index], text=printable(row[index].text)) for index in side_by_side_columns]
        column_widths = [
            max(column_width, len(field.text)) for column_width, field in zip(column_widths, fields, strict=True)
        ]
        rows.append(fields)
    num_grid_columns = len(columns)
    # While the first column is too narrow, take the last column out of the grid. Its fields are printed below each row.
    while num_grid_columns > 1 and _name_column_width(column_widths[:num_grid_columns], width) < min(
        column_widths[0], _MIN_NAME_WIDTH
    ):
        num_grid_columns -= 1
    name_column_width = _name_column_width(column_widths[:num_grid_columns], width)
    row_name_lengths = [len(fields[0].text) for fields in rows]
    column_widths[0] = max(
        [
            min(len(columns[0].title), name_column_width),
            *(column_width for column_width in row_name_lengths if column_width <= name_column_width),
        ]
    )
    # 2. Print the titles of the columns, then the rows. Fields that neighbouring rows share are above these rows.
    column_titles = [
        Field(column.title[:column_width], tone=Tone.STRONG)
        for column, column_width in zip(columns, column_widths, strict=True)
    ]
    lines = _row_lines(column_titles[:num_grid_columns], columns, column_widths, width, paint)
    previous_shared_text = ""
    for row, fields in zip(element.rows, rows, strict=True):
        shared_fields_text = _join_shared_fields(element.columns, row)
        if shared_fields_text and shared_fields_text != previous_shared_text:
            lines += wrap(shared_fields_text, width, hang=INDENT)
        previous_shared_text = shared_fields_text
        lines += _row_lines(fields[:num_grid_columns], columns, column_widths, width, paint)
        lines += _wrap_folded_fields(columns[num_grid_columns:], fields[num_grid_columns:], width)
        for column, field in zip(element.columns, row, strict=True):
            if column.below and field.text:
                for text in field.text.split("\n"):
                    lines += _wrap_colored_text(text, field.tone, width, paint, INDENT * 3)
    return lines


def _join_shared_fields(columns: Sequence[Column], row: Sequence[Field]) -> str:
    texts = [field.text for column, field in zip(columns, row, strict=True) if column.shared]
    return "  ".join(filter(None, texts))


def _wrap_folded_fields(columns: Sequence[Column], fields: Sequence[Field], width: int) -> list[str]:
    folded_field_texts = []
    for column, field in zip(columns, fields, strict=True):
        if field.text not in ("", units.NONE):
            text = " ".join(field.text.split())
            folded_field_texts.append(f"{column.title}: {text}".removeprefix(": "))
    return wrap("; ".join(folded_field_texts), width, INDENT * 3, INDENT) if folded_field_texts else []


def _name_column_width(widths: Sequence[int], width: int) -> int:
    return width - len(INDENT) - sum(len(GAP) + column_width for column_width in widths[1:])


def _row_lines(
    fields: Sequence[Field], columns: Sequence[Column], widths: Sequence[int], width: int, paint: PaintText
) -> list[str]:
    name = fields[0].text
    lines: list[str] = []
    # Print a long name on a separate line, so that one row does not widen the column for all rows.
    if len(name) > widths[0]:
        lines += wrap(name, width, INDENT, INDENT)
        name = ""
    cell_texts = [paint(name, fields[0].tone) + " " * (widths[0] - len(name))]
    for field, column, column_width in zip(fields[1:], columns[1:], widths[1:], strict=False):
        padding = " " * (column_width - len(field.text))
        text = paint(field.text, field.tone)
        cell_texts.append(padding + text if column.number else text + padding)
    line = (INDENT + GAP.join(cell_texts)).rstrip()
    return [*lines, line] if line else lines
