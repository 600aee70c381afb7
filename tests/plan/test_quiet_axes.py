"""Quiet axes: the default is not a parameter of a case, so that cases from before the axis existed keep their ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fp8bench.model import Case, DeviceFacts, Params, Request, Scalar, Work
from fp8bench.plan.make import make_plan, replace_batch_size, settings_with_batch_search
from fp8bench.protocols import Grid, Phases, Setup, Workload
from fp8bench.protocols.axes import Axis, one_of, whole_number
from fp8bench.registry import workloads
from fp8bench.store.points import find_grid_cell_of_case
from fp8bench.store.series import list_grid_cells, list_parameters, make_series
from tests.facts import CPU, H200
from tests.plans import cases_of
from tests.runs import run_of

WAY = Axis("way", "there, or back again", ("there",), one_of("there", "back"), quiet=True)


class Before(Workload):
    """As it was: one axis."""

    name = "quiet"
    summary = "nothing much"
    dtypes = ("fp32", "bf16")
    batch_axis = "rows"
    history = Grid(cpu={"rows": ("8",)}, gpu={"rows": ("64",)}, dtypes=("fp32", "bf16"))

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return (Axis("rows", "how many", ("64" if facts.accelerated else "8",), whole_number()),)

    def work(self, params: Mapping[str, Scalar]) -> Work:
        return Work(1.0)

    def prepare(self, setup: Setup) -> Any:
        raise NotImplementedError

    def step(self, state: Any, phase: Phases) -> None:
        raise NotImplementedError


class After(Before):
    """The workload after a quiet axis was added."""

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return (*super().axes(facts), WAY)


class Following(After):
    """Both values are in its history."""

    history = Grid(
        cpu={"rows": ("8",), "way": ("there", "back")},
        gpu={"rows": ("64",), "way": ("there", "back")},
        dtypes=("fp32", "bf16"),
    )


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Workload]], None]:
    """Registers one of these workloads in place of the other."""
    workloads.names()
    monkeypatch.setattr(workloads, "_leaves", dict(workloads._leaves))

    def register(kind: type[Workload]) -> None:
        workloads._leaves.pop("quiet", None)
        workloads.register("quiet")(kind)

    return register


def cases(*way: str, facts: DeviceFacts = CPU, **words: Any) -> list[Case]:
    request = Request("quiet", axes=(("way", way),) if way else (), **words)
    return [planned.case for planned in cases_of(make_plan(request, (facts,)))]


@pytest.mark.parametrize("facts", [CPU, H200], ids=lambda facts: facts.key)
def test_cases_keep_their_names(suite: Callable[[type[Workload]], None], facts: DeviceFacts) -> None:
    suite(Before)
    before = cases(facts=facts)
    suite(After)
    assert cases(facts=facts) == before == cases("there", facts=facts)
    assert [case.id for case in cases("back", facts=facts)] == [case.id.replace("]@", ",way=back]@") for case in before]
    assert len({case.setting for case in cases("back", "there", facts=facts)}) == 2


def test_its_value_is_known_where_it_is_left_out() -> None:
    assert [WAY.of(params) for params in ({}, {"way": "back"})] == ["there", "back"]
    with pytest.raises(KeyError):
        Axis("loud", "", ("1",), whole_number()).of({})


def test_another_batch_is_the_same_case_otherwise(suite: Callable[[type[Workload]], None]) -> None:
    suite(After)
    plan = make_plan(Request("quiet", axes=(("way", ("there", "back")),), memory_limit=1 << 20), (CPU,))
    for group, more in zip(plan, ("", ",way=back"), strict=True):
        other = replace_batch_size(group.cases[0], 16, CPU)
        assert other is not None and other.case.setting == f"quiet[rows=16{more}]@cpu"
    assert settings_with_batch_search(plan) == {group.setting for group in plan}


def test_a_history_goes_on(suite: Callable[[type[Workload]], None]) -> None:
    suite(Before)
    before = make_series(Before(), None), list_grid_cells(Before(), CPU, None)
    suite(After)
    assert (make_series(After(), None), list_grid_cells(After(), CPU, None)) == before
    run = run_of([], request=Request("quiet"))
    (there, _) = cases()
    (back, _) = cases("back")
    assert [find_grid_cell_of_case(case, run) for case in (there, back)] == [("fp32", 8), None]
    suite(Following)
    assert list_parameters(Following()) == {"dtype": ("fp32", "bf16"), "rows": (8, 64), "way": ("there", "back")}
    assert [find_grid_cell_of_case(case, run) for case in (there, back)] == [("fp32", 8, "there"), ("fp32", 8, "back")]


class Strict(Before):
    """Is asked about its own axes alone."""

    def expand(self, params: Mapping[str, Scalar]) -> tuple[Params, ...]:
        assert set(params) == {"rows"}
        return super().expand(params)


KNOWN = replace(CPU, cache_bytes=32 << 20, cache_shared=2)


def test_every_suite_has_the_axis_of_its_cache(suite: Callable[[type[Workload]], None]) -> None:
    suite(Strict)
    request = Request("quiet", axes=(("cache", ("hot", "cold", "rotating")),), memory_limit=1 << 20)
    plan = make_plan(request, (KNOWN,))
    assert [group.setting for group in plan] == [
        "quiet[rows=8]@cpu",
        "quiet[rows=8,cache=cold]@cpu",
        "quiet[rows=8,cache=rotating]@cpu",
    ]
    assert all(planned.runs for planned in cases_of(plan))
    cold = plan.groups[1].cases[0]
    other = replace_batch_size(cold, 16, KNOWN)
    assert other is not None and other.case.setting == "quiet[rows=16,cache=cold]@cpu"
    assert find_grid_cell_of_case(cold.case, run_of([], request=Request("quiet"))) is None
    assert settings_with_batch_search(plan) == {group.setting for group in plan}


def test_a_cache_of_which_nobody_knows_the_size_stays_hot(suite: Callable[[type[Workload]], None]) -> None:
    suite(Before)
    hot, cold = make_plan(Request("quiet", axes=(("cache", ("hot", "cold")),)), (CPU,))
    assert all(planned.runs for planned in hot.cases)
    assert {planned.skip for planned in cold.cases} == {
        "cache=cold: the size of the last-level cache of cpu is unknown; choose cache=hot"
    }
