"""What a page is made of: values that say what is to be seen, and nothing of how.

A section builds elements; a renderer turns them into HTML or Markdown. Every chart carries its numbers, so that each
renderer, and each reader, can have them as a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


def printable(text: str) -> str:
    """A text on one line with a blank for whatever is no letter and no sign.

    Those are control characters and what a terminal obeys, marks that turn the order of letters round, halves of
    surrogate pairs. Names, errors and files are others' words, and only say something.
    """
    return text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)


class Tone(StrEnum):
    """How something is meant; never told by colour alone. DOUBT is grey: labelled, emulated, not to be trusted."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    DOUBT = "doubt"
    STRONG = "strong"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class Items:
    """A list of short texts."""

    items: tuple[Text, ...]


@dataclass(frozen=True)
class Facts:
    """Names and what they are."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Verdicts:
    """The answer at a glance: a row for each precision, and for each question a word; its hint is seen below it."""

    questions: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Field, ...]], ...]


@dataclass(frozen=True)
class Code:
    """Something to type, or a file's content."""

    text: str


@dataclass(frozen=True)
class Column:
    """A column of a table. Numbers stand right, and sort as numbers; `hint` says what the column is.

    `unit` is what the values of its fields are counted in ('s', 'B', 'x'), for who gets them without their texts.
    A terminal says what is `shared` once above the rows that share it, and what stands `below` under its row.
    """

    title: str
    number: bool = False
    hint: str = ""
    unit: str = ""
    shared: bool = False
    below: bool = False


@dataclass(frozen=True)
class Field:
    """One field of a table: what is shown, what it sorts by where that differs, and more words for who asks.

    A page draws a `trend`, oldest first, behind the text, a ratio's `interval` below it, and makes the text a `link` to
    a file beside it.
    """

    text: str
    value: float | None = None
    tone: Tone = Tone.PLAIN
    hint: str = ""
    link: str = ""
    trend: tuple[float, ...] = ()
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Table:
    """Rows under columns. `name` is a word for links and files; one that is `main` can be filtered and sorted.

    A `folded` one is for who asks: only its caption is seen at first.
    """

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Field, ...], ...]
    main: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Mark:
    """One value of a chart with its interval, and the words that show on hovering.

    `flag` is what happened there: a chart of lines writes it beside the mark.
    """

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    tone: Tone = Tone.PLAIN
    hint: str = ""
    flag: str = ""


@dataclass(frozen=True)
class ChartAxis:
    """An axis: what it shows, and the unit of its ticks ('s', 'B', 'J', 'x'; '' for plain numbers)."""

    title: str
    unit: str = ""
    log: bool = False


@dataclass(frozen=True)
class Chart:
    """What all charts have: a name for links and ids, a title, and a description that replaces seeing it.

    A `folded` one is for who asks, as a table is. `order` are series that a page has in several charts: they look
    alike in all of them.
    """

    name: str
    title: str
    description: str
    folded: bool = field(default=False, kw_only=True)
    order: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Bars(Chart):
    """Horizontal bars with intervals, from `start` (1 for ratios), which is no place on a logarithmic axis of
    errors: they are dots; groups have a heading each."""

    axis: ChartAxis
    groups: tuple[tuple[str, tuple[Mark, ...]], ...]
    start: float = 0.0


@dataclass(frozen=True)
class Waterfall(Chart):
    """How one whole becomes another: what each change adds, or takes where it is below zero."""

    axis: ChartAxis
    before: tuple[str, float]
    changes: tuple[Mark, ...]
    after: tuple[str, float]


@dataclass(frozen=True)
class ChartPoint:
    """One point of a scatter chart; without x it stands in a margin of its own. `series` chooses shape and colour.

    Of a series that is joined each `strand` is a line of its own. `low` and `high` are the interval of y.
    """

    series: str
    label: str
    x: float | None
    y: float
    tone: Tone = Tone.PLAIN
    hint: str = ""
    strand: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Scatter(Chart):
    """Points over two axes; `margin` says what those without x have in common, `joined` are series that are lines."""

    x: ChartAxis
    y: ChartAxis
    points: tuple[ChartPoint, ...]
    margin: str = ""
    joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stacks(Chart):
    """Horizontal bars of parts that sum to a whole: `rows` give each part's value in the order of `parts`."""

    axis: ChartAxis
    parts: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]

    @property
    def present(self) -> tuple[int, ...]:
        return tuple(n for n in range(len(self.parts)) if any(values[n] != 0 for _, values in self.rows))


@dataclass(frozen=True)
class Heat(Chart):
    """A figure for rows and columns; None where there is none. Ratios on either side of 1 differ in colour; of others
    more is stronger, each shade as often."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    axis: ChartAxis
    hints: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Lines(Chart):
    """Series over one row of places (runs, commits): a mark for each place or None.

    The axis is that of the places from `settled` on. Where those before it do not fit there, an inset has them.
    `levels` are lines across, with their words, where the axis reaches so far.
    """

    places: tuple[str, ...]
    axis: ChartAxis
    series: tuple[tuple[str, tuple[Mark | None, ...]], ...]
    settled: int = field(default=0, kw_only=True)
    levels: tuple[tuple[float, str], ...] = field(default=(), kw_only=True)


SparkLines = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class Sparks(Chart):
    """A small chart for each row and column, of the same few series over the same places: each line in octaves around
    its own middle, all of them on one scale. `rows` have a cell a column, a line a series, a value a place."""

    places: tuple[str, ...]
    columns: tuple[str, ...]
    series: tuple[str, ...]
    rows: tuple[tuple[str, tuple[SparkLines, ...]], ...]


@dataclass(frozen=True)
class Strips(Chart):
    """All samples of each row, side by side."""

    axis: ChartAxis
    rows: tuple[tuple[str, tuple[float, ...], Tone], ...]


# What a chart can be as a file of its own.
PICTURE_FORMATS = ("png", "svg", "pdf")

AnyChart = Bars | Scatter | Stacks | Heat | Lines | Sparks | Strips | Waterfall
Element = Text | Items | Facts | Code | Table | Verdicts | AnyChart


@dataclass(frozen=True)
class Part:
    """A section as it was built: an anchor, a heading, and its elements. `lead` stands under the heading."""

    name: str
    title: str
    elements: tuple[Element, ...]
    lead: str = ""


@dataclass(frozen=True)
class Page:
    """A whole report. `facts` are the few that stand in one line under the title.

    `kind` is what it is of, `command` what measured that: who lists reports says it. A browser asks every `refresh`
    seconds for one that will be written again.
    """

    title: str
    subtitle: str
    parts: tuple[Part, ...]
    footer: Sequence[str] = ()
    facts: tuple[tuple[str, str], ...] = ()
    kind: str = "run"
    command: str = ""
    refresh: int = 0
