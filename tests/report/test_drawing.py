"""Charts as SVG: sound markup whatever comes in, the same bytes anywhere, and nothing seen that is not there."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import get_data_path
from matplotlib.font_manager import get_font

from fp8bench.features.train.curve_charts import ends_of
from fp8bench.report.elements import (
    AnyChart,
    Bars,
    ChartAxis,
    ChartPoint,
    Heat,
    Lines,
    Mark,
    Scatter,
    Sparks,
    Stacks,
    Strips,
    Tone,
    Waterfall,
)
from fp8bench.report.page.drawing import plots
from fp8bench.report.page.drawing import scale as limits
from fp8bench.report.page.drawing.draw import draw
from fp8bench.report.page.drawing.rows import chosen
from fp8bench.report.page.drawing.scale import Scale, escaped, fitted, shortened, shown, width
from fp8bench.report.page.drawing.sheet import looks_of
from tests.counts import for_each
from tests.pages import SPEED, TIME, charts

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "charts"
STYLE = (ROOT / "fp8bench" / "report" / "page" / "drawing" / "charts.css").read_text()


def mark(label: str, value: float, share: float = 0.02, tone: Tone = Tone.PLAIN) -> Mark:
    """A value with an interval of so much on either side."""
    return Mark(label, value, value * (1 - share), value * (1 + share), tone)


def bars(*marks: Mark, axis: ChartAxis = SPEED, start: float = 1.0) -> Bars:
    return Bars("speed", "Speed", "How fast each case is.", axis, (("", marks),), start)


CHARTS: dict[str, AnyChart] = {
    **{type(chart).__name__.lower(): chart for chart in charts()},
    "bars": Bars(
        "speed",
        "Speed-up over bf16",
        "Steps a second against bf16.",
        SPEED,
        (
            ("small", (mark("fp8", 1.31, tone=Tone.GOOD), mark("fp32", 0.47, tone=Tone.BAD))),
            ("large", (mark("fp16", 1.01, 0.12, Tone.DOUBT), Mark("bf16", 1.0, tone=Tone.STRONG, hint="reference"))),
        ),
        1.0,
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


def parsed(drawn: str) -> list[ElementTree.Element]:
    """The SVG elements of a drawing, read as XML."""
    return list(ElementTree.fromstring(f"<div>{drawn}</div>"))


def marks_of(sheet: ElementTree.Element) -> list[ElementTree.Element]:
    return [one for one in sheet.iter() if "mark" in one.get("class", "").split()]


def texts_of(sheet: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in sheet.iter("text")]


def described(chart: AnyChart) -> str:
    """The description in the first drawing."""
    return parsed(draw(chart))[0].findtext("desc") or ""


@KINDS
def test_golden(kind: str) -> None:
    """The bytes. After a wanted change write the new drawing to tests/golden/charts and look at it in a browser."""
    assert draw(CHARTS[kind]) + "\n" == (GOLDEN / f"{kind}.svg").read_text()


@KINDS
def test_a_drawing_is_two_sheets_with_title_and_description(kind: str) -> None:
    """One for a window, one for a telephone; each names itself, and holds its own parts only."""
    chart = CHARTS[kind]
    sheets = parsed(draw(chart))
    assert [sheet.get("class") for sheet in sheets] == [f"of-{kind} wide", f"of-{kind} narrow"]
    for sheet in sheets:
        assert sheet.tag == "svg" and sheet.get("role") == "group"
        title, description = sheet.find("title"), sheet.find("desc")
        assert title is not None and title.text == chart.title and title.get("id") == sheet.get("aria-labelledby")
        assert description is not None and description.get("id") == sheet.get("aria-describedby")
        assert (description.text or "").startswith(chart.description)


@KINDS
def test_only_markup_a_page_without_network_allows(kind: str) -> None:
    """No address, no style element, no script, no reference past the drawing; inline style is a width at most."""
    drawn = draw(CHARTS[kind])
    assert drawn.startswith("<svg ") and drawn.endswith("</svg>")
    for word in ("http", "url(", "<?xml", "<!", "<style", "<script", "xlink", "metadata", "font-family", "@import"):
        assert word not in drawn
    for sheet in parsed(drawn):
        ids = {one.get("id") for one in sheet.iter()}
        for one in sheet.iter():
            assert re.fullmatch(r"(min-width:\d+px)?", one.get("style", ""))
            assert one.get("href", "#")[0] == "#" and one.get("href", "#" + (sheet.get("id") or ""))[1:] in ids


@KINDS
def test_every_class_has_a_style(kind: str) -> None:
    """charts.css knows what is drawn: a class it does not name would be drawn as nothing, or black."""
    used = {
        word for sheet in parsed(draw(CHARTS[kind])) for one in sheet.iter() for word in one.get("class", "").split()
    }
    drawn_by_default = {f"of-{kind}", "label", "value", "plain"}
    assert {word for word in used - drawn_by_default if f".{word}" not in STYLE} == set()


@KINDS
def test_marks_can_be_reached_and_say_what_they_are(kind: str) -> None:
    """By keyboard and by pointing: a role, a short label, a hint that begins with it."""
    counts = {"bars": 4, "scatter": 4, "stacks": 6, "heat": 6, "lines": 9, "strips": 2, "waterfall": 5, "sparks": 2}
    for sheet in parsed(draw(CHARTS[kind])):
        marks = marks_of(sheet)
        assert len(marks) == counts[kind]
        for one in marks:
            assert one.get("tabindex") == "0" and one.get("role") == "img"
            assert one.get("aria-label") and (one.get("data-hint") or "").startswith(one.get("aria-label") or "?")


PROGRAM = """
from tests.report.test_drawing import CHARTS, draw
print("".join(draw(chart) for chart in CHARTS.values()))
"""


@pytest.mark.slow
def test_the_same_bytes_in_any_process() -> None:
    """Whatever the hash seed and the locale, and without matplotlib."""
    outputs = []
    for seed, locale in (("1", "C"), ("77", "C.UTF-8")):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "LC_ALL": locale,
            "PYTHONIOENCODING": "utf-8",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        outputs.append(done.stdout.decode().strip())
    assert outputs[0] == outputs[1] == "".join(draw(chart) for chart in CHARTS.values())


# --- whatever comes in -------------------------------------------------------------------------------------------

WILD = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=40),
    st.sampled_from(
        [
            "<script>alert(1)</script>",
            "a & b",
            "\"quoted\" 'name'",
            "$x^2$",
            "🚀👩‍🚀",
            "שלום עולם",
            "\x00\x1b[31m",
            "]]>",
            "n" * 300,
        ]
    ),
)
NUMBERS = st.one_of(
    st.floats(),
    st.floats(0.2, 5),
    st.sampled_from([0.0, 1.0, 1e-300, 1e300, -1e300, 5e-324, math.inf, -math.inf, math.nan]),
)
AXES = st.builds(ChartAxis, WILD, st.sampled_from(["", "s", "B", "x", "J", "%"]), st.booleans())
TONES = st.sampled_from(Tone)
MARKS = st.builds(Mark, WILD, NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS, TONES, WILD, WILD)
POINTS = st.builds(
    ChartPoint, st.sampled_from(["a", "b", "<c>"]) | WILD, WILD, st.none() | NUMBERS, NUMBERS, TONES, WILD,
    st.sampled_from(["", "x"]),
)  # fmt: skip


def few(things: st.SearchStrategy[object], most: int = 5) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(things, max_size=most).map(tuple)


def many(count: int, thing: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.tuples(*[thing] * count)


def rows_of(count: int, rows: int, thing: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    """So many rows, as long as there are columns."""
    return many(rows, many(count, thing))


WORDS = (st.just("name"), WILD, WILD)
SIZES = st.tuples(st.integers(0, 5), st.integers(0, 5))
CELLS = st.none() | NUMBERS
ANY = {
    "bars": st.builds(Bars, *WORDS, AXES, few(st.tuples(WILD, few(MARKS))), NUMBERS),
    "scatter": st.builds(Scatter, *WORDS, AXES, AXES, few(POINTS, 20), WILD, st.just(("a", "b"))),
    "stacks": st.integers(0, 5).flatmap(
        lambda parts: st.builds(
            Stacks, *WORDS, AXES, many(parts, st.just("unattributed") | WILD),
            few(st.tuples(WILD, many(parts, NUMBERS))),
        )
    ),
    "heat": SIZES.flatmap(
        lambda size: st.builds(
            Heat, *WORDS, many(size[0], WILD), many(size[1], WILD), rows_of(size[1], size[0], CELLS), AXES,
            rows_of(size[1], size[0], WILD),
        )
    ),
    "lines": st.integers(0, 5).flatmap(
        lambda places: st.builds(
            Lines, *WORDS, many(places, WILD), AXES, few(st.tuples(WILD, many(places, st.none() | MARKS))),
            settled=st.integers(0, places),
        )
    ),
    "sparks": SIZES.flatmap(
        lambda size: st.builds(
            Sparks, *WORDS, many(size[0], WILD), many(size[1], WILD), st.just(("a", "b")),
            few(st.tuples(WILD, rows_of(2, size[1], many(size[0], CELLS)))),
        )
    ),
    "strips": st.builds(Strips, *WORDS, AXES, few(st.tuples(WILD, few(NUMBERS, 50), TONES))),
    "waterfall": st.builds(Waterfall, *WORDS, AXES, st.tuples(WILD, NUMBERS), few(MARKS), st.tuples(WILD, NUMBERS)),
}  # fmt: skip


@KINDS
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_anything_is_drawn_soundly(kind: str, data: st.DataObject) -> None:
    """Wild texts and numbers: sound XML, every number in it a number, every text as it came."""
    drawn = draw(data.draw(ANY[kind]))
    sheets = parsed(drawn)
    assert sheets
    for sheet in sheets:
        for one in sheet.iter():
            assert one.tag in ("svg", "title", "desc", "defs", "path", "use", "text")
            geometry = " ".join(one.get(name, "") for name in ("d", "x", "y", "viewBox"))
            assert not re.search(r"nan|inf|e[+-]?\d|\d\.\d{3}", geometry, re.IGNORECASE)
    assert "<script" not in drawn


@for_each("text", ["<b>&amp;</b>", "a \" b ' c", "🚀 שלום", "$x^2$ \\frac{1}{2}"])
def test_texts_show_as_they_are(text: str) -> None:
    """Escaped once: what the reader sees is what the user wrote."""
    sheet = parsed(draw(Bars("n", text, text, ChartAxis(text, "x"), ((text, (mark(text, 1.2),)),), 1.0)))[0]
    assert sheet.findtext("title") == text and sheet.findtext("desc") == text
    assert texts_of(sheet).count(text) == 3
    assert (marks_of(sheet)[0].get("data-hint") or "").startswith(text)


@for_each("bold", [False, True])
def test_widths_are_those_of_a_wide_font(bold: bool) -> None:
    """No letter of DejaVu Sans, which is wider than what most pages are read in, is wider than it is taken for."""
    font = get_font(get_data_path() + f"/fonts/ttf/DejaVuSans{'-Bold' if bold else ''}.ttf")
    font.set_size(100, 72)
    real = {chr(code): font.load_char(code).linearHoriAdvance / 65536 / 100 for code in range(32, 127)}
    assert {letter: one for letter, one in real.items() if one > width(letter, 1, bold) + 0.005} == {}
    assert {letter: one for letter, one in real.items() if width(letter, 1, bold) > 1.5 * one} == {}


def test_what_xml_cannot_hold_is_replaced() -> None:
    assert escaped("a\x00b\ud800\n<") == "a\ufffdb\ufffd&#10;&lt;"


def test_a_long_name_is_cut_in_its_middle() -> None:
    """Both ends tell cases apart; all of it is in the hint."""
    name = "first " + "x" * 290 + " last"
    sheet = parsed(draw(bars(mark(name, 1.2))))[0]
    label = next(text for text in texts_of(sheet) if "\u2026" in text)
    assert label.startswith("first") and label.endswith("last") and len(label) < 60
    assert name in (marks_of(sheet)[0].get("data-hint") or "")
    assert width(shortened(name, 100, 13), 13) <= 100.01


@for_each(
    "chart",
    [
        bars(),
        bars(Mark("nan", math.nan)),
        Scatter("s", "S", "", SPEED, TIME, ()),
        Stacks("s", "S", "", TIME, ("a",), (("row", (0.0,)),)),
        Heat("s", "S", "", (), (), (), SPEED, ()),
        Heat("s", "S", "", ("a",), ("b",), ((None,),), SPEED, (("",),)),
        Lines("s", "S", "", ("a",), TIME, (("b", (None,)),)),
        Strips("s", "S", "", TIME, (("a", (), Tone.PLAIN),)),
        Waterfall("w", "W", "", TIME, ("a", math.nan), (), ("b", 1.0)),
    ],
)
def test_nothing_to_draw_is_said(chart: AnyChart) -> None:
    """A sheet with a sentence, an image without parts."""
    for sheet in parsed(draw(chart)):
        assert texts_of(sheet) == ["Nothing to draw: no value here has a place on the axis."]
        assert sheet.get("role") == "img"


def test_what_is_not_drawn_is_counted() -> None:
    """In the description: numbers that are none, and bars that find no room."""
    marks = [Mark("inf", math.inf), Mark("nan", math.nan), Mark("ok", 1.2, -math.inf, 2.0), *([mark("x", 1.1)] * 30)]
    chart = bars(*marks)
    assert described(chart) == (
        "How fast each case is. 3 numbers are not finite or without a place on the axis, and not drawn. "
        "6 more are in the table only."
    )
    assert len(marks_of(parsed(draw(chart))[0])) == limits.BARS


# --- chart by chart ----------------------------------------------------------------------------------------------


def spans(drawn: str, style: str) -> list[tuple[float, float]]:
    """Left and right ends of the shapes of a class, in the first sheet."""
    found = []
    for one in parsed(drawn)[0].iter("path"):
        if one.get("class") == style:
            data = re.findall(r"[MLHV][-\d. ]+", one.get("d", ""))
            xs = [float(part[1:].split()[0]) for part in data if part[0] != "V"]
            found.append((min(xs), max(xs)))
    return found


def test_twice_as_fast_and_half_as_fast_are_equally_far() -> None:
    """Ratios stand on a logarithmic axis, whether it was asked for or not."""
    drawn = draw(bars(Mark("fast", 2.0), Mark("slow", 0.5)))
    (start, fast), (slow, start_too) = spans(drawn, "bar plain")
    assert fast - start == pytest.approx(start_too - slow, abs=0.02)
    assert {"0.5x", "1x", "2x"} <= set(texts_of(parsed(drawn)[0]))


def test_a_value_stands_past_the_end_of_its_bar() -> None:
    """And past its interval, away from the start."""
    sheet = parsed(draw(bars(mark("fast", 1.5), mark("slow", 0.6))))[0]
    values = {one.text: one for one in sheet.iter("text") if (one.text or "").endswith("00x")}
    whiskers = spans(draw(bars(mark("fast", 1.5), mark("slow", 0.6))), "whisker")
    assert values["1.500x"].get("text-anchor") is None and float(values["1.500x"].get("x", "")) > whiskers[0][1]
    assert values["0.600x"].get("text-anchor") == "end" and float(values["0.600x"].get("x", "")) < whiskers[1][0]


def test_a_group_without_a_bar_has_no_heading() -> None:
    groups = (("empty", ()), ("nan", (Mark("a", math.nan),)), ("full", (Mark("b", 1.1),)))
    texts = texts_of(parsed(draw(Bars("n", "", "", SPEED, groups, 1.0)))[0])
    assert "full" in texts and not {"empty", "nan"} & set(texts)


def test_errors_are_dots() -> None:
    """A logarithmic axis has no place where a bar could begin: 0 is not on it."""
    drawn = draw(bars(Mark("a", 2.3e-7), Mark("b", 1e-3), axis=ChartAxis("error", "", log=True), start=0.0))
    sheet = parsed(drawn)[0]
    dots = [float(one.get("x", "0")) for one in sheet.iter("use") if one.get("class") == "dot plain"]
    assert len(dots) == 2 and dots[0] < dots[1] and not spans(drawn, "bar plain") and len(marks_of(sheet)) == 2


def test_shares_are_written_as_such() -> None:
    """And that they sum to 100% is not."""
    chart = Stacks("s", "", "", ChartAxis("share", "%"), ("a", "b"), (("row", (97.25, 2.75)),))
    texts = texts_of(parsed(draw(chart))[0])
    assert {"0%", "20%", "97%"} <= set(texts) and texts.count("100%") == 1
    assert marks_of(parsed(draw(chart))[0])[0].get("data-hint") == "row, a: 97.2%"


def test_an_interval_without_ends_is_no_whisker() -> None:
    chart = bars(Mark("a", 1.2, -math.inf, math.inf))
    assert spans(draw(chart), "whisker") == []
    assert marks_of(parsed(draw(chart))[0])[0].get("data-hint") == "a: 1.200x"


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.floats(0.01, 100), min_size=1, max_size=12), narrow=st.booleans())
def test_nothing_runs_over_the_sheet(values: list[float], narrow: bool) -> None:
    """Texts are estimated in a wide font, and stay inside the sheet."""
    sheet = parsed(draw(bars(*(mark(f"case {value:.3g}", value) for value in values))))[narrow]
    wide = float(sheet.get("viewBox", "").split()[2])
    for one in sheet.iter("text"):
        long, x = width(one.text or "", 12 if narrow else 13), float(one.get("x", ""))
        left = x - {"end": long, "middle": long / 2}.get(one.get("text-anchor", ""), 0.0)
        assert left >= -0.5 and left + long <= wide + 0.5


def test_joined_series_are_lines() -> None:
    """From point to point by their places, not by their order; the others, and a lone point, have none."""
    points = [ChartPoint("a", "", x, y) for x, y in ((2.0, 1.0), (1.0, 1.0), (3.0, 2.0))]
    points += [ChartPoint("b", "", 1.0, 2.0), ChartPoint("b", "", 2.0, 2.0), ChartPoint("c", "", 2.0, 2.0)]
    chart = Scatter("s", "", "", SPEED, TIME, tuple(points), joined=("a", "c"))
    sheet = draw(chart)
    assert sheet.count('class="line s1"') == 2 and 'class="line s2"' not in sheet and 'class="line s3"' not in sheet
    assert re.search(r'class="line s1" d="M[^LHV]+[LHV][^LHV]+[LHV][^LHV]+"', sheet)


def test_points_all_without_x_need_no_plot() -> None:
    chart = Scatter(
        "s", "", "", SPEED, TIME, (ChartPoint("a", "one", None, 1.0), ChartPoint("b", "two", None, 2.0)), "emulated"
    )
    sheet = parsed(draw(chart))[0]
    assert len(marks_of(sheet)) == 2 and SPEED.title not in texts_of(sheet)


def test_series_differ_by_shape_and_colour() -> None:
    """The first 64 of them by one or the other."""
    points = tuple(ChartPoint(f"s{n}", "", 1.0 + n, 1.0) for n in range(64))
    sheet = parsed(draw(Scatter("s", "", "", SPEED, TIME, points)))[0]
    assert len({(one.get("href"), one.get("class")) for one in marks_of(sheet)}) == 64
    assert len({one.get("href") for one in marks_of(sheet)[:8]}) == 8


def test_at_most_twelve_points_are_named_and_no_names_overlap() -> None:
    points = tuple(ChartPoint("a", f"point {n}", 1 + n % 7 + n / 50, 1 + n % 5 + n / 40) for n in range(60))
    sheet = parsed(draw(Scatter("s", "", "", ChartAxis("x"), ChartAxis("y"), points)))[0]
    boxes = []
    for one in sheet.iter("text"):
        if one.get("class") == "label":
            long, x, y = width(one.text or "", 13), float(one.get("x", "")), float(one.get("y", ""))
            left = x - {"end": long, "middle": long / 2}.get(one.get("text-anchor", ""), 0.0)
            boxes.append((left, y - 10, left + long, y + 3))
    assert 1 < len(boxes) <= limits.LABELS
    for number, a in enumerate(boxes):
        for b in boxes[:number]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_a_large_map_is_cut_and_scrolls() -> None:
    """At most 40 by 40 cells, one sheet for all windows, cells that can be pointed at and not tabbed to."""
    names = tuple(str(n) for n in range(45))
    cells = tuple(tuple(0.5 + 0.01 * (row + column) for column in range(45)) for row in range(45))
    chart = Heat("h", "", "", names, names, cells, SPEED, (("",) * 45,) * 45)
    (sheet,) = parsed(draw(chart))
    assert len(marks_of(sheet)) == 1600 and described(chart) == "425 more are in the table only."
    assert sheet.get("class") == "of-heat only" and (sheet.get("style") or "").startswith("min-width:")
    assert all(one.get("tabindex") is None and one.get("data-hint") for one in marks_of(sheet))


def test_a_map_of_other_figures_has_each_shade_as_often() -> None:
    """One far from all others leaves these apart; zero and less have a place."""
    rows = tuple(map(str, range(5)))
    cells = (*((2.0 * row - 2, 2.0 * row - 1) for row in range(4)), (6.0, 900.0))
    chart = Heat("h", "", "", rows, ("a", "b"), cells, ChartAxis("SQNR", "dB"), (("", ""),) * 5)
    sheet = parsed(draw(chart))[0]
    styles = [(one.get("class") or "").split()[-1] for one in marks_of(sheet)]
    assert styles == [shade for shade in ("level", "high-1", "high-2", "high-3", "high-4") for _ in range(2)]
    assert {"-2.0", "0.0", "-2.0 dB", "exact"} <= {*texts_of(sheet)} and not sheet.findall(".//*[@class='even']")


def test_points_have_their_intervals_on_the_axis_and_in_words() -> None:
    chart = Scatter("s", "", "", ChartAxis("size", "B", log=True), ChartAxis("rate", "B/s", log=True), (
        ChartPoint("a", "one", 1024.0, 1e6, low=1e3, high=1e9), ChartPoint("a", "two", 4096.0, 2e6)))  # fmt: skip
    sheet = parsed(draw(chart))[0]
    (whisker,) = sheet.findall(".//*[@class='whisker']")
    assert (whisker.get("d") or "").count("M") == 1 and {"1 kB/s", "1 GB/s"} <= {*texts_of(sheet)}
    hints = [one.get("data-hint") or "" for one in marks_of(sheet)]
    assert "rate 1.00 MB/s (1.00 kB/s to 1.00 GB/s)" in hints[0] and hints[1].endswith("rate 2.00 MB/s")


def test_series_look_alike_in_all_charts_of_a_page() -> None:
    """By the page's order; others come behind it, and where two would look alike the chart's own order decides."""
    assert looks_of(["b", "c"], ()) == looks_of(["b", "c"], ("x",)) == {"b": ("o", "s1"), "c": ("s", "s2")}
    assert looks_of(["c", "a"], ("a", "b")) == {"c": ("^", "s3"), "a": ("o", "s1")}
    order = tuple(map(str, range(9)))
    assert looks_of(["0", "8"], order) == {"0": ("o", "s1"), "8": ("s", "s2")}
    every = [f"n{number}" for number in range(64)]
    assert len({*looks_of(every, ("n3", "n1")).values()}) == 64


def test_levels_stand_where_the_axis_reaches_and_places_at_round_numbers() -> None:
    places = tuple(str(number) for number in range(1, 61))
    marks = tuple(Mark("", number / 30) for number in range(60))
    levels = ((1.0, "margin +1.0%"), (-1.0, "margin -1.0%"))
    sheet = parsed(draw(Lines("l", "", "", places, ChartAxis("gap", "%"), (("fp8", marks),), levels=levels)))[0]
    assert len(sheet.findall(".//*[@class='level-line']")) == 1
    assert "margin +1.0%" in texts_of(sheet) and "margin -1.0%" not in texts_of(sheet)
    assert [text for text in texts_of(sheet) if text.isdigit()] == ["10", "20", "30", "40", "50", "60"]


def test_long_histories_keep_their_end() -> None:
    """The newest places are drawn, a few of them named, some marks pointed at, those meant somehow among them."""
    places = tuple(f"commit {n}" for n in range(250))
    marks = tuple(mark("", 1.0 + n / 1000, tone=Tone.BAD if n == 123 else Tone.PLAIN) for n in range(250))
    chart = Lines("l", "", "", places, SPEED, (("one", marks),))
    sheet = parsed(draw(chart))[0]
    hints = [one.get("data-hint") or "" for one in marks_of(sheet)]
    assert described(chart) == "50 more are in the table only."
    assert limits.POINTED[False] <= len(hints) <= limits.POINTED[False] + 1
    assert hints[0].startswith("one, commit 50:") and hints[-1].startswith("one, commit 249:")
    assert any(hint.startswith("one, commit 123:") for hint in hints)
    assert "commit 249" in texts_of(sheet) and "commit 0" not in texts_of(sheet)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400))
def test_dots_are_chosen_evenly_over_the_sorted_samples(samples: list[float]) -> None:
    """Both ends stay, and so does the share of samples on either side of any value."""
    kept = chosen(samples)
    assert len(kept) == min(len(samples), limits.DOTS)
    assert (kept[0], kept[-1]) == (min(samples), max(samples))
    for edge in samples[:5]:
        below = sum(one <= edge for one in samples) / len(samples)
        assert sum(one <= edge for one in kept) / len(kept) == pytest.approx(below, abs=2 / len(kept))


def test_two_humps_stay_two_humps() -> None:
    """One path a row; a quarter of the samples lie far off, and a quarter of the dots."""
    samples = tuple(1.0 + n / 1e5 for n in range(300)) + tuple(2.0 + n / 1e5 for n in range(100))
    drawn = draw(Strips("s", "", "", TIME, (("a", samples, Tone.PLAIN),)))
    (dots,) = [one for one in parsed(drawn)[0].iter("path") if one.get("class") == "dots plain"]
    xs = [float(x) for x in re.findall(r"M([\d.]+) ", dots.get("d", ""))]
    assert len(xs) == limits.DOTS
    assert sum(x > (min(xs) + max(xs)) / 2 for x in xs) == limits.DOTS / 4
    assert "chosen evenly over their sorted order" in (parsed(drawn)[0].findtext("desc") or "")


# --- scales ------------------------------------------------------------------------------------------------------


def ticks(low: float, high: float, unit: str = "", log: bool = False, most: int = 6) -> list[str]:
    return [text for _, text in Scale(low, high, 0, 100, log, unit).ticks(most)]


def test_steps_have_round_numbers_below_them() -> None:
    """Where they lie between the places that are drawn; places that are far apart are written themselves."""
    steps = [str(step) for step in ends_of(300)]
    assert [text for _, text in plots._written(steps, 7)] == ["50", "100", "150", "200", "250", "300"]
    for place, text in plots._written(steps, 7):
        low, high = int(steps[math.floor(place)]), int(steps[math.ceil(place)])
        assert low + (high - low) * (place % 1) == pytest.approx(int(text))
    sizes = [str(4**power) for power in range(9)]
    assert [text for _, text in plots._written(sizes, 7)] == ["1", "16", "256", "4096", "65536"]


def test_ticks_read_as_a_person_writes_them() -> None:
    assert ticks(0.4, 2.2, "x", True) == ["0.5x", "0.75x", "1x", "1.5x", "2x"]
    assert ticks(0.2, 5, "x", True) == ["0.2x", "0.5x", "1x", "2x", "5x"]
    assert ticks(0.03, 1, "x", True) == ["0.05x", "0.1x", "0.2x", "0.5x", "1x"]
    assert ticks(0.96, 1.05, "x", True) == ["0.96x", "0.98x", "1x", "1.02x", "1.04x"]
    assert ticks(0, 0.0021, "s") == ["0 ms", "0.5 ms", "1 ms", "1.5 ms", "2 ms"]
    assert ticks(0, 5 * 2**30, "B") == ["0 GiB", "1 GiB", "2 GiB", "3 GiB", "4 GiB", "5 GiB"]
    assert ticks(1e-7, 1e-1, "", True) == ["1e-07", "1e-06", "1e-05", "1e-04", "1e-03", "0.01", "0.1"][:7]
    assert ticks(1e-3, 0.9, "ratio", True) == ["1e-03", "1e-02", "1e-01"]
    assert ticks(2e5, 3e9, "B/s", True) == ["1 MB/s", "10 MB/s", "100 MB/s", "1 GB/s"]
    assert ticks(1e-6, 3.0, "s", True) == ["1 us", "100 us", "10 ms", "1 s"]
    assert ticks(0, 1.3e12) == ["0 T", "0.25 T", "0.5 T", "0.75 T", "1 T", "1.25 T"]


@given(
    values=st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=6),
    log=st.booleans(),
    unit=st.sampled_from(["", "s", "B", "x", "J", "B/s", "dB", "ratio"]),
)
def test_any_axis_has_ticks_in_order_and_told_apart(values: list[float], log: bool, unit: str) -> None:
    """And every value stands between its ends."""
    scale = fitted(values, 10, 90, log, unit)
    found = scale.ticks(6)
    assert 1 <= len(found) <= 20
    assert [scale.at(value) for value, _ in found] == sorted(scale.at(value) for value, _ in found)
    assert len({text for _, text in found}) == len(found)
    assert all(9.99 <= scale.at(value) <= 90.01 for value in values)


def test_values_are_written_by_their_unit() -> None:
    assert [shown(0.0243, "s"), shown(1.0312, "x"), shown(2**31, "B")] == ["24.3 ms", "1.031x", "2.00 GiB"]
    assert [shown(0.0008, ""), shown(0.05, ""), shown(0.0, "")] == ["8.0e-04", "0.0500", "0"]
    assert [shown(12.4, "J"), shown(0.05, "ratio")] == ["12.4 J", "5.0e-02"]
