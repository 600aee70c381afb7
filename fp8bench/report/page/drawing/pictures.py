"""Charts as files for slides and papers, drawn by matplotlib like on the page, in its light colours.

A sheet collects the shapes, and the page's styles determine their look. Only --plots imports this module, and with it
matplotlib.
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
from fp8bench.report.page.drawing.draw import draw_on
from fp8bench.report.page.drawing.scale import FORBIDDEN
from fp8bench.report.page.drawing.sheet import Line, Sheet, Steps, along_lines, outline

# Pixels of the sheet, points of a font or line, and pixels of a file, in an inch.
_PIXELS = 96.0
_POINTS = 72.0
_DOTS = 192.0
_EDGE = 20.0
_TITLE = 17.0
_SMALL = 12.0
_LINE = 17.0
# Texts stay texts, fonts are embedded as journals require, and output is reproducible.
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "svg.hashsalt": "fp8bench",
    "path.simplify": False,
}
_CODES = {"M": [Path.MOVETO], "L": [Path.LINETO], "C": [Path.CURVE4] * 3, "z": [Path.CLOSEPOLY]}
# Each format's metadata key for a description, and dates, which would change the bytes.
_DESCRIBED_BY = {"png": "Description", "svg": "Description", "pdf": "Subject"}
_NO_DATES: dict[str, dict[str, None]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
_BOLD_FROM = 550

Style = Mapping[str, str]


def picture(chart: AnyChart, page_title: str, form: str) -> bytes:
    """Returns the chart as a file in that format, with its title above and its description below."""
    sheet = _PictureSheet(chart)
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters missing from the font are boxes
        # A user's matplotlibrc must not affect the file.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        figure = sheet.figure(draw_on(sheet, chart), chart.title)
        titles = {"Title": f"{chart.title} ({page_title})", _DESCRIBED_BY[form]: sheet.description}
        file = BytesIO()
        metadata = {key: _plain(text) for key, text in titles.items()} | _NO_DATES[form]
        figure.savefig(file, format=form, dpi=_DOTS, metadata=metadata)
    return file.getvalue()


class _PictureSheet(Sheet):
    """Collects what matplotlib draws, in the sheet's pixels."""

    def __init__(self, chart: AnyChart) -> None:
        super().__init__(chart)
        self._shapes: list[tuple[int, Steps, Style]] = []
        self._texts: list[tuple[float, float, str, dict[str, Any]]] = []

    def lines(self, style: str, lines: Sequence[Line], layer: int = 1, hint: str = "", closed: bool = False) -> None:
        self._shapes.append((layer, along_lines(lines, closed), looks("path", style)))

    def dot(self, style: str, shape: str, x: float, y: float, size: float = 8.0, hint: str = "") -> None:
        steps = []
        for command, numbers in outline(shape, size):
            shifts = itertools.cycle((x, y))
            steps.append((command, [number + shift for number, shift in zip(numbers, shifts, strict=False)]))
        self._shapes.append((2, steps, looks("path", style)))

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        look = looks("text", style)
        options = {
            "color": look["fill"],
            "fontweight": "bold" if int(look.get("font-weight", 400)) >= _BOLD_FROM else "normal",
            "fontsize": self.size,
            "ha": {"start": "left", "middle": "center", "end": "right"}[anchor],
        }
        self._texts.append((x, y + 0.36 * self.size, text, options))

    def figure(self, height: float, title: str) -> Figure:
        # 1. Make room for the title above the chart and the description below it.
        wide = self.width + 2 * _EDGE
        heading = textwrap.wrap(_plain(title), int(self.width / (0.62 * _TITLE)))
        words = textwrap.wrap(_plain(self.description), int(self.width / (0.55 * _SMALL)))
        top = _EDGE + 1.4 * _TITLE * len(heading) + 8
        high = top + height + 12 + _LINE * len(words) + _EDGE
        figure = Figure(figsize=(wide / _PIXELS, high / _PIXELS), facecolor=looks("path", "")["--raised"])
        place = Affine2D().translate(_EDGE, top).scale(1 / wide, -1 / high).translate(0, 1) + figure.transFigure
        # 2. Draw shapes, then texts.
        for layer, steps, look in self._shapes:
            if (patch := _patch(steps, look)) is not None:
                patch.set(transform=place, zorder=layer)
                figure.add_artist(patch)
        texts = list(self._texts)
        bold = {"color": looks("text", "")["fill"], "fontsize": _TITLE, "fontweight": "bold"}
        texts += [(0.0, 1.4 * _TITLE * (n + 0.7) + _EDGE - top, line, bold) for n, line in enumerate(heading)]
        quiet = {"color": looks("text", "quiet")["fill"], "fontsize": _SMALL}
        texts += [(0.0, height + 12 + _LINE * (n + 0.7), line, quiet) for n, line in enumerate(words)]
        for x, y, text, options in texts:
            artist = figure.text(x, y, _plain(text), transform=place, zorder=3, va="baseline", **options)
            # A dollar sign in a name does not start a formula.
            artist.set(parse_math=False, rotation_mode="anchor", fontsize=options["fontsize"] * _POINTS / _PIXELS)
        return figure


