"""Verdicts from hand-built samples: every number here can be checked with a pencil."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from fp8bench.analysis.findings import find
from fp8bench.analysis.verdicts import (
    MIN_ROUNDS_FOR_VERDICT,
    VERDICT_BAND,
    best_ratio,
    compute_aa_interval,
    compute_best_phase_seconds,
    compute_verdict_band,
    conclude_comparison,
    decide_verdict,
    find_common_rounds,
    find_fastest_candidate,
    is_case_decided,
    share_below_fastest_step,
)
from fp8bench.model import CELL_PHASES, Finding, Interval, Label, Level, Overheads, Record, Status, Timing, Verdict
from fp8bench.model.stopping import LEAST_ROUNDS
from tests.counts import for_each
from tests.fakes import MS, called, record, steady, timing

ROUNDS = 24
TEN = steady(10 * MS, ROUNDS)


def found(*records: Record, overheads: dict[str, Overheads] | None = None) -> dict[str, Finding]:
    return {finding.case.precision: finding for finding in find(records, overheads or {})}


def against_ten(case: Timing, control: Timing | None = None, level: Level = Level.NATIVE) -> Finding:
    return found(record(TEN, "fp32", is_reference=True, control=control), record(case, "bf16", level))["bf16"]


def once(best: int, else_: int, rounds: int = ROUNDS) -> Timing:
    """Three outliers, in the first rounds: some resamples contain none."""
    return timing(*[(best,)] * 3, *[(else_,)] * (rounds - 3))


def compare(case: Timing, references: Sequence[Timing], level: float) -> Interval | None:
    timings = [case, *references]
    rounds = find_common_rounds(timings)
    return best_ratio(timings, rounds, level) if rounds else None


@for_each(
    ("low", "high", "band", "verdict"),
    [
        (1.0051, 1.9, 0.005, Verdict.SLOWER),
        (1.0049, 1.9, 0.005, Verdict.UNSURE),
        (1.005, 1.9, 0.005, Verdict.UNSURE),
        (0.5, 0.9949, 0.005, Verdict.FASTER),
        (0.5, 0.9951, 0.005, Verdict.UNSURE),
        (0.9801, 1.0199, 0.005, Verdict.SAME),
        (0.9799, 1.0, 0.005, Verdict.UNSURE),
        (1.0, 1.0201, 0.005, Verdict.UNSURE),
        (1.0049, 1.0051, 0.005, Verdict.SAME),
        (1.006, 1.007, 0.01, Verdict.SAME),
        (1.03, 1.04, 0.035, Verdict.UNSURE),
        (0.0, math.inf, 0.005, Verdict.UNSURE),
    ],
)
def test_the_rule(low: float, high: float, band: float, verdict: Verdict) -> None:
    assert decide_verdict(Interval(1.0, low, high, 0.99), band) is verdict


@for_each(
    ("nanoseconds", "verdict"),
    [
        (20_000_000, Verdict.SLOWER),
        (10_060_000, Verdict.SLOWER),
        (10_040_000, Verdict.SAME),
        (10_000_000, Verdict.SAME),
        (9_960_000, Verdict.SAME),
        (9_940_000, Verdict.FASTER),
        (2_000_000, Verdict.FASTER),
    ],
)
def test_steady_samples_have_plain_verdicts(nanoseconds: int, verdict: Verdict) -> None:
    finding = against_ten(steady(nanoseconds, ROUNDS), TEN)
    assert finding.verdict is verdict and finding.why == ""
    assert finding.ratio is not None
    ratio = nanoseconds / 1e7
    assert [finding.ratio.low, finding.ratio.point, finding.ratio.high] == pytest.approx([ratio] * 3, rel=1e-12)
    assert finding.ratio.level == 0.99


def test_one_odd_round_takes_a_verdict_away() -> None:
    finding = against_ten(once(9_000_000, 11_000_000), TEN)
    assert finding.verdict is Verdict.UNSURE
    # From 0.9 to 1.1: 1.5 half-widths of log(1.1 / 0.9) / 2, and the band.
    assert finding.why == "24 rounds, noise floor 0.0% (A/A): a difference of 16.8% or more would have been seen"
    assert finding.ratio is not None
    assert [finding.ratio.low, finding.ratio.high] == pytest.approx([0.9, 1.1])
    case = timing(*[(11 * MS,)] * 9, (10 * MS,))
    finding = against_ten(case, steady(10 * MS, 10))
    assert finding.verdict is Verdict.UNSURE and finding.why == (
        "10 rounds are too few, and they do not agree; give it 24 or more (no --quick)"
    )


def test_a_difference_below_the_noise_floor_is_never_called_visible() -> None:
    """The case's interval alone would show 7.0%."""
    finding = against_ten(once(9_700_000, 10_300_000), once(9_000_000, 12_000_000))
    assert finding.verdict is Verdict.UNSURE and finding.floor == pytest.approx(0.2)
    assert finding.why == "24 rounds, noise floor 20.0% (A/A): a difference of 20.0% or more would have been seen"


