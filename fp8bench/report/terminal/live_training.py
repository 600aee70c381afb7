"""A training while it goes on, for who watches: a row an arm with its losses so far, its speed and its alarms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fp8bench import units
from fp8bench.model.training import Arm
from fp8bench.report.elements import Column, Field, Page, Part, Table, Tone
from fp8bench.report.words.run_facts import many

# Losses are drawn in so many bars of eight heights, each the mean of its part of all steps.
PARTS = 24
BARS, _NOT_FINITE, _NOT_YET = "▁▂▃▄▅▆▇█", "x", " "


@dataclass(frozen=True)
class ArmNow:
    """An arm in the seed that is being trained: its last loss, and the sum and number of those in each part.

    `seconds` are those of the last step that was timed, 0 before there is one. `alarms` are of all seeds, `last_alarm`
    says where the last one was, and `ended` how the arm came to an early end.
    """

    arm: Arm
    parts: tuple[tuple[float, int], ...] = ((0.0, 0),) * PARTS
    loss: float | None = None
    held_out: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    alarms: int = 0
    last_alarm: str = ""
    ended: str = ""

    @property
    def means(self) -> tuple[float | None, ...]:
        """Of the losses in each part; None where no step has been yet."""
        return tuple(total / count if count else None for total, count in self.parts)


def board_of(where: str, arms: Sequence[ArmNow], drawn: bool) -> Page:
    """Rows of arms. With `drawn` their losses are bars on one scale for all of them."""
    finite = [mean for one in arms for mean in one.means if mean is not None and math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    columns = (
        Column("arm"), Column("loss", number=True), Column("held-out", number=True), Column("tokens/s", number=True),
        Column("health"), *([Column("losses so far")] if drawn else []),
    )  # fmt: skip
    rows = tuple(
        (
            Field(one.arm.name), _loss(one.loss), _loss(one.held_out),
            Field(units.count(one.tokens / one.seconds) if one.arm.native and one.seconds else units.NONE),
            _health(one), *([Field("".join(_bar(mean, low, high) for mean in one.means))] if drawn else []),
        )
        for one in arms
    )  # fmt: skip
    return Page(where, "", (Part("arms", "", (Table("arms", "", columns, rows),)),))


def _loss(loss: float | None) -> Field:
    return Field(units.NONE if loss is None else f"{loss:.4f}")


def _health(now: ArmNow) -> Field:
    if now.ended:
        return Field(now.ended, tone=Tone.BAD)
    if not now.alarms:
        return Field("no alarm", tone=Tone.GOOD)
    return Field(f"{many(now.alarms, 'alarm')}, last in {now.last_alarm}", tone=Tone.BAD)


def _bar(mean: float | None, low: float, high: float) -> str:
    if mean is None:
        return _NOT_YET
    if not math.isfinite(mean):
        return _NOT_FINITE
    return BARS[round((len(BARS) - 1) * (mean - low) / (high - low))] if high > low else BARS[0]
