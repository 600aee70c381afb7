"""The advisor's score, and checks beside their predictions."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.features.advise.view import checks, score_page
from fp8bench.model import Interval
from fp8bench.report.elements import Table
from fp8bench.report.terminal.layout import render
from tests.features.advise.test_kept import CHECKED

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
