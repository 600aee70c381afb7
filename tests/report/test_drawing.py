"""Charts as SVG: sound markup whatever comes in, the same bytes anywhere, and nothing seen that is not there."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench.report.elements import (
    AnyChart,
    Bars,
    ChartAxis,
    ChartMark,
    ChartPoint,
    Lines,
    Scatter,
    Stacks,
    Tone,
)
from fp8bench.report.page.drawing import scale as limits
from fp8bench.report.page.drawing.draw import draw_chart_as_svg
from fp8bench.report.page.drawing.scale import AxisScale, escape, fit_axis_scale, show_number, text_width
from tests.counts import for_each
from tests.pages import SPEED, TIME, charts
from tests.told_before import Told, as_before

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "charts"
STYLE = (ROOT / "fp8bench" / "report" / "page" / "drawing" / "charts.css").read_text()


def mark(label: str, value: float, share: float = 0.02, tone: Tone = Tone.PLAIN) -> ChartMark:
    return ChartMark(label, value, value * (1 - share), value * (1 + share), tone)


def bars(*marks: ChartMark) -> Bars:
    return Bars("speed", "Speed", "How fast each case is.", SPEED, (("", marks),))


CHARTS: dict[str, AnyChart] = {
    **{type(chart).__name__.lower(): chart for chart in charts()},
    "bars": Bars(
        "speed",
        "Speed-up over bf16",
        "Steps a second against bf16.",
        SPEED,
        (
            ("small", (mark("fp8", 1.31, tone=Tone.GOOD), mark("fp32", 0.47, tone=Tone.BAD))),
            (
                "rounds",
                (
                    ChartMark("bf16", 1.0, samples=(0.98, 1.0, 1.03)),
                    ChartMark("fp8", 1.2, 1.1, 1.3, samples=(1.15, 1.3)),
                ),
            ),
            (
                "large",
                (mark("fp16", 1.01, 0.12, Tone.DOUBT), ChartMark("bf16", 1.0, tone=Tone.STRONG, hint="reference")),
            ),
        ),
    ),
    "lines": Lines(
        "history",
        "Over commits",
        "The best case of each run.",
        ("a1", "b2", "c3", "d4", "e5"),
        TIME,
        (
            ("bf16", tuple(mark("", one) for one in (0.024, 0.0241, 0.0239, 0.024, 0.0242))),
            ("fp8", (mark("", 0.017), None, mark("", 0.0172), mark("", 0.0199, tone=Tone.BAD), mark("", 0.0198))),
        ),
    ),
}
KINDS = for_each("kind", CHARTS)


def parsed(drawn: str) -> ElementTree.Element:
    return ElementTree.fromstring(drawn)


def marks_of(sheet: ElementTree.Element) -> list[ElementTree.Element]:
    return [element for element in sheet.iter() if "mark" in element.get("class", "").split()]


def texts_of(sheet: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in sheet.iter("text")]


def describe_chart(chart: AnyChart) -> str:
    return parsed(draw_chart_as_svg(chart)).findtext("desc") or ""


@KINDS
def test_drawings(kind: str) -> None:
    """After a deliberate change rewrite tests/golden/charts and look at it in a browser.

    The sheet names itself, loads nothing, uses only classes of charts.css, and has marks reachable by keyboard.
    """
    chart, drawn = CHARTS[kind], draw_chart_as_svg(CHARTS[kind])
    assert drawn + "\n" == (GOLDEN / f"{kind}.svg").read_text()
    for word in ("http", "url(", "<?xml", "<!", "<style", "<script", "xlink", "metadata", "font-family", "@import"):
        assert word not in drawn
    sheet = parsed(drawn)
    assert sheet.get("class") == f"of-{kind}"
    used = {word for element in sheet.iter() for word in element.get("class", "").split()}
    assert not {word for word in used - {f"of-{kind}", "label", "value", "plain"} if f".{word}" not in STYLE}
    assert sheet.get("role") == "group" and sheet.findtext("title") == chart.title
    assert (sheet.findtext("desc") or "").startswith(chart.description)
    ids = {element.get("id") for element in sheet.iter()}
    named = {sheet.get("aria-labelledby"), sheet.get("aria-describedby")}
    assert named | {element.get("href", "#")[1:] for element in sheet.iter() if element.get("href")} <= ids
    assert len(marks_of(sheet)) == MARKS_OF[kind]
    for mark in marks_of(sheet):
        assert mark.get("tabindex") == "0" and mark.get("role") == "img"
        assert mark.get("aria-label") and (mark.get("data-hint") or "").startswith(mark.get("aria-label") or "?")


MARKS_OF = {"bars": 6, "scatter": 4, "stacks": 6, "lines": 9}


# --- whatever comes in -------------------------------------------------------------------------------------------

HOSTILE = ["<script>alert(1)</script>", "\"a\" & 'b'", "$x^2$", "🚀👩‍🚀", "שלום עולם", "\x00\x1b[31m", "]]>", "n" * 300]
WILD = st.text(st.characters(exclude_categories=()), max_size=40) | st.sampled_from(HOSTILE)
ODD = [0.0, 1.0, 1e-300, 1e300, -1e300, 5e-324, math.inf, -math.inf, math.nan]
NUMBERS = st.one_of(st.floats(), st.floats(0.2, 5), st.sampled_from(ODD))
AXES = st.builds(ChartAxis, WILD, st.sampled_from(["", "s", "B", "x", "J", "%"]))
TONES = st.sampled_from(Tone)
MARKS = st.builds(ChartMark, WILD, NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS, TONES, WILD, WILD)
POINTS = st.builds(
    ChartPoint,
    st.sampled_from(["a", "b", "<c>"]) | WILD,
    WILD,
    st.none() | NUMBERS,
    NUMBERS,
    TONES,
    WILD,
    st.none() | NUMBERS,
    st.none() | NUMBERS,
)


def few(things: st.SearchStrategy[object], most: int = 5) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(things, max_size=most).map(tuple)


def many(count: int, thing: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.tuples(*[thing] * count)


WORDS = (st.just("name"), WILD, WILD)
ANY = {
    "bars": st.builds(Bars, *WORDS, AXES, few(st.tuples(WILD, few(MARKS)))),
    "scatter": st.builds(Scatter, *WORDS, AXES, AXES, few(POINTS, 20), WILD),
    "stacks": st.integers(0, 5).flatmap(
        lambda parts: st.builds(
            Stacks, *WORDS, AXES, many(parts, st.just("other") | WILD),
            few(st.tuples(WILD, many(parts, NUMBERS))),
        )
    ),
    "lines": st.integers(0, 5).flatmap(
        lambda places: st.builds(
            Lines, *WORDS, many(places, WILD), AXES, few(st.tuples(WILD, many(places, st.none() | MARKS))),
            settled=st.integers(0, places),
        )
    ),
}  # fmt: skip


@KINDS
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_anything_is_drawn_soundly(kind: str, data: st.DataObject) -> None:
    """Arbitrary texts and numbers give valid XML, finite coordinates, and unchanged texts."""
    drawn = draw_chart_as_svg(data.draw(ANY[kind]))
    for element in parsed(drawn).iter():
        assert element.tag in ("svg", "title", "desc", "defs", "path", "use", "text")
        geometry = " ".join(element.get(name, "") for name in ("d", "x", "y", "viewBox"))
        assert not re.search(r"nan|inf|e[+-]?\d|\d\.\d{3}", geometry, re.IGNORECASE)
    assert "<script" not in drawn


@for_each("text", ["<b>&amp;</b>", "a \" b ' c", "🚀 שלום", "$x^2$ \\frac{1}{2}"])
def test_texts_show_as_they_are(text: str) -> None:
    sheet = parsed(draw_chart_as_svg(Bars("n", text, text, ChartAxis(text, "x"), ((text, (mark(text, 1.2),)),))))
    assert sheet.findtext("title") == text and sheet.findtext("desc") == text
    assert texts_of(sheet).count(text) == 3
    assert (marks_of(sheet)[0].get("data-hint") or "").startswith(text)
    assert escape("a\x00b\ud800\n<") == "a\ufffdb\ufffd&#10;&lt;"


def test_what_is_not_drawn_is_counted() -> None:
    marks = [
        ChartMark("inf", math.inf),
        ChartMark("nan", math.nan),
        ChartMark("ok", 1.2, -math.inf, 2.0),
        *([mark("x", 1.1)] * 30),
    ]
    chart = bars(*marks)
    assert describe_chart(chart) == "How fast each case is. In the table only: 8."
    assert len(marks_of(parsed(draw_chart_as_svg(chart)))) == limits.MAX_BARS


def drawing(chart: AnyChart) -> list[str]:
    """The first sheet's description, and its drawing: texts, classes with hints, and rounded corners."""
    sheet = parsed(draw_chart_as_svg(chart))
    shapes = [element for element in sheet.iter() if element.tag in ("path", "use", "text") and element.get("class")]
    return [f"role {sheet.get('role')}: {describe_chart(chart)}".strip()] + [
        " ".join(filter(None, (shape.get("class"), shape.text or shape.get("data-hint"), places_of(shape))))
        for shape in shapes
    ]


