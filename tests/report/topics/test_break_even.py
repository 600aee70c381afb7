"""How break-even is told: words, the table, the chart, and a terminal's lines."""

from __future__ import annotations

import re

from fp8bench.analysis.break_even import SizedRatio, break_even
from fp8bench.model import Interval, Label, Scalar
from fp8bench.report.data.run import run_value
from fp8bench.report.elements import Scatter, Table, Text, Tone
from fp8bench.report.notebook import RunFrames
from fp8bench.report.topics.break_even import BreakEvenRow, break_even_rows, break_even_table, pays, swept
from tests.counts import for_each
from tests.materials import Made, built, material, of_kind, part, shapes, told


def swept_shapes(*speeds: float, labels: tuple[Label, ...] = ()) -> Made:
    """bf16 at m = 16, 32, 64, ... is so many times as fast as fp32; fp8 is emulated."""
    made = [shapes(params(16 << place), speed=speed, labels=labels) for place, speed in enumerate(speeds)]
    run, _ = shapes(*(params(16 << place) for place in range(len(speeds))))
    return run, {key: finding for _, findings in made for key, finding in findings.items()}


def params(m: int) -> dict[str, Scalar]:
    return {"m": m, "n": 64, "k": 64, "product": "forward"}


@for_each(
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
    found = break_even_table(panel, swept(panel), "")
    rows = [[field.text for field in row] for row in found.rows]
    assert [row[:3] for row in rows] == [["over m", "bf16", "fp32"], ["over m", "fp8", "fp32"]]
    assert rows[0][3].startswith("from m = 45 (") and rows[0][4:] == ["m = 16 to 128, 4 sizes", ""]
    assert rows[1][3:] == ["-", "m = 16 to 128, 4 sizes", "no ratio at 16, 32, 64 and 128: emulated here: no speed"]
    assert found.rows[0][3].tone is Tone.PLAIN and found.rows[1][3].tone is Tone.DOUBT


def test_remarks_name_what_is_not_sure() -> None:
    ((_, panel),) = material(swept_shapes(1.0, 1.0, 1.25, 2.0, labels=(Label.NOISY,))).panels()
    (row, _) = break_even_table(panel, swept(panel), "").rows
    assert row[5].text.startswith("too close to tell from 16 to ") and row[3].tone is Tone.DOUBT
    assert "; within the noise: 16 and 32; labels cast doubt on 16, 32, 64 and 128" in row[5].text


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


TWICE = swept_shapes(0.5, 2.0, 2.0, 0.5)


def of_bf16(made: Made) -> list[BreakEvenRow]:
    return [row for row in break_even_rows(*made) if row.mode == "bf16"]


@for_each(("speed", "pays"), [(2.0, "at every size"), (0.5, "nowhere")])
def test_without_a_crossing_words_say_all(speed: float, pays: str) -> None:
    (row,) = of_bf16(swept_shapes(speed, speed, speed))
    assert (row.pays, row.size, row.low, row.high, row.begins) == (pays, None, None, None, None)


def test_what_has_no_ratio_says_why() -> None:
    (row,) = (row for row in break_even_rows(*TWICE) if row.mode == "fp8")
    assert (row.pays, row.size, row.confidence) == ("", None, None) and "emulated here: no speed" in row.remarks


def test_a_run_without_a_sweep_has_none() -> None:
    made = shapes(params(16), params(32))
    assert not [*break_even_rows(*made)] and run_value(*made)["break_even"] == []
    assert RunFrames(made[0]).break_even.empty
