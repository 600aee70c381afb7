"""Lines of plain text that never run over: wrapping, tables, and colour for those who want it.

Text is laid out first and coloured after, so colour changes no column. Tables have no boxes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fp8bench import units

MIN_WIDTH = 40
INDENT = "  "
GAP = "  "
# A first cell that finds less room than this has cells at the end of its row moved below it instead.
_LEAST_NAME = 8


class Tone(StrEnum):
    """What colour says; never the only way it is said."""

    GOOD = "green"
    BAD = "red"
    DOUBT = "yellow"
    QUIET = "dim"
    STRONG = "bold"


Paint = Callable[[str, Tone], str]


def painter(color: bool) -> Paint:
    """A function that colours a text, or leaves it as it is."""
    if not color:
        return lambda text, tone: text
    from rich.color import ColorSystem
    from rich.style import Style

    styles = {tone: Style.parse(tone.value) for tone in Tone}
    return lambda text, tone: styles[tone].render(text, color_system=ColorSystem.STANDARD)


def wrap(text: str, width: int, indent: str = "", hang: str = "") -> list[str]:
    """`text` in lines of at most `width`; the first begins with `indent`, the others with `hang` after it.

    Control characters (a traceback's colours, say) become blanks.
    """
    clean = "".join(letter if letter.isprintable() else " " for letter in text)
    return textwrap.wrap(
        clean, width, initial_indent=indent, subsequent_indent=indent + hang, break_on_hyphens=False
    ) or [indent.rstrip()]


@dataclass(frozen=True)
class Column:
    """A column of a table. Numbers stand at the right, words at the left."""

    title: str
    right: bool = False

    def align(self, text: str, width: int, shown: str) -> str:
        """`shown` (the text, perhaps with colour, which takes no room) filled up to `width`."""
        blanks = " " * (width - len(text))
        return blanks + shown if self.right else shown + blanks


@dataclass(frozen=True)
class Row:
    """A row of a table; `tones` colours cells by column title, `below` is text for lines of its own under it."""

    cells: tuple[str, ...]
    tones: Mapping[str, Tone] = field(default_factory=dict)
    below: tuple[str, ...] = ()


@dataclass(frozen=True)
class SectionRow:
    """A line of text between rows, saying what the rows under it share."""

    text: str


def table(columns: Sequence[Column], rows: Sequence[Row | SectionRow], width: int, paint: Paint) -> list[str]:
    """Lines of a table no wider than `width`.

    A name too long for the first column gets a line of its own. Where that is not enough, the last columns leave the
    grid and follow each row as 'title: value'.
    """
    plain = [row for row in rows if isinstance(row, Row)]
    widths = [
        max([len(column.title), *(len(row.cells[index]) for row in plain)]) for index, column in enumerate(columns)
    ]
    shown = len(columns)
    while shown > 1 and _room_for_name(widths[:shown], width) < min(widths[0], _LEAST_NAME):
        shown -= 1
    room = _room_for_name(widths[:shown], width)
    fitting = [len(row.cells[0]) for row in plain if len(row.cells[0]) <= room]
    widths[0] = max([min(len(columns[0].title), room), *fitting])
    titles = Row(tuple(column.title[:one] for column, one in zip(columns, widths, strict=True)))
    lines = [paint(line, Tone.STRONG) for line in _row_lines(titles, columns[:shown], widths, width, _no_paint)]
    for row in rows:
        if isinstance(row, SectionRow):
            lines += wrap(row.text, width, hang=INDENT)
            continue
        lines += _row_lines(row, columns[:shown], widths, width, paint)
        lines += _folded(columns[shown:], row.cells[shown:], width)
        lines += [paint(line, Tone.DOUBT) for text in row.below for line in wrap(text, width, INDENT * 3, INDENT)]
    return lines


def _folded(columns: Sequence[Column], cells: Sequence[str], width: int) -> list[str]:
    """What found no room in the grid, without the empty cells."""
    pairs = [
        f"{' '.join(column.title.split())}: {' '.join(cell.split())}"
        for column, cell in zip(columns, cells, strict=True)
        if cell != units.NONE
    ]
    return wrap("; ".join(pairs), width, INDENT * 3, INDENT) if pairs else []


def _no_paint(text: str, tone: Tone) -> str:
    return text


def _room_for_name(widths: Sequence[int], width: int) -> int:
    """How wide the first column may be when the others are as wide as they need."""
    return width - len(INDENT) - sum(len(GAP) + one for one in widths[1:])


def _row_lines(row: Row, columns: Sequence[Column], widths: Sequence[int], width: int, paint: Paint) -> list[str]:
    name, *others = row.cells[: len(columns)]
    above = wrap(name, width, INDENT, INDENT) if len(name) > widths[0] else []
    cells = [("" if above else name).ljust(widths[0])]
    for cell, column, one in zip(others, columns[1:], widths[1 : len(columns)], strict=True):
        tone = row.tones.get(column.title)
        cells.append(column.align(cell, one, cell if tone is None else paint(cell, tone)))
    line = (INDENT + GAP.join(cells)).rstrip()
    return [*above, line] if line else above