def places_of(shape: ElementTree.Element) -> str:
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.0f}", shape.get("d", ""))


@as_before
def test_charts() -> Told:
    for claim, chart in {
        "no bars": bars(),
        "a bar that is no number": bars(ChartMark("nan", math.nan)),
        "no points": Scatter("s", "S", "", SPEED, TIME, ()),
        "parts of nothing": Stacks("s", "S", "", TIME, ("a",), (("row", (0.0,)),)),
        "no marks": Lines("s", "S", "", ("a",), TIME, (("b", (None,)),)),
    }.items():
        yield f"there is nothing to draw of {claim}", drawing(chart)
    groups = (("empty", ()), ("nan", (ChartMark("a", math.nan),)), ("full", (ChartMark("b", 1.1),)))
    yield "a group without a bar has no heading", drawing(Bars("n", "", "", SPEED, groups))
    shares = Stacks("s", "", "", ChartAxis("share", "%"), ("a", "b"), (("row", (97.25, 2.75)),))
    yield "shares are written as such, and that they sum to 100% is not", drawing(shares)
    aside = (ChartPoint("a", "one", None, 1.0), ChartPoint("b", "two", None, 2.0))
    yield "points all without x have no plot", drawing(Scatter("s", "", "", SPEED, TIME, aside, "emulated"))
    marks = tuple(ChartMark("", number / 30) for number in range(0, 60, 5))
    levels = ((1.0, "margin +1.0%"), (-1.0, "margin -1.0%"))
    places = tuple(map(str, range(12)))
    leveled = Lines("l", "", "", places, ChartAxis("gap", "%"), (("fp8", marks),), levels=levels)
    yield "levels stand where the axis reaches", drawing(leveled)


