"""The elements of a page. They are its content without a layout.

A section builds elements, and a renderer turns them into HTML, Markdown or text. Every chart carries its numbers, so
that renderers can also show them as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


def printable(text: str) -> str:
    """Returns the text on one line, with a blank in place of each unprintable character.

    Names, errors and files are untrusted. Their control characters must not reach a terminal, and neither must marks
    that reverse the order of letters.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " for letter in text)


class Tone(StrEnum):
    """The meaning of an element, such as good or bad. Colour alone never expresses it. DOUBT is for results that are
    labelled or emulated.
    """

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
class TextList:
    """A list of short texts."""

    items: tuple[Text, ...]


@dataclass(frozen=True)
class NameValuePairs:
    """Pairs of a name and a value."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Code:
    """A command to type, or the content of a file."""

    text: str


@dataclass(frozen=True)
class Column:
    """A column of a table. A column of numbers is right-aligned and sorts by value. `hint` describes the column.

    `unit` ('s', 'B', 'x') is the unit of the fields' values. A terminal prints the text of a `shared` column once,
    above the rows that have the same text. It prints the text of a `below` column under its row.
    """

    title: str
    number: bool = False
    hint: str = ""
    unit: str = ""
    shared: bool = False
    below: bool = False


@dataclass(frozen=True)
class Field:
    """A field of a table: its text, and the value to sort by if that is not the text.

    If there is a `link`, the text is a link to a file in the same folder.
    """

    text: str
    value: float | None = None
    tone: Tone = Tone.PLAIN
    link: str = ""


@dataclass(frozen=True)
class Table:
    """Columns and rows. `name` is used in links and file names. Readers can filter and sort a `main` table.

    A `folded` table shows only its caption until a reader opens it.
    """

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Field, ...], ...]
    main: bool = False
    folded: bool = False


@dataclass(frozen=True)
class ChartMark:
    """One value of a chart, with its interval and a hint that is shown on hovering.

    `flag` is the name of an event, which a line chart writes next to the mark. Below a bar, a bar chart draws a
    stroke for each of the `samples`.
    """

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    tone: Tone = Tone.PLAIN
    hint: str = ""
    flag: str = ""
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class ChartAxis:
    """The title of an axis, and the unit of its ticks ('s', 'B', 'J', 'x', or '' for plain numbers).

    `show` formats a value if the unit alone does not determine the format.
    """

    title: str
    unit: str = ""
    show: Callable[[float], str] | None = None


@dataclass(frozen=True)
class Chart:
    """The fields that all charts share: a name for links and ids, a title, and a description.

    Screen readers read the description.
    """

    name: str
    title: str
    description: str
    folded: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Bars(Chart):
    """Horizontal bars of ratios with intervals, in groups with headings. Bars begin at 1 on a logarithmic axis."""

    axis: ChartAxis
    groups: tuple[tuple[str, tuple[ChartMark, ...]], ...]


@dataclass(frozen=True)
class ChartPoint:
    """A point of a scatter chart, whose `series` determines shape and colour. A point without x is drawn in the
    margin.

    `x_low` and `x_high` are the bounds of the interval of x.
    """

    series: str
    label: str
    x: float | None
    y: float
    tone: Tone = Tone.PLAIN
    hint: str = ""
    x_low: float | None = None
    x_high: float | None = None


@dataclass(frozen=True)
class Scatter(Chart):
    """Points over a linear x axis and a logarithmic y axis. Points without x are drawn in a margin, which has the
    title `margin`.
    """

    x: ChartAxis
    y: ChartAxis
    points: tuple[ChartPoint, ...]
    margin: str = ""


@dataclass(frozen=True)
class Stacks(Chart):
    """Horizontal bars, each of which is divided into parts. A row has the value of each part, in the order of
    `parts`.

    In a timeline, each row also has `pieces` in the order of time: the index of a part, and the length of the piece.
    A part may occur more than once.
    """

    axis: ChartAxis
    parts: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    pieces: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def nonzero_part_indices(self) -> tuple[int, ...]:
        """The indices of the parts that are not 0 in some row."""
        return tuple(part for part in range(len(self.parts)) if any(values[part] for _, values in self.rows))


@dataclass(frozen=True)
class Lines(Chart):
    """A line chart of several series over the same x positions, such as runs or commits (`places`). A series has None
    at a place without a mark.

    The value axis fits the marks from `places[settled]` on. Earlier marks may lie outside it. `levels` are labelled
    horizontal lines, which are drawn if the axis includes their values.
    """

    places: tuple[str, ...]
    axis: ChartAxis
    series: tuple[tuple[str, tuple[ChartMark | None, ...]], ...]
    settled: int = field(default=0, kw_only=True)
    levels: tuple[tuple[float, str], ...] = field(default=(), kw_only=True)


# The file formats of chart pictures. matplotlib has more formats, but tests ensure only for these that the files are
# reproducible.
PICTURE_FORMATS = ("png", "svg", "pdf")

AnyChart = Bars | Scatter | Stacks | Lines
Element = Text | TextList | NameValuePairs | Code | Table | AnyChart


# Return types of generators.
Elements = Iterator[Element]
Tables = Iterator[Table]
Texts = Iterator[Text]
Sentences = Iterator[str]


def bullet_list(sentences: Iterable[str], tone: Tone = Tone.PLAIN) -> Iterator[TextList]:
    """Yields one list of these sentences, or nothing if the list would be empty."""
    texts = tuple(Text(sentence, tone) for sentence in sentences)
    if texts:
        yield TextList(texts)


@dataclass(frozen=True)
class Part:
    """A section that has been built: an anchor, a heading, elements, and a `lead` paragraph under the heading.

    A terminal prints a `tight` part without blank lines.
    """

    name: str
    title: str
    elements: tuple[Element, ...]
    lead: str = ""
    tight: bool = False


@dataclass(frozen=True)
class Page:
    """A whole report. `facts` are shown on one line under the title.

    A list of reports shows the `kind` of a page, as 'run', and a `remark` on its answer, as 'noisy'. With `refresh`, a
    browser loads the page again after that many seconds.
    """

    title: str
    subtitle: str
    parts: tuple[Part, ...]
    footer: Sequence[str] = ()
    facts: tuple[tuple[str, str], ...] = ()
    kind: str = "run"
    refresh: int = 0
    remark: str = ""
