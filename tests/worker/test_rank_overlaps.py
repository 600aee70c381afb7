"""How far a communication hides is measured once of cases that send the same."""

from __future__ import annotations

import random
from functools import partial

import pytest

from fp8bench.model import Case, DeviceFacts
from fp8bench.worker.ranks import bench
from fp8bench.worker.ranks.bench import RankBench, RankMeeting, StepAnswer, rounds
from tests.counts import for_each
from tests.fakes import CPU


def _case(precision: str, way: str, elements: int = 64) -> Case:
    params = (("collective", "all_reduce"), ("elements", elements), ("fp8", way), ("scaling", "pre"))
    return Case("collective", params, precision, "cpu", ranks=2)


def test_a_plain_collective_is_measured_once_beside_all_ways_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(bench: RankBench, case: Case, facts: DeviceFacts) -> StepAnswer:
        measured.append(case)
        return (), {"compute": [float(len(measured))]}

    monkeypatch.setattr(RankBench, "_step_parts", measure)
    bench = RankBench.__new__(RankBench)
    bench._parts = {}
    plain = [bench.step_parts(_case("bf16", way), CPU) for way in ("fp8_gather", "fp8_ring")]
    assert plain == [((), {"compute": [1.0]})] * 2 and len(measured) == 1
    others = [_case("bf16", "fp8_ring", 128), _case("fp32", "fp8_ring"), _case("fp8", "fp8_ring"), _case("fp8", "pre")]
    found = [bench.step_parts(one, CPU) for one in others]
    assert found == [((), {"compute": [float(turn)]}) for turn in (2, 3, 4, 5)]


@for_each(("seconds", "count"), [(1.0, 6), (0.01, 15)])
def test_rounds_are_as_many_of_each_part_in_the_same_order_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
) -> None:
    """Before them each part that is made of nothing else has run once, and nothing of that is counted."""
    monkeypatch.setattr(bench, "_most", lambda own: seconds)
    names, ran = ["one", "two", "both", "in_turn"], {0: list[str](), 1: list[str]()}
    for said in ran.values():
        parts = {name: partial(said.append, name) for name in names}
        found = rounds(parts, RankMeeting(lambda: None, partial(said.append, "met")), 7)
        assert {name: len(times) for name, times in found.items()} == dict.fromkeys(names, count)
    assert ran[0] == ran[1] and ran[0][:3] == ["one", "two", "met"] and ran[0].count("met") == 4 * count
    order = random.Random(7)
    assert [name for name in ran[0][2:] if name != "met"] == [
        name for _ in range(count) for name in order.sample(names, len(names))
    ]