# --- chart by chart ----------------------------------------------------------------------------------------------


def spans(drawn: str, style: str) -> list[tuple[float, float]]:
    """Left and right ends of a class's shapes in the first sheet."""
    ends = []
    for element in parsed(drawn).iter("path"):
        if element.get("class") == style:
            data = re.findall(r"[MLHV][-\d. ]+", element.get("d", ""))
            xs = [float(part[1:].split()[0]) for part in data if part[0] != "V"]
            ends.append((min(xs), max(xs)))
    return ends


def test_each_sample_has_a_stroke_at_its_place() -> None:
    """1x and 2x are the ends of the first bar; non-finite samples have none."""
    drawn = draw_chart_as_svg(bars(ChartMark("a", 2.0), ChartMark("b", 1.5, samples=(1.0, 2.0, math.nan, 0.0))))
    (start, end), *_ = spans(drawn, "bar plain")
    assert spans(drawn, "samples plain") == [(pytest.approx(start, abs=0.02), pytest.approx(end, abs=0.02))]


@settings(max_examples=12, deadline=None)
@given(values=st.lists(st.floats(0.01, 100), min_size=1, max_size=12))
def test_nothing_runs_over_the_sheet(values: list[float]) -> None:
    sheet = parsed(draw_chart_as_svg(bars(*(mark(f"case {value:.3g}", value) for value in values))))
    wide = float(sheet.get("viewBox", "").split()[2])
    for element in sheet.iter("text"):
        long, x = text_width(element.text or "", 13), float(element.get("x", ""))
        left = x - {"end": long, "middle": long / 2}.get(element.get("text-anchor", ""), 0.0)
        assert left >= -0.5 and left + long <= wide + 0.5


# --- scales ------------------------------------------------------------------------------------------------------


@as_before
def test_ticks() -> Told:
    for low, high, unit, log in (
        (0.4, 2.2, "x", True),
        (0.2, 5, "x", True),
        (0.03, 1, "x", True),
        (0.96, 1.05, "x", True),
        (0, 0.0021, "s", False),
        (0, 5 * 2**30, "B", False),
        (1e-7, 1e-1, "", True),
        (1e-3, 0.9, "ratio", True),
        (2e5, 3e9, "B/s", True),
        (1e-6, 3.0, "s", True),
        (0, 1.3e12, "", False),
    ):
        ticks = AxisScale(low, high, 0, 100, log, unit).ticks(6)
        yield f"from {low:g} to {high:g} {unit}{', by factors' * log}", ", ".join(text for _, text in ticks)
    for value, unit in (
        (0.0243, "s"),
        (1.0312, "x"),
        (2**31, "B"),
        (0.0008, ""),
        (0.05, ""),
        (0.0, ""),
        (12.4, "J"),
        (0.05, "ratio"),
    ):
        yield f"{value} {unit}", show_number(value, unit)


@given(
    values=st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=6),
    log=st.booleans(),
    unit=st.sampled_from(["", "s", "B", "x", "J", "B/s", "dB", "ratio"]),
)
def test_any_axis_has_ticks_in_order_and_told_apart(values: list[float], log: bool, unit: str) -> None:
    scale = fit_axis_scale(values, 10, 90, log, unit)
    ticks = scale.ticks(6)
    assert 1 <= len(ticks) <= 20
    assert [scale.to_pixels(value) for value, _ in ticks] == sorted(scale.to_pixels(value) for value, _ in ticks)
    assert len({text for _, text in ticks}) == len(ticks)
    assert all(9.99 <= scale.to_pixels(value) <= 90.01 for value in values)


def test_an_axis_is_as_wide_as_the_intervals_of_its_points() -> None:
    point = ChartPoint("bf16", "bf16", 1.01, 5e-3, x_low=0.9, x_high=1.2)
    chart = Scatter("s", "", "", SPEED, ChartAxis("error", "ratio"), (point,))
    drawn = draw_chart_as_svg(chart)
    ((left, right),) = spans(drawn, "whisker")
    (axis,) = spans(drawn, "axis")
    assert axis[0] < left < right < axis[1]
    assert right - left > 0.8 * (axis[1] - axis[0])
