"""The board of a training: what a row says, and what its bars draw."""

from __future__ import annotations

import math
from dataclasses import replace

from fp8bench.features.train.progress import PARTS, ArmNow, board_of
from fp8bench.report.elements import Table, Tone
from tests.learning_curves import CANDIDATE, REFERENCE

NOW = ArmNow(REFERENCE, ((6.0, 2), (2.0, 1), *((0.0, 0),) * (PARTS - 2)), 2.0, 2.5, 192, 0.01)


def rows(*arms: ArmNow, drawn: bool = True) -> dict[str, list[str]]:
    (part,) = board_of("seed 1/2, step 3/20", arms, drawn).parts
    (table,) = part.elements
    assert isinstance(table, Table)
    return {row[0].text: [field.text for field in row[1:]] for row in table.rows}


def test_a_row_says_loss_speed_and_health() -> None:
    """Means of parts are drawn on one scale for all arms; what has not been yet is blank, and no emulation is fast."""
    other = replace(NOW, arm=CANDIDATE, parts=((4.0, 2), (math.nan, 1), *NOW.parts[2:]), alarms=2,
                    last_alarm="seed 0, step 2")  # fmt: skip
    shown = rows(NOW, other)
    blank = " " * (PARTS - 2)
    assert shown["bf16"] == ["2.0000", "2.5000", "19.2 k", "no alarm", f"█▁{blank}"]
    assert shown["fp8"] == ["2.0000", "2.5000", "-", "2 alarms, last in seed 0, step 2", f"▁x{blank}"]
    assert rows(NOW, drawn=False)["bf16"] == ["2.0000", "2.5000", "19.2 k", "no alarm"]


def test_what_is_not_known_is_not_made_up() -> None:
    """Nothing at all yet; losses that are all the same, or no numbers; an arm that came to an early end."""
    assert rows(ArmNow(REFERENCE))["bf16"] == ["-", "-", "-", "no alarm", " " * PARTS]
    assert rows(replace(NOW, parts=((2.0, 1),) * PARTS))["bf16"][-1] == "▁" * PARTS
    assert rows(replace(NOW, parts=((math.inf, 1),) * PARTS))["bf16"][-1] == "x" * PARTS
    assert rows(replace(NOW, ended="stopped in step 9"))["bf16"][3] == "stopped in step 9"
    (part,) = board_of("", [NOW, replace(NOW, alarms=1)], drawn=True).parts
    (table,) = part.elements
    assert isinstance(table, Table) and [row[4].tone for row in table.rows] == [Tone.GOOD, Tone.BAD]
