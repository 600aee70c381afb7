"""Rounds on a virtual clock: who runs when, for how many calls, and when it ends; and in which order."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest

from fp8bench.analysis.verdicts import is_case_decided
from fp8bench.measure.arm import STATES_PER_SHORT_STEP, MeasuredArm
from fp8bench.measure.rounds import IsComparisonDecided, RoundOrders, RoundSession
from fp8bench.measure.slots import cut_step_into_cells
from fp8bench.model import Level, SlotSample, Timing, Work
from fp8bench.model.raw import RawSlot, RawStep
from fp8bench.model.stopping import EMULATED_ROUNDS, StoppingRule
from tests.counts import for_each
from tests.fakes import (
    CAST,
    CPU,
    GEMM,
    GPU,
    MS,
    UNATTRIBUTED,
    FakeWorker,
    Script,
    arm,
    gemm_steps,
    lasting,
    planned,
)

EMULATED = Level.EMULATED
FOREVER = StoppingRule(least=16, budget=1e9, ceiling=1e9)


def never(case: Timing, reference: Timing, control: Timing | None) -> bool:
    return False


def after(rounds: Mapping[int, int]) -> IsComparisonDecided:
    """Decides an arm, identified by its step time, after its number in `rounds`."""

    def judge(case: Timing, reference: Timing, control: Timing | None) -> bool:
        return case.num_rounds >= rounds[case.slots[0].calls_ns[0][0]]

    return judge


def sit(
    scripts: Mapping[str, Script],
    session: RoundSession,
    rule: StoppingRule = FOREVER,
    judge: IsComparisonDecided = never,
    seed: int = 0,
    tick: Callable[[MeasuredArm, float], None] = lambda arm, share: None,
) -> tuple[FakeWorker, str]:
    """Prepares and runs; returns the worker with its log, and why it ended."""
    worker = FakeWorker(scripts)
    session.prepare(worker)
    worker.log.clear()
    return worker, session.run(worker, rule, judge, seed, tick, worker.clock)


def three() -> RoundSession:
    return RoundSession(arm("fp32"), arm("fp32", control=True), [arm("bf16")])


def turns(worker: FakeWorker, arms: int) -> list[tuple[str, ...]]:
    labels = [entry[1] for entry in worker.slots()]
    return [tuple(labels[at : at + arms]) for at in range(0, len(labels), arms)]


@for_each(
    ("milliseconds", "more", "sized"),
    [
        ((900, 7, 2, 5), [("slot", "fp32", 3, 0)], (0.002, 4, 1)),
        ((10_000,), [], (10.0, 1, 0)),
        ((0,), [("slot", "fp32", 3, 0)], (1e-7, 80_000, 1)),  # clocks tick in tens of nanoseconds
    ],
)
def test_slots_are_sized_by_the_fastest_of_three_calls_after_the_first(
    milliseconds: tuple[int, ...], more: list[object], sized: tuple[float, int, int]
) -> None:
    worker, reference = FakeWorker({"fp32": Script(gemm_steps(*(MS * each for each in milliseconds)))}), arm("fp32")
    reference.prepare(worker)
    assert worker.log == [("prepare", "fp32"), ("slot", "fp32", 1, 0), *more]
    assert (reference.step_seconds, reference.calls, reference.untimed_call_count) == sized


class Noting(FakeWorker):
    """One that notes which state it was asked about, by request."""

    def __init__(self) -> None:
        super().__init__({"fp32": lasting(1), "bf16": lasting(5)})
        self.keys: dict[str, set[str]] = {}

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        self.keys.setdefault(name, set()).add(arguments[0])
        return super().ask(limit, name, *arguments)


@for_each(
    ("one", "states"),
    [
        (arm("fp32"), STATES_PER_SHORT_STEP),
        (arm("bf16"), 1),
        (arm("fp32", EMULATED), 1),
        (MeasuredArm("gpu", planned("fp32"), replace(CPU, kind="cuda")), 1),
        (MeasuredArm("compiled", replace(planned("fp32"), work=Work(setup_seconds=60.0)), CPU), 1),
    ],
)
def test_a_short_step_has_several_states_of_which_each_round_takes_one(one: MeasuredArm, states: int) -> None:
    worker, session = Noting(), RoundSession(one, None, [])
    session.prepare(worker)
    for number in range(60):
        one.run(worker, number)
    session.check_states(worker)
    session.release_states(worker)
    assert len(worker.keys["slot"]) == states
    assert worker.keys["slot"] == worker.keys["prepare"] == worker.keys["check"] and not worker.held


def test_every_round_runs_every_arm_once() -> None:
    session = three()
    worker, why = sit({}, session, StoppingRule(fixed=50))
    rounds = turns(worker, 3)
    assert all(sorted(turn) == ["bf16", "fp32", "fp32'"] for turn in rounds)
    assert why == "50 rounds, a fixed number"
    for timed in session.arms:
        assert [slot.round for slot in timed.slots] == list(range(50))
    assert len(set(rounds)) == 6


def test_a_decided_arm_leaves_early() -> None:
    scripts = {"bf16": lasting(11), "fp16": lasting(12)}
    session = RoundSession(arm("fp32"), arm("fp32", control=True), [arm("bf16"), arm("fp16")])
    worker, why = sit(scripts, session, judge=after({11 * MS: 3, 12 * MS: 33}))
    counts = {label: len(worker.slots(label)) for label in ("fp32", "fp32'", "bf16", "fp16")}
    assert counts == {"fp32": 40, "fp32'": 40, "bf16": 16, "fp16": 40}
    assert why == "answered after 40 rounds"


def test_the_judge_gets_case_reference_and_control() -> None:
    seen = []

    def judge(case: Timing, reference: Timing, control: Timing | None) -> bool:
        seen.append([one.slots[-1].calls_ns[0][0] for one in (case, reference, control)])
        assert case.num_rounds == reference.num_rounds == control.num_rounds == 8 * (len(seen) + 1)
        return len(seen) == 2

    scripts = {"fp32": lasting(10), "fp32'": lasting(10.000001), "bf16": lasting(5)}
    _, why = sit(scripts, three(), judge=judge)
    assert seen == [[5 * MS, 10 * MS, 10 * MS + 1]] * 2
    assert why == "answered after 24 rounds"


def test_with_emulated_candidates_only_the_control_decides() -> None:
    questions = []

    def judge(case: Timing, reference: Timing, control: Timing | None) -> bool:
        questions.append((case.slots[0].calls_ns[0][0], control))
        return case.num_rounds >= 24

    session = RoundSession(arm("fp32"), arm("fp32", control=True), [arm("fp8", EMULATED)])
    worker, why = sit({"fp32": lasting(10), "fp32'": lasting(10.000001)}, session, judge=judge)
    assert questions == [(10 * MS + 1, None)] * 2 and why == "answered after 24 rounds"
    assert [len(worker.slots(label)) for label in ("fp32", "fp32'", "fp8")] == [24, 24, 4]


@for_each("rule", [FOREVER, StoppingRule(fixed=30), StoppingRule(least=16, budget=0.0, ceiling=1e9)])
def test_emulated_arms_get_four_rounds(rule: StoppingRule) -> None:
    scripts = {"bf16": lasting(11), "fp8": lasting(500)}
    session = RoundSession(arm("fp32"), arm("fp32", control=True), [arm("bf16"), arm("fp8", EMULATED)])
    worker, _ = sit(scripts, session, rule, after({11 * MS: 24}))
    assert len(worker.slots("fp8")) == EMULATED_ROUNDS == 4
    assert len(worker.slots("bf16")) == {None: 24, 30: 30}[rule.fixed] - 8 * (rule.budget == 0)


def test_emulated_steps_do_not_use_up_the_budget() -> None:
    slow = {label: lasting(500) for label in ("fp8", "mxfp8", "nvfp4", "mxfp4", "fp8-block")}
    rule, ended = StoppingRule(least=16, budget=1.0), []
    for emulated in ([], list(slow)):
        candidates = [arm("bf16"), *(arm(label, EMULATED) for label in emulated)]
        session = RoundSession(arm("fp32"), arm("fp32", control=True), candidates)
        ended.append(sit(slow, session, rule)[1])
    assert ended == ["time was up after 34 rounds"] * 2
    session = RoundSession(arm("fp32"), arm("fp32", control=True), [arm("bf16"), arm("fp8", EMULATED)])
    assert sit(slow, session, replace(rule, ceiling=0.9))[1] == "time was up after 2 rounds"


@for_each(
    ("session", "counts"),
    [
        (RoundSession(arm("fp32"), None, []), {"fp32": 32}),
        (RoundSession(None, None, [arm("bf16")]), {"bf16": 32}),
        (RoundSession(None, None, [arm("fp8", EMULATED)]), {"fp8": 4}),
        (RoundSession(arm("fp8", EMULATED), None, [arm("mxfp8", EMULATED)]), {"fp8": 4, "mxfp8": 4}),
        (RoundSession(arm("fp8", EMULATED), None, [arm("bf16")]), {"fp8": 4, "bf16": 32}),
    ],
)
def test_arms_without_a_comparison_get_a_fixed_number_of_rounds(session: RoundSession, counts: dict[str, int]) -> None:
    """Alone, or next to a reference without a speed, no number of rounds would decide anything."""

    def judge(case: Timing, reference: Timing, control: Timing | None) -> bool:
        raise AssertionError("there is nothing to judge")

    worker, why = sit({}, session, judge=judge)
    assert {label: len(worker.slots(label)) for label in counts} == counts
    assert why == f"answered after {max(counts.values())} rounds"


@for_each(
    ("rule", "why"),
    [
        (StoppingRule(least=16, budget=1.0), "time was up after 34 rounds"),
        # The minimum runs even when the budget is over, unless the ceiling ends it first.
        (StoppingRule(least=16, budget=0.1), "time was up after 16 rounds"),
        (StoppingRule(least=16, budget=0.1, ceiling=0.2), "time was up after 7 rounds"),
        # No group runs for ever.
        (StoppingRule(least=16, most=40, budget=1e9, ceiling=1e9), "40 rounds, the most a group gets"),
    ],
)
def test_measuring_ends_with_its_budget(rule: StoppingRule, why: str) -> None:
    worker, ended = sit({"bf16": Script(preparing_ns=10**10)}, three(), rule)
    assert ended == why
    assert len(worker.slots()) == 3 * int(re.findall(r"\d+", why)[0])


FASTER_NOW_AND_THEN = Script(lambda call: ((GEMM,), (9_700_000 if call % 8 == 4 else 10_300_000,)))


@for_each(
    ("script", "rounds"),
    [
        *(
            (lasting(nanoseconds / MS), 16)
            for nanoseconds in (9 * MS, 10 * MS, 10 * MS + 50_000, 10 * MS + 60_000, 11 * MS)
        ),
        (FASTER_NOW_AND_THEN, 64),
    ],
)
def test_clear_differences_end_at_the_first_look(script: Script, rounds: int) -> None:
    _, why = sit({"bf16": script}, three(), StoppingRule(least=16, most=64, budget=1e9, ceiling=1e9), is_case_decided)
    assert f" {rounds} rounds" in f" {why}"


@for_each("slow", range(4))
def test_periodic_disturbances_are_not_always_discarded(slow: int) -> None:
    def step(call: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (GEMM,), (6 * MS if call % 4 == slow and call > 4 else 3 * MS,)

    session = RoundSession(arm("fp32"), None, [])
    sit({"fp32": Script(step)}, session, StoppingRule(fixed=200))
    slots = session.arms[0].timing().slots
    calls = list(map(sum, chain.from_iterable(slot.calls_ns for slot in slots)))
    assert sum(call == 6 * MS for call in calls) / len(calls) == pytest.approx(0.25, abs=0.05)


def test_samples_are_kept_whole() -> None:
    step = gemm_steps(3 * MS, 2 * MS)
    session = RoundSession(arm("fp32"), None, [])
    sit({"fp32": Script(lambda call: ((CAST, GEMM), (MS, *step(call)[1])))}, session, StoppingRule(fixed=2))
    found = session.arms[0].timing()
    assert found.segments.phases == ("cast", "gemm")
    assert found.entries == (("cast", 1), ("gemm", 1))
    assert (found.varying, found.num_rounds, found.num_calls) == (False, 2, 6)
    assert found.slots[0].calls_ns == ((MS, 2 * MS), (MS, 3 * MS), (MS, 2 * MS))
    seconds = sum(map(sum, found.slots[1].calls_ns)) / 1e9
    assert found.slots[1] == SlotSample(1, found.slots[1].calls_ns, seconds, seconds, seconds / 3, place=0)


def test_arms_on_both_sides_of_the_repeating_threshold_are_warmed_alike() -> None:
    near = {"fp32": lasting(4.01), "fp32'": lasting(4.01), "bf16": lasting(3.99)}
    session = three()
    session.prepare(FakeWorker(near))
    assert [(arm.calls, arm.untimed_call_count) for arm in session.arms] == [(1, 1), (1, 1), (2, 1)]
    long = RoundSession(arm("fp32"), None, [arm("bf16")])
    long.prepare(FakeWorker({"fp32": lasting(200), "bf16": lasting(1)}))
    assert [arm.untimed_call_count for arm in long.arms] == [0, 1]
    neither = three()
    neither.prepare(FakeWorker({label: lasting(5) for label in ("fp32", "fp32'", "bf16")}))
    assert [(arm.calls, arm.untimed_call_count) for arm in neither.arms] == [(1, 0)] * 3


def test_arms_with_the_same_marks_have_the_same_cells() -> None:

    def script(first_ns: int, codes: tuple[int, ...]) -> Script:
        return Script(lambda call: (codes, (first_ns, *[400_000] * (len(codes) - 1))))

    codes = (CAST, GEMM) * 10
    session = three()
    session.prepare(
        FakeWorker(
            {
                "fp32": script(400_000, codes),
                "fp32'": script(9_000_000, codes),
                "bf16": script(400_000, codes[:-1]),
            }
        )
    )
    reference, control, other = session.arms
    assert control.segmentation is reference.segmentation
    assert other.segmentation.codes == codes[:-1]


def drawn(arms: int, rounds: int, seed: int = 0) -> list[list[int]]:
    orders: RoundOrders[int] = RoundOrders(random.Random(seed))
    return [orders.draw_round_order(range(arms)) for _ in range(rounds)]


def count_places(rounds: list[list[int]]) -> Counter[tuple[int, int]]:
    """How often each arm has each place in a round."""
    return Counter(chain.from_iterable(zip(row, range(len(row)), strict=True) for row in rounds))


@for_each("arms", range(1, 9))
@for_each("seed", range(3))
def test_every_arm_has_every_position_once_in_a_block(arms: int, seed: int) -> None:
    rounds = drawn(arms, 5 * arms, seed)
    assert all(sorted(row) == list(range(arms)) for row in rounds)
    for block in range(5):
        places = count_places(rounds[block * arms :][:arms])
        assert set(places.values()) == {1} and len(places) == arms * arms


@for_each("arms", range(2, 9))
def test_every_arm_follows_every_other_equally_often(arms: int) -> None:
    rounds = 2 * arms if arms % 2 else arms
    after = Counter(chain.from_iterable(pairwise(row) for row in drawn(arms, rounds)))
    assert len(after) == arms * (arms - 1) and set(after.values()) == {rounds // arms}


@for_each("stay", range(1, 7))
@for_each("before", [3, 16, 17])
def test_arms_that_leave_keep_the_orders_balanced(stay: int, before: int) -> None:
    orders: RoundOrders[int] = RoundOrders(random.Random(stay))
    first = [orders.draw_round_order(range(7)) for _ in range(before)]
    rest = [orders.draw_round_order(range(stay)) for _ in range(3 * stay)]
    cut = count_places(first)
    least = min(cut.values()) if len(cut) == 7 * 7 else 0
    assert max(cut.values()) - least <= 1
    assert set(count_places(rest).values()) == {3}


def test_orders_are_random() -> None:
    orders: RoundOrders[int] = RoundOrders(random.Random(0))
    assert (
        orders.draw_round_order([]) == []
        and sorted(orders.draw_round_order([3, 4])) == [3, 4]
        and orders.draw_round_order([]) == []
    )
    assert drawn(4, 40, 1) == drawn(4, 40, 1) != drawn(4, 40, 2)
    blocks = {tuple(map(tuple, drawn(4, 400)[4 * block :][:4])) for block in range(100)}
    assert len(blocks) > 60
    firsts = Counter(drawn(2, 1, seed)[0][0] for seed in range(200))
    assert min(firsts.values()) > 60


def test_steps_without_marks_have_the_proportions_of_the_one_before() -> None:
    one = arm("fp8", facts=GPU)
    marked = RawStep((UNATTRIBUTED, CAST, GEMM), (10, 30, 60))
    one.calibration_step, one.segmentation = marked, cut_step_into_cells(marked.codes, marked.intervals_ns)
    bare = [RawStep((UNATTRIBUTED,), (total,)) for total in (200, 77)]
    other = RawStep(marked.codes, (0, 50, 50))
    one.add_slot(RawSlot((marked, *bare, other, bare[1]), 1.0, 1.0, 0.0), 0)
    calls = one.slots[0].calls_ns
    assert calls == ((10, 30, 60), (20, 60, 120), (7, 23, 47), (0, 50, 50), (0, 39, 38)) and not one.phase_marks_vary
    assert [sum(call) for call in calls] == [100, 200, 77, 100, 77]
