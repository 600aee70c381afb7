"""The sheet on which charts are drawn, as one SVG element. Positions are in pixels. x points right and y points down.

Shapes have CSS classes. The style sheet charts.css determines colours and fonts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from fp8bench.report.elements import Chart
from fp8bench.report.page.drawing.scale import MAX_SERIES, cut_to_width, escape, text_width

_SHEET_WIDTH = 880.0
# The font size in pixels, equal to that in charts.css.
_FONT_SIZE = 13.0
# Different marker shapes distinguish series without colour. The scale factors make all shapes look equally large.
_MARKER_SHAPE_SCALES = {"o": 1.0, "s": 0.9, "^": 1.1, "D": 0.82, "v": 1.1}
MARKER_SHAPES = tuple(_MARKER_SHAPE_SCALES)
# Corners of each marker shape, relative to its centre. Positive y is upwards.
_MARKER_SHAPE_CORNERS: dict[str, Sequence[tuple[float, float]]] = {
    "s": ((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)),
    "^": ((0, 0.5), (-0.5, -0.5), (0.5, -0.5)),
    "D": ((0, -(0.5**0.5)), (0.5**0.5, 0), (0, 0.5**0.5), (-(0.5**0.5), 0)),
    "v": ((0, -0.5), (0.5, 0.5), (-0.5, 0.5)),
}  # fmt: skip
# A quarter of a circle as two Bezier curves, from its lowest point.
_QUARTER_CIRCLE = (
    (0.13260155, -0.5),
    (0.259789935, -0.447316846),
    (0.353553391, -0.353553391),
    (0.447316846, -0.259789935),
    (0.5, -0.13260155),
    (0.5, 0.0),
)

Polyline = Sequence[tuple[float, float]]
# An SVG path command, as 'L', with the coordinates of its points.
SvgPathCommand = tuple[str, Sequence[float]]
SvgPathCommands = Sequence[SvgPathCommand]


class ChartSheet:
    """Collects the shapes of a chart. `to_svg` returns them as one SVG element."""

    width = _SHEET_WIDTH
    font_size = _FONT_SIZE

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        self._name = f"chart-{chart.name}"
        self._elements: list[tuple[int, str]] = []  # (layer, SVG element)
        # The SVG id of each marker, by the path data of its outline.
        self._markers: dict[str, str] = {}
        self._role = "img"
        self._omitted = ""

    def add_lines(
        self, style: str, lines: Sequence[Polyline], layer: int = 1, hint: str = "", closed: bool = False
    ) -> None:
        svg_path_data = _format_svg_path(line_commands(lines, closed))
        self._elements.append((layer, f'<path class="{style}" d="{svg_path_data}"{self._make_hint_attributes(hint)}/>'))

    def add_box(
        self, style: str, x: float, y: float, width: float, height: float, layer: int = 1, hint: str = ""
    ) -> None:
        box_corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
        self.add_lines(style, [box_corners], layer, hint, closed=True)

    def add_dot(self, style: str, shape: str, x: float, y: float, size: float = 8.0, hint: str = "") -> None:
        """Draws a marker at a position. Markers with the same shape share one path in the SVG file."""
        # Hundreds of points use a few shapes, so this keeps the page small.
        marker = self._markers.setdefault(_make_marker_svg_path(shape, size), f"{self._name}-m{len(self._markers)}")
        position = f'href="#{marker}" x="{_to_decimals(x)}" y="{_to_decimals(y)}"'
        self._elements.append((2, f'<use class="{style}" {position}{self._make_hint_attributes(hint)}/>'))

    def add_text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        """Writes a line of text whose lowercase letters are centred vertically on `y`."""
        if not text:
            return
        x_decimals = _to_decimals(x)
        y_decimals = _to_decimals(y + 0.36 * self.font_size)
        svg_text_attributes = f' class="{style}"' if style else ""
        svg_text_attributes += f' x="{x_decimals}" y="{y_decimals}"'
        svg_text_attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._elements.append((3, f"<text{svg_text_attributes}>{escape(text)}</text>"))

    def measure_text_width(self, text: str, bold: bool = False) -> float:
        return text_width(text, self.font_size, bold)

    def cut_to_width(self, text: str, max_width: float, bold: bool = False) -> str:
        return cut_to_width(text, max_width, self.font_size, bold)

    def note_missing_values(self, num_hidden: int) -> None:
        """Notes in the chart's description how many values only the table has, because they are too many to draw or
        beyond the axis.
        """
        if num_hidden:
            self._omitted = f"In the table only: {num_hidden}."

    @property
    def description(self) -> str:
        return f"{self._chart.description.strip()} {self._omitted}".strip()

    def to_svg(self, height: float) -> str:
        marker_svg_paths = "".join(f'<path id="{name}" d="{path}"/>' for path, name in self._markers.items())
        svg_elements = [f"<defs>{marker_svg_paths}</defs>"] if marker_svg_paths else []
        # Shapes of a higher layer cover those of a lower one. Within a layer, later shapes cover earlier ones.
        svg_elements += [element for _, element in sorted(self._elements, key=lambda pair: pair[0])]
        svg_lines = "\n".join(svg_elements)
        return (
            f'<svg class="of-{type(self._chart).__name__.lower()}" id="{self._name}" role="{self._role}"'
            f' aria-labelledby="{self._name}-title" aria-describedby="{self._name}-desc"'
            f' viewBox="0 0 {self.width:.0f} {height:.0f}">\n'
            f'<title id="{self._name}-title">{escape(self._chart.title)}</title>\n'
            f'<desc id="{self._name}-desc">{escape(self.description)}</desc>\n'
            f"{svg_lines}\n</svg>"
        )

    def _make_hint_attributes(self, hint: str) -> str:
        """Returns SVG attributes that describe a mark and let the tab key stop at it, or '' without a hint."""
        if not hint:
            return ""
        # Screen readers skip everything inside an image, so a chart whose marks have hints has the role of a group.
        self._role = "group"
        label = hint.partition("\n")[0]
        return f' tabindex="0" role="img" aria-label="{escape(label)}" data-hint="{escape(hint)}"'


def choose_series_styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Returns the shape and CSS class of each series. The first 40 series all look different."""
    # There are MAX_SERIES CSS classes. Series beyond that reuse the classes with different shapes.
    return {
        name: (MARKER_SHAPES[(index + index // MAX_SERIES) % len(MARKER_SHAPES)], f"s{index % MAX_SERIES + 1}")
        for index, name in enumerate(dict.fromkeys(names))
    }


def line_commands(lines: Sequence[Polyline], closed: bool) -> SvgPathCommands:
    commands: list[SvgPathCommand] = []
    for line in lines:
        commands.append(("M", line[0]))
        commands += [("L", point) for point in line[1:]]
        if closed:
            commands.append(("z", ()))
    return commands


def shape_outline(shape: str, size: float) -> SvgPathCommands:
    """Returns the path of a shape around (0, 0), with y pointing down."""
    size *= _MARKER_SHAPE_SCALES[shape]
    if shape in _MARKER_SHAPE_CORNERS:
        marker_corners = [(x * size, -y * size) for x, y in _MARKER_SHAPE_CORNERS[shape]]
        return line_commands([marker_corners], closed=True)
    points = list(_QUARTER_CIRCLE)
    for _ in range(3):
        # Each further quarter of the circle is the previous one, rotated by 90 degrees.
        points += [(-y, x) for x, y in points[-6:]]
    commands: list[SvgPathCommand] = [("M", (0.0, size / 2))]
    for index in range(0, len(points), 3):
        curve_coordinates = []
        for x, y in points[index : index + 3]:
            curve_coordinates += [x * size, -y * size]
        commands.append(("C", curve_coordinates))
    return [*commands, ("z", ())]


@cache
def _make_marker_svg_path(shape: str, size: float) -> str:
    return _format_svg_path(shape_outline(shape, size))


def _format_svg_path(commands: SvgPathCommands) -> str:
    """Formats path commands as short SVG path data, as 'M1 2H3'. Coordinates have at most two decimals."""
    parts = []
    x = y = ""
    for command, coordinates in commands:
        texts = [_to_decimals(coordinate) for coordinate in coordinates]
        previous_x = x
        previous_y = y
        # The command 'z' has no coordinates.
        x, y = texts[-2:] or (x, y)
        if command == "L" and y == previous_y:
            parts.append(f"H{x}")
        elif command == "L" and x == previous_x:
            parts.append(f"V{y}")
        else:
            parts.append(command + " ".join(texts))
    return "".join(parts)


def _to_decimals(number: float) -> str:
    """Formats a number with at most two decimals, as '3.1'.

    The number is first rounded to six decimals, so that floating-point noise does not decide between two hundredths.
    """
    text = f"{round(float(number), 6):.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
