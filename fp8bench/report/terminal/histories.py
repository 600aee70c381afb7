"""What every way of delayed scaling would have done to the amaxes of a training, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.learning.histories import Replayed, best_of
from fp8bench.model.training import Training
from fp8bench.protocols import Role
from fp8bench.report.elements import Column, Field, Page, Part, Table, Text, Tone

_ROLES = (Role.INPUT, Role.WEIGHT, Role.GRADIENT)
_COLUMNS = (
    Column("history", number=True), Column("margin", number=True), Column("interval", number=True),
    *(Column(f"over {role[0]}", number=True) for role in _ROLES), Column("worst", number=True),
    *(Column(f"under {role[0]}", number=True) for role in _ROLES), Column("idle", number=True),
)  # fmt: skip
_LEGEND = (
    "over: casts of inputs (i), weights (w) and gradients (g) whose largest value would have been cut off",
    "worst: by how many octaves at most",
    "under: casts whose smallest value above 0 would have become 0",
    "idle: octaves of the format's range that the other casts left unused, the mean over roles",
    "a history of 1 is the most recent amax; a tensor that other scales would have changed is replayed as it was",
)


def page_of(training: Training, arm: str, found: Sequence[Replayed]) -> Page:
    """A row for each way, in their order."""
    ways = dict.fromkeys(one.delayed for one in found)
    rows = tuple(tuple(_row([one for one in found if one.delayed == way])) for way in ways)
    casts = sum(one.casts for one in found if one.delayed == found[0].delayed)
    table = Table("histories", "", _COLUMNS, rows, main=True)
    title = f"delayed scaling of {arm} in {training.id}, replayed over {units.whole(casts)} casts"
    best = best_of(found)
    advice = f"least is cut off, and of such ways least left idle, by history {best.history}, margin {best.margin}, "
    return Page(title, "", (Part("histories", "", (table, Text(f"{advice}interval {best.interval}"))),), _LEGEND)


def _row(found: Sequence[Replayed]) -> Iterator[Field]:
    delayed, by_role = found[0].delayed, {one.role: one for one in found}
    for number in (delayed.history, delayed.margin, delayed.interval):
        yield Field(str(number), number)
    for role in _ROLES:
        yield _share(by_role[role].overflow if role in by_role else None)
    worst = max(one.worst for one in found)
    yield Field(f"{worst:.1f}" if worst else units.NONE, worst)
    for role in _ROLES:
        yield _share(by_role[role].underflow if role in by_role else None)
    idle = sum(one.idle for one in found) / len(found)
    yield Field(f"{idle:.1f}", idle)


def _share(value: float | None) -> Field:
    if value is None:
        return Field("?")
    return Field(units.share(value), value, Tone.BAD if value else Tone.PLAIN)
