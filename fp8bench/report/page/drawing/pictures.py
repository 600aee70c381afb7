"""Draws charts as picture files for slides and papers, by matplotlib, in the light colours of the page.

A sheet collects the shapes of a chart. The style sheets of the page determine their colours and lines. Only --plots
imports this module, because it needs matplotlib.
"""

from __future__ import annotations

import itertools
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from fp8bench.report.elements import AnyChart
from fp8bench.report.page.drawing.draw import draw_chart_on_sheet
from fp8bench.report.page.drawing.scale import FORBIDDEN_CHARACTERS
from fp8bench.report.page.drawing.sheet import ChartSheet, Polyline, SvgPathCommands, line_commands, shape_outline

# One inch in three units: pixels of the sheet, points (of fonts and line widths), and pixels of the picture file.
_PIXELS_PER_INCH = 96.0
_POINTS_PER_INCH = 72.0
_FILE_PIXELS_PER_INCH = 192.0
_PICTURE_MARGIN = 20.0
_TITLE_FONT_SIZE = 17.0
_DESCRIPTION_FONT_SIZE = 12.0
_DESCRIPTION_LINE_HEIGHT = 17.0
# These settings of matplotlib keep texts as texts, embed fonts as journals require, and make files reproducible.
_MATPLOTLIB_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "svg.hashsalt": "fp8bench",
    "path.simplify": False,
}
_MATPLOTLIB_PATH_CODES = {"M": [Path.MOVETO], "L": [Path.LINETO], "C": [Path.CURVE4] * 3, "z": [Path.CLOSEPOLY]}
# The metadata key of a chart's description, by file format.
_DESCRIPTION_KEY_BY_FORMAT = {"png": "Description", "svg": "Description", "pdf": "Subject"}
# The metadata keys of dates, by file format. Dates are left out, because they would make files differ.
_OMITTED_DATES: dict[str, dict[str, None]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
_MIN_BOLD_WEIGHT = 550

CssProperties = Mapping[str, str]


def draw_chart_picture(chart: AnyChart, page_title: str, file_format: str) -> bytes:
    """Returns the bytes of a picture file: the chart, with its title above and its description below."""
    sheet = _PictureSheet(chart)
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Without this, matplotlib warns of each character that the font lacks. It draws boxes for them.
        warnings.simplefilter("ignore")
        # The settings of a user's matplotlibrc must not affect the file.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_MATPLOTLIB_SETTINGS)
        figure = sheet.to_matplotlib_figure(draw_chart_on_sheet(sheet, chart), chart.title)
        metadata_texts = {
            "Title": f"{chart.title} ({page_title})",
            _DESCRIPTION_KEY_BY_FORMAT[file_format]: sheet.description,
        }
        file = BytesIO()
        metadata = {key: _printable_line(text) for key, text in metadata_texts.items()} | _OMITTED_DATES[file_format]
        figure.savefig(file, format=file_format, dpi=_FILE_PIXELS_PER_INCH, metadata=metadata)
    return file.getvalue()


class _PictureSheet(ChartSheet):
    """Collects shapes and texts, in pixels of the sheet, and draws them with matplotlib."""

    def __init__(self, chart: AnyChart) -> None:
        super().__init__(chart)
        self._shapes: list[tuple[int, SvgPathCommands, CssProperties]] = []
        self._texts: list[tuple[float, float, str, dict[str, Any]]] = []

    def add_lines(
        self, style: str, lines: Sequence[Polyline], layer: int = 1, hint: str = "", closed: bool = False
    ) -> None:
        self._shapes.append((layer, line_commands(lines, closed), css_properties("path", style)))

    def add_dot(self, style: str, shape: str, x: float, y: float, size: float = 8.0, hint: str = "") -> None:
        path_commands = []
        for command, coordinates in shape_outline(shape, size):
            offsets = itertools.cycle((x, y))
            path_commands.append(
                (command, [coordinate + offset for coordinate, offset in zip(coordinates, offsets, strict=False)])
            )
        self._shapes.append((2, path_commands, css_properties("path", style)))

    def add_text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        text_css_properties = css_properties("text", style)
        options = {
            "color": text_css_properties["fill"],
            "fontweight": "bold" if int(text_css_properties.get("font-weight", 400)) >= _MIN_BOLD_WEIGHT else "normal",
            "fontsize": self.font_size,
            "ha": {"start": "left", "middle": "center", "end": "right"}[anchor],
        }
        # Lower the baseline, so that lowercase letters are centred on `y`, as in `ChartSheet.add_text`.
        self._texts.append((x, y + 0.36 * self.font_size, text, options))

    def to_matplotlib_figure(self, height: float, title: str) -> Figure:
        # 1. Make room for the title above the chart and the description below it. 0.62 and 0.55 are estimates of a
        # character's width, as a multiple of the font size.
        figure_width = self.width + 2 * _PICTURE_MARGIN
        title_lines = textwrap.wrap(_printable_line(title), int(self.width / (0.62 * _TITLE_FONT_SIZE)))
        description_lines = textwrap.wrap(
            _printable_line(self.description), int(self.width / (0.55 * _DESCRIPTION_FONT_SIZE))
        )
        top = _PICTURE_MARGIN + 1.4 * _TITLE_FONT_SIZE * len(title_lines) + 8
        figure_height = top + height + 12 + _DESCRIPTION_LINE_HEIGHT * len(description_lines) + _PICTURE_MARGIN
        # The background is the CSS variable --raised, which the style sheet defines for all elements.
        figure = Figure(
            figsize=(figure_width / _PIXELS_PER_INCH, figure_height / _PIXELS_PER_INCH),
            facecolor=css_properties("path", "")["--raised"],
        )
        # Convert pixels (y points down from the top of the chart) into fractions of the figure (y points up).
        transform = (
            Affine2D().translate(_PICTURE_MARGIN, top).scale(1 / figure_width, -1 / figure_height).translate(0, 1)
            + figure.transFigure
        )
        # 2. Draw all shapes, then all texts.
        for layer, steps, look in self._shapes:
            if (patch := _make_path_patch(steps, look)) is not None:
                patch.set(transform=transform, zorder=layer)
                figure.add_artist(patch)
        texts = list(self._texts)
        title_text_options = {
            "color": css_properties("text", "")["fill"],
            "fontsize": _TITLE_FONT_SIZE,
            "fontweight": "bold",
        }
        texts += [
            (0.0, 1.4 * _TITLE_FONT_SIZE * (n + 0.7) + _PICTURE_MARGIN - top, line, title_text_options)
            for n, line in enumerate(title_lines)
        ]
        description_text_style = {
            "color": css_properties("text", "quiet")["fill"],
            "fontsize": _DESCRIPTION_FONT_SIZE,
        }
        texts += [
            (0.0, height + 12 + _DESCRIPTION_LINE_HEIGHT * (n + 0.7), line, description_text_style)
            for n, line in enumerate(description_lines)
        ]
        for x, y, text, options in texts:
            text_artist = figure.text(
                x, y, _printable_line(text), transform=transform, zorder=3, va="baseline", **options
            )
            # A dollar sign in a name must not start a formula.
            text_artist.set(
                parse_math=False,
                rotation_mode="anchor",
                fontsize=options["fontsize"] * _POINTS_PER_INCH / _PIXELS_PER_INCH,
            )
        return figure


def _make_path_patch(steps: SvgPathCommands, look: CssProperties) -> PathPatch | None:
    """Returns a matplotlib patch for a path with the CSS properties `look`, or None if the path is invisible."""
    fill_color_and_opacity = _color_and_opacity(look, "fill")
    stroke_color_and_opacity = _color_and_opacity(look, "stroke")
    if not (fill_color_and_opacity[1] or stroke_color_and_opacity[1]):
        return None
    points: list[tuple[float, float]] = []
    matplotlib_path_codes: list[Any] = []
    for command, coordinates in steps:
        coordinate_pairs = list(zip(coordinates[::2], coordinates[1::2], strict=True))
        # Lengthen a line of zero length, because matplotlib would omit it. With round line ends it is a dot.
        if command == "L" and coordinate_pairs == points[-1:]:
            coordinate_pairs = [(coordinates[0] + 0.01, coordinates[1])]
        # matplotlib needs a point for each code, also for the one that closes a path.
        points += coordinate_pairs or [points[0]]
        matplotlib_path_codes += _MATPLOTLIB_PATH_CODES[command]
    width = float(look.get("stroke-width", "1").removesuffix("px")) * _POINTS_PER_INCH / _PIXELS_PER_INCH
    # matplotlib calls CSS's square line ends 'projecting'.
    line_cap_style = {"square": "projecting"}.get(
        look.get("stroke-linecap", "butt"), look.get("stroke-linecap", "butt")
    )
    return PathPatch(
        Path(points, matplotlib_path_codes),
        facecolor=fill_color_and_opacity,
        edgecolor=stroke_color_and_opacity,
        linewidth=width if stroke_color_and_opacity[1] else 0.0,
        capstyle=line_cap_style,
        joinstyle="round",
        snap=False if line_cap_style == "round" else None,
    )


def _color_and_opacity(look: CssProperties, name: str) -> tuple[str, float]:
    color = look.get(name, "none")
    return ("#ffffff", 0.0) if color == "none" else (color, float(look.get(f"{name}-opacity", "1")))


def _printable_line(text: str) -> str:
    """Returns the text on one line, without characters that fonts, XML or metadata cannot represent."""
    return " ".join(FORBIDDEN_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text).split())


