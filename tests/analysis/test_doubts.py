"""Labels that need several cases or arms: times flat over sizes, different clocks, positions in the round."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fp8bench.analysis.doubts import (
    MIN_CLOCK_READINGS,
    SlotPositionEffect,
    find_position_effect,
    label_clock_offset,
    label_size_independent_times,
)
from fp8bench.analysis.findings import find, findings
from fp8bench.features.duel.values import CaseResult, CaseSession
from fp8bench.features.duel.verdicts import compare_case_sides
from fp8bench.measure.rounds import RoundOrders
from fp8bench.model import (
    Case,
    Ceiling,
    Label,
    Level,
    Products,
    Record,
    Request,
    Segments,
    SlotSample,
    Status,
    Support,
    Timing,
    Verdict,
    Work,
)
from fp8bench.model.stopping import EMULATED_ROUNDS
from tests.counts import counts, for_each
from tests.fakes import MS, called, record, steady, timing
from tests.runs import run_of

STEP = steady(10 * MS, 12)
FEW = Products(1, None, ("float32",), 10)


def sized(n: int, flops: float, time: Any = STEP, **options: Any) -> Record:
    """A case of a suite with one size and ten operators in a step."""
    params = (("kind", options.pop("kind", "a")), ("n", n), *options.pop("params", ()))
    work = Work(flops, **{name: options.pop(name) for name in ("tokens", "bytes", "least_memory") if name in options})
    case = Case("mine", params, options.pop("precision", "fp32"), options.pop("device", "cpu"))
    return Record(
        case, Support(Level.NATIVE, ""), Status.OK, work, timing=time, products=options.pop("products", FEW), **options
    )


def flat(*records: Record, threads: int = 1) -> list[tuple[object, str]]:
    found = label_size_independent_times(records, threads)
    assert all(one.label is Label.FLAT_TIME and not one.hard for one in found.values())
    return [(one.case.param("n"), found[one.case.id].reason) for one in records if one.case.id in found]


def test_twice_the_work_in_the_same_time_is_labelled() -> None:
    small, large = sized(64, 1e6), sized(128, 8e6)
    assert flat(small, large) == flat(large, small) == [(128, "10.0 ms for 8.00 MFLOP, 10.0 ms for 1.00 MFLOP")]
    assert flat(small, replace(large, timing=steady(5 * MS, 12)))[0][1].startswith("5.00 ms for 8.00 MFLOP")
    assert flat(small) == []
    wild = [round(10 * MS * factor) for factor in (0.7, 1.5, 1.0, 2.0, 1.2, 0.9, 1.7, 0.8, 1.1, 1.4, 1.9, 1.3)]
    assert flat(sized(64, 1e6, timing(*[(ns,) for ns in wild])), sized(128, 8e6, timing(*[(ns,) for ns in wild]))) == []
    some = [round(10 * MS * factor) for factor in (1.0, 1.004, 1.008, 1.002, 1.006, 1.01) * 2]
    assert flat(
        sized(64, 1e6, timing(*[(ns,) for ns in some])), sized(128, 8e6, timing(*[(ns + MS // 100,) for ns in some]))
    )
    # The minimum of more calls is lower by chance alone.
    calm = called(*[(10 * MS,) * 4] * 12)
    assert flat(sized(64, 1e6, calm), sized(128, 8e6, calm))
    slots = tuple(replace(slot, host_seconds=0.01) for slot in STEP.slots)
    small = sized(64, 1e9, replace(STEP, slots=slots), device="cuda:0")
    assert flat(small, sized(128, 2e9, device="cuda:0", ceiling=Ceiling(1e11, None))) == []


@for_each("share", [1.01, 1.05, 1.5, 2.0])
def test_time_that_grows_is_not_flat(share: float) -> None:
    assert flat(sized(64, 1e6), sized(128, 8e6, steady(round(10 * MS * share), 12))) == []


@for_each(
    ("small", "large"),
    [
        (sized(64, 1e6), sized(128, 1.9e6)),
        (sized(64, 0), sized(128, 0)),
        (sized(64, 1e6, kind="a"), sized(128, 8e6, kind="b")),
        (sized(64, 1e6, precision="bf16"), sized(128, 8e6)),
        (sized(64, 1e6, device="cuda:0"), sized(128, 8e6)),
        (sized(64, 1e6, params=(("m", 9),)), sized(128, 8e6, params=(("m", 8),))),
        (sized(64, 1e6, params=(("causal", False),)), sized(128, 8e6, params=(("causal", True),))),
        (sized(64, 1e6, tokens=9), sized(128, 8e6, tokens=8)),
        (sized(64, 1e6, bytes=9.0), sized(128, 8e6, bytes=9.0)),
        (sized(64, 1e6, least_memory=9.0), sized(128, 8e6, least_memory=10.0)),  # more rows through the same weights
        (sized(64, 1e6), sized(128, 8e6, steady(10 * MS, EMULATED_ROUNDS - 1))),
        (sized(64, 1e6, products=None), sized(128, 8e6)),
        (sized(64, 1e6, products=replace(FEW, operators=400)), sized(128, 8e6)),  # 10 ms is the overhead alone
    ],
)
def test_these_sizes_are_not_compared(small: Record, large: Record) -> None:
    assert flat(small, large) == []


@for_each(
    ("small", "large"),
    [
        (sized(64, 0, tokens=4), sized(128, 0, tokens=8)),
        (sized(64, 0, bytes=4.0), sized(128, 0, bytes=8.0)),
        (sized(64, 1e6, tokens=8), sized(128, 8e6, tokens=8)),
        (sized(64, 1e6, bytes=4.0, least_memory=9.0), sized(128, 8e6, bytes=8.0, least_memory=9.0)),
        (sized(64, 1e6, params=(("m", 8),)), sized(128, 8e6, params=(("m", 8),))),
    ],
)
def test_these_sizes_are_compared(small: Record, large: Record) -> None:
    assert flat(small, large)


@for_each(("device", "threads"), [("cuda:0", 1), ("cpu", 2)])
def test_a_device_that_may_have_been_half_idle_is_not_compared(device: str, threads: int) -> None:
    small, large = (sized(n, flops, device=device) for n, flops in ((64, 1e9), (128, 2e9)))
    assert flat(small, large, threads=threads) == []
    for bound, told in ((Ceiling(5e11, 1e11), False), (Ceiling(3e11, 1e11), True), (Ceiling(None, 1e11), False)):
        assert bool(flat(small, replace(large, ceiling=bound), threads=threads)) is told


def test_the_finding_has_the_label_and_keeps_its_verdict() -> None:
    records = []
    for n, flops in ((64, 1e6), (128, 8e6)):
        reference = sized(
            n, flops, steady(20 * MS, 24), precision="fp32", is_reference=True, control=steady(20 * MS, 24)
        )
        records += [reference, sized(n, flops, steady(10 * MS, 24), precision="bf16")]
    found = {finding.case.id: finding for finding in findings(run_of(records, request=Request("mine"))).values()}
    for each in records:
        finding = found[each.case.id]
        assert (Label.FLAT_TIME in finding.labels) is (each.case.param("n") == 128) and not finding.hard
    assert found[records[3].case.id].verdict is Verdict.FASTER
    assert found[records[3].case.id].verdict_words == "perhaps faster"


CLOCK_STEP = 15e6


def clocked(clocks: Sequence[float | None]) -> Timing:
    """A slot of one second at each of these clock rates."""
    plain = steady(10 * MS, len(clocks))
    slots = zip(plain.slots, clocks, strict=True)
    return replace(plain, slots=tuple(replace(slot, wall_seconds=1.0, clock=clock) for slot, clock in slots))


def told(case: Sequence[float | None], *entries: Sequence[float | None]) -> list[str]:
    """Returns the reasons of the labels, after asserting that all are hard labels."""
    found = list(label_clock_offset(clocked(case), [clocked(entry) for entry in entries], "fp32"))
    assert all(one.label is Label.CLOCK_OFFSET and one.hard for one in found)
    return [one.reason for one in found]


@for_each(
    ("case", "entries", "void"),
    [
        ([1.71e9] * 8, ([1.76e9] * 8,), True),
        ([1.76e9] * 8, ([1.71e9] * 8, [1.71e9] * 8), True),
        ([1.75e9] * 8, ([1.76e9] * 8,), False),
        ([1.71e9] * 8, ([1.76e9] * 8, [1.68e9] * 8), False),  # entries of the reference count too
        ([1.71e9, 1.82e9] * 8, ([1.76e9] * 16,), False),
        ([1.71e9] * (MIN_CLOCK_READINGS - 1), ([1.76e9] * (MIN_CLOCK_READINGS - 1),), False),
        ([1.71e9, None] * 4, ([None, 1.76e9] * 4,), False),  # no round has both
    ],
)
def test_clocks_that_differ_by_more_than_one_percent_remove_the_verdict(
    case: list[float | None], entries: tuple[list[float | None], ...], void: bool
) -> None:
    assert bool(told(case, *entries)) == void
    assert not void or all("against fp32's" in reason for reason in told(case, *entries))


def test_a_clock_that_falls_for_both_is_no_offset() -> None:
    """Rounds are paired: a device that slows down by 10% slows both arms."""
    falling = [1.98e9 * (1 - 0.1 * number / 23) for number in range(24)]
    assert not told(falling, [clock * 1.005 for clock in falling])
    assert told(falling, [clock * 1.03 for clock in falling])


NOISES = ("gaussian", "one-sided", "spikes", "drift", "unlike")


def measured(seed: int, arms: int, rounds: int, noise: str = "gaussian", leave: int = 0, **slow: float) -> list[Timing]:
    """Arms in the random orders of measuring; `leave` names arms that stop half-way.

    `slow` maps a position ('p0'), or an arm and position, to a factor.
    """
    draw, orders = np.random.default_rng(seed), RoundOrders[int](random.Random(seed))
    slots: list[list[SlotSample]] = [[] for _ in range(arms)]
    for number in range(rounds):
        there = arms - leave if number >= rounds // 2 else arms
        for place, arm in enumerate(orders.draw_round_order(range(there))):
            spread = {"gaussian": 0.02, "unlike": 0.005 * (1 + 4 * arm)}.get(noise, 0.0)
            log = draw.normal(0, spread) + 0.3 * max(0, arm - 1)
            log += {"one-sided": draw.exponential(0.03), "drift": 0.2 * number / rounds + draw.normal(0, 0.01)}.get(
                noise, 0
            )
            log += draw.exponential(1.0) if noise == "spikes" and draw.random() < 0.1 else 0.0
            log += math.log1p(slow.get(f"p{place}", 0.0) + slow.get(f"a{arm}p{place}", 0.0))
            took = round(1e7 * math.exp(log))
            slots[arm].append(SlotSample(number, ((took,),), took / 1e9, took / 1e9, place=place))
    return [Timing(Segments(("gemm",), (0,)), tuple(slot)) for slot in slots]


@counts(60, 2000)
def test_noise_has_no_position_effect(count: int) -> None:
    wrong = 0
    for seed in range(count):
        arms, rounds = (2, 3, 4, 6, 8)[seed % 5], (16, 24, 100)[seed // 5 % 3]
        leave = arms - 3 if arms > 3 and seed % 2 else 0
        wrong += find_position_effect(measured(seed, arms, rounds, NOISES[seed // 15 % 5], leave)) is not None
    assert wrong <= 0.01 * count + 3 * math.sqrt(0.01 * count)


@for_each("arms", [2, 3, 4, 8])
def test_a_slower_first_slot_is_found(arms: int) -> None:
    found = find_position_effect(measured(1, arms, 40, p0=0.1))
    assert found.ratio.low < 1.1 < found.ratio.high and found.ratio.low > 1.05
    assert found.position == 0


def test_few_rounds_show_no_position_effect() -> None:
    found = find_position_effect(measured(2, 4, 48, a3p0=1.0))
    assert found.position == 0 and 1.1 < found.ratio.point < 1.3
    assert find_position_effect(measured(5, 4, 9, p0=1.0)) is None
    assert find_position_effect(measured(5, 1, 30)) is None and find_position_effect([]) is None
    assert isinstance(find_position_effect(measured(5, 4, 12, p0=1.0)), SlotPositionEffect)


def groups(slow: float, **changes: object) -> list[Timing]:
    return [
        replace(one, slots=tuple(replace(slot, **changes) for slot in one.slots))  # type: ignore[arg-type]
        for one in measured(3, 3, 40, p0=slow)
    ]


def labels(timings: list[Timing]) -> list[dict[Label, str]]:
    reference, control, native = timings
    records = [
        record(reference, "fp32", is_reference=True, control=control),
        record(native),
        record(native, "fp8", Level.EMULATED),
        record(native, "fp16", paired=False),
    ]
    return [dict.fromkeys(one.labels, "") | dict(one.label_reasons) for one in find(records, {})]


@pytest.mark.slow
def test_all_cases_of_the_rounds_get_the_position_label() -> None:
    told = labels(groups(0.2))
    assert [Label.POSITION in one for one in told] == [True, True, True, False]
    assert told[0][Label.POSITION].startswith("the first of its round takes +")
    assert find_position_effect(groups(0.2, place=None)) is None
    small = measured(4, 3, 4000, "unlike", p0=0.004)
    assert find_position_effect(small) is not None
    assert not any(Label.POSITION in label for label in labels(small))


@for_each(("slow", "sessions", "told"), [(0.3, 4, True), (0.3, 2, True), (0.3, 1, False), (0.0, 4, False)])
def test_a_duel_gets_the_position_label(slow: float, sessions: int, told: bool) -> None:
    made = []
    for number in range(4):
        arms = measured(number, 4, 40, p0=slow if number < sessions else 0.0)
        made.append(CaseSession((arms[0], arms[1]), (_faster(arms[2], 0.3), _faster(arms[3], 0.6))))
    (time,) = (
        one for one in compare_case_sides(CaseResult(record(None), record(None), tuple(made))) if one.metric == "time"
    )
    assert (Label.POSITION in time.labels) == told


def _faster(timing: Timing, log: float) -> Timing:
    slots = (replace(slot, calls_ns=((round(slot.calls_ns[0][0] / math.exp(log)),),)) for slot in timing.slots)
    return replace(timing, slots=tuple(slots))


@for_each("nonsense", [-1, -(10**6), 10**12])
def test_an_impossible_position_counts_as_unknown(nonsense: int) -> None:
    honest = measured(1, 3, 40, p0=0.2)
    changed = replace(honest[0], slots=(replace(honest[0].slots[0], place=nonsense), *honest[0].slots[1:]))
    found = find_position_effect([changed, *honest[1:]])
    assert found.position == 0
