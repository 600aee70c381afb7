"""The sheet on which all charts are drawn, in pixels with x to the right and y down, as one SVG element.

Shapes have a class instead of colour and font; the page's stylesheet decides (charts.css).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from fp8bench.report.elements import Chart
from fp8bench.report.page.drawing.scale import SERIES, escape, width

_WIDTH = 880.0
# The font size in pixels, as in charts.css.
_SIZE = 13.0
# Shapes distinguish series without colour; the factors make them look equally large.
_SHAPE_SIZES = {"o": 1.0, "s": 0.9, "^": 1.1, "D": 0.82, "v": 1.1}
SHAPES = tuple(_SHAPE_SIZES)
# Corners around the middle, with y up.
_CORNERS: dict[str, Sequence[tuple[float, float]]] = {
    "s": ((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)),
    "^": ((0, 0.5), (-0.5, -0.5), (0.5, -0.5)),
    "D": ((0, -(0.5**0.5)), (0.5**0.5, 0), (0, 0.5**0.5), (-(0.5**0.5), 0)),
    "v": ((0, -0.5), (0.5, 0.5), (-0.5, 0.5)),
}  # fmt: skip
# A quarter of a circle as two curves, from the lowest point.
_QUARTER = (
    (0.13260155, -0.5),
    (0.259789935, -0.447316846),
    (0.353553391, -0.353553391),
    (0.447316846, -0.259789935),
    (0.5, -0.13260155),
    (0.5, 0.0),
)

Line = Sequence[tuple[float, float]]
# SVG's path commands with the numbers of their points.
Step = tuple[str, Sequence[float]]
Steps = Sequence[Step]


class Sheet:
    """Collects shapes; `svg` returns them as one element."""

    width = _WIDTH
    size = _SIZE

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        self._name = f"chart-{chart.name}"
        self._drawn: list[tuple[int, str]] = []  # elements with their layers
        self._markers: dict[str, str] = {}  # ids by their paths
        self._role = "img"
        self._omitted = ""

    def lines(self, style: str, lines: Sequence[Line], layer: int = 1, hint: str = "", closed: bool = False) -> None:
        steps = along_lines(lines, closed)
        self._drawn.append((layer, f'<path class="{style}" d="{_path(steps)}"{self._words(hint)}/>'))

    def box(self, style: str, x: float, y: float, wide: float, high: float, layer: int = 1, hint: str = "") -> None:
        corners = [(x, y), (x + wide, y), (x + wide, y + high), (x, y + high)]
        self.lines(style, [corners], layer, hint, closed=True)

    def dot(self, style: str, shape: str, x: float, y: float, size: float = 8.0, hint: str = "") -> None:
        """Draws a marker, whose path is stored in the sheet once."""
        # Hundreds of points share few outlines, which keeps the page small.
        marker = self._markers.setdefault(_marker(shape, size), f"{self._name}-m{len(self._markers)}")
        place = f'href="#{marker}" x="{_to_decimals(x)}" y="{_to_decimals(y)}"'
        self._drawn.append((2, f'<use class="{style}" {place}{self._words(hint)}/>'))

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        """A line of text whose small letters are centred on `y`."""
        if not text:
            return
        at = _to_decimals(x)
        down = _to_decimals(y + 0.36 * self.size)
        attributes = f' class="{style}"' if style else ""
        attributes += f' x="{at}" y="{down}"'
        attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._drawn.append((3, f"<text{attributes}>{escape(text)}</text>"))

    def measure(self, text: str, bold: bool = False) -> float:
        return width(text, self.size, bold)

    def omit(self, num_hidden: int) -> None:
        """Adds to the description how many values are not drawn: too many, or without a place on the axis."""
        if num_hidden:
            self._omitted = f"In the table only: {num_hidden}."

    @property
    def description(self) -> str:
        return f"{self._chart.description.strip()} {self._omitted}".strip()

    def svg(self, height: float) -> str:
        paths = "".join(f'<path id="{name}" d="{path}"/>' for path, name in self._markers.items())
        content = [f"<defs>{paths}</defs>"] if paths else []
        # Layers determine what covers what; within a layer the order of drawing does.
        content += [element for _, element in sorted(self._drawn, key=lambda drawn: drawn[0])]
        lines = "\n".join(content)
        return (
            f'<svg class="of-{type(self._chart).__name__.lower()}" id="{self._name}" role="{self._role}"'
            f' aria-labelledby="{self._name}-title" aria-describedby="{self._name}-desc"'
            f' viewBox="0 0 {self.width:.0f} {height:.0f}">\n'
            f'<title id="{self._name}-title">{escape(self._chart.title)}</title>\n'
            f'<desc id="{self._name}-desc">{escape(self.description)}</desc>\n'
            f"{lines}\n</svg>"
        )

    def _words(self, hint: str) -> str:
        """Returns attributes that make a mark reachable by keyboard, and describe it."""
        if not hint:
            return ""
        # Screen readers do not see an image's children, so a chart with marks is a group.
        self._role = "group"
        label = hint.partition("\n")[0]
        return f' tabindex="0" role="img" aria-label="{escape(label)}" data-hint="{escape(hint)}"'


def looks_of(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Returns the shape and class of each series; no two of a chart's first SERIES look alike, and no two of 40."""
    return {
        name: (SHAPES[(number + number // SERIES) % len(SHAPES)], f"s{number % SERIES + 1}")
        for number, name in enumerate(dict.fromkeys(names))
    }


def along_lines(lines: Sequence[Line], closed: bool) -> Steps:
    steps: list[Step] = []
    for line in lines:
        steps.append(("M", line[0]))
        steps += [("L", point) for point in line[1:]]
        if closed:
            steps.append(("z", ()))
    return steps


def outline(shape: str, size: float) -> Steps:
    """A shape around (0, 0), with y down."""
    size *= _SHAPE_SIZES[shape]
    if shape in _CORNERS:
        corners = [(x * size, -y * size) for x, y in _CORNERS[shape]]
        return along_lines([corners], closed=True)
    points = list(_QUARTER)
    for _ in range(3):
        # Each further quarter is the previous one rotated by 90 degrees.
        points += [(-y, x) for x, y in points[-6:]]
    steps: list[Step] = [("M", (0.0, size / 2))]
    for place in range(0, len(points), 3):
        numbers: list[float] = []
        for x, y in points[place : place + 3]:
            numbers += [x * size, -y * size]
        steps.append(("C", numbers))
    return [*steps, ("z", ())]


@cache
def _marker(shape: str, size: float) -> str:
    return _path(outline(shape, size))


def _path(steps: Steps) -> str:
    """Formats commands with as few characters as two decimals allow: 'M1 2H3'."""
    parts = []
    x = y = ""
    for command, numbers in steps:
        words = [_to_decimals(number) for number in numbers]
        previous_x = x
        previous_y = y
        x, y = words[-2:] or (x, y)
        if command == "L" and y == previous_y:
            parts.append(f"H{x}")
        elif command == "L" and x == previous_x:
            parts.append(f"V{y}")
        else:
            parts.append(command + " ".join(words))
    return "".join(parts)


def _to_decimals(number: float) -> str:
    """Formats '3.1'. Rounds twice, so that floating-point noise does not decide between two hundredths."""
    text = f"{round(float(number), 6):.2f}".rstrip("0").rstrip(".")
    if text == "-0":
        return "0"
    return text