@cache
def css_properties(kind: str, classes: str) -> CssProperties:
    """Returns the CSS properties that a path or text with these classes has in the page's light theme."""
    matching_properties: dict[str, str] = {}
    # As in CSS, a rule with more classes overrides one with fewer.
    for names, properties in sorted(_css_rules(), key=lambda rule: len(rule[0] - {":root", "path", "text"})):
        if names <= {":root", kind, *classes.split()}:
            matching_properties |= properties
    # Replace CSS variables by their values, which may contain further variables. In var(--a, var(--b)), the first
    # variable that has a value counts.
    while variable_texts := {name: text for name, text in matching_properties.items() if "var(" in text}:
        for name, text in variable_texts.items():
            defined_variable_values = [
                matching_properties[variable]
                for variable in re.findall(r"--[\w-]+", text)
                if variable in matching_properties
            ]
            matching_properties[name] = next(iter(defined_variable_values), "none")
    return matching_properties


@cache
def _css_rules() -> Sequence[tuple[frozenset[str], CssProperties]]:
    """Returns the CSS rules of both style sheets as (tags and classes, properties). Rules in @media blocks are left
    out.
    """
    page = files("fp8bench.report.page")
    text = page.joinpath("style.css").read_text("utf-8") + page.joinpath("drawing", "charts.css").read_text("utf-8")
    # Remove comments and @ rules with a block, such as @media.
    text = re.sub(r"/\*.*?\*/|@[^{;]+\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", text, flags=re.DOTALL)
    rules = []
    for selectors, declarations in re.findall(r"([^{}]+)\{([^{}]*)\}", text):
        declared_properties = dict(re.findall(r"([\w-]+):\s*([^;]+?)\s*(?:;|$)", declarations.strip()))
        rules += [(names, declared_properties) for names in _parse_css_selectors(selectors)]
    return rules


def _parse_css_selectors(selectors: str) -> Iterator[frozenset[str]]:
    """Yields the tag and classes of each selector that applies to drawings, such as '.drawing .a.b' or ':root'. Skips
    other selectors.

    A selector ':is(.a, .b)' gives one result for each alternative.
    """
    for selector in re.split(r",(?![^(]*\))", selectors):
        # Only the page's rules for drawings apply to a picture.
        name = selector.strip().removeprefix(".drawing ")
        if name == ":root":
            yield frozenset({name})
        elif selector.strip() != name:
            match = re.fullmatch(r":is\(([^)]*)\)", name)
            for alternative in match[1].split(",") if match else [name]:
                if re.fullmatch(r"(text|path|(\.[\w-]+)+)", alternative.strip()):
                    yield frozenset(filter(None, alternative.strip().split(".")))
