"""The elements of a page: its content without its layout.

A section builds elements; a renderer turns them into HTML, Markdown or text. Every chart carries its numbers, so that
renderers and readers can get them as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


def printable(text: str) -> str:
    """Returns the text on one line, with blanks in place of unprintable characters.

    These are control characters, marks that reverse the order of letters, and halves of surrogate pairs: names, errors
    and files are untrusted, and must not control a terminal.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " for letter in text)


class Tone(StrEnum):
    """The meaning of an element; never expressed by colour alone. DOUBT is grey: labelled or emulated."""

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
    """Names and values."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Code:
    """A command to type, or the content of a file."""

    text: str


@dataclass(frozen=True)
class Column:
    """A column of a table. Numbers are right-aligned and sort by value; `hint` describes the column.

    `unit` ('s', 'B', 'x') applies to its fields' values, for readers of values without texts. A terminal prints a
    `shared` column once above the rows that share it, and one that is `below` under each row.
    """

    title: str
    number: bool = False
    hint: str = ""
    unit: str = ""
    shared: bool = False
    below: bool = False


@dataclass(frozen=True)
class Field:
    """A field of a table: its text, and its sort value if that differs.

    On a page the text is a `link` to a file in the same folder.
    """

    text: str
    value: float | None = None
    tone: Tone = Tone.PLAIN
    link: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under columns. `name` is used in links and files; a `main` table can be filtered and sorted.

    A `folded` table initially shows only its caption.
    """

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Field, ...], ...]
    main: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Mark:
    """One value of a chart, with its interval and a hint for hovering.

    A chart of lines writes the `flag`, an event, next to the mark; one of bars draws each of the `samples` as a stroke
    below the bar.
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
    """The title of an axis, and the unit of its ticks ('s', 'B', 'J', 'x'; '' for plain numbers).

    `show` formats a value if its unit does not determine that.
    """

    title: str
    unit: str = ""
    show: Callable[[float], str] | None = None


@dataclass(frozen=True)
class Chart:
    """The common fields of charts: a name for links and ids, a title, and a description for readers who cannot see
    it."""

    name: str
    title: str
    description: str
    folded: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Bars(Chart):
    """Horizontal bars of ratios with intervals, from 1 on a logarithmic axis, in groups with headings."""

    axis: ChartAxis
    groups: tuple[tuple[str, tuple[Mark, ...]], ...]


@dataclass(frozen=True)
class ChartPoint:
    """A point of a scatter chart; without x it is in a margin. `series` chooses shape and colour.

    `x_low` and `x_high` are the interval of x.
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
    """Points over a linear axis and a logarithmic one, y; `margin` describes points without x."""

    x: ChartAxis
    y: ChartAxis
    points: tuple[ChartPoint, ...]
    margin: str = ""


@dataclass(frozen=True)
class Stacks(Chart):
    """Horizontal bars of parts that sum to a whole; `rows` have each part's value in the order of `parts`.

    In a timeline each row has `pieces` instead: the numbers and values of parts in sequence, in which a part may occur
    again.
    """

    axis: ChartAxis
    parts: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    pieces: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def present(self) -> tuple[int, ...]:
        """The numbers of the parts that are not 0 in every row."""
        return tuple(part for part in range(len(self.parts)) if any(values[part] for _, values in self.rows))


@dataclass(frozen=True)
class Lines(Chart):
    """Series over one row of places (runs, commits): for each place a mark or None.

    The axis fits the places from `settled` on; earlier ones may lie beyond it. `levels` are labelled horizontal lines,
    drawn if they are within the axis.
    """

    places: tuple[str, ...]
    axis: ChartAxis
    series: tuple[tuple[str, tuple[Mark | None, ...]], ...]
    settled: int = field(default=0, kw_only=True)
    levels: tuple[tuple[float, str], ...] = field(default=(), kw_only=True)


# The file formats of charts. matplotlib has more; these are tested to be reproducible.
PICTURE_FORMATS = ("png", "svg", "pdf")

AnyChart = Bars | Scatter | Stacks | Lines
Element = Text | Items | Facts | Code | Table | AnyChart


# Return types of generators: elements, tables, texts, sentences.
Elements = Iterator[Element]
Tables = Iterator[Table]
Texts = Iterator[Text]
Sentences = Iterator[str]


def items_of(sentences: Iterable[str], tone: Tone = Tone.PLAIN) -> Iterator[Items]:
    """Yields a list of these sentences, or nothing."""
    texts = tuple(Text(sentence, tone) for sentence in sentences)
    if texts:
        yield Items(texts)


@dataclass(frozen=True)
class Part:
    """A section after building: an anchor, a heading, elements, and a `lead` under the heading.

    A terminal prints a `tight` part without blank lines.
    """

    name: str
    title: str
    elements: tuple[Element, ...]
    lead: str = ""
    tight: bool = False


@dataclass(frozen=True)
class Page:
    """A whole report. `facts` are on one line under the title.

    `kind` is its subject and `command` what measured it, for lists of reports. A browser reloads it every `refresh`
    seconds if it will be written again.
    """

    title: str
    subtitle: str
    parts: tuple[Part, ...]
    footer: Sequence[str] = ()
    facts: tuple[tuple[str, str], ...] = ()
    kind: str = "run"
    command: str = ""
    refresh: int = 0
