"""The sheet all charts are drawn on: a matplotlib figure measured in pixels, with x to the right and y down.

An artist is drawn without colour or font: it carries a class, and the page's stylesheet decides (charts.css). Texts are
placeholders for matplotlib, so that no name can be taken for mathematics or for letters that its own font lacks.

Of matplotlib's SVG only the geometry goes into the page. matplotlib repeats its style at every path, names groups and
markers by chance or hash, and knows no class: each artist, found by its number, becomes one short element instead.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from matplotlib.artist import Artist
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import Affine2D

from fp8bench.report.elements import Chart
from fp8bench.report.page.drawing.labels import Hint, escaped, width

# A chart is drawn twice, for a window and for a telephone; charts.css shows the one that fits.
WIDE, NARROW = 880.0, 340.0
# Letters, in pixels; charts.css says the same.
SIZES = {False: 13.0, True: 12.0}
# Shapes of series, so that they differ without colour.
SHAPES = ("o", "s", "^", "D", "v", "P", "X", "p")
# What makes them look alike in size.
_SHAPE_SIZES = {"o": 1.0, "s": 0.9, "^": 1.1, "D": 0.82, "v": 1.1, "P": 1.1, "X": 1.05, "p": 1.1}

# Whatever could change a path, wherever the reader's matplotlibrc comes from. The salt is always the same, because the
# ids that matplotlib makes with it never reach the page.
PARAMETERS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fp8bench",
    "svg.image_inline": True,
    "text.usetex": False,
    "path.sketch": None,
    "path.effects": [],
    "path.snap": True,
    "path.simplify": False,
    "lines.scale_dashes": False,
    "figure.autolayout": False,
    "figure.constrained_layout.use": False,
}
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))

Line = Sequence[tuple[float, float]]


class Sheet:
    """Collects what is drawn; `svg` gives it as one element."""

    def __init__(self, chart: Chart, narrow: bool) -> None:
        self.narrow = narrow
        self.width = NARROW if narrow else WIDE
        self.size = SIZES[narrow]
        self._kind = type(chart).__name__.lower()
        self._title = chart.title
        self._name = f"chart-{chart.name}-{'narrow' if narrow else 'wide'}"
        self._inks: list[Ink] = []
        self._down = Affine2D()  # set when the height is known
        self._figure = Figure(dpi=72, frameon=False)

    @property
    def grown(self) -> bool:
        """Whether it is wider than the sheets that the page expects."""
        return self.width > (NARROW if self.narrow else WIDE)

    def lines(
        self, style: str, lines: Sequence[Line], layer: int = 1, hint: Hint | None = None, closed: bool = False
    ) -> None:
        """Lines, or closed shapes, all of them one path."""
        points: list[tuple[float, float]] = []
        codes: list[Any] = []  # small numbers of numpy
        for line in lines:
            points += [*line, line[0]] if closed else line
            codes += [Path.MOVETO] + [Path.LINETO] * (len(line) - 1) + [Path.CLOSEPOLY] * closed
        self._add(PathPatch(Path(points, codes)), Ink(style, hint=hint), layer)

    def box(
        self, style: str, x: float, y: float, wide: float, high: float, layer: int = 1, hint: Hint | None = None
    ) -> None:
        """A rectangle from its upper left corner."""
        corners = [(x, y), (x + wide, y), (x + wide, y + high), (x, y + high)]
        self.lines(style, [corners], layer, hint, closed=True)

    def hatch(self, style: str, x: float, y: float, wide: float, high: float, layer: int = 1) -> None:
        """Slanted lines that fill a rectangle."""
        gap, lines = 6.0, []
        offset = gap / 2
        while offset < wide + high:
            right, left = min(offset, wide), max(0.0, offset - high)
            lines.append([(x + right, y + offset - right), (x + left, y + offset - left)])
            offset += gap
        if lines:
            self.lines(style, lines, layer)

    def dot(self, style: str, shape: str, x: float, y: float, size: float = 8.0, hint: Hint | None = None) -> None:
        """A marker in matplotlib's shapes."""
        size *= _SHAPE_SIZES[shape]
        dot = Line2D([x], [y], linestyle="none", marker=shape, markersize=size, markeredgewidth=0.0)
        self._add(dot, Ink(style, hint=hint), 2)

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start", turn: float = 0.0) -> None:
        """A line of text whose small letters have their middle at `y`, turned to the left by so many degrees."""
        if text:
            line = Text(x, y + 0.36 * self.size * (turn == 0), "-", parse_math=False, fontsize=self.size)
            line.set(rotation=turn, rotation_mode="anchor")
            self._add(line, Ink(style, text, anchor), 3)

    def measure(self, text: str, bold: bool = False) -> float:
        """About how wide a text comes out."""
        return width(text, self.size, bold)

    def svg(self, height: float, description: str) -> str:
        """The sheet as an element of a page, cut off at `height`."""
        self._figure.set_size_inches(self.width / 72, height / 72)
        self._down.scale(1, -1).translate(0, height)
        drawn = io.StringIO()
        canvas: Any = FigureCanvasSVG(self._figure)  # its types leave print_svg out
        canvas.print_svg(drawn, metadata=_NO_METADATA)
        content = body(drawn.getvalue(), self._inks, self._name)
        # Children of an image are hidden from screen readers, so a chart with marks in it is a group of them.
        role = "group" if any(ink.hint for ink in self._inks) else "img"
        # One that has grown keeps its size, and scrolls in its own box.
        style = f' style="min-width:{self.width:.0f}px"' if self.grown else ""
        form = "narrow" if self.narrow else "only" if self.grown else "wide"
        return (
            f'<svg class="of-{self._kind} {form}" id="{self._name}" role="{role}"'
            f' aria-labelledby="{self._name}-title" aria-describedby="{self._name}-desc"'
            f' viewBox="0 0 {self.width:.0f} {height:.0f}"{style}>\n'
            f'<title id="{self._name}-title">{escaped(self._title)}</title>\n'
            f'<desc id="{self._name}-desc">{escaped(description)}</desc>\n'
            f"{content}\n</svg>"
        )

    def _add(self, artist: Artist, ink: Ink, layer: int) -> None:
        artist.set_gid(str(len(self._inks)))
        artist.set_zorder(layer)
        artist.set_transform(self._down)
        self._inks.append(ink)
        self._figure.add_artist(artist)


