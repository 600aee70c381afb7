"""A page as GitHub's Markdown, for pull requests, wikis and issues. Charts are tables of their numbers.

The title and the answer are seen at first; a line opens the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

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
    Table,
    Text,
    Tone,
    printable,
)
from fp8bench.report.page.charts import numbers_table

# Lines before the fold; a block that is cut there is repeated whole behind it.
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
# Signs that are marks wherever they stand; an underscore within a word is none.
_MARKS = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")
# Beginnings of lines that are no paragraphs.
_STARTS = re.compile(r"^(?:=|#+(?=\s|$)|[+-](?=[\s-]|$)|\d+(?=[.)](?:\s|$)))")


def render(page: Page) -> str:
    blocks = [_heading(1, page.title)]
    blocks += [_paragraph(page.subtitle)] if page.subtitle else []
    blocks += [", ".join(f"{_line(name)}: {_line(what)}" for name, what in page.facts)] if page.facts else []
    for part in page.parts:
        blocks += _part(part)
    blocks += ["There is nothing to report."] if not page.parts else []
    blocks += ["---", *(_paragraph(line) for line in page.footer)] if page.footer else []
    if _lines(blocks) > _MOST_LINES:
        seen, rest = _split_at_fold(blocks)
        blocks = [*seen, _REST, *rest, "</details>"]
    return "\n\n".join(blocks) + "\n"


def _lines(blocks: Sequence[str]) -> int:
    return "\n\n".join(blocks).count("\n") + 1


def _split_at_fold(blocks: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The blocks before the fold, and those behind it; of a part after the first all or nothing is before it."""
    number = 1
    while _lines(blocks[: number + 1]) + 2 <= _MOST_LINES:
        number += 1
    parts = [place for place, block in enumerate(blocks[:number]) if block.startswith("## ")]
    if len(parts) > 1 and not blocks[number].startswith("## "):
        number = parts[-1]
    lines, headed = blocks[number].split("\n")[: _MOST_LINES - _lines(blocks[:number]) - 3], number
    cut = ["\n".join(lines)] if len(lines) >= _LEAST_CUT and blocks[number].startswith(("- ", "| ")) else []
    while headed > 1 and blocks[headed - 1].startswith("#"):
        headed -= 1
    return [*blocks[:number], *cut] if cut else blocks[:headed], blocks[headed:]


def _part(part: Part) -> Iterator[str]:
    if part.title:
        yield _heading(2, part.title)
    if part.lead:
        yield _paragraph(part.lead)
    for element in part.elements:
        yield from _element(element)


def _element(element: Element) -> Iterator[str]:
    match element:
        case Text():
            yield _paragraph(element.text, element.tone)
        case Items():
            yield "\n".join(f"- {_paragraph(item.text, item.tone)}" for item in element.items)
        case Facts():
            yield _table((Column("what"), Column("is")), [(Field(name), Field(what)) for name, what in element.pairs])
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


def _chart(chart: AnyChart) -> Iterator[str]:
    numbers = numbers_table(chart)
    yield _heading(3, chart.title)
    yield _paragraph(chart.description)
    yield _table(numbers.columns, numbers.rows[:_MOST_NUMBERS])
    left_out = len(numbers.rows) - _MOST_NUMBERS
    if left_out > 0:
        yield f"{left_out} more rows are left out here."


def _table(columns: Sequence[Column], rows: Sequence[Sequence[Field]]) -> str:
    if not rows:
        return "No rows."
    lines = [_row([_line(column.title) for column in columns])]
    lines += [_row(["---:" if column.number else "---" for column in columns])]
    lines += [_row([_add_sign(_line(field.text), field.tone) for field in row]) for row in rows]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _heading(level: int, text: str) -> str:
    """A number sign at the end would be taken for the heading's own."""
    line = re.sub(r"#$", r"\\#", _line(text))
    return f"{'#' * level} {line}".rstrip()


def _paragraph(text: str, tone: Tone = Tone.PLAIN) -> str:
    line = _line(text)
    # '#' -> '\\#', but '1' -> '1\\', because a list's number is marked by its dot.
    return _add_sign(_STARTS.sub(lambda match: f"{match[0]}\\" if match[0].isdigit() else f"\\{match[0]}", line), tone)


def _add_sign(text: str, tone: Tone) -> str:
    """A sign before it, or bold if it is strong."""
    if not text:
        return text
    return f"**{text}**" if tone is Tone.STRONG else f"{_SIGNS.get(tone, '')}{text}"


def _line(text: str) -> str:
    line = _SPACES.sub(" ", printable(text)).strip()
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKS.sub(lambda match: f"\\{match[0]}", line)
