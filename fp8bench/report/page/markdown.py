"""Renders a page as GitHub's Markdown, for pull requests, wikis and issues. Charts become tables of their numbers.

At first, only the title and the answer are visible. A click unfolds the remaining report.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fp8bench.report.elements import (
    AnyChart,
    Code,
    Column,
    Element,
    Field,
    NameValuePairs,
    Page,
    Part,
    Sentences,
    Table,
    Text,
    TextList,
    Tone,
    printable,
)
from fp8bench.report.page.charts import numbers_table

# At most this many lines are visible before a reader unfolds the page. A list or table that does not fit continues in
# the folded part.
_MAX_LINES_ABOVE_FOLD = 25
_MIN_LINES_OF_CUT_BLOCK = 5
_DETAILS_START_HTML = "<details><summary>The rest of the report</summary>"
# The table of a chart's numbers has at most this many rows.
_MAX_CHART_ROWS = 25
_SIGN_BY_TONE = {
    Tone.GOOD: "\N{BLACK UP-POINTING TRIANGLE} ",
    Tone.BAD: "\N{BLACK DOWN-POINTING TRIANGLE} ",
    Tone.DOUBT: "\N{WHITE CIRCLE} ",
}
_SPACES_PATTERN = re.compile(r"\s+")
# Characters that are Markdown markup anywhere. An underscore within a word is plain text.
_MARKUP_PATTERN = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")
# Characters that are markup at the beginning of a line: headings, list items and underlines.
_LINE_START_MARKUP_PATTERN = re.compile(r"^(?:=|#+(?=\s|$)|[+-](?=[\s-]|$)|\d+(?=[.)](?:\s|$)))")


def render(page: Page) -> str:
    blocks = [_heading_markdown(1, page.title)]
    if page.subtitle:
        blocks.append(_paragraph_markdown(page.subtitle))
    if page.facts:
        blocks.append(", ".join(f"{_escape_line(name)}: {_escape_line(fact)}" for name, fact in page.facts))
    for part in page.parts:
        blocks += _render_part_blocks(part)
    if not page.parts:
        blocks.append("There is nothing to report.")
    if page.footer:
        blocks += ["---", *map(_paragraph_markdown, page.footer)]
    if _count_lines(blocks) > _MAX_LINES_ABOVE_FOLD:
        visible_blocks, hidden_blocks = _split_blocks_at_fold(blocks)
        blocks = [*visible_blocks, _DETAILS_START_HTML, *hidden_blocks, "</details>"]
    return "\n\n".join(blocks) + "\n"


def _count_lines(blocks: Sequence[str]) -> int:
    return "\n\n".join(blocks).count("\n") + 1


def _split_blocks_at_fold(blocks: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Splits the blocks of a page into visible blocks and blocks that a click unfolds. The split may be within the
    first part of the page, but not within a later part.
    """
    # 1. Make as many blocks visible as fit.
    num_visible_blocks = 1
    while _count_lines(blocks[: num_visible_blocks + 1]) + 2 <= _MAX_LINES_ABOVE_FOLD:
        num_visible_blocks += 1
    part_heading_indices = [index for index, block in enumerate(blocks[:num_visible_blocks]) if block.startswith("## ")]
    if len(part_heading_indices) > 1 and not blocks[num_visible_blocks].startswith("## "):
        # Only part of the last section fits, so fold this section from its heading on.
        num_visible_blocks = part_heading_indices[-1]
    # 2. Split a list or table that does not fit, and repeat the table's header. Fold any other block together with its
    # headings.
    block = blocks[num_visible_blocks]
    num_visible_block_lines = _MAX_LINES_ABOVE_FOLD - _count_lines(blocks[:num_visible_blocks]) - 3
    if num_visible_block_lines >= _MIN_LINES_OF_CUT_BLOCK and block.startswith(("- ", "| ")):
        lines = block.split("\n")
        header = lines[:2] if block.startswith("| ") else []
        text_below_fold = "\n".join([*header, *lines[num_visible_block_lines:]])
        return [*blocks[:num_visible_blocks], "\n".join(lines[:num_visible_block_lines])], [
            text_below_fold,
            *blocks[num_visible_blocks + 1 :],
        ]
    first_hidden_block_index = num_visible_blocks
    while first_hidden_block_index > 1 and blocks[first_hidden_block_index - 1].startswith("#"):
        first_hidden_block_index -= 1
    return blocks[:first_hidden_block_index], blocks[first_hidden_block_index:]


