"""Slow-downs that do not hit every call: planted in noise, none gets a wrong sign or passes as the same."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from fp8bench.analysis.findings import find, rarest
from fp8bench.analysis.labels import pattern
from fp8bench.analysis.verdicts import Conclusion, conclude, means
from fp8bench.model import Interval, Label, Segments, SlotSample, Timing, Verdict
from tests.counts import counts, for_each
from tests.fakes import called, record

WRONG = (Verdict.FASTER, Verdict.SAME)
# How many of how many calls are slower.
SHARES = ((1, 2), (3, 4), (1, 4), (1, 10), (9, 10), (1, 20), (19, 20), (1, 40))
MEANS = (0.05, 0.1, 0.3, 1.0, 3.0)


def measured(draw: np.random.Generator, calls: int, slow: np.ndarray, load: float, rounds: int) -> Timing:
    """Calls of about 1 ms, slower by `slow` in turn, on a machine that takes the core in `load` of all slots."""
    slots, place = [], int(draw.integers(len(slow)))
    for number in range(rounds):
        place += 1 + int(draw.integers(2)) if calls > 1 else 0  # the discarded ones
        times = 1e6 * np.exp(np.abs(draw.normal(0, 0.02, calls))) * slow[(place + np.arange(calls)) % len(slow)]
        place += calls
        waited = float(draw.exponential(4e6)) if draw.random() < load else 0.0
        times[draw.integers(calls)] += waited
        cells = tuple((int(one),) for one in times)
        slots.append(
            SlotSample(number, cells, times.sum() / 1e9, 0.0, waited_seconds=waited / 1e9, preemptions=bool(waited))
        )
    return Timing(Segments(("gemm",), (0,)), tuple(slots))


def planted(part: int, whole: int, mean: float, fastest: float, seed: int) -> np.ndarray:
    """Factors of a period of calls: `part` of `whole` are slower, so that all take `mean` more on average."""
    slow = np.full(whole, fastest)
    slow[random.Random(seed).sample(range(whole), part)] = fastest * (1 + mean / fastest * whole / part)
    return slow * (1 + mean) / slow.mean()


@counts(40, 1000)
def test_a_slow_down_of_some_calls_has_no_wrong_sign_and_is_never_the_same(count: int) -> None:
    """Even where the fastest calls are 2% faster than those of the reference, as they were where this was found."""
    for trial in range(count):
        draw = np.random.default_rng(trial)
        part, whole = SHARES[trial % len(SHARES)]
        calls, rounds = ((26, 20), (4, 40), (1, 120))[trial % 3]
        load = (0.0, 0.3, 0.8)[trial // 3 % 3]
        slow = planted(part, whole, MEANS[trial % len(MEANS)], (1.0, 0.98)[trial % 2], trial)
        even = np.ones(1)
        case, reference, control = (measured(draw, calls, one, load, rounds) for one in (slow, even, even))
        said = conclude(case, reference, control)
        assert said is not None and said.verdict not in WRONG, (trial, part, whole, said)


@for_each("slower", [1.025, 1.05])
def test_a_slow_down_of_every_call_is_found_as_ever(slower: float) -> None:
    """On a machine that takes the core away in half of the slots: what waited is in no mean."""
    draw = np.random.default_rng(3)
    found = []
    for _ in range(20):
        timings = (measured(draw, 26, np.full(1, factor), 0.5, 20) for factor in (slower, 1.0, 1.0))
        said = conclude(*timings)
        assert said is not None
        found.append(said.verdict)
    assert found.count(Verdict.SLOWER) >= 19


def test_what_waited_for_a_core_is_in_no_mean() -> None:
    """Of one call a slot as of several; where nobody knows it, or it cannot be, the calls count as they are."""
    slot = SlotSample(0, ((1_000_000,), (5_000_000,)), 0.006, 0.002, waited_seconds=0.004)
    alone = SlotSample(1, ((5_000_000,),), 0.005, 0.001, waited_seconds=0.004)
    others = (replace(slot, round=2, waited_seconds=None), replace(slot, round=3, waited_seconds=1.0))
    timing = replace(called(), slots=(slot, alone, *others))
    assert means(timing, range(4)).tolist() == pytest.approx([1e-3, 1e-3, 3e-3, 3e-3])
    assert means(timing, [2]).tolist() == pytest.approx([3e-3])


def test_a_step_slower_on_three_of_four_calls_is_not_faster() -> None:
    """As it was found: three times as long on three of four calls, and the fastest ones 2.4 times as fast."""
    case = called(*[[417_000, 1_250_000, 1_251_000, 1_252_000] * 2] * 16)
    reference = called(*[[1_000_000] * 8] * 16)
    records = (record(reference, "fp32", is_reference=True, control=reference), record(case, "bf16"))
    finding = find(records, {})[1]
    assert (finding.verdict, finding.hard) == (Verdict.UNSURE, (Label.UNEVEN,))
    assert finding.why == (
        "labelled uneven (2.40x by its fastest calls, 0.959x by all; about 3 of 4 calls, always the same ones of "
        "a slot, take 3.0 times as long): times measured so get no verdict"
    )


def test_too_few_calls_are_not_the_same() -> None:
    """The fastest ones are alike, and what all say is not known to 5%."""
    draw = np.random.default_rng(0)
    slots = [[1_000_000, 1_000_000, int(1_000_000 * math.exp(draw.exponential(0.12)))] for _ in range(12)]
    reference = called(*[[1_000_000] * 3] * 12)
    records = (record(reference, "fp32", is_reference=True, control=reference), record(called(*slots), "bf16"))
    finding = find(records, {})[1]
    assert finding.verdict is Verdict.UNSURE and "does not confirm it" in finding.why


@for_each(
    ("slots", "words"),
    [
        ([[100, 300, 300, 300]] * 8, "about 3 of 4 calls, always the same ones of a slot, take 3.0 times as long"),
        ([[100, 300, 300, 300], [300, 100, 300, 300], [300, 300, 300, 100]] * 8,
         "about 3 of 4 calls take 3.0 times as long"),
        ([[100] * 6, [100] * 6, [150] * 6] * 8, "about 1 of 3 rounds take in all their calls 1.5 times as long"),
        (([[100]] * 19 + [[200]]) * 4, "about 1 of 18 calls take 2.0 times as long"),
        (([[100]] * 3 + [[150]] * 297), "about all but 1 of 100 calls take 1.5 times as long"),
        ([[100, 101, 102, 103]] * 8, ""),
        ([[100, 100, 900, 100]] + [[100] * 4] * 8, ""),
        ([[0, 0, 0]] * 8, ""),
        ([], ""),
    ],
)  # fmt: skip
def test_a_pattern_is_told(slots: list[list[int]], words: str) -> None:
    """Calls, whole rounds, or places of a slot; two calls are none."""
    assert pattern(called(*slots)) == words


def test_a_call_from_which_the_core_was_taken_is_of_no_pattern() -> None:
    """Whatever it took beside waiting."""
    timing = called(*[[100, 300, 300, 300]] * 8)
    slots = [
        replace(one, calls_ns=(*one.calls_ns, (90_000,)), waited_seconds=1e-4, preemptions=1) for one in timing.slots
    ]
    assert pattern(replace(timing, slots=tuple(slots))).startswith("about 3 of 4 calls")


def test_a_slot_all_of_whose_calls_are_far_out_says_nothing() -> None:
    """Of the others there is a pattern all the same."""
    slots = [[1000, 1000, 2000, 2000]] * 20
    assert pattern(called(*slots, [4_000] * 4)).startswith("about 1 of 2 calls")


def calls_of(draw: np.random.Generator, calls: int, rounds: int, one_in: float) -> Timing:
    """Calls of about 1 ms, of which one in so many takes twice as long."""
    times = (
        1e6 * np.exp(np.abs(draw.normal(0, 0.02, (rounds, calls)))) * (1 + (draw.random((rounds, calls)) < 1 / one_in))
    )
    return called(*times.astype(int).tolist())


@for_each(("calls", "rounds"), [(26, 24), (4, 40), (1, 120), (60, 24)])
@counts(12, 300)
def test_what_would_have_been_seen_is_seen(calls: int, rounds: int, count: int) -> None:
    """A case that is called the same says with one in how many calls that take twice as long it would not have been:
    with so many planted it is not, in 99% of all draws, nor is the claim far too modest."""
    told, seen, rarer = 0, 0, 0
    for trial in range(count):
        draw = np.random.default_rng(trial)
        case, reference, control = (calls_of(draw, calls, rounds, math.inf) for _ in range(3))
        same = conclude(case, reference, control)
        assert same is not None and same.verdict is Verdict.SAME
        one_in = rarest(case.num_calls, same)
        assert one_in is not None
        found = [conclude(calls_of(draw, calls, rounds, n * one_in), reference, control) for n in (1, 12)]
        told += 1
        seen += found[0] is not None and found[0].verdict is not Verdict.SAME
        rarer += found[1] is not None and found[1].verdict is not Verdict.SAME
    assert seen >= 0.97 * told and rarer <= 0.8 * told, (seen, rarer, told)


@for_each(
    ("calls", "point", "one_in"), [(1, 1.0, None), (24, 1.0, 3), (624, 1.0, 25), (10**6, 1.0, 28), (624, 1.03, 85)]
)
def test_the_rarest_event_that_would_have_been_seen(calls: int, point: float, one_in: int | None) -> None:
    """Never rarer than what moves a mean by 3.5%; a mean that lies higher already has less of a way to go."""
    typical = Interval(point, point, point, 0.99)
    assert rarest(calls, Conclusion(Verdict.SAME, typical, typical, None)) == one_in
