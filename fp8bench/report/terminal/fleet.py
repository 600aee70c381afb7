"""Where the cells of a plan stand, as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fp8bench import units
from fp8bench.model.fleet import CellState, CellStatus, FleetPlan
from fp8bench.report.elements import Column, Field, Page, Part, Table, Text, Tone

_TONES = {CellStatus.DONE: Tone.GOOD, CellStatus.FAILED: Tone.BAD}
_LEGEND = (
    "begun: a run was cut off, and is resumed by the next worker where machine and software are the same",
    "took: seconds of the last attempt, the start of its process included",
)


def counts_of(states: Sequence[CellState]) -> str:
    """'2 done, 1 waiting'."""
    counts = Counter(one.status for one in states)
    return ", ".join(f"{counts[status]} {status}" for status in CellStatus if counts[status])


def page_of(plan: FleetPlan, states: Sequence[CellState]) -> Page:
    """A row a cell, and the counts."""
    columns = (
        Column("cell", number=True), Column("setting"), Column("status"), Column("run"), Column("machine"),
        Column("attempts", number=True), Column("took", number=True), Column("why", below=True),
    )  # fmt: skip
    rows = tuple(
        (
            Field(str(one.number)), Field(one.cell.setting), Field(one.status, tone=_TONES.get(one.status, Tone.PLAIN)),
            Field(one.run or units.NONE), Field(one.machine or units.NONE), Field(str(len(one.attempts))),
            Field(units.seconds(one.attempts[-1].seconds) if one.attempts else units.NONE), Field(one.why),
        )
        for one in states
    )  # fmt: skip
    cases: Counter[str] = Counter()
    for one in states:
        cases.update(dict(one.cases))
    machines = sorted({one.machine for one in states if one.machine})
    planned = sum(len(cell.cases) for cell in plan.cells)
    covered = f"Of {planned} cases {cases.get('ok', 0)} were measured" + "".join(
        f", {cases[status]} {status}" for status in ("skipped", "failed") if cases[status]
    ) + (f", on {', '.join(machines)}" if machines else "")  # fmt: skip
    title = f"plan {plan.id}: {plan.request.suite} in {len(plan.cells)} cells"
    return Page(
        title,
        "",
        (Part("cells", "", (Table("cells", "", columns, rows), Text(f"{counts_of(states)}."), Text(f"{covered}."))),),
        _LEGEND,
    )