def _patch(steps: Steps, look: Style) -> PathPatch | None:
    """Returns a patch; None if it is invisible."""
    face = _color(look, "fill")
    edge = _color(look, "stroke")
    if not (face[1] or edge[1]):
        return None
    points: list[tuple[float, float]] = []
    codes: list[Any] = []
    for command, numbers in steps:
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        if command == "L" and pairs == points[-1:]:  # a dot made of round line ends, which matplotlib would omit
            pairs = [(numbers[0] + 0.01, numbers[1])]
        points += pairs or [points[0]]
        codes += _CODES[command]
    width = float(look.get("stroke-width", "1").removesuffix("px")) * _POINTS / _PIXELS
    cap = {"square": "projecting"}.get(look.get("stroke-linecap", "butt"), look.get("stroke-linecap", "butt"))
    return PathPatch(
        Path(points, codes),
        facecolor=face,
        edgecolor=edge,
        linewidth=width if edge[1] else 0.0,
        capstyle=cap,
        joinstyle="round",
        snap=False if cap == "round" else None,
    )


def _color(look: Style, name: str) -> tuple[str, float]:
    color = look.get(name, "none")
    return ("#ffffff", 0.0) if color == "none" else (color, float(look.get(f"{name}-opacity", "1")))


def _plain(text: str) -> str:
    """Returns one line of characters that fonts, XML and metadata can represent."""
    return " ".join(FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text).split())


@cache
def looks(kind: str, classes: str) -> Style:
    """Returns the properties that the page's light styles give a path or text with these classes."""
    look: dict[str, str] = {}
    for names, properties in sorted(_rules(), key=lambda rule: len(rule[0] - {":root", "path", "text"})):
        if names <= {":root", kind, *classes.split()}:
            look |= properties
    # Variables may refer to others.
    while variable_texts := {name: text for name, text in look.items() if "var(" in text}:
        for name, text in variable_texts.items():
            values = [look[variable] for variable in re.findall(r"--[\w-]+", text) if variable in look]
            look[name] = next(iter(values), "none")
    return look


@cache
def _rules() -> Sequence[tuple[frozenset[str], Style]]:
    """Returns the unconditional rules of both stylesheets for the page and drawings, by tag and class."""
    page = files("fp8bench.report.page")
    text = page.joinpath("style.css").read_text("utf-8") + page.joinpath("drawing", "charts.css").read_text("utf-8")
    text = re.sub(r"/\*.*?\*/|@[^{;]+\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", text, flags=re.DOTALL)
    rules = []
    for selectors, content in re.findall(r"([^{}]+)\{([^{}]*)\}", text):
        properties = dict(re.findall(r"([\w-]+):\s*([^;]+?)\s*(?:;|$)", content.strip()))
        rules += [(names, properties) for names in _parse_selectors(selectors)]
    return rules


def _parse_selectors(selectors: str) -> Iterator[frozenset[str]]:
    """Yields ':root' or '.drawing .a.b' as names, with ':is(.a, .b)' as alternatives; skips other selectors."""
    for selector in re.split(r",(?![^(]*\))", selectors):
        # Only rules for drawings on the page apply to a picture.
        name = selector.strip().removeprefix(".drawing ")
        if name == ":root":
            yield frozenset({name})
        elif selector.strip() != name:
            match = re.fullmatch(r":is\(([^)]*)\)", name)
            for alternative in match[1].split(",") if match else [name]:
                if re.fullmatch(r"(text|path|(\.[\w-]+)+)", alternative.strip()):
                    yield frozenset(filter(None, alternative.strip().split(".")))
