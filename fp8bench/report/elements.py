"""What a page is made of: values that say what is shown, and nothing of how.

A section builds elements; a renderer turns them into HTML, Markdown or text. Every chart carries its numbers, so that
renderers and readers can have them as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


def printable(text: str) -> str:
    """The text on one line, with blanks for what is no letter or sign.

    That is control characters, marks that reverse the order of letters, and halves of surrogate pairs: names, errors
    and files come from others, and must not control a terminal.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " for letter in text)


class Tone(StrEnum):
    """How something is meant; never told by colour alone. DOUBT is grey: labelled or emulated."""

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
    """Something to type, or a file's content."""

    text: str


@dataclass(frozen=True)
class Column:
    """A column of a table. Numbers are aligned right and sort by value; `hint` says what the column is.

    `unit` ('s', 'B', 'x') is that of its fields' values, for who gets these without their texts. A terminal prints what
    is `shared` once above the rows that share it, and what is `below` under its row.
    """

    title: str
    number: bool = False
    hint: str = ""
    unit: str = ""
    shared: bool = False
    below: bool = False


@dataclass(frozen=True)
class Field:
    """A field of a table: its text, the value it sorts by if that differs, and a hint.

    A page makes the text a `link` to a file beside the page.
    """

    text: str
    value: float | None = None
    tone: Tone = Tone.PLAIN
    hint: str = ""
    link: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under columns. `name` is used in links and files; a `main` table can be filtered and sorted.

    Of a `folded` table only the caption is shown at first.
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

    `flag` is what happened there: a chart of lines writes it beside the mark. `samples` are the single values that the
    mark stands for: bars have a stroke for each below them.
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
    """What an axis shows, and the unit of its ticks ('s', 'B', 'J', 'x'; '' for plain numbers).

    `show` writes a value where its unit does not determine that.
    """

    title: str
    unit: str = ""
    log: bool = False
    show: Callable[[float], str] | None = None


@dataclass(frozen=True)
class Chart:
    """What all charts have: a name for links and ids, a title, and a description that replaces seeing it."""

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
    """A point of a scatter chart; without x it stands in a margin. `series` chooses shape and colour.

    In a joined series each `strand` is a line of its own. `low` and `high` are the interval of y, `x_low` and `x_high`
    that of x.
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
    x_low: float | None = None
    x_high: float | None = None


@dataclass(frozen=True)
class Scatter(Chart):
    """Points over two axes; `margin` names what those without x have in common, `joined` are series with lines."""

    x: ChartAxis
    y: ChartAxis
    points: tuple[ChartPoint, ...]
    margin: str = ""
    joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stacks(Chart):
    """Horizontal bars of parts that sum to a whole; `rows` have each part's value in the order of `parts`.

    In a timeline each row has `pieces` instead: the numbers and values of parts as they follow each other, in which a
    part may come again.
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

    The axis fits the places from `settled` on; earlier ones may run beyond it. `levels` are labelled
    lines across, drawn where the axis reaches them.
    """

    places: tuple[str, ...]
    axis: ChartAxis
    series: tuple[tuple[str, tuple[Mark | None, ...]], ...]
    settled: int = field(default=0, kw_only=True)
    levels: tuple[tuple[float, str], ...] = field(default=(), kw_only=True)


# The file formats of charts.
# matplotlib has more; these are tested to give the same bytes again.
PICTURE_FORMATS = ("png", "svg", "pdf")

AnyChart = Bars | Scatter | Stacks | Lines
Element = Text | Items | Facts | Code | Table | AnyChart


# What functions yield: elements, tables, texts, sentences.
Elements = Iterator[Element]
Tables = Iterator[Table]
Texts = Iterator[Text]
Sentences = Iterator[str]


def items_of(sentences: Iterable[str], tone: Tone = Tone.PLAIN) -> Iterator[Items]:
    """Yields a list of these sentences; nothing without any."""
    texts = tuple(Text(sentence, tone) for sentence in sentences)
    if texts:
        yield Items(texts)


@dataclass(frozen=True)
class Part:
    """A section as it was built: an anchor, a heading, elements, and a `lead` under the heading.

    A terminal prints a `tight` part without blank lines.
    """

    name: str
    title: str
    elements: tuple[Element, ...]
    lead: str = ""
    tight: bool = False


@dataclass(frozen=True)
class Page:
    """A whole report. `facts` stand in one line under the title.

    `kind` is what it reports on and `command` what measured it, for lists of reports. A browser reloads it every
    `refresh` seconds if it will be written again.
    """

    title: str
    subtitle: str
    parts: tuple[Part, ...]
    footer: Sequence[str] = ()
    facts: tuple[tuple[str, str], ...] = ()
    kind: str = "run"
    command: str = ""
    refresh: int = 0