_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
# Commands of a path -> the numbers that follow.
_NUMBERS = {"M": 2, "L": 2, "Q": 4, "C": 6, "z": 0}
_TURN = re.compile(r"rotate\((-?[\d.]+)")


@dataclass(frozen=True)
class Ink:
    """What an artist is in the page: its class, its words if it is a text, its hint if it is a mark."""

    style: str
    text: str = ""
    anchor: str = "start"
    hint: Hint | None = None


def body(svg: str, inks: Sequence[Ink], name: str) -> str:
    """The elements of a drawing, in the order of their layers; artist number N carries the gid 'N'."""
    groups = {group.get("id"): group for group in ElementTree.fromstring(svg).iter(f"{_SVG}g")}
    markers: dict[str, str] = {}
    for path in (path for group in groups.values() for path in group.findall(f"{_SVG}defs/{_SVG}path")):
        markers.setdefault(f"#{path.get('id')}", f'<path id="{name}-m{len(markers)}" d="{_path(path.get("d", ""))}"/>')
    places = {key: f'href="#{name}-m{number}"' for number, key in enumerate(markers)}
    lines = [f"<defs>{''.join(markers.values())}</defs>"] if markers else []
    order = (group.get("id", "") for group in groups.values())
    lines += (_element(groups[one], inks[int(one)], places) for one in order if one.isdigit())
    return "\n".join(lines)


def _element(group: ElementTree.Element, ink: Ink, markers: dict[str, str]) -> str:
    """One artist as one element."""
    leaf = next(_leaves(group))
    if leaf.tag == f"{_SVG}text":
        return f"<text{_text_attributes(leaf, ink)}>{escaped(ink.text)}</text>"
    shape = f' d="{_path(leaf.get("d", ""))}"'
    if leaf.tag == f"{_SVG}use":
        shape = f' {markers[leaf.get(_HREF, "")]} x="{_rounded(leaf.get("x", "0"))}" y="{_rounded(leaf.get("y", "0"))}"'
    words = _words(ink.hint) if ink.hint else ""
    return f'<{leaf.tag.removeprefix(_SVG)} class="{ink.style}"{shape}{words}/>'


def _leaves(group: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """What is drawn by a group, without what it only defines."""
    for child in group:
        if child.tag == f"{_SVG}g":
            yield from _leaves(child)
        elif child.tag != f"{_SVG}defs":
            yield child


def _text_attributes(leaf: ElementTree.Element, ink: Ink) -> str:
    x, y = _rounded(leaf.get("x", "0")), _rounded(leaf.get("y", "0"))
    style = f' class="{ink.style}"' if ink.style else ""
    anchor = f' text-anchor="{ink.anchor}"' if ink.anchor != "start" else ""
    turned = _TURN.search(leaf.get("transform", ""))
    angle = float(turned[1]) if turned else 0.0
    turn = f' transform="rotate({_rounded(str(angle))} {x} {y})"' if angle else ""
    return f'{style} x="{x}" y="{y}"{anchor}{turn}'


def _words(hint: Hint) -> str:
    """A mark can be reached by keyboard, and says what it is."""
    stop = f' tabindex="0" role="img" aria-label="{escaped(hint.short)}"' if hint.stop else ""
    return f'{stop} data-hint="{escaped(hint.full)}"'


def _path(data: str) -> str:
    """A path in as few letters as two decimals take: 'M 1 2 \\n L 3 2' becomes 'M1 2H3'."""
    words = data.split()
    parts: list[str] = []
    at, here = 0, ("", "")
    while at < len(words):
        command, count = words[at], _NUMBERS[words[at]]
        numbers = [_rounded(word) for word in words[at + 1 : at + 1 + count]]
        end = (numbers[-2], numbers[-1]) if numbers else here
        if command == "L" and end[1] == here[1]:
            parts.append(f"H{end[0]}")
        elif command == "L" and end[0] == here[0]:
            parts.append(f"V{end[1]}")
        else:
            parts.append(command + " ".join(numbers))
        at, here = at + 1 + count, end
    return "".join(parts)


def _rounded(number: str) -> str:
    """'3.10000' -> '3.1'."""
    text = f"{float(number):.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text