def test_a_reference_that_differs_from_its_control_widens_the_band() -> None:
    control = steady(10_150_000, ROUNDS)
    middle = 10e6 * math.sqrt(1.015)
    for ratio, verdict in (
        (1.016, Verdict.SLOWER),
        (1.014, Verdict.SAME),
        (0.986, Verdict.SAME),
        (0.984, Verdict.FASTER),
    ):
        finding = against_ten(steady(round(middle * ratio), ROUNDS), control)
        assert (finding.verdict, finding.hard) == (verdict, ())
    unsure = against_ten(once(round(middle * 1.012), round(middle * 1.03)), control)
    assert (unsure.verdict, unsure.why) == (
        Verdict.UNSURE,
        "the reference differs from its control, which runs the same code, by as much",
    )


@for_each(
    ("low", "high", "band"),
    [
        (0.9, 1.2, VERDICT_BAND),
        (1.0, 1.2, VERDICT_BAND),
        (1.004, 1.2, VERDICT_BAND),
        (1.03, 1.2, 0.03),
        (0.7, 0.96, 0.04),
    ],
)
def test_the_band_is_what_is_proven_and_the_floor_what_is_possible(low: float, high: float, band: float) -> None:
    aa = Interval(1.0, low, high, 0.99)
    assert compute_verdict_band(aa) == pytest.approx(band)
    assert aa.reach == pytest.approx(max(high - 1, 1 - low))
    assert compute_verdict_band(None) == VERDICT_BAND


def test_noise_that_proves_nothing_leaves_the_band_alone() -> None:
    # A control with one outlier reaches 4% but is never evidence: a case 1% slower is still slower.
    finding = against_ten(steady(10_100_000, ROUNDS), once(9_600_000, 10_000_000))
    assert finding.verdict is Verdict.SLOWER
    assert finding.floor == pytest.approx(0.04)
    alone = found(record(TEN, "fp32", is_reference=True), record(steady(10_060_000, ROUNDS), "bf16"))
    assert alone["fp32"].floor is None and alone["bf16"].floor is None and alone["bf16"].verdict is Verdict.SLOWER
    assert compute_aa_interval(TEN, None) is None and compute_aa_interval(TEN, timing()) is None
    # One arm's three fastest rounds are 10% faster: their ratio alone would be 0.9, with a narrow interval.
    burst = timing(*[(9 * MS,)] * 3, *[(10 * MS,)] * 45)
    finding = found(
        record(steady(10 * MS, 48), "fp32", is_reference=True, control=steady(10 * MS, 48)), record(burst, "bf16")
    )["bf16"]
    assert finding.verdict is Verdict.UNSURE and finding.ratio is not None
    assert finding.ratio.point == pytest.approx(1 - 0.1 * 3 / 12) and finding.ratio.high == pytest.approx(1.0)


def test_the_printed_floor_is_the_reach_of_the_same_rounds() -> None:
    control = replace(TEN, slots=(*TEN.slots, *steady(5 * MS, ROUNDS, start=ROUNDS).slots))
    reference = record(steady(10 * MS, 2 * ROUNDS), "fp32", is_reference=True, control=control)
    findings = found(reference, record(TEN, "bf16"))
    assert findings["bf16"].floor == pytest.approx(0.0, abs=1e-12)
    assert findings["fp32"].floor == pytest.approx(0.5)
    assert findings["fp32"].verdict is Verdict.REFERENCE and findings["fp32"].ratio is None


@for_each("rounds", range(1, MIN_ROUNDS_FOR_VERDICT + 1))
def test_few_rounds_are_unsure_however_clear_they_look(rounds: int) -> None:
    finding = against_ten(steady(20 * MS, rounds), TEN)
    if rounds < MIN_ROUNDS_FOR_VERDICT:
        few = "1 round is" if rounds == 1 else f"{rounds} rounds are"
        why = f"{few} too few for a verdict; give it more time (--budget) or rounds"
        assert (finding.verdict, finding.why) == (Verdict.UNSURE, why)
    else:
        assert finding.verdict is Verdict.SLOWER


