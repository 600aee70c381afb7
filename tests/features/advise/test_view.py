"""The advisor's score, checks beside their predictions, and the checklist in the report."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.analysis.findings import findings
from fp8bench.features.advise.view import checks, score_page
from fp8bench.model import Interval, Level
from fp8bench.report.elements import Items, Table, Tone
from fp8bench.report.terminal.layout import render
from tests.advised import BF16, FP8, NANO, group, run
from tests.features.advise.test_job import CHECKED
from tests.materials import Made, built, of_kind, part
from tests.runs import transformer

MISSED = replace(CHECKED, measured=Interval(1.7, 1.6, 1.8, 0.99))
UNKNOWN = replace(CHECKED, measured=None, why="it was throttled")


def test_the_score_counts_what_was_measured() -> None:
    """By advice and rule; what came to no figure counts as none, and says why."""
    page = score_page([CHECKED, MISSED, UNKNOWN, CHECKED], ["line 3 is broken"])
    text = render(page, 100)
    assert "hit rate 67%: 2 of 3 checks" in text and "1 check came to no figure" in text and "line 3 is broken" in text
    (score, _) = (one for one in page.parts[0].elements if isinstance(one, Table))
    assert [[field.text for field in row] for row in score.rows] == [["adopt", "step", "2", "3"]]


def test_checks_stand_beside_what_was_predicted() -> None:
    rows = [[field.text for field in row] for row in checks([CHECKED, MISSED, UNKNOWN]).rows]
    assert [row[3] for row in rows] == ["yes", "no", "-"] and rows[2][-1] == "it was throttled"
    assert rows[0][1:3] == ["1.50x [1.40, 1.60]", "1.45x [1.40, 1.50]"]


def made(*groups: list[object]) -> Made:
    one = run(*groups)  # type: ignore[arg-type]
    return one, findings(one)


def table(*runs: Made) -> Table:
    return next(one for one in of_kind(part("advice", *runs), Table) if one.name.startswith("checklist"))


def test_each_question_has_a_row_with_its_figure() -> None:
    found = part("advice", made(group(fp8=FP8)))
    (items,) = of_kind(found, Items)
    assert items.items[0].tone is Tone.GOOD and items.items[0].text.endswith("(transformer@cuda:0).")
    rows = {row[1].text: row for row in table(made(group(fp8=FP8))).rows}
    assert rows["Is the whole step faster?"][2].text == "yes" and "1.32x" in rows["Is the whole step faster?"][3].text
    compiled = rows["Is the batch large enough?"]
    assert compiled[2].text == "not measured here" and compiled[4].text.startswith("measure it: fp8bench suite")


def test_what_an_emulation_leaves_open_is_one_row() -> None:
    """And nothing of it is green or red but that it is emulated."""
    rows = table(made(group(fp8={**BF16, "gemm": 1}, level=Level.EMULATED))).rows
    (left,) = (row for row in rows if "Is the whole step faster?" in row[1].text)
    assert "Do casts leave what the products gain?" in left[1].text and left[2].text == "not measured here"
    assert {row[1].text for row in rows if row[2].tone is Tone.GOOD} <= {"Are all results finite?"}


def test_of_several_settings_what_most_say() -> None:
    """With how many do, and at which one the figure is; parameters that all share are left out."""
    sizes = [
        group({**NANO, "batch": batch}, fp8={**FP8, "cast": cast}) for batch, cast in ((1, 4000), (2, 600), (4, 500))
    ]
    row = next(row for row in table(made(*sizes)).rows if row[1].text == "Is the whole step faster?")
    assert row[2].text == "yes (2 of 3)" and row[3].text.endswith("at transformer[batch=2]@cuda:0")


def test_a_label_makes_an_adoption_doubtful() -> None:
    run_, found = transformer()
    assert built("advice", (run_, found)) is not None
    items = [one for each in of_kind(part("advice", (run_, found)), Items) for one in each.items]
    assert not any(one.tone is Tone.GOOD for one in items)
