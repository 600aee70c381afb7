"""A page as GitHub's Markdown, for pull requests, wikis and issues. Charts are tables of their numbers.

Initially the title and the answer are visible; a line unfolds the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fp8bench.report.elements import (
    AnyChart,
    Code,
    Column,
    Element,
    Facts,
    Field,
    Items,
    Page,
    Part,
    Sentences,
    Table,
    Text,
    Tone,
    printable,
)
from fp8bench.report.page.charts import numbers_table

# Lines before the fold; a block that is cut there is repeated in full after it.
_MOST_LINES = 25
_LEAST_CUT = 5
_REST = "<details><summary>The rest of the report</summary>"
# The most rows of a chart's numbers.
_MOST_NUMBERS = 25
_SIGNS = {
    Tone.GOOD: "\N{BLACK UP-POINTING TRIANGLE} ",
    Tone.BAD: "\N{BLACK DOWN-POINTING TRIANGLE} ",
    Tone.DOUBT: "\N{WHITE CIRCLE} ",
}
_SPACES = re.compile(r"\s+")
# Characters that are markup anywhere; an underscore within a word is not.
_MARKS = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")
# Beginnings of lines that are not paragraphs.
_STARTS = re.compile(r"^(?:=|#+(?=\s|$)|[+-](?=[\s-]|$)|\d+(?=[.)](?:\s|$)))")


def render(page: Page) -> str:
    blocks = [_heading(1, page.title)]
    if page.subtitle:
        blocks.append(_paragraph(page.subtitle))
    if page.facts:
        blocks.append(", ".join(f"{_line(name)}: {_line(fact)}" for name, fact in page.facts))
    for part in page.parts:
        blocks += _part(part)
    if not page.parts:
        blocks.append("There is nothing to report.")
    if page.footer:
        blocks += ["---", *map(_paragraph, page.footer)]
    if _lines(blocks) > _MOST_LINES:
        visible, hidden = _split_at_fold(blocks)
        blocks = [*visible, _REST, *hidden, "</details>"]
    return "\n\n".join(blocks) + "\n"


def _lines(blocks: Sequence[str]) -> int:
    return "\n\n".join(blocks).count("\n") + 1


def _split_at_fold(blocks: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the blocks before and after the fold; a part after the first is not split."""
    # 1. Take as many blocks as fit.
    number = 1
    while _lines(blocks[: number + 1]) + 2 <= _MOST_LINES:
        number += 1
    parts = [place for place, block in enumerate(blocks[:number]) if block.startswith("## ")]
    if len(parts) > 1 and not blocks[number].startswith("## "):
        number = parts[-1]
    # 2. The block at the fold goes after it with its headings; some of its lines are also shown before it.
    beginning = number
    while beginning > 1 and blocks[beginning - 1].startswith("#"):
        beginning -= 1
    lines = blocks[number].split("\n")[: _MOST_LINES - _lines(blocks[:number]) - 3]
    if len(lines) >= _LEAST_CUT and blocks[number].startswith(("- ", "| ")):
        return [*blocks[:number], "\n".join(lines)], blocks[beginning:]
    return blocks[:beginning], blocks[beginning:]


def _part(part: Part) -> Sentences:
    if part.title:
        yield _heading(2, part.title)
    if part.lead:
        yield _paragraph(part.lead)
    for element in part.elements:
        yield from _element(element)


def _element(element: Element) -> Sentences:
    match element:
        case Text():
            yield _paragraph(element.text, element.tone)
        case Items():
            yield "\n".join(f"- {_paragraph(item.text, item.tone)}" for item in element.items)
        case Facts():
            yield _table((Column("what"), Column("is")), [(Field(name), Field(fact)) for name, fact in element.pairs])
        case Code():
            # The fence is longer than any run of backticks in the text.
            fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", element.text)), 3)
            lines = ("\t".join(map(printable, line.split("\t"))) for line in element.text.rstrip("\n").split("\n"))
            yield "\n".join([fence, *lines, fence])
        case Table():
            if element.caption:
                yield _heading(3, element.caption)
            yield _table(element.columns, element.rows)
        case _:
            yield from _chart(element)


def _chart(chart: AnyChart) -> Sentences:
    # GitHub shows no inline SVG, so a chart is the table of its numbers.
    numbers = numbers_table(chart)
    yield _heading(3, chart.title)
    yield _paragraph(chart.description)
    yield _table(numbers.columns, numbers.rows[:_MOST_NUMBERS])
    num_hidden = len(numbers.rows) - _MOST_NUMBERS
    if num_hidden > 0:
        yield f"{num_hidden} more rows are left out here."


def _table(columns: Sequence[Column], rows: Sequence[Sequence[Field]]) -> str:
    # A table without rows would be parsed as text.
    if not rows:
        return "No rows."
    lines = [_row([_line(column.title) for column in columns])]
    lines += [_row(["---:" if column.number else "---" for column in columns])]
    lines += [_row([_add_sign(_line(field.text), field.tone) for field in row]) for row in rows]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _heading(level: int, text: str) -> str:
    """A trailing number sign would be parsed as part of the heading's markup."""
    line = re.sub(r"#$", r"\\#", _line(text))
    return f"{'#' * level} {line}".rstrip()


def _paragraph(text: str, tone: Tone = Tone.PLAIN) -> str:
    line = _line(text)
    if start := _STARTS.match(line):
        # '#' -> '\\#', but '1' -> '1\\', because the dot marks a list's number.
        end = start.end()
        line = f"{line[:end]}\\{line[end:]}" if line[0].isdigit() else f"\\{line}"
    return _add_sign(line, tone)


def _add_sign(text: str, tone: Tone) -> str:
    """Prepends a sign, or makes the text bold if it is strong."""
    if not text:
        return text
    if tone is Tone.STRONG:
        return f"**{text}**"
    return f"{_SIGNS.get(tone, '')}{text}"


def _line(text: str) -> str:
    # A line break would end the table's row, the item or the heading.
    line = _SPACES.sub(" ", printable(text)).strip()
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKS.sub(lambda match: f"\\{match[0]}", line)
