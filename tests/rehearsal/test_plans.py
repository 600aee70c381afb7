"""A plan for a GPU and its duration are known without the GPU."""

from __future__ import annotations

import pytest

from fp8bench.cli.commands.suite import describe_expected_time
from fp8bench.model import DeviceFacts, Request
from fp8bench.plan.make import make_plan
from fp8bench.registry import workloads
from tests.facts import B200, H200, MI300X


@pytest.mark.parametrize("facts", [H200, B200, MI300X], ids=lambda facts: facts.name)
def test_all_suites_are_planned(facts: DeviceFacts) -> None:
    plan = make_plan(Request("all"), (facts,), "text")
    cases = [planned for group in plan for planned in group.cases]
    assert {one.case.workload for one in cases} == {*workloads.names()}
    assert all(one.runs or one.skip for one in cases)
    assert all(sum(one.runs for one in group.cases) > 1 for group in plan)


def told(**options: bool | float | str) -> str:
    request = Request("cast", ("fp32", "bf16", "mxfp8"), axes=(("direction", ("to",)),), **options)
    return describe_expected_time(make_plan(request, (H200,)), request)


def test_turns_are_part_of_it_too() -> None:
    assert "for turns of seconds (--sustained)" in told(sustained=5.0) and "for energy" not in told(sustained=5.0)
    assert "for turns of seconds (--sustained)" in told(sustained=5.0, energy=False)


def test_energy_is_part_of_the_estimated_time() -> None:
    """Two groups idle for six seconds each; in each, two cases have three windows and the emulated one has one."""
    assert (
        "about 12 s to 24 s, or longer if a step takes seconds or a GPU warms up, and 30 s to 1 min 26 s for energy"
        in told()
    )
    assert "10 rounds of every group, however long, and 14 s to 38 s for energy" in told(quick=True)
    assert "energy" not in told(energy=False) + told(budget=60.0)
    assert ", more for that of phases; --budget" in told(energy_of="phases")
