"""What is learned of runs of the same case, against numpy and by simulation, and what it does to an interval."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fp8bench.analysis.findings import find
from fp8bench.analysis.reruns import LEAST_FREEDOM, Seen, is_busy, learned, reach_of
from fp8bench.analysis.verdicts import best_log, conclude
from fp8bench.model import Interval, Reruns, Timing, Verdict
from tests.analysis.test_verdicts import busy
from tests.counts import for_each
from tests.fakes import MS, record, steady

TEN = steady(10 * MS, 24)
FIVE = steady(5 * MS, 24)


def seen(*logs: float) -> Seen:
    found = Seen()
    for log in logs:
        found = found.also(log)
    return found


def test_a_few_numbers_say_what_all_runs_say() -> None:
    logs = np.random.default_rng(0).normal(0.3, 0.02, 40)
    found = seen(*logs)
    assert (found.runs, found.freedom) == (40, 39) and found.mean == pytest.approx(logs.mean())
    assert found.squares / found.freedom == pytest.approx(np.var(logs, ddof=1))


def test_too_few_runs_say_nothing() -> None:
    """Of the case and of all others together; a case without a second run has no spread."""
    assert learned("a", {}) is None
    assert learned("a", {"a": seen(0.0, 0.01, 0.02), **{name: seen(0.1) for name in "bcdefg"}}) is None
    assert learned("a", {"a": seen(*[0.01] * LEAST_FREEDOM, 0.02)}) is not None
    assert learned("new", {"b": seen(0.0, 0.01, 0.02), "c": seen(0.0, 0.01, 0.02)}) is not None
    assert reach_of(None) == 0.0


def test_a_case_alone_goes_by_its_runs_and_a_new_one_by_the_others() -> None:
    runs = np.random.default_rng(1).normal(0, 0.02, 50)
    own = learned("a", {"a": seen(*runs)})
    assert own is not None and own.spread == pytest.approx(np.std(runs, ddof=1)) and own.freedom == 49
    other = learned("new", {"a": seen(*runs)})
    assert other is not None and other.spread == pytest.approx(own.spread) and (other.freedom, other.runs) == (2, 50)
    assert reach_of(other) > reach_of(own)  # whoever has never run may be worse than the others


def test_the_long_run_is_held() -> None:
    """Of cases whose runs lie 0.1 to 10% apart, of which rounds say nothing."""
    draw, held = np.random.default_rng(2), []
    for _ in range(300):
        spreads = np.exp(draw.normal(math.log(0.01), 1.0, 8))
        known = {str(place): seen(*draw.normal(0, one, draw.integers(1, 12))) for place, one in enumerate(spreads)}
        for place, one in enumerate(spreads):
            if (found := learned(str(place), known)) is not None:
                held.append(abs(draw.normal(0, one)) <= reach_of(found))
    assert len(held) > 2000 and 0.96 < np.mean(held) < 0.995


def test_an_interval_is_never_narrower_than_runs_lie_apart() -> None:
    """And the verdict is by that; a range of few rounds stays what it is."""
    apart = math.log(1.05)
    plain, known = conclude(FIVE, TEN, TEN), conclude(FIVE, TEN, TEN, reach=apart)
    assert plain is not None and known is not None and known.ratio.point == plain.ratio.point
    assert known.ratio.low == pytest.approx(min(plain.ratio.low, plain.ratio.point / 1.05))
    assert known.ratio.high == pytest.approx(max(plain.ratio.high, plain.ratio.point * 1.05))
    assert plain.verdict is known.verdict is Verdict.FASTER
    same = conclude(TEN, TEN, TEN)
    wide = conclude(TEN, TEN, TEN, reach=apart)
    assert same is not None and wide is not None and (same.verdict, wide.verdict) == (Verdict.SAME, Verdict.UNSURE)


def test_what_no_more_rounds_would_settle_says_so() -> None:
    lead = record(TEN, "fp32", is_reference=True, control=TEN)
    case = replace(record(TEN), reruns=Reruns(0.02, 12, 40))
    (_, found) = find([lead, case], {})
    assert found.verdict is Verdict.UNSURE and "by 40 earlier ones: more rounds do not help" in found.why
    (_, found) = find([lead, replace(case, reruns=None)], {})
    assert found.verdict is Verdict.SAME


def held_up(one: Timing, quiet: int) -> Timing:
    """All but so many of its slots, every third call of which takes twice as long."""
    slots = [
        replace(
            slot, wall_seconds=(1 if place < quiet else 2) * slot.cpu_seconds, calls_ns=(*slot.calls_ns * 2, (20 * MS,))
        )
        for place, slot in enumerate(one.slots)
    ]
    return replace(one, slots=tuple(slots))


def test_where_too_few_rounds_were_undisturbed_there_is_a_range_and_no_interval() -> None:
    """It holds what the mean over all calls says, too; one more quiet round, and it is an interval again."""
    lead = record(TEN, "fp32", is_reference=True, control=TEN)
    (_, found) = find([lead, record(held_up(FIVE, 5))], {})
    assert found.ratio is not None and found.typical is not None and found.ratio.level == 0
    assert found.ratio.point == pytest.approx(0.5) and found.ratio.high >= found.typical.high > 0.9
    assert found.verdict is Verdict.UNSURE
    (_, known) = find([lead, replace(record(held_up(FIVE, 5)), reruns=Reruns(0.01, 12, 40))], {})
    assert known.ratio is not None and known.ratio.level == 0.99 and known.ratio.high == found.ratio.high
    (_, calm) = find([lead, record(held_up(FIVE, 6))], {})
    assert calm.ratio is not None and calm.ratio.level == 0.99 and calm.ratio.high < 0.51
    group = [replace(one, case=replace(one.case, device="cuda:0")) for one in (lead, record(held_up(FIVE, 5)))]
    (_, gpu) = find(group, {})
    assert gpu.ratio is not None and gpu.ratio.level == 0.99  # a thread that waits for a device is held up by nobody


def test_who_was_held_up_is_busy() -> None:
    """More than a fifth of the slots of both together."""
    late = replace(TEN, slots=tuple(replace(slot, wall_seconds=2 * slot.cpu_seconds) for slot in TEN.slots))
    some = replace(TEN, slots=(*late.slots[:12], *TEN.slots[12:]))
    assert is_busy(late, TEN) and is_busy(some, TEN) and not is_busy(TEN, TEN)
    assert not is_busy(replace(TEN, slots=(*late.slots[:4], *TEN.slots[4:])), TEN)


def test_a_wild_case_takes_no_verdict_of_its_neighbours() -> None:
    """Of three others the second says how far a new case's runs may lie apart."""
    known = {"calm": seen(0, 0.01, 0.02), "usual": seen(0, 0.02, 0.04), "wild": seen(0, 2.0, 4.0)}
    found = learned("new", known)
    assert found is not None and found.spread == pytest.approx(0.02)


