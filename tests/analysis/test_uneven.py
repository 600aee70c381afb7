"""Slow-downs that do not hit every call, and steps whose stretches make up for each other: no wrong sign."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fp8bench.analysis.findings import find
from fp8bench.analysis.verdicts import (
    best_ratio,
    compute_best_phase_seconds,
    conclude_comparison,
    is_uneven,
    mean_agrees_with_verdict,
    mean_seconds,
    share_below_fastest_step,
)
from fp8bench.model import Interval, Label, Segments, SlotSample, Timing, Verdict
from tests.counts import counts, for_each
from tests.fakes import MS, called, record, timing

WRONG = (Verdict.FASTER, Verdict.SAME)
# Slow calls out of calls.
SHARES = ((1, 2), (3, 4), (1, 4), (1, 10), (9, 10), (1, 20), (19, 20), (1, 40))
MEANS = (0.05, 0.1, 0.3, 1.0, 3.0)


def measured(draw: np.random.Generator, calls: int, slow: np.ndarray, load: float, rounds: int) -> Timing:
    slots, place = [], int(draw.integers(len(slow)))
    for number in range(rounds):
        place += 1 + int(draw.integers(2)) if calls > 1 else 0  # the discarded calls
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
    """Factors of calls: `part` of every `whole` calls are slower, so that the mean rises by `mean`."""
    slow = np.full(whole, fastest)
    slow[random.Random(seed).sample(range(whole), part)] = fastest * (1 + mean / fastest * whole / part)
    return slow * (1 + mean) / slow.mean()


@counts(40, 1000)
def test_a_slow_down_of_some_calls_is_never_called_faster_or_same(count: int) -> None:
    for trial in range(count):
        draw = np.random.default_rng(trial)
        part, whole = SHARES[trial % len(SHARES)]
        calls, rounds = ((26, 20), (4, 40), (1, 120))[trial % 3]
        load = (0.0, 0.3, 0.8)[trial // 3 % 3]
        slow = planted(part, whole, MEANS[trial % len(MEANS)], (1.0, 0.98)[trial % 2], trial)
        even = np.ones(1)
        case, reference, control = (measured(draw, calls, one, load, rounds) for one in (slow, even, even))
        said = conclude_comparison(case, reference, control)
        assert said.verdict not in WRONG, (trial, part, whole, said)


@for_each("slower", [1.025, 1.05])
def test_a_slow_down_of_every_call_is_found(slower: float) -> None:
    draw = np.random.default_rng(3)
    found = []
    for _ in range(20):
        timings = (measured(draw, 26, np.full(1, factor), 0.5, 20) for factor in (slower, 1.0, 1.0))
        said = conclude_comparison(*timings)
        found.append(said.verdict)
    assert found.count(Verdict.SLOWER) >= 19


def test_waiting_is_not_part_of_the_mean() -> None:
    slot = SlotSample(0, ((1_000_000,), (5_000_000,)), 0.006, 0.002, waited_seconds=0.004)
    alone = SlotSample(1, ((5_000_000,),), 0.005, 0.001, waited_seconds=0.004)
    others = (replace(slot, round=2, waited_seconds=None), replace(slot, round=3, waited_seconds=1.0))
    timing = replace(called(), slots=(slot, alone, *others))
    assert mean_seconds(timing, range(4)).tolist() == pytest.approx([1e-3, 1e-3, 3e-3, 3e-3])
    assert mean_seconds(timing, [2]).tolist() == pytest.approx([3e-3])
    draw = np.random.default_rng(0)
    slots = [[1_000_000, 1_000_000, int(1_000_000 * math.exp(draw.exponential(0.12)))] for _ in range(12)]
    reference = called(*[[1_000_000] * 3] * 12)
    records = (record(reference, "fp32", is_reference=True, control=reference), record(called(*slots), "bf16"))
    finding = find(records, {})[1]
    assert finding.verdict is Verdict.UNSURE and "contradicts the fastest calls" in finding.why


def test_a_step_slower_on_three_of_four_calls_is_not_faster() -> None:
    case = called(*[[417_000, 1_250_000, 1_251_000, 1_252_000] * 2] * 16)
    reference = called(*[[1_000_000] * 8] * 16)
    records = (record(reference, "fp32", is_reference=True, control=reference), record(case, "bf16"))
    finding = find(records, {})[1]
    assert (finding.verdict, finding.hard) == (Verdict.UNSURE, (Label.UNEVEN,))
    assert finding.why == (
        "labelled uneven (against the reference, the mean is +150.0% off the fastest calls), so there is no verdict"
    )


ROUNDS = 60
PHASES = ("gemm", "data_load", "elementwise")
Draw = np.random.Generator
Step = Callable[[Draw, float], tuple[float, float, float]]


def pacing(draw: Draw, wide: float) -> tuple[float, float, float]:
    """Work of variable length, then a wait until 5 ms have passed."""
    work = 1 + wide * draw.random()
    return work, 5 - work, 0.1 + 0.01 * draw.exponential()


def prefetched(draw: Draw, wide: float) -> tuple[float, float, float]:
    """Another thread prepares a batch in 3 ms after each step; longer work then waits less for it."""
    compute = 2 + wide * draw.random()
    return compute, max(0.0, 3 - compute) + 0.02 * draw.exponential(), 0.3


def spinning(draw: Draw, wide: float) -> tuple[float, float, float]:
    """A lock that other threads hold at independent times, before or after the work."""
    before = wide * draw.random()
    return before, 1.0, wide - before + 0.02 * draw.exponential()


def stretched(step: Step, draw: Draw, wide: float) -> Timing:
    return timing(*[tuple(int(MS * one) for one in step(draw, wide)) for _ in range(ROUNDS)], phases=PHASES)


@for_each("step", [pacing, prefetched, spinning])
@counts(10, 80)
def test_steps_whose_phases_compensate_are_neither_faster_nor_slower(step: Step, count: int) -> None:
    of_stretches = 0
    for seed in range(count):
        draw = np.random.default_rng(seed)
        reference, control = (stretched(step, draw, 0.4 if step is not spinning else 1.0) for _ in range(2))
        case = stretched(step, draw, 0.8 if step is not spinning else 1.0)
        best = [
            sum(seconds for _, seconds in compute_best_phase_seconds(one, whole_steps=False))
            for one in (case, reference)
        ]
        of_stretches += best[0] < 0.995 * best[1]
        known = conclude_comparison(case, reference, control)
        assert known.whole_steps
        assert known.verdict in (Verdict.SAME, Verdict.UNSURE), (seed, known)
    assert of_stretches == count or step is spinning


def test_a_wide_noise_floor_does_not_hide_compensation() -> None:
    draw = np.random.default_rng(0)
    reference, control, case = (stretched(pacing, draw, wide) for wide in (0.2, 3.0, 0.2))
    rounds = list(range(ROUNDS))
    by_stretches = best_ratio([control, reference], rounds, whole_steps=False)
    assert by_stretches.reach > max(map(share_below_fastest_step, (reference, control, case)))
    known = conclude_comparison(case, reference, control)
    assert known.whole_steps and known.verdict is Verdict.SAME
    assert known.aa.reach < 0.02


def test_the_best_time_is_that_of_steps_and_the_label_says_why() -> None:
    draw = np.random.default_rng(0)
    reference, control, case = (stretched(pacing, draw, wide) for wide in (0.4, 0.4, 0.8))
    told = find([record(reference, "fp32", is_reference=True, control=control), record(case, "bf16")], {})
    for finding in told:
        assert Label.WHOLE_STEPS in finding.labels and not finding.doubtful
        assert finding.best_seconds == pytest.approx(5.1e-3, rel=0.01)
        assert finding.best_seconds == sum(seconds for _, seconds in finding.phases)
    words = dict(told[1].label_reasons)[Label.WHOLE_STEPS]
    assert words == "the fastest stretches sum to 4.52 ms, the fastest of 60 steps takes 5.10 ms"


def test_a_compensating_reference_is_named_at_the_case() -> None:
    draw = np.random.default_rng(0)
    reference, control = (stretched(pacing, draw, 0.8) for _ in range(2))
    steady = timing(*[(5 * MS, 50_000, 50_000)] * ROUNDS, phases=PHASES)
    told = find([record(reference, "fp32", is_reference=True, control=control), record(steady, "bf16")], {})
    assert dict(told[1].label_reasons)[Label.WHOLE_STEPS].startswith("in the reference, ")
    assert told[1].verdict in (Verdict.SAME, Verdict.UNSURE)


def test_a_best_case_and_a_mean_with_opposite_signs_do_not_agree() -> None:
    below, above = Interval(0.996, 0.993, 0.999, 0.99), Interval(1.004, 1.001, 1.007, 0.99)
    about = Interval(1.0, 0.998, 1.002, 0.99)
    for verdict, ratio, typical in ((Verdict.FASTER, below, above), (Verdict.SLOWER, above, below)):
        assert is_uneven(ratio, typical) and not mean_agrees_with_verdict(verdict, ratio, typical)
        assert not is_uneven(ratio, about) and mean_agrees_with_verdict(verdict, ratio, about)
