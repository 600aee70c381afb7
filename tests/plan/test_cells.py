"""A plan cut into cells, and one of them found again where it is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.errors import UsageError
from fp8bench.model import Plan, Request
from fp8bench.model.run import Cell
from fp8bench.plan.cells import list_plan_cells, make_fleet_cell, restrict_to_cell, shorten_device_name
from fp8bench.plan.make import make_plan
from tests.facts import CPU, H200


def planned(*devices: str, shapes: tuple[str, ...] = ("64", "128", "256")) -> Plan:
    request = Request("gemm", ("bf16", "fp8"), devices, axes=(("shape", shapes),))
    return make_plan(request, (CPU, H200), None)


def test_every_group_that_measures_something_is_a_cell() -> None:
    plan = planned("cpu", "cuda")
    cells = list_plan_cells(plan)
    assert [cell.setting for cell in cells] == [group.setting for group in plan] and len(cells) == 6
    assert all(restrict_to_cell(plan, cell).groups == (group,) for cell, group in zip(cells, plan, strict=True))
    first = plan.groups[0]
    skipped = replace(first, cases=tuple(replace(one, skip="no memory") for one in first.cases))
    assert list_plan_cells(replace(plan, groups=(skipped, *plan.groups[1:]))) == cells[1:]


def test_a_cell_names_its_device() -> None:
    plan = planned("cpu", "cuda")
    cells = list_plan_cells(plan, (CPU, H200))
    assert {(cell.kind, cell.gpus) for cell in cells} == {("cpu", 0), ("h200", 1)}
    assert restrict_to_cell(plan, cells[0]) == restrict_to_cell(plan, replace(cells[0], kind="b200"))
    names = {"NVIDIA H100 80GB HBM3": "h100-80gb-hbm3", "AMD Instinct MI300X": "mi300x", "NVIDIA": "gpu"}
    assert {name: shorten_device_name(name) for name in names} == names


def test_a_cell_of_another_machine_or_version_is_refused() -> None:
    cell = list_plan_cells(planned("cuda"))[0]
    with pytest.raises(UsageError, match="planned for other devices"):
        restrict_to_cell(planned("cpu"), cell)
    other = Cell(cell.setting, (*cell.cases, cell.cases[0].replace("bf16", "mxfp8")))
    with pytest.raises(UsageError, match=r"planned differently here .*mxfp8"):
        restrict_to_cell(planned("cuda"), other)
    assert make_fleet_cell(planned("cuda").groups[0]) == cell