@for_each("rounds", [8, 24, 60])
def test_the_ratio_without_an_interval_is_that_of_the_verdict(rounds: int) -> None:
    arms = [busy(3, seed, rounds) for seed in (1, 2, 3)]
    known, log = conclude(*arms), best_log(*arms)
    assert known is not None and (log is None) == (rounds < 24)
    assert log is None or known.ratio.point == pytest.approx(math.exp(log), rel=1e-12)


@for_each("bad", [Reruns(math.nan, 4, 4), Reruns(math.inf, 4, 4), Reruns(-1.0, 4, 4), Reruns(0.1, 0, 4)])
def test_a_file_that_somebody_changed_ends_in_no_traceback(bad: Reruns) -> None:
    """What is no spread is none, what is no ratio is none; a huge one is an interval without a verdict."""
    assert reach_of(bad) == 0.0
    none = [Interval(point, 0.9, 1.1, 0.99) for point in (0.0, -1.0, math.nan, math.inf)]
    plain = conclude(FIVE, TEN, TEN)
    assert plain == conclude(FIVE, TEN, TEN, sessions=none)
    wide = conclude(FIVE, TEN, TEN, reach=reach_of(Reruns(1e9, 4, 4)))
    assert wide is not None and wide.verdict is Verdict.UNSURE and math.isfinite(wide.ratio.high)
