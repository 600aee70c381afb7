"""Divides a plan into cells for a fleet. A cell is one group of cases: they must run in the same process so that they
can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Group, Plan
from fp8bench.model.run import Cell

_VENDOR_WORDS = frozenset({"nvidia", "amd", "intel", "r", "instinct", "radeon", "graphics"})


def list_plan_cells(plan: Plan, facts: Sequence[DeviceFacts] = ()) -> tuple[Cell, ...]:
    """Returns a cell (a group that a fleet measures on one machine) for each group in which a case will run."""
    return tuple(make_fleet_cell(group, facts) for group in plan if any(planned.runs for planned in group.cases))


def make_fleet_cell(group: Group, facts: Sequence[DeviceFacts] = ()) -> Cell:
    """Makes the cell in which a fleet measures a group. The cell has no kind of device if `facts` does not describe the
    group's device.
    """
    case_ids = tuple(planned.case.id for planned in group.cases)
    first_case = group.cases[0].case
    for device in facts:
        if device.key == first_case.device:
            if not device.accelerated:
                return Cell(group.setting, case_ids, device.kind)
            return Cell(group.setting, case_ids, shorten_device_name(device.name), device.index + first_case.ranks)
    return Cell(group.setting, case_ids, "")


def shorten_device_name(name: str) -> str:
    """Returns a device's name without its vendor: 'h200' for 'NVIDIA H200', 'mi300x' for 'AMD Instinct MI300X'."""
    device_name_words = re.findall(r"[a-z0-9.]+", name.lower())
    return "-".join(part for part in device_name_words if part not in _VENDOR_WORDS) or "gpu"


def restrict_to_cell(plan: Plan, cell: Cell) -> Plan:
    """Returns the part of this machine's plan that belongs to a fleet's cell. Raises UsageError if this machine would
    plan the cell differently.
    """
    groups = [group for group in plan if group.setting == cell.setting]
    if not groups:
        raise UsageError(f"{cell.setting} cannot be planned here: it was planned for other devices.")
    case_ids = {planned.case.id for planned in groups[0].cases}
    if case_ids != set(cell.cases):
        differing_case_id = min(case_ids ^ set(cell.cases))
        raise UsageError(
            f"{cell.setting} would be planned differently here ({differing_case_id}): another version made the plan."
        )
    return replace(plan, groups=(groups[0],))
