"""Odd machines: named as often as is said where none is, whatever the spread, and found where one is.

What machines are named for is in the same words for the same runs.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp8bench.features.fleet.machines import FALSE_ALARMS, LEAST_CHANGE, Deviation, MachineRun, deviations, seen_from
from fp8bench.features.fleet.report import of_coverage
from tests.counts import for_each


def fleet(
    random: np.random.Generator, machines: int, cases: int, spread: float, **odd: float
) -> dict[str, dict[str, float]]:
    """Times of honest machines, each a little slow or fast in everything, and in each case; `odd` are factors."""
    logs = random.normal(0, spread, (1 + cases, machines))
    return {
        f"case {case}": {
            f"m{number}": math.exp(log) * (1 + case) * odd.get(f"m{number}", 1.0)
            for number, log in enumerate(logs[0] + logs[1 + case])
        }
        for case in range(cases)
    }


def odd(times: dict[str, dict[str, float]]) -> list[Deviation]:
    return [own for by_machine in deviations(times).values() for own in by_machine.values() if own.odd]


@pytest.mark.parametrize(
    ("machines", "reports"), [(5, 100), *(pytest.param(n, 1000, marks=pytest.mark.slow) for n in (4, 5, 8))]
)
def test_honest_fleets_are_left_alone_as_often_as_is_said(machines: int, reports: int) -> None:
    """With 6 cases each; 1% gives more than the bound by chance in one of a thousand tests."""
    random = np.random.default_rng(machines)
    alarms = sum(bool(odd(fleet(random, machines, 6, 0.1))) for _ in range(reports))
    assert alarms <= reports * FALSE_ALARMS + 3.1 * math.sqrt(reports * FALSE_ALARMS)


@for_each(("machines", "slow"), [(4, ("m1",)), (8, ("m1",)), (8, ("m1", "m5", "m7")), (16, ("m3",))])
def test_what_is_slow_is_named_and_nobody_else(machines: int, slow: tuple[str, ...]) -> None:
    times = fleet(np.random.default_rng(1), machines, 5, 0.01, **dict.fromkeys(slow, 2.0))
    assert {own.machine for own in odd(times) if not own.case} == set(slow)
    assert seen_from(times) is not None


def test_a_machine_that_is_odd_in_one_case_alone() -> None:
    times = fleet(np.random.default_rng(2), 12, 5, 0.01)
    times["case 3"]["m4"] *= 3
    (only,) = odd(times)
    assert (only.machine, only.case) == ("m4", "case 3") and only.change == pytest.approx(2, abs=0.2)


def test_too_few_and_too_alike() -> None:
    """Three machines show nothing; among equal ones a small change is ignored, and a large one is not."""
    assert deviations(fleet(np.random.default_rng(3), 3, 4, 0.01, m0=9.0)) == {}
    equal = {"a": dict.fromkeys("wxyz", 1.0)}
    assert not odd(equal) and seen_from(equal) == LEAST_CHANGE
    assert not odd({"a": {**equal["a"], "z": 1 + LEAST_CHANGE / 2}})
    assert {own.machine for own in odd({"a": {**equal["a"], "z": 2.0}})} == {"z"}


def test_cells_that_are_missing_are_named_in_the_order_of_the_runs() -> None:
    """A set would have another order in every process."""
    settings = [f"setting {number}" for number in range(12)]
    runs = [
        MachineRun(machine, machine, "", (), 0.0, None, (), (), tuple(whole), (), {}, {}, {}, ())
        for machine, whole in (("one", settings), ("two", settings), ("three", settings[:1]))
    ]
    (alarm,) = of_coverage(runs, ())
    assert alarm.machine == "three"
    assert alarm.words.endswith(f"are missing: {', '.join(settings[1:5])} and 7 more")
