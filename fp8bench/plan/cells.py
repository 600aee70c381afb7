"""A plan cut into cells: each is one group, whose cases belong beside each other."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.errors import UsageError
from fp8bench.model import Group, Plan
from fp8bench.model.fleet import Cell


def cells_of(plan: Plan) -> tuple[Cell, ...]:
    """Of every group with something to measure, in the plan's order."""
    return tuple(cell_of(group) for group in plan if any(planned.runs for planned in group.cases))


def cell_of(group: Group) -> Cell:
    return Cell(group.setting, tuple(planned.case.id for planned in group.cases))


def of_cell(plan: Plan, cell: Cell) -> Plan:
    """What is planned here, of that cell alone; UsageError where the group would be another one here."""
    found = [group for group in plan if group.setting == cell.setting]
    if not found:
        raise UsageError(f"nothing would be planned here for {cell.setting}: it was planned for other devices.")
    if cell_of(found[0]) != cell:
        here = {planned.case.id for planned in found[0].cases}
        other = min(here ^ set(cell.cases))
        raise UsageError(f"{cell.setting} would be planned differently here ({other}): the plan is another version's.")
    return replace(plan, groups=(found[0],))
