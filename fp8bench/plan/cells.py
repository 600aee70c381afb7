"""Cuts a plan into cells. A cell is one group, whose cases must run in the same process to be compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Group, Plan
from fp8bench.model.run import Cell

_MAKERS = frozenset({"nvidia", "amd", "intel", "r", "instinct", "radeon", "graphics"})


def cells_of(plan: Plan, facts: Sequence[DeviceFacts] = ()) -> tuple[Cell, ...]:
    """Returns the cells of all groups that have a case to measure, in the plan's order."""
    return tuple(cell_of(group, facts) for group in plan if _runs(group))


def _runs(group: Group) -> bool:
    return any(planned.runs for planned in group.cases)


def cell_of(group: Group, facts: Sequence[DeviceFacts] = ()) -> Cell:
    """Makes a cell of a group. Without facts about devices, its device kind is empty."""
    cases = tuple(planned.case.id for planned in group.cases)
    first = group.cases[0].case
    device = next((fact for fact in facts if fact.key == first.device), None)
    if device is None:
        return Cell(group.setting, cases, "")
    if not device.accelerated:
        return Cell(group.setting, cases, device.kind)
    return Cell(group.setting, cases, kind_of(device.name), device.index + first.ranks)


def kind_of(name: str) -> str:
    """Returns a short name: 'h200' for 'NVIDIA H200', 'mi300x' for 'AMD Instinct MI300X'."""
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return "-".join(word for word in words if word not in _MAKERS) or "gpu"


def of_cell(plan: Plan, cell: Cell) -> Plan:
    """Returns the plan for one cell on this machine. Raises UsageError if it differs from the plan that created the
    cell."""
    groups = [group for group in plan if group.setting == cell.setting]
    if not groups:
        raise UsageError(f"nothing would be planned here for {cell.setting}: it was planned for other devices.")
    cases = {planned.case.id for planned in groups[0].cases}
    if cases != set(cell.cases):
        different = min(cases ^ set(cell.cases))
        raise UsageError(
            f"{cell.setting} would be planned differently here ({different}): another version made that plan."
        )
    return replace(plan, groups=(groups[0],))
