"""Odd machines: seldom named where none is, whatever the spread, and found where one is."""

from __future__ import annotations

import numpy as np
import pytest

from fp8bench.features.fleet.machines import MIN_OUTLIER_CHANGE, OUTLIER_DEVIATIONS, MachineRun, find_machine_deviations
from fp8bench.features.fleet.report import find_missing_measurements
from tests.counts import for_each


def fleet(
    random: np.random.Generator, machines: int, cases: int, spread: float, **odd: float
) -> dict[str, dict[str, float]]:
    """Times of honest machines, each with small common and per-case factors; `odd` are extra factors."""
    logs = random.normal(0, spread, (1 + cases, machines))
    times = {}
    for case in range(cases):
        seconds = (1 + case) * np.exp(logs[0] + logs[1 + case])
        times[f"case {case}"] = {f"m{number}": one * odd.get(f"m{number}", 1.0) for number, one in enumerate(seconds)}
    return times


def odd(times: dict[str, dict[str, float]]) -> set[str]:
    return {machine for machine, deviation in find_machine_deviations(times).items() if deviation.odd}


@for_each(("machines", "spread", "most"), [(7, 0.01, 1), (7, 0.1, 30), (17, 0.1, 8)])
def test_honest_fleets_are_seldom_named(machines: int, spread: float, most: int) -> None:
    random = np.random.default_rng(machines)
    assert sum(bool(odd(fleet(random, machines, 6, spread))) for _ in range(300)) <= most


@for_each(("machines", "slow"), [(6, ("m1",)), (8, ("m1", "m5", "m7")), (16, ("m3",))])
def test_only_slow_machines_are_named(machines: int, slow: tuple[str, ...]) -> None:
    times = fleet(np.random.default_rng(1), machines, 5, 0.01, **dict.fromkeys(slow, 2.0))
    assert odd(times) == set(slow)


def test_a_machine_is_as_far_as_its_median_case_in_median_deviations() -> None:
    ratios = dict(zip("abcdef", (0.96, 0.98, 1.0, 1.0, 1.02, 1.5), strict=True))
    times = {}
    for case, scale in (("one", 1.0), ("two", 3.0), ("three", 7.0)):
        times[case] = {machine: scale * ratio for machine, ratio in ratios.items()}
    times["two"]["f"] = 900.0
    deviation = find_machine_deviations(times)["f"]
    assert deviation.ratio == pytest.approx(1.5) and deviation.score == pytest.approx(25) and deviation.odd
    times["one"]["f"] = times["three"]["f"] = 1.0
    ratios = {"f": 1.0 + 0.02 * (OUTLIER_DEVIATIONS - 0.1)}
    for case, scale in (("one", 1.0), ("three", 7.0)):
        times[case]["f"] = scale * ratios["f"]
    assert not find_machine_deviations(times)["f"].odd


def test_few_or_equal_machines_show_nothing() -> None:
    assert find_machine_deviations(fleet(np.random.default_rng(3), 5, 4, 0.01, m0=9.0)) == {}
    equal = dict.fromkeys("uvwxyz", 1.0)
    assert not odd({"a": equal})
    assert not odd({"a": {**equal, "z": 1 + MIN_OUTLIER_CHANGE / 2}})
    assert odd({"a": {**equal, "z": 2.0}}) == {"z"}


def test_cells_that_are_missing_are_named_in_the_order_of_the_runs() -> None:
    """A set would have another order in every process."""
    settings = [f"setting {number}" for number in range(12)]
    runs = [
        MachineRun(machine, machine, (), (), tuple(whole), (), {}, {})
        for machine, whole in (("one", settings), ("two", settings), ("three", settings[:1]))
    ]
    (alarm,) = find_missing_measurements(runs, ())
    assert alarm.machine == "three"
    assert alarm.words.endswith(f"are missing: {', '.join(settings[1:5])} and 7 more")
