"""A place in the round that costs time is told, with what it costs; noise of any kind is not."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np

from fp8bench.analysis.findings import find
from fp8bench.analysis.places import PlaceEffect, place_effect
from fp8bench.features.duel.values import CaseResult, Session
from fp8bench.features.duel.verdicts import compared
from fp8bench.measure.rounds import Orders
from fp8bench.model import Label, Level, Segments, SlotSample, Timing
from tests.counts import counts, for_each
from tests.fakes import record

NOISES = ("gaussian", "one-sided", "spikes", "drift", "unlike")


def measured(seed: int, arms: int, rounds: int, noise: str = "gaussian", leave: int = 0, **slow: float) -> list[Timing]:
    """Arms in the orders that measuring draws; `leave` of them half-way. `slow` is by place ('p0') or arm and place."""
    draw, orders = np.random.default_rng(seed), Orders[int](random.Random(seed))
    slots: list[list[SlotSample]] = [[] for _ in range(arms)]
    for number in range(rounds):
        there = arms - leave if number >= rounds // 2 else arms
        for place, arm in enumerate(orders.next(range(there))):
            spread = {"gaussian": 0.02, "unlike": 0.005 * (1 + 4 * arm)}.get(noise, 0.0)
            log = draw.normal(0, spread) + 0.3 * max(0, arm - 1)
            log += {"one-sided": draw.exponential(0.03), "drift": 0.2 * number / rounds + draw.normal(0, 0.01)}.get(
                noise, 0
            )
            log += draw.exponential(1.0) if noise == "spikes" and draw.random() < 0.1 else 0.0
            log += math.log1p(slow.get(f"p{place}", 0.0) + slow.get(f"a{arm}p{place}", 0.0))
            took = round(1e7 * math.exp(log))
            slots[arm].append(SlotSample(number, ((took,),), took / 1e9, took / 1e9, place=place))
    return [Timing(Segments(("gemm",), (0,)), tuple(one)) for one in slots]


@counts(60, 2000)
def test_noise_is_no_place(count: int) -> None:
    """Whatever it is like: of so many honest groups at most 1 in 100 has one, up to chance in so many."""
    wrong = 0
    for seed in range(count):
        arms, rounds = (2, 3, 4, 6, 8)[seed % 5], (16, 24, 100)[seed // 5 % 3]
        leave = arms - 3 if arms > 3 and seed % 2 else 0
        wrong += place_effect(measured(seed, arms, rounds, NOISES[seed // 15 % 5], leave)) is not None
    assert wrong <= 0.01 * count + 3 * math.sqrt(0.01 * count)


@for_each("arms", [2, 3, 4, 8])
def test_the_first_of_a_round_is_slower(arms: int) -> None:
    """By 10% in 40 rounds under noise of 2%: told, with its size in the interval."""
    found = place_effect(measured(1, arms, 40, p0=0.1))
    assert found is not None and found.ratio.low < 1.1 < found.ratio.high and found.ratio.low > 1.05
    assert found.place == 0


def test_one_arm_is_slower_where_it_comes_first() -> None:
    """It counts by its share of those that come first."""
    found = place_effect(measured(2, 4, 48, a3p0=1.0))
    assert found is not None and found.place == 0 and 1.1 < found.ratio.point < 1.3


def groups(slow: float, **changes: object) -> list[Timing]:
    return [
        replace(one, slots=tuple(replace(slot, **changes) for slot in one.slots))  # type: ignore[arg-type]
        for one in measured(3, 3, 40, p0=slow)
    ]


def labels(timings: list[Timing]) -> list[dict[Label, str]]:
    """Those of a reference, a native and an emulated case."""
    reference, control, native = timings
    records = [
        record(reference, "fp32", is_reference=True, control=control), record(native),
        record(native, "fp8", Level.EMULATED), record(native, "fp16", paired=False),
    ]  # fmt: skip
    return [dict.fromkeys(one.labels, "") | dict(one.label_reasons) for one in find(records, {})]


def test_the_label_is_that_of_all_cases_of_the_rounds() -> None:
    """Not of one that had no part in them; nor of an effect within the noise floor, or where places are not known."""
    told = labels(groups(0.2))
    assert [Label.POSITION in one for one in told] == [True, True, True, False]
    assert told[0][Label.POSITION].startswith("the first of its round takes +")
    assert place_effect(groups(0.2, place=None)) is None
    small = measured(4, 3, 4000, "unlike", p0=0.004)
    assert place_effect(small) is not None
    assert not any(Label.POSITION in one for one in labels(small))


def test_too_few_rounds_say_nothing() -> None:
    """Nor does an arm alone, nor none."""
    assert place_effect(measured(5, 4, 9, p0=1.0)) is None
    assert place_effect(measured(5, 1, 30)) is None and place_effect([]) is None
    assert isinstance(place_effect(measured(5, 4, 12, p0=1.0)), PlaceEffect)


@for_each(("slow", "sessions", "told"), [(0.3, 4, True), (0.3, 2, True), (0.3, 1, False), (0.0, 4, False)])
def test_in_a_duel_too(slow: float, sessions: int, told: bool) -> None:
    """Where half of its sessions have it, by more than processes of one side differ."""
    made = []
    for number in range(4):
        arms = measured(number, 4, 40, p0=slow if number < sessions else 0.0)
        made.append(Session((arms[0], arms[1]), (_faster(arms[2], 0.3), _faster(arms[3], 0.6))))
    (time,) = (one for one in compared(CaseResult(record(None), record(None), tuple(made))) if one.metric == "time")
    assert (Label.POSITION in time.labels) == told


def _faster(timing: Timing, log: float) -> Timing:
    slots = (replace(one, calls_ns=((round(one.calls_ns[0][0] / math.exp(log)),),)) for one in timing.slots)
    return replace(timing, slots=tuple(slots))


@for_each("nonsense", [-1, -(10**6), 10**12])
def test_a_place_that_cannot_be_counts_as_unknown(nonsense: int) -> None:
    """As in a file that somebody has changed; no table of its size is made."""
    honest = measured(1, 3, 40, p0=0.2)
    changed = replace(honest[0], slots=(replace(honest[0].slots[0], place=nonsense), *honest[0].slots[1:]))
    found = place_effect([changed, *honest[1:]])
    assert found is not None and found.place == 0
