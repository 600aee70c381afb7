"""A plan cut into cells: each is one group, whose cases belong beside each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Group, Plan
from fp8bench.model.run import Cell

_MAKERS = frozenset({"nvidia", "amd", "intel", "r", "instinct", "radeon", "graphics"})


def cells_of(plan: Plan, facts: Sequence[DeviceFacts] = ()) -> tuple[Cell, ...]:
    """Of every group with something to measure, in the plan's order."""
    return tuple(cell_of(group, facts) for group in plan if any(planned.runs for planned in group.cases))


def cell_of(group: Group, facts: Sequence[DeviceFacts] = ()) -> Cell:
    """What a group is as a cell; without facts it is not known what for."""
    cases = tuple(planned.case.id for planned in group.cases)
    first = group.cases[0].case
    device = next((fact for fact in facts if fact.key == first.device), None)
    if device is None or not device.accelerated:
        return Cell(group.setting, cases, "" if device is None else device.kind)
    return Cell(group.setting, cases, kind_of(device.name), device.index + first.ranks)


def kind_of(name: str) -> str:
    """'h200' of 'NVIDIA H200', 'mi300x' of 'AMD Instinct MI300X': a word for all devices of that name."""
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return "-".join(word for word in words if word not in _MAKERS) or "gpu"


def of_cell(plan: Plan, cell: Cell) -> Plan:
    """What is planned here, of that cell alone; UsageError where the group would be another one here."""
    found = [group for group in plan if group.setting == cell.setting]
    if not found:
        raise UsageError(f"nothing would be planned here for {cell.setting}: it was planned for other devices.")
    here = {planned.case.id for planned in found[0].cases}
    if here != set(cell.cases):
        other = min(here ^ set(cell.cases))
        raise UsageError(f"{cell.setting} would be planned differently here ({other}): the plan is another version's.")
    return replace(plan, groups=(found[0],))
