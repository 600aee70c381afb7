"""Pictures of charts by matplotlib: what the page shows, in any format, on any machine."""

from __future__ import annotations

import re
import sys
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from fp8bench.cli.main import main
from fp8bench.report.elements import PICTURE_FORMATS, Bars, ChartAxis, ChartMark, Tone
from fp8bench.report.page.drawing.draw import draw_chart_as_svg
from fp8bench.report.page.drawing.pictures import draw_chart_picture
from tests.counts import for_each, paired
from tests.report.test_drawing import CHARTS, KINDS, parsed, texts_of

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "reports" / "sample" / "run.jsonl"
STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
GREEN = "#146c3c"


def texts_in(svg: bytes) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form"), paired([*CHARTS], [*PICTURE_FORMATS]))
def test_each_chart_in_each_format_is_the_same_bytes_again(kind: str, form: str) -> None:
    first = draw_chart_picture(CHARTS[kind], "page", form)
    assert first.startswith(STARTS[form]) and draw_chart_picture(CHARTS[kind], "page", form) == first


@KINDS
def test_every_text_of_the_page_is_in_the_picture(kind: str) -> None:
    chart = CHARTS[kind]
    texts = texts_in(draw_chart_picture(chart, "page", "svg"))
    for text in texts_of(parsed(draw_chart_as_svg(chart))):
        texts.remove(" ".join(text.split()))
    assert texts[0] == chart.title and " ".join(texts[1:]).startswith(chart.description)


def lengths(png: bytes) -> list[int]:
    """The length of each bar, counted in pixels of its colour."""
    pixels = imread(BytesIO(png))[:, :, :3]
    wanted = 0.75 * np.array([int(GREEN[n : n + 2], 16) / 255 for n in (1, 3, 5)]) + 0.25
    rows = (np.abs(pixels - wanted) < 0.02).all(axis=2).sum(axis=1)
    starts = [n for n in range(1, len(rows)) if rows[n] and not rows[n - 1]]
    return [int(rows[n : n + 20].max()) for n in starts]


def test_a_bar_is_as_long_as_its_value() -> None:
    """On a log scale from 1, read from the pixels."""
    marks = tuple(ChartMark(name, value, tone=Tone.GOOD) for name, value in (("a", 2.0), ("b", 4.0), ("c", 16.0)))
    chart = Bars("b", "B", "", ChartAxis("speed-up", "x"), (("", marks),))
    short, middle, long = lengths(draw_chart_picture(chart, "page", "png"))
    assert long > 500 and middle == pytest.approx(long / 2, abs=2) and short == pytest.approx(long / 4, abs=2)


# --- the command -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_writes_each_chart_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, page = tmp_path / "new", tmp_path / "page.html"
    words = ["report", str(STORED), "--store", str(tmp_path / "store"), "--html", str(page), "--plots", str(folder)]
    assert main([*words, "--plots-format", "svg,png,svg"]) == 0
    drawn = set(re.findall(r'<svg class="of-\w+" id="chart-([\w-]+)"', page.read_text()))
    assert drawn and {path.name for path in folder.iterdir()} == {
        f"{n}.{form}" for n in drawn for form in ("svg", "png")
    }
    assert capsys.readouterr().err == ""


@for_each(
    ("words", "said"),
    [
        (["--plots", "{}", "--plots-format", "jpeg"], "'jpeg' is not supported. Give one of png, svg, pdf"),
        (["--plots-format", "svg"], "Add --plots DIR"),
        (["--plots", "{}/file"], "cannot be written"),
        (["--plots", "{}", "--plots-format", "png,"], "empty name"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    given = [word.format(tmp_path) for word in words]
    assert main(["report", str(STORED), "--store", str(tmp_path / "store"), *given]) == 2
    assert said in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "store").exists()


@pytest.mark.slow
def test_without_matplotlib_the_page_is_written_and_pictures_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib" or name.endswith(".pictures")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["report", str(STORED), "--store", str(tmp_path / "store")]
    assert main(words) == 0 and "report.html" in capsys.readouterr().out
    assert main([*words, "--plots", str(tmp_path / "plots")]) == 2
    assert "pip install 'fp8bench[plots]'" in " ".join(capsys.readouterr().err.split())
