"""How break-even is told: words, the table, the chart, and a terminal's lines."""

from __future__ import annotations

import re

import pytest

from fp8bench.analysis.break_even import SizedRatio, break_even
from fp8bench.model import Interval, Label, Scalar
from fp8bench.report.break_evens import pays, swept, table
from fp8bench.report.elements import Scatter, Table, Text, Tone
from fp8bench.report.page import markdown
from fp8bench.report.page.section import page_of
from fp8bench.report.terminal import run as terminal
from tests.materials import Made, built, material, of_kind, part, shapes, told


def swept_shapes(*speeds: float, labels: tuple[Label, ...] = ()) -> Made:
    """bf16 at m = 16, 32, 64, ... is so many times as fast as fp32; fp8 is emulated."""
    made = [shapes(params(16 << place), speed=speed, labels=labels) for place, speed in enumerate(speeds)]
    run, _ = shapes(*(params(16 << place) for place in range(len(speeds))))
    return run, {key: finding for _, findings in made for key, finding in findings.items()}


def params(m: int) -> dict[str, Scalar]:
    return {"m": m, "n": 64, "k": 64, "product": "forward"}


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        ((0.5, 0.8, 1.25, 2.0), "from m = N (N to N) on"),
        ((2.0, 1.25, 0.8, 0.5), "up to m = N (N to N)"),
        ((0.5, 2.0, 2.0, 0.5), "from m = N (N to N) to N (N to N)"),
        ((2.0, 0.5, 0.5, 2.0), "up to m = N (N to N) and from m = N (N to N) on"),
        ((2.0, 2.0, 2.0), "at every size"),
        ((0.5, 0.5, 0.5), "nowhere"),
        ((1.0, 1.0, 1.0), "cannot be told: every size is within the noise"),
        ((2.0, 2.0, 1.0), "wherever it can be told"),
        ((0.5, 0.5, 1.0), "nowhere that can be told"),
    ],
)
def test_words(speeds: tuple[float, ...], words: str) -> None:
    """One crossing or several, or none."""
    intervals = (Interval(1 / one, 0.99 / one, 1.01 / one, 0.99) for one in speeds)
    found = break_even([SizedRatio(16 << place, one) for place, one in enumerate(intervals)])
    assert found is not None
    assert re.sub(r"\d+", "N", pays("m", found)) == words


def test_the_table_says_where_each_pays_and_why_not() -> None:
    """An emulation has no speed; one group that varies in nothing else needs no place."""
    ((_, panel),) = material(swept_shapes(0.5, 0.8, 1.25, 2.0)).panels()
    found = table(panel, swept(panel), "")
    rows = [[field.text for field in row] for row in found.rows]
    assert [row[:3] for row in rows] == [["over m", "bf16", "fp32"], ["over m", "fp8", "fp32"]]
    assert rows[0][3].startswith("from m = 45 (") and rows[0][4:] == ["m = 16 to 128, 4 sizes", ""]
    assert rows[1][3:] == ["-", "m = 16 to 128, 4 sizes", "no ratio at 16, 32, 64 and 128: emulated here: no speed"]
    assert found.rows[0][3].tone is Tone.PLAIN and found.rows[1][3].tone is Tone.DOUBT


def test_remarks_name_what_is_not_sure() -> None:
    ((_, panel),) = material(swept_shapes(1.0, 1.0, 1.25, 2.0, labels=(Label.NOISY,))).panels()
    (row, _) = table(panel, swept(panel), "").rows
    assert row[5].text.startswith("too close to tell from 16 to ") and row[3].tone is Tone.DOUBT
    assert "; within the noise: 16 and 32; labels cast doubt on 16, 32, 64 and 128" in row[5].text


def test_a_terminal_has_the_table_and_its_legend() -> None:
    run, findings = swept_shapes(0.5, 0.8, 1.25, 2.0)
    text = terminal.render(run, findings)
    assert "from where on it pays" in text and "bf16  fp32     from m = 45" in text
    assert "pays: The sizes at which" in " ".join(text.split())
    plain = terminal.render(*shapes(params(16), params(32)))
    assert "pays" not in plain


def test_the_chart_marks_the_crossing_on_the_lines() -> None:
    """Where both lines meet, with the numbers as a table beside it."""
    (chart,) = of_kind(part("break-even", swept_shapes(0.5, 0.8, 1.25, 2.0)), Scatter)
    assert chart.joined == ("fp32", "bf16") and chart.x.log and (chart.x.title, chart.y.title) == ("m", "FLOP/s")
    assert {point.series for point in chart.points} == {"fp32", "bf16", "break-even"}
    mark = chart.points[-1]
    assert mark.label.startswith("bf16: m = 45") and mark.tone is Tone.STRONG
    assert mark.x == pytest.approx(45.25, rel=0.02) and mark.y == pytest.approx(1e12, rel=0.02)
    assert chart.description.startswith("bf16 against fp32 pays from m = 45 (")


def test_markdown_has_the_points() -> None:
    text = markdown.render(page_of(material(swept_shapes(0.5, 0.8, 1.25, 2.0))))
    assert "From which size on it pays" in text and "from m = 45" in text and "| bf16 |" in text.replace("  ", " ")


def test_without_a_sweep_there_is_nothing() -> None:
    """Nor a table, nor a section."""
    assert built("break-even", shapes(params(16), params(32))) is None


def test_a_sweep_of_emulations_alone_says_so() -> None:
    """No line to draw, and a table with the reason."""
    run, findings = swept_shapes(2.0, 2.0, 2.0)
    only = [record for record in run.records if record.case.mode in ("fp32", "fp8")]
    made = type(run)(**{**vars(run), "records": tuple(only)}), findings
    found = part("break-even", made)
    assert of_kind(found, Text) == [] and [one.joined for one in of_kind(found, Scatter)] == [("fp32",)]
    lines = told(of_kind(found, Table))
    assert "emulated here: no speed" in " ".join(lines)