def _render_part_blocks(part: Part) -> Sentences:
    if part.title:
        yield _heading_markdown(2, part.title)
    if part.lead:
        yield _paragraph_markdown(part.lead)
    for element in part.elements:
        yield from _make_markdown_blocks(element)


def _make_markdown_blocks(element: Element) -> Sentences:
    match element:
        case Text():
            yield _paragraph_markdown(element.text, element.tone)
        case TextList():
            yield "\n".join(f"- {_paragraph_markdown(item.text, item.tone)}" for item in element.items)
        case NameValuePairs():
            yield _render_markdown_table(
                (Column("what"), Column("is")), [(Field(name), Field(fact)) for name, fact in element.pairs]
            )
        case Code():
            # In Markdown, the marks around a code block must be longer than any run of backticks in the code.
            code_fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", element.text)), 3)
            lines = ("\t".join(map(printable, line.split("\t"))) for line in element.text.rstrip("\n").split("\n"))
            yield "\n".join([code_fence, *lines, code_fence])
        case Table():
            if element.caption:
                yield _heading_markdown(3, element.caption)
            yield _render_markdown_table(element.columns, element.rows)
        case _:
            yield from _chart_blocks(element)


def _chart_blocks(chart: AnyChart) -> Sentences:
    # GitHub shows no inline SVG, so print the numbers of the chart as a table.
    chart_numbers_table = numbers_table(chart)
    yield _heading_markdown(3, chart.title)
    yield _paragraph_markdown(chart.description)
    yield _render_markdown_table(chart_numbers_table.columns, chart_numbers_table.rows[:_MAX_CHART_ROWS])
    num_hidden_rows = len(chart_numbers_table.rows) - _MAX_CHART_ROWS
    if num_hidden_rows > 0:
        yield f"{num_hidden_rows} more rows are left out here."


def _render_markdown_table(columns: Sequence[Column], rows: Sequence[Sequence[Field]]) -> str:
    # Markdown parses a table without rows as text.
    if not rows:
        return "No rows."
    lines = [_row_markdown([_escape_line(column.title) for column in columns])]
    lines += [_row_markdown(["---:" if column.number else "---" for column in columns])]
    lines += [_row_markdown([_add_tone_symbol(_escape_line(field.text), field.tone) for field in row]) for row in rows]
    return "\n".join(lines)


def _row_markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _heading_markdown(level: int, text: str) -> str:
    """Formats a heading. A number sign at its end is escaped, because Markdown would drop it."""
    line = re.sub(r"#$", r"\\#", _escape_line(text))
    return f"{'#' * level} {line}".rstrip()


def _paragraph_markdown(text: str, tone: Tone = Tone.PLAIN) -> str:
    line = _escape_line(text)
    if markup := _LINE_START_MARKUP_PATTERN.match(line):
        # Escape '#' as '\#', but '1.' as '1\.', because the dot makes it a list item.
        markup_end_index = markup.end()
        line = f"{line[:markup_end_index]}\\{line[markup_end_index:]}" if line[0].isdigit() else f"\\{line}"
    return _add_tone_symbol(line, tone)


def _add_tone_symbol(text: str, tone: Tone) -> str:
    """Puts the sign of a tone, such as a triangle for GOOD, before a text. Makes a text with the tone STRONG bold."""
    if not text:
        return text
    if tone is Tone.STRONG:
        return f"**{text}**"
    return f"{_SIGN_BY_TONE.get(tone, '')}{text}"


def _escape_line(text: str) -> str:
    # A line break would end the table row, list item or heading.
    line = _SPACES_PATTERN.sub(" ", printable(text)).strip()
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP_PATTERN.sub(lambda match: f"\\{match[0]}", line)
