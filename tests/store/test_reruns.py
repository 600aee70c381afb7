"""Spread between runs of a case: stored by code and machine, and estimated, checked against numpy and by simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fp8bench.analysis.findings import find, half_width_of_reruns
from fp8bench.analysis.verdicts import conclude_comparison, log_of_best_ratio
from fp8bench.model import Environment, Interval, Record, Reruns, Run, Timing, Verdict
from fp8bench.store.reruns import (
    MIN_RERUN_COMPARISONS,
    CaseRuns,
    add_rerun_spreads,
    learn_run_spread,
    store_ratios,
    was_machine_busy,
)
from fp8bench.store.verify import verify_store
from tests.analysis.test_verdicts import busy
from tests.counts import for_each
from tests.fakes import CPU, MS, record, steady
from tests.runs import run_of

RUN = replace(
    run_of([]), devices=(CPU,), environment=Environment({"commit": "a" * 40, "fp8bench": "0.1", "threads": 1})
)


def group(time: int = 5 * MS, late: bool = False, rounds: int = 24, control: int = 10 * MS) -> tuple[Record, ...]:
    ten, own = steady(10 * MS, rounds), steady(time, rounds)
    if late:
        own = replace(own, slots=tuple(replace(slot, wall_seconds=3 * slot.cpu_seconds) for slot in own.slots))
    return record(ten, "fp32", is_reference=True, control=steady(control, rounds)), record(own)


def known(store: Path, records: tuple[Record, ...] | None = None, run: Run = RUN) -> list[int]:
    return [
        marked.reruns.runs if marked.reruns is not None else 0
        for marked in add_rerun_spreads(records or group(), run, store)
    ]


def test_the_fifth_run_knows_the_four_before_it(tmp_path: Path) -> None:
    for number in range(6):
        assert known(tmp_path) == [number if number > 4 else 0] * 2
        store_ratios(group(5 * MS + number), RUN, tmp_path)
    (_, one) = add_rerun_spreads(group(), RUN, tmp_path)
    assert one.reruns is not None and 0 < one.reruns.spread < 1e-6


def test_how_far_identical_code_lies_apart_is_learned_too(tmp_path: Path) -> None:
    for number in range(6):
        store_ratios(group(control=10 * MS + (-1) ** number * MS // 10), RUN, tmp_path)
    lead, case = add_rerun_spreads(group(), RUN, tmp_path)
    assert lead.reruns is not None and lead.reruns.spread == pytest.approx(0.011, rel=0.05)
    assert case.reruns is not None and case.reruns.spread < 0.006  # half of a control's difference is the reference's
    findings = find([lead, case], {})
    assert all(finding.floor == pytest.approx(math.expm1(half_width_of_reruns(lead.reruns))) for finding in findings)


def test_other_code_another_machine_and_a_busy_one_are_known_apart(tmp_path: Path) -> None:
    for _ in range(6):
        store_ratios(group(), RUN, tmp_path)
    assert known(tmp_path)[1] == 6 and known(tmp_path, group(late=True)) == [6, 6]  # quiet ones, while none was busy
    for _ in range(5):
        store_ratios(group(late=True), RUN, tmp_path)
    assert known(tmp_path) == [11, 6] and known(tmp_path, group(late=True)) == [11, 5]  # its reference was not late
    for facts in ({"threads": 2}, {"torch": "9.9"}):
        assert known(tmp_path, run=replace(RUN, environment=RUN.environment.also(facts))) == [0, 0]
    other = add_rerun_spreads(group(), replace(RUN, environment=RUN.environment.also({"commit": "b" * 40})), tmp_path)
    assert [one.reruns.freedom for one in other if one.reruns] == [2, 2]  # without runs: like the others


def test_few_rounds_are_no_run_and_where_nobody_can_write_a_run_goes_on(tmp_path: Path) -> None:
    for _ in range(6):
        store_ratios(group(rounds=6), RUN, tmp_path)
    assert not (tmp_path / "reruns").exists()
    (tmp_path / "reruns").write_text("a file")
    store_ratios(group(), RUN, tmp_path)
    assert known(tmp_path) == [0, 0]


@for_each("content", [b"", b"[]", b'{"version": 7}', b'{"version": 1, "cases": {"a": 1}}', b"\xff"])
def test_a_broken_file_is_none_and_is_written_anew(tmp_path: Path, content: bytes) -> None:
    store_ratios(group(), RUN, tmp_path)
    (path,) = (tmp_path / "reruns").glob("*.json")
    path.write_bytes(content)
    assert known(tmp_path) == [0, 0]
    for _ in range(6):
        store_ratios(group(), RUN, tmp_path)
    assert known(tmp_path)[1] == 6


def test_a_digit_that_changed_is_named_when_a_store_is_verified(tmp_path: Path) -> None:
    store_ratios(group(), RUN, tmp_path)
    (path,) = (tmp_path / "reruns").glob("*.json")
    assert not [fault for fault in verify_store(tmp_path).faults if fault.broken]
    path.write_text(path.read_text().replace("[1,", "[7,", 1))
    (fault,) = verify_store(tmp_path).faults
    assert fault.path == str(path) and "its checksum does not match its content" in fault.what


TEN = steady(10 * MS, 24)
FIVE = steady(5 * MS, 24)


def seen(*logs: float) -> CaseRuns:
    runs = CaseRuns()
    for log in logs:
        runs = runs.add(log)
    return runs


def test_a_few_numbers_say_what_all_runs_say_unless_they_are_too_few() -> None:
    logs = np.random.default_rng(0).normal(0.3, 0.02, 40)
    known_runs = seen(*logs)
    assert (known_runs.runs, known_runs.freedom) == (40, 39) and known_runs.mean == pytest.approx(logs.mean())
    assert known_runs.squares / known_runs.freedom == pytest.approx(np.var(logs, ddof=1))
    assert learn_run_spread("a", {}) is None
    assert learn_run_spread("a", {"a": seen(0.0, 0.01, 0.02), **{name: seen(0.1) for name in "bcdefg"}}) is None
    assert learn_run_spread("a", {"a": seen(*[0.01] * MIN_RERUN_COMPARISONS, 0.02)}) is not None
    assert learn_run_spread("new", {"b": seen(0.0, 0.01, 0.02), "c": seen(0.0, 0.01, 0.02)}) is not None
    assert half_width_of_reruns(None) == 0.0
    runs = np.random.default_rng(1).normal(0, 0.02, 50)
    own = learn_run_spread("a", {"a": seen(*runs)})
    assert own is not None and own.spread == pytest.approx(np.std(runs, ddof=1)) and own.freedom == 49
    other = learn_run_spread("new", {"a": seen(*runs)})
    assert other is not None and other.spread == pytest.approx(own.spread) and (other.freedom, other.runs) == (2, 50)
    assert half_width_of_reruns(other) > half_width_of_reruns(own)  # a new case may be worse than the others
    known = {"calm": seen(0, 0.01, 0.02), "usual": seen(0, 0.02, 0.04), "wild": seen(0, 2.0, 4.0)}
    known_runs = learn_run_spread("new", known)
    assert known_runs is not None and known_runs.spread == pytest.approx(0.02)


def test_no_interval_reaches_much_farther_than_runs_were_apart() -> None:
    two_speeds = learn_run_spread("new", {"wild": seen(0.0, 0.01, 0.4, 0.41, 0.41)})
    assert two_speeds is not None and half_width_of_reruns(two_speeds) == pytest.approx(0.82)


def test_the_long_run_is_held() -> None:
    draw, held = np.random.default_rng(2), []
    for _ in range(300):
        spreads = np.exp(draw.normal(math.log(0.01), 1.0, 8))
        known = {str(place): seen(*draw.normal(0, one, draw.integers(1, 12))) for place, one in enumerate(spreads)}
        for place, one in enumerate(spreads):
            if (found := learn_run_spread(str(place), known)) is not None:
                held.append(abs(draw.normal(0, one)) <= half_width_of_reruns(found))
    assert len(held) > 2000 and 0.96 < np.mean(held) < 0.995


def _covered_share(draws: np.ndarray, cover: bool) -> float:
    """Returns the share of intervals, each from all runs before a draw, that contain the draw."""
    is_covered = []
    for logs in draws:
        for place in range(5, len(logs) - 1):
            spread = learn_run_spread("a", {"a": seen(*logs[:place])})
            assert spread is not None
            reach, point, earlier = half_width_of_reruns(spread), logs[place], logs[:place] if cover else ()
            low, high = min(point - reach, *earlier, point), max(point + reach, *earlier, point)
            is_covered.append(low <= logs[place + 1] <= high)
    return float(np.mean(is_covered))


def test_a_rare_speed_is_in_the_interval_and_an_ordinary_spread_is_no_wider(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    ordinary = draw.normal(0.0, 0.02, (40, 40))
    two_speeds = draw.normal(0.0, 0.005, (40, 40)) + 0.41 * (draw.random((40, 40)) < 0.08)
    assert _covered_share(two_speeds, cover=False) < 0.93 < _covered_share(two_speeds, cover=True)
    assert _covered_share(ordinary, cover=True) - _covered_share(ordinary, cover=False) < 0.03
    # The case's own runs count, on a busy machine and on a quiet one; those of other code do not.
    for number in range(12):
        store_ratios(group(late=True), RUN, tmp_path)
        store_ratios(group(5 * MS + (number == 3) * 2 * MS), RUN, tmp_path)
    reference, case = add_rerun_spreads(group(), RUN, tmp_path)
    assert case.reruns is not None and case.reruns.own_runs == 24
    (_, finding) = find([reference, case], {})
    assert finding.ratio is not None and finding.ratio.high == pytest.approx(0.7)


def test_the_code_of_callables_is_code_and_their_spread_is_not_that_of_a_suite(tmp_path: Path) -> None:
    calls = [replace(member, case=replace(member.case, workload="bench")) for member in group()]
    edited = replace(RUN, environment=RUN.environment.also({"imports_sha256": "other"}))
    for number in range(6):
        store_ratios([replace(calls[0]), replace(calls[1], timing=steady((5 + number) * MS, 24))], RUN, tmp_path)
    assert known(tmp_path) == [0, 0] and known(tmp_path, tuple(calls))[1] == 6
    reruns_of_edit = add_rerun_spreads(calls, edited, tmp_path)[1].reruns
    assert reruns_of_edit is not None and reruns_of_edit.own_runs == 0 and reruns_of_edit.low == math.inf


def test_an_interval_is_never_narrower_than_runs_lie_apart() -> None:
    apart = math.log(1.05)
    plain, known = conclude_comparison(FIVE, TEN, TEN), conclude_comparison(FIVE, TEN, TEN, min_half_width=apart)
    assert plain is not None and known is not None and known.ratio.point == plain.ratio.point
    assert known.ratio.low == pytest.approx(min(plain.ratio.low, plain.ratio.point / 1.05))
    assert known.ratio.high == pytest.approx(max(plain.ratio.high, plain.ratio.point * 1.05))
    assert plain.verdict is known.verdict is Verdict.FASTER
    same = conclude_comparison(TEN, TEN, TEN)
    wide = conclude_comparison(TEN, TEN, TEN, min_half_width=apart)
    assert same is not None and wide is not None and (same.verdict, wide.verdict) == (Verdict.SAME, Verdict.UNSURE)


def test_what_no_more_rounds_would_settle_says_so() -> None:
    lead = record(TEN, "fp32", is_reference=True, control=TEN)
    case = replace(record(TEN), reruns=Reruns(0.02, 12, 40))
    (_, finding) = find([lead, case], {})
    assert finding.verdict is Verdict.UNSURE and "as 40 earlier ones show" in finding.why
    (_, finding) = find([lead, replace(case, reruns=None)], {})
    assert finding.verdict is Verdict.SAME


def test_an_interval_reaches_as_far_down_as_up() -> None:
    wide = conclude_comparison(FIVE, TEN, TEN, min_half_width=0.1)
    assert wide is not None and wide.ratio.point == pytest.approx(0.5)
    assert (wide.ratio.low, wide.ratio.high) == pytest.approx((0.5 * math.exp(-0.1), 0.5 * math.exp(0.1)))


def held_up(timing: Timing, quiet: int) -> Timing:
    """A case with `quiet` undisturbed slots; in the others every third call takes twice as long."""
    slots = [
        replace(
            slot, wall_seconds=(1 if place < quiet else 2) * slot.cpu_seconds, calls_ns=(*slot.calls_ns * 2, (20 * MS,))
        )
        for place, slot in enumerate(timing.slots)
    ]
    return replace(timing, slots=tuple(slots))


def test_where_too_few_rounds_were_undisturbed_there_is_a_range_and_no_interval() -> None:
    lead = record(TEN, "fp32", is_reference=True, control=TEN)
    (_, finding) = find([lead, record(held_up(FIVE, 5))], {})
    assert finding.ratio is not None and finding.typical is not None and finding.ratio.level == 0
    assert finding.ratio.point == pytest.approx(0.5) and finding.ratio.high >= finding.typical.high > 0.9
    assert finding.verdict is Verdict.UNSURE
    (_, known) = find([lead, replace(record(held_up(FIVE, 5)), reruns=Reruns(0.01, 12, 40))], {})
    assert known.ratio is not None and known.ratio.level == 0.99 and known.ratio.high == finding.ratio.high
    (_, calm) = find([lead, record(held_up(FIVE, 6))], {})
    assert calm.ratio is not None and calm.ratio.level == 0.99 and calm.ratio.high < 0.51
    group = [replace(member, case=replace(member.case, device="cuda:0")) for member in (lead, record(held_up(FIVE, 5)))]
    (_, gpu) = find(group, {})
    assert gpu.ratio is not None and gpu.ratio.level == 0.99  # waiting for a device is no delay


def test_who_was_held_up_is_busy() -> None:
    late = replace(TEN, slots=tuple(replace(slot, wall_seconds=2 * slot.cpu_seconds) for slot in TEN.slots))
    some = replace(TEN, slots=(*late.slots[:12], *TEN.slots[12:]))
    assert was_machine_busy(late, TEN) and was_machine_busy(some, TEN) and not was_machine_busy(TEN, TEN)
    assert not was_machine_busy(replace(TEN, slots=(*late.slots[:4], *TEN.slots[4:])), TEN)


@for_each("rounds", [8, 24, 60])
def test_the_ratio_without_an_interval_is_that_of_the_verdict(rounds: int) -> None:
    arms = [busy(3, seed, rounds) for seed in (1, 2, 3)]
    known, log = conclude_comparison(*arms), log_of_best_ratio(*arms)
    assert known is not None and (log is None) == (rounds < 24)
    assert log is None or known.ratio.point == pytest.approx(math.exp(log), rel=1e-12)


@for_each("bad", [Reruns(math.nan, 4, 4), Reruns(math.inf, 4, 4), Reruns(-1.0, 4, 4), Reruns(0.1, 0, 4)])
def test_a_file_that_somebody_changed_ends_in_no_traceback(bad: Reruns) -> None:
    assert half_width_of_reruns(bad) == 0.0
    none = [Interval(point, 0.9, 1.1, 0.99) for point in (0.0, -1.0, math.nan, math.inf)]
    plain = conclude_comparison(FIVE, TEN, TEN)
    assert plain == conclude_comparison(FIVE, TEN, TEN, sessions=none)
    wide = conclude_comparison(FIVE, TEN, TEN, min_half_width=half_width_of_reruns(Reruns(1e9, 4, 4)))
    assert wide is not None and wide.verdict is Verdict.UNSURE and math.isfinite(wide.ratio.high)