def wobbling(best: int, rounds: int, start: int = 0) -> Timing:
    return timing(*[(best + (37 * (number + start)) % 101 * best // 10_000,) for number in range(rounds)])


@pytest.mark.parametrize("rounds", [MIN_ROUNDS_FOR_VERDICT, LEAST_ROUNDS - 1, LEAST_ROUNDS])
def test_fewer_rounds_than_a_plain_command_takes_have_a_range_and_no_interval(rounds: int) -> None:
    reference, case = wobbling(10 * MS, rounds), wobbling(11 * MS, rounds, 50)
    finding = found(
        record(reference, "fp32", is_reference=True, control=wobbling(10 * MS, rounds, 20)),
        record(case, "bf16"),
    )["bf16"]
    assert finding.ratio is not None and finding.typical is not None
    few = rounds < LEAST_ROUNDS
    assert finding.ratio.level == finding.typical.level == (0.0 if few else 0.99)
    assert finding.verdict is Verdict.SLOWER and (Label.FEW_SAMPLES in finding.labels) is few
    if few:
        each = [own / other for (own,), (other,) in zip(samples(case), samples(reference), strict=True)]
        assert finding.ratio.low < finding.ratio.point < finding.ratio.high
        assert finding.ratio.low == pytest.approx(min(each), rel=0.01)
        assert finding.ratio.high == pytest.approx(max(each), rel=0.01)


def samples(one: Timing) -> list[tuple[int, ...]]:
    return [tuple(sum(call) for call in slot.calls_ns) for slot in one.slots]


def test_only_shared_rounds_count_and_without_any_nothing_is_said() -> None:
    late = replace(TEN, slots=(*TEN.slots, *steady(5 * MS, ROUNDS, start=ROUNDS).slots))
    findings = found(record(late, "fp32", is_reference=True), record(TEN, "bf16"))
    assert findings["bf16"].verdict is Verdict.SAME
    assert len(find_common_rounds([TEN, late])) == ROUNDS
    finding = against_ten(steady(5 * MS, ROUNDS, start=ROUNDS))
    assert (finding.verdict, finding.why) == (Verdict.UNSURE, "no round contains both the case and the reference")
    assert finding.ratio is None and finding.best_seconds == pytest.approx(5e-3)
    assert compare(TEN, [timing()], 0.99) is None and conclude_comparison(timing(), TEN, None) is None


def test_emulated_and_unpaired_cases_have_no_verdict_on_speed() -> None:
    finding = against_ten(steady(50 * MS, 8), TEN, Level.EMULATED)
    assert finding.verdict is Verdict.EMULATED
    assert (finding.ratio, finding.why, finding.labels) == (None, "", ())
    assert finding.best_seconds == pytest.approx(0.05)
    beside = found(record(steady(50 * MS, 8), "fp8", Level.EMULATED, is_reference=True), record(TEN, "bf16"))
    assert beside["fp8"].verdict is Verdict.EMULATED
    assert (beside["bf16"].verdict, "no speed" in beside["bf16"].why) == (Verdict.UNSURE, True)
    findings = found(record(TEN, "fp32", is_reference=True), record(steady(MS, ROUNDS), "bf16", paired=False))
    why = "the case shares no rounds with a reference"
    assert (findings["bf16"].verdict, findings["bf16"].why) == (Verdict.UNSURE, why)
    alone = found(record(TEN, "bf16"))["bf16"]
    assert (alone.verdict, alone.why) == (Verdict.UNSURE, why)


def test_a_case_of_another_sitting_is_held_against_that_sitting_s_reference() -> None:
    reference = record(TEN, "fp32", is_reference=True, control=steady(40 * MS, ROUNDS))
    findings = found(
        reference,
        record(steady(21 * MS, ROUNDS), "bf16", paired_with=steady(20 * MS, ROUNDS)),
        record(steady(21 * MS, ROUNDS), "fp16", paired_with=steady(20 * MS, ROUNDS), control=steady(20 * MS, ROUNDS)),
    )
    for name, floor in (("bf16", None), ("fp16", 0.0)):
        ratio = findings[name].ratio
        assert ratio is not None and ratio.point == pytest.approx(1.05)
        assert findings[name].floor == (None if floor is None else pytest.approx(floor, abs=1e-12))


@for_each("status", [Status.SKIPPED, Status.FAILED])
def test_a_case_that_did_not_run_has_no_finding(status: Status) -> None:
    findings = found(
        record(TEN, "fp32", is_reference=True), record(None, "bf16", status=status), record(timing(), "fp8")
    )
    for name in ("bf16", "fp8"):
        assert findings[name] == Finding(findings[name].case, Verdict.NONE)


def test_a_minimum_over_more_calls_is_not_allowed() -> None:
    case = called(*[(12 * MS, 11 * MS, 5 * MS, 5 * MS)] * ROUNDS)
    two = called(*[(10 * MS, 11 * MS)] * ROUNDS)
    interval = compare(case, [two], 0.99)
    assert interval is not None and interval.point == pytest.approx(1.1)
    three = called(*[(10 * MS, 11 * MS, 8 * MS)] * ROUNDS)
    pair = compare(case, [two, three], 0.99)
    assert pair is not None and pair.point == pytest.approx(1.1)
    short = called((12 * MS,), *[(12 * MS, MS)] * ROUNDS)  # slots of one call still keep their first call
    interval = compare(short, [called(*[(10 * MS, MS)] * (ROUNDS + 1))], 0.99)
    assert interval is not None and interval.point == pytest.approx(1.2)


def busy(parts: int, seed: int, rounds: int = 60) -> Timing:
    """20 ms split into `parts` marks; the machine delays half of all milliseconds."""
    draw = np.random.default_rng(seed)
    slots = [
        [int(cut.sum()) for cut in np.array_split(MS * (1 + draw.integers(0, 2, 20)), parts)] for _ in range(rounds)
    ]
    return timing(*slots, phases=("gemm",) * parts)


def test_many_marks_beside_few_are_whole_steps_whatever_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8bench.analysis.verdicts.do_cells_compensate", lambda *told: False)
    known = conclude_comparison(busy(20, 1), busy(1, 2), busy(1, 3))
    assert known is not None and not known.whole_steps and known.ratio.low < 1 < known.ratio.high


@for_each("parts", [10, 20])
def test_a_step_in_many_marks_is_not_faster_for_that(parts: int) -> None:
    """As a converted copy next to an unconverted model: the best of each mark would make it 25% faster."""
    many, few, control = busy(parts, 1), busy(1, 2), busy(1, 3)
    marks = compute_best_phase_seconds(many, whole_steps=False)
    assert sum(seconds for _, seconds in marks) < 0.8 * sum(seconds for _, seconds in compute_best_phase_seconds(few))
    assert share_below_fastest_step(many) > 0.1 and share_below_fastest_step(few) == 0
    assert (
        sum(seconds for _, seconds in compute_best_phase_seconds(many))
        >= min(sum(slot.calls_ns[0]) for slot in many.slots) * 1e-9
    )
    for case, references in ((many, [few, control]), (few, [many])):
        interval = compare(case, references, 0.99)
        assert interval is not None and interval.low < 1 < interval.high and abs(interval.point - 1) < 0.05


def test_marks_that_take_no_time_cut_nothing() -> None:
    one = timing(*[(10 * MS,)] * ROUNDS)
    thin = timing(*[(10, 10 * MS, 10, 10, 10)] * ROUNDS, phases=("cast", "gemm", "cast", "gemm", "cast"))
    making_up = timing(*[(4 * MS, 8 * MS), (6 * MS, 6 * MS)] * ROUNDS, phases=("cast", "gemm"))
    for case, point in ((thin, 1.0), (making_up, 1.2)):
        interval = compare(case, [one], 0.99)
        assert interval is not None and interval.point == pytest.approx(point, abs=1e-4)


def test_the_best_of_each_cell_makes_the_step_and_the_median_is_of_all_calls() -> None:
    fast, slow = (3 * MS, 7 * MS, MS), (5 * MS, 9 * MS, 2 * MS)
    mixed = timing(*[fast, slow] * 3, phases=("cast", "gemm", "cast"))
    phases = dict(compute_best_phase_seconds(mixed))
    assert tuple(phases) == CELL_PHASES
    assert {name: seconds for name, seconds in phases.items() if seconds} == pytest.approx({"cast": 4e-3, "gemm": 7e-3})
    finding = against_ten(mixed)
    assert finding.best_seconds == sum(seconds for _, seconds in finding.phases) == pytest.approx(11e-3)
    assert finding.median_seconds == pytest.approx(13.5e-3)
    finding = against_ten(called((MS, 2 * MS), (3 * MS, 4 * MS), (5 * MS,)))
    assert finding.median_seconds == pytest.approx(3e-3)
    assert finding.spread == pytest.approx(2 / 3)


@for_each(
    ("overheads", "below"),
    [
        (Overheads(0.4e-6, 0.2e-6, 0.1e-6), ("cast",)),
        (Overheads(0.3e-6, 0.2e-6, 0.1e-6), ()),
        (Overheads(0.3e-6, 0.2e-6, 0.1e-6, event_pair=2e-6), ("cast", "gemm")),
        (None, ()),
    ],
)
def test_phases_below_the_floor_are_named(overheads: Overheads | None, below: tuple[str, ...]) -> None:
    case = timing(*[(7_000, 30_000)] * ROUNDS, phases=("cast", "gemm"))
    far = {"cuda:0": Overheads(1.0, 1.0, 1.0)}  # each device has its own clock
    finding = found(record(case, "bf16"), overheads={**far, "cpu": overheads} if overheads else far)["bf16"]
    assert finding.below_floor == below
    assert (Label.BELOW_FLOOR in finding.labels) == (below == ("cast", "gemm"))


def test_an_early_decision_needs_more_than_a_final_one() -> None:
    case = once(9_850_000, 10_000_000)
    conclusion = conclude_comparison(case, TEN, TEN)
    assert conclusion is not None and conclusion[0] is Verdict.SAME
    assert not is_case_decided(case, TEN, TEN)
    assert is_case_decided(once(9_950_000, 10_000_000), TEN, TEN)
    assert is_case_decided(steady(11 * MS, ROUNDS), TEN, TEN) and is_case_decided(TEN, TEN, None)
    assert not is_case_decided(once(9 * MS, 11 * MS), TEN, TEN)
    assert not is_case_decided(steady(5 * MS, 5), TEN, TEN)
    assert not is_case_decided(steady(5 * MS, ROUNDS, start=ROUNDS), TEN, TEN)


def test_a_clear_side_is_not_enough_to_stop_early() -> None:
    for milliseconds, else_, stops in ((14, 14.6, False), (14, 14.4, True), (40, 46, False), (40, 42.5, True)):
        case = once(milliseconds * MS, round(else_ * MS))
        conclusion = conclude_comparison(case, TEN, TEN)
        assert conclusion is not None and conclusion[0] is Verdict.SLOWER
        assert is_case_decided(case, TEN, TEN) is stops


def test_a_small_effect_needs_a_narrower_interval_to_stop_early() -> None:
    # Both intervals have a half-width of about 1.5%. That is narrow compared with 6%, and wide compared with 3%.
    for fastest, stops in ((10.2, False), (10.5, True)):
        case = once(round(fastest * MS), round((fastest + 0.3) * MS))
        conclusion = conclude_comparison(case, TEN, TEN)
        assert conclusion is not None and conclusion[0] is Verdict.SLOWER
        assert 0.01 < conclusion.ratio.half_width < 0.02
        assert is_case_decided(case, TEN, TEN) is stops


def test_the_smallest_ratio_is_the_fastest() -> None:
    nine, eight = steady(9 * MS, 24), steady(8 * MS, 24)
    assert find_fastest_candidate([nine, eight, TEN], TEN, TEN) == 1
    assert find_fastest_candidate([TEN, steady(11 * MS, 24)], TEN, None) is None
    assert find_fastest_candidate([nine, steady(5 * MS, 24, start=100)], TEN, TEN) == 0
    assert find_fastest_candidate([], TEN, TEN) is None


def noisy(draw: np.random.Generator, rounds: int = 24) -> Timing:
    """10 ms steps with noise that mostly adds, as on a shared machine."""
    return timing(*[(round(10 * MS * (1 + one)),) for one in draw.exponential(0.05, rounds)])


def speed_up(case: Timing, reference: Timing, control: Timing) -> float:
    entries = [case, reference, control]
    return 1 / best_ratio(entries, find_common_rounds(entries)).point


@pytest.mark.slow
def test_of_equal_candidates_the_first_figure_is_too_good_and_the_fresh_one_is_not() -> None:
    draw = np.random.default_rng(17)
    first, fresh = [], []
    for _ in range(200):
        reference, control, *candidates = (noisy(draw) for _ in range(10))
        chosen = find_fastest_candidate(candidates, reference, control)
        if chosen is None:  # none was faster, so no cause is named
            continue
        first.append(speed_up(candidates[chosen], reference, control))
        fresh.append(speed_up(*(noisy(draw) for _ in range(3))))
    error = float(np.std(fresh)) / len(fresh) ** 0.5
    print(f"first {fmean(first):.4f}, fresh {fmean(fresh):.4f} +- {error:.4f}, named in {len(first)} of 200")
    assert fmean(first) > 1 + 7 * error and abs(fmean(fresh) - 1) < 3 * error
