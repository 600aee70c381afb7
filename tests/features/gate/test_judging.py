"""Suspects, second looks, failures, and the smallest detectable slow-down."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy

from fp8bench.analysis.steps.change_points import MIN_NOISE, PieceLevel, smallest_visible_step
from fp8bench.cli.progress import SILENT
from fp8bench.features.duel.values import CaseSession
from fp8bench.features.duel.verdicts import compare_case_sides
from fp8bench.features.gate.judging import (
    MIN_CASES_FOR_SPREAD,
    DetectionLimit,
    GateOutcome,
    GateVerdict,
    JudgedFigure,
    SecondMeasurement,
    apply_second_look,
    case_and_metric,
    estimate_spread,
    judge_first_look,
    select_discoveries,
)
from fp8bench.features.gate.power import RemeasurementMethod, SeriesState, detection_limits, history_detection_limits
from fp8bench.features.gate.stored_runs import (
    MAX_SUSPECT_REMEASUREMENTS,
    GateSource,
    SuspectRemeasurer,
    judge_comparisons,
)
from fp8bench.features.gate.thresholds import ThresholdRule
from fp8bench.features.gate.view import summarize_limits
from fp8bench.model import Comparison, Direction, Evidence, Interval, Noise
from tests.counts import counts, for_each, sampled
from tests.duels import result
from tests.fakes import steady
from tests.features.gate.builds import (
    Setting,
    duel_verdict,
    false_alarms,
    found,
    nights,
    share_failing,
    stored_verdict,
)
from tests.features.gate.builds import stored as stored_runs


def figure(times: float, **changes: object) -> Comparison:
    """A time of 1 ms that became `times` times as long in a duel, known to 1%."""
    where = Direction.WORSE if times > 1.01 else Direction.BETTER if times < 0.99 else Direction.SAME
    change = Comparison(
        "gemm[m=64]@cpu/bf16",
        "gemm",
        "time",
        "s",
        where,
        Evidence.PAIRED,
        1e-3,
        1e-3 * times,
        Interval(times, times * 0.99, times * 1.01, 0.99),
        1e-9 if where is not Direction.SAME else 0.8,
    )
    return replace(change, **changes)  # type: ignore[arg-type]


def stored(times: float, **changes: object) -> Comparison:
    """One stored run against another, as `compare` reads them."""
    where = Direction.WORSE if times > 1.1 else Direction.UNSURE
    given = {"evidence": Evidence.CROSS_RUN, "p_value": None, "direction": where, "labels": ("cross-run",)}
    return figure(times, **{**given, **changes})


# For a time that other programs may have doubled.
TAKEN: dict[str, object] = {"direction": Direction.UNSURE, "why": "steps waited", "others": 2.0}


def exact(times: float, **changes: object) -> Comparison:
    """Memory, which is always the same for the same code."""
    given = {
        "metric": "peak_memory",
        "unit": "B",
        "before": 1e8,
        "after": 1e8 * times,
        "p_value": None,
        "ratio": Interval(times, times, times, 1.0),
        "evidence": Evidence.CROSS_RUN,
    }
    return figure(times, **{**given, **changes})


def settle(first: Comparison, again: Comparison | None, rules: tuple[ThresholdRule, ...] = ()) -> JudgedFigure:
    """Both looks at one figure."""
    judged = judge_first_look([first], rules)
    assert judged[0].outcome is GateOutcome.SUSPECTED
    found = {case_and_metric(first): again} if again is not None else {}
    return apply_second_look(judged, SecondMeasurement(found, "again", "" if again else "no device"), rules)[0]


@for_each(
    ("change", "outcome"),
    [
        (figure(1.0), GateOutcome.WITHIN_THRESHOLD),
        (figure(0.9), GateOutcome.BETTER),
        (figure(1.04), GateOutcome.WITHIN_THRESHOLD),
        (figure(1.06), GateOutcome.SUSPECTED),
        (figure(1.06, direction=Direction.UNSURE), GateOutcome.OPEN),
        (figure(2.0, before=1e-6, after=2e-6), GateOutcome.WITHIN_THRESHOLD),
        (figure(1.06, p_value=0.03), GateOutcome.OPEN),
        (stored(1.04), GateOutcome.OPEN),
        (stored(1.06), GateOutcome.SUSPECTED),
        (stored(1.2), GateOutcome.SUSPECTED),
        (stored(1.06, ratio=Interval(1.06, 0.95, 1.2, 0.99)), GateOutcome.OPEN),
        (exact(1.01), GateOutcome.WITHIN_THRESHOLD),
        (exact(1.03), GateOutcome.SUSPECTED),
        (figure(1.0, direction=Direction.NONE, before=None), GateOutcome.NONE),
        (figure(1.0, direction=Direction.NONE, failed=True), GateOutcome.FAILED),
        (figure(2.0, metric="x_error", before=0.0, after=0.1, ratio=None), GateOutcome.SUSPECTED),
    ],
)
def test_a_first_look_sorts_figures_by_outcome(change: Comparison, outcome: GateOutcome) -> None:
    assert judge_first_look([change])[0].outcome is outcome


def test_many_figures_need_smaller_p_values() -> None:
    suspect = figure(1.06, p_value=0.01)
    others = [figure(1.0, case=f"gemm[m={n}]@cpu/bf16") for n in range(99)]
    assert judge_first_look([suspect])[0].outcome is GateOutcome.SUSPECTED
    judged = judge_first_look([suspect, *others])[0]
    assert judged.outcome is GateOutcome.OPEN and "among 100 figures" in judged.why


def test_the_rule_of_benjamini_and_hochberg() -> None:
    generator = np.random.default_rng(3)
    for _ in range(200):
        p_values = generator.uniform(size=generator.integers(1, 60)) ** generator.integers(1, 6)
        expected = scipy.stats.false_discovery_control(p_values) <= 0.05
        assert select_discoveries(list(p_values), 0.05) == list(expected)
    assert select_discoveries([], 0.05) == []


FAILED = figure(1.0, failed=True, direction=Direction.NONE)
KNOWN = figure(1.08, evidence=Evidence.CROSS_RUN, p_value=1e-4)
ABSENT = replace(KNOWN, ratio=Interval(1.0, 0.99, 1.01, 0.99), direction=Direction.SAME)
UNKNOWN = Interval(1.1, 1.1, 1.1, 0.0)
STEP = figure(1.08, evidence=Evidence.HISTORY, p_value=1e-4)
RELATIVE = stored(1.2, metric="relative_time", unit="x", before=0.5, after=0.6)


@for_each(
    ("first", "again", "outcome"),
    [
        # A second look confirms, clears, or shows a failed case.
        (figure(1.06), figure(1.07), GateOutcome.REGRESSION),
        (figure(1.06), figure(1.02), GateOutcome.CLEARED),
        # A difference that is not excluded stays a suspect: an interval too wide, or none.
        (figure(1.06), figure(1.06, direction=Direction.UNSURE), GateOutcome.SUSPECTED),
        (figure(1.11), figure(1.1, direction=Direction.UNSURE, ratio=UNKNOWN), GateOutcome.SUSPECTED),
        (figure(1.06), FAILED, GateOutcome.FAILED),
        (exact(1.05), exact(1.05), GateOutcome.REGRESSION),
        (exact(1.05), exact(1.0), GateOutcome.CLEARED),
        # Stored runs alone never fail below 10%, even when repeated; a duel or a known spread may.
        (stored(1.08), stored(1.08), GateOutcome.SUSPECTED),
        (stored(1.08), stored(1.3), GateOutcome.REGRESSION),
        (stored(1.3), stored(1.08), GateOutcome.SUSPECTED),
        (stored(1.2), stored(1.2), GateOutcome.REGRESSION),
        # Nor where other programs may explain the difference; they clear a difference that they exclude despite that.
        (stored(1.2, **TAKEN), stored(1.2, **TAKEN), GateOutcome.SUSPECTED),
        (stored(1.2, **TAKEN), stored(1.2), GateOutcome.REGRESSION),
        (stored(1.2), stored(1.0), GateOutcome.SUSPECTED),
        (stored(1.2), stored(0.93), GateOutcome.CLEARED),
        (stored(1.2), stored(0.93, others=1.2), GateOutcome.SUSPECTED),
        (KNOWN, ABSENT, GateOutcome.CLEARED),
        (KNOWN, replace(ABSENT, others=5.0), GateOutcome.SUSPECTED),
        (stored(1.08), figure(1.08), GateOutcome.REGRESSION),
        (KNOWN, KNOWN, GateOutcome.REGRESSION),
        (STEP, STEP, GateOutcome.REGRESSION),
        # A relative time is settled by a duel of times, whose difference is in seconds instead of shares.
        (RELATIVE, figure(1.2), GateOutcome.REGRESSION),
        (RELATIVE, figure(1.0), GateOutcome.CLEARED),
        # Without it, a figure that may fail does fail.
        (stored(1.2), None, GateOutcome.REGRESSION),
    ],
)
def test_a_second_look_confirms_clears_or_leaves_open(
    first: Comparison, again: Comparison | None, outcome: GateOutcome
) -> None:
    settled = settle(first, again)
    assert settled.outcome is outcome
    assert outcome is not GateOutcome.SUSPECTED or again is None or again.why in settled.why


def test_what_would_confirm_is_named() -> None:
    duelled = settle(figure(1.06), figure(1.06, direction=Direction.UNSURE))
    assert "--sessions" in duelled.why and "fp8bench duel" not in duelled.why
    assert "fp8bench duel suite" in settle(stored(1.08), stored(1.08)).why
    assert "--against 1a2b3c4d`" in settle(stored(1.08, since="1a2b3c4d5e"), stored(1.08)).why
    kernel = settle(stored(1.08, suite="bench"), stored(1.08)).why
    assert kernel.endswith("8 runs in all decide: repeat `fp8bench bench` at both commits")


@for_each(("launches", "is_noted"), [(5.0, True), (6.0, False)])
def test_a_suspect_that_does_the_same_work_says_so(launches: float, is_noted: bool) -> None:
    counted = exact(1.0, metric="launches", unit="count", before=5.0, after=launches)
    judged = judge_comparisons(GateSource("", (stored(1.08), counted)), (), False, SILENT).judged
    assert judged[0].outcome is GateOutcome.SUSPECTED
    assert ("its operators and bytes are the same in both" in judged[0].why) is is_noted


def test_figures_without_a_second_look_keep_their_suspicion() -> None:
    for change, outcome in (
        (stored(1.2), GateOutcome.REGRESSION),
        (stored(1.08), GateOutcome.SUSPECTED),
        (figure(1.06), GateOutcome.REGRESSION),
        (exact(1.05), GateOutcome.REGRESSION),
        (stored(1.2, **TAKEN), GateOutcome.SUSPECTED),
    ):
        (judged,) = apply_second_look(judge_first_look([change]), SecondMeasurement({}, refused="--no-rerun"))
        assert judged.outcome is outcome and "not measured again: --no-rerun" in judged.why


def test_times_with_a_ratio_and_figures_named_by_rules_are_ignored() -> None:
    both = [stored(1.5), stored(1.0, metric="relative_time", unit="x", before=0.5, after=0.5)]
    assert [judged.outcome for judged in judge_first_look(both)] == [GateOutcome.IGNORED, GateOutcome.OPEN]
    assert judge_first_look(both, (ThresholdRule("gemm", "time", 0.1),))[0].outcome is GateOutcome.SUSPECTED
    assert judge_first_look([figure(1.5)])[0].outcome is GateOutcome.SUSPECTED
    rules = (ThresholdRule("*", "*", ignored=True),)
    assert judge_first_look([figure(3.0)], rules)[0].outcome is GateOutcome.IGNORED
    assert judge_first_look([figure(1.0, failed=True)], rules)[0].outcome is GateOutcome.FAILED


@for_each(
    ("outcomes", "code", "headline"),
    [
        ("", 0, "no regression"),
        ("WITHIN_THRESHOLD SUSPECTED CLEARED OPEN BETTER", 4, "1 suspected"),
        ("WITHIN_THRESHOLD CLEARED OPEN BETTER", 0, "no regression found, 1 cannot tell (not blocking)"),
        ("REGRESSION REGRESSION", 1, "2 regressions"),
        ("REGRESSION SUSPECTED", 1, "1 regression and 1 suspected"),
        ("REGRESSION FAILED", 3, "1 failed and 1 regression"),
    ],
)
def test_outcomes_decide_the_exit_code(outcomes: str, code: int, headline: str) -> None:
    fine = judge_first_look([figure(1.0)])[0]
    verdict = GateVerdict("b against a", tuple(replace(fine, outcome=GateOutcome[name]) for name in outcomes.split()))
    assert (verdict.exit_code, verdict.headline) == (code, headline)
    for code in (3, 4):
        assert replace(verdict, problem="no case", code=code).exit_code == code


# Of 100 builds at a rate of 1%, more than 4 fail in one of 300 trials; the seed is fixed.
BUILDS = 100
MOST = 4 / BUILDS


USUAL = (Setting(1, 1, 0.02), Setting(5, 5, 0.02, one_sided=True))


@pytest.mark.parametrize(
    "setting",
    sampled(
        USUAL,
        [
            *USUAL,
            Setting(1, 1, 0.005),
            Setting(1, 1, 0.05),
            Setting(1, 1, 0.02, 0.02),
            Setting(3, 1, 0.02),
            Setting(5, 5, 0.02),
        ],
    ),
    ids=str,
)
def test_an_unchanged_build_of_100_cases_raises_no_alarm(setting: Setting) -> None:
    assert false_alarms(setting, BUILDS) <= MOST


@for_each("setting", [Setting(1, 1, 0.01), Setting(3, 1, 0.02), Setting(5, 5, 0.01)])
def test_a_planted_slow_down_is_found(setting: Setting) -> None:
    assert found(setting, 1.3, 20) >= 0.9


def test_a_spread_is_that_of_unchanged_cases() -> None:
    usual = [0.02 * ((7 * n) % 20 - 9.5) / 6 for n in range(20)]
    even, shifted, everything, alike = map(
        estimate_spread, (usual, [log + 0.05 for log in usual], [log + 0.3 for log in usual], [0.0] * 20)
    )
    assert even and shifted and everything and alike
    assert 0.01 < even.deviation < 0.04 and abs(even.shift) < 0.01
    for moved in (0.3, -0.3):
        half = estimate_spread([*usual, *[moved] * 15])
        assert half is not None and half.deviation < 2 * even.deviation and half.compute_p_value(0.3) < 1e-4
    assert shifted.shift == pytest.approx(0.05, abs=0.01) and shifted.deviation == pytest.approx(even.deviation)
    assert everything.shift == 0 and everything.compute_p_value(0.3) < 1e-6
    assert estimate_spread([0.1] * (MIN_CASES_FOR_SPREAD - 1)) is None
    assert alike.compute_p_value(0.0) == 1 and alike.compute_p_value(0.2) == 0


DUEL = Noise(0.005, 11)
MANY = Noise(0.01, 8, 5, 5)


def sights(
    *figures: Comparison,
    remeasurement: RemeasurementMethod = RemeasurementMethod.MEASURED_AGAIN,
    rules: tuple[ThresholdRule, ...] = (),
) -> tuple[DetectionLimit, ...]:
    return detection_limits(judge_first_look(figures, rules), remeasurement)


@counts(60, 400)
@for_each("between", [0.01, 0.03])
def test_as_often_as_it_says_a_history_fails_what_is_planted(count: int, between: float) -> None:
    assert abs(share_failing(nights(30, between), count) - 0.8) < 0.08 + 3 * math.sqrt(0.16 / count)


@pytest.mark.slow
@pytest.mark.parametrize("setting", sampled([Setting(3, 1, 0.02)], [Setting(3, 1, 0.02), Setting(5, 5, 0.02)]), ids=str)
def test_as_often_as_it_says_stored_runs_do(setting: Setting) -> None:
    assert abs(share_failing(stored_runs(setting), 60) - 0.8) < 0.1 + 3 * math.sqrt(0.16 / 60)


def test_noise_raises_the_smallest_detectable_slow_down() -> None:
    (usual,) = sights(figure(1.0, noise=DUEL), remeasurement=RemeasurementMethod.DUEL)
    assert 0.015 < usual.smallest < 0.04 and usual.threshold == 0.05 and usual.can_detect_threshold
    wide = Interval(1.0, 0.96, 1.04, 0.99)
    (noisy,) = sights(figure(1.0, ratio=wide, noise=Noise(0.015, 11)), remeasurement=RemeasurementMethod.DUEL)
    assert noisy.smallest > 0.05 and not noisy.can_detect_threshold
    among = sights(
        *(figure(1.0, noise=DUEL, case=f"gemm[m={n}]@cpu/bf16") for n in range(50)),
        remeasurement=RemeasurementMethod.DUEL,
    )
    assert all(other.smallest > usual.smallest for other in among)
    assert sights(figure(1.0, noise=DUEL), remeasurement=RemeasurementMethod.NONE)[0].smallest < usual.smallest
    # A difference of 5 us exceeds 5% of a time of 10 us.
    (short,) = sights(figure(1.0, noise=DUEL, before=1e-5, after=1e-5), remeasurement=RemeasurementMethod.DUEL)
    assert short.threshold == 0.5 and short.smallest == usual.smallest


def test_stored_runs_state_their_smallest_detectable_slow_down() -> None:
    (many,) = sights(figure(1.0, evidence=Evidence.CROSS_RUN, noise=MANY))
    assert 0.05 < many.smallest < 0.1 and not many.unknown
    dozen = [stored(1 + 0.002 * (n - 6), case=f"gemm[m={n}]@cpu/bf16", noise=Noise(0.003, 0, 1, 1)) for n in range(13)]
    for sight in sights(*dozen):
        assert 0.1 < sight.smallest < 0.2 and not sight.unknown and not sight.can_detect_threshold
    # A later duel may fail figures that stored runs may not.
    assert all(sight.smallest < 0.1 for sight in sights(*dozen, remeasurement=RemeasurementMethod.DUEL))
    (alone,) = sights(dozen[0])
    assert "fp8bench duel suite gemm --against" in alone.unknown
    assert alone.unknown and alone.smallest > 0.1 and not alone.can_detect_threshold
    assert sights(dozen[0], rules=(ThresholdRule("*", "*", 0.5),))[0].can_detect_threshold is False
    nothing = stored(1.0, ratio=Interval(1.0, 1.0, 1.0, 0.0), noise=Noise(0.003, 0, 1, 1), why="a few rounds each")
    assert sights(nothing)[0].smallest == math.inf and sights(nothing)[0].unknown == "a few rounds each"


def test_a_duel_without_an_interval() -> None:
    for many, rounds, known in ((4, 5, True), (2, 5, False), (4, 4, False)):
        slots = [steady(1000 + n, rounds) for n in range(4)]
        time = next(compare_case_sides(result("bf16", *[CaseSession(tuple(slots[:2]), tuple(slots[2:]))] * many)))
        assert (time.noise is not None) == known
    (sight,) = sights(
        figure(1.0, p_value=None, ratio=Interval(1.0, 0.0, math.inf, 0.99)), remeasurement=RemeasurementMethod.DUEL
    )
    assert sight.smallest == math.inf and "--sessions" in sight.unknown and not sight.can_detect_threshold
    # Memory, ignored figures and failed cases do not vary.
    assert sights(exact(1.0), figure(1.0, failed=True, direction=Direction.NONE)) == ()
    assert sights(figure(1.0, noise=DUEL), rules=(ThresholdRule("*", "*", ignored=True),)) == ()


FLAT = figure(1.0, evidence=Evidence.HISTORY, metric="relative_time", unit="x", before=1.0, after=1.0)


def history(noise: float, count: int, metric: str = FLAT.metric) -> DetectionLimit:
    """A series with this noise and number of nights."""
    level = PieceLevel(noise, count - 1, count) if count >= 11 else None
    (sight,) = history_detection_limits(
        [SeriesState(replace(FLAT, metric=metric), level)], (), 0, RemeasurementMethod.MEASURED_AGAIN
    )
    return sight


@for_each(
    ("noise", "count", "why"),
    [
        (0.01, 30, ""),
        (0.01, 11, ""),
        (0.05, 40, "that would have been found is +"),
        (0.05, 13, "history too young: 13 nights"),
        (0.001, 4, "fewer than 11 nights"),
    ],
)
def test_a_history_that_cannot_find_its_threshold_does_not_pass(noise: float, count: int, why: str) -> None:
    level = PieceLevel(noise, count - 1, count) if count >= 11 else None
    source = GateSource("a history", series_states=(SeriesState(FLAT, level),))
    verdict = judge_comparisons(source, (), True, SILENT)
    assert verdict.exit_code == (4 if why else 0)
    assert [figure.outcome for figure in verdict.judged] == [GateOutcome.CANNOT_TELL] * bool(why)
    assert all(why in figure.why for figure in verdict.judged)
    # Figures other than times are only listed, and a rule with a higher threshold lets it pass.
    memory = replace(source, series_states=(SeriesState(replace(FLAT, metric="peak_memory"), level),))
    assert (
        judge_comparisons(memory, (), True, SILENT).exit_code == 0
        and judge_comparisons(memory, (), True, SILENT).sights
    )
    assert judge_comparisons(source, (ThresholdRule("*", "*", ignored=True),), True, SILENT).exit_code == 0


def test_a_relative_loss_that_is_always_the_same_finds_its_threshold() -> None:
    loss = history(MIN_NOISE, 14, metric="relative_loss")
    assert loss.can_detect_threshold and 0.001 < loss.smallest < loss.threshold == 0.002
    time = history(MIN_NOISE, 14)
    assert time.can_detect_threshold and time.smallest > 0.01


def test_the_least_step_is_the_code_s_own() -> None:
    assert smallest_visible_step(PieceLevel(0.01, 20, 5), 0.01) == (math.inf, math.inf)
    least = [smallest_visible_step(PieceLevel(0.01, count, count), 0.01)[0] for count in (11, 14, 30, 100)]
    assert least == sorted(least, reverse=True) and least[-1] > 0.015
    assert smallest_visible_step(PieceLevel(0.01, 100, 100), 1e-6)[0] > least[-1]


def test_the_summary_names_the_worst_figure() -> None:
    blind = history(0.05, 30)
    young = history(0.05, 3)
    assert summarize_limits((blind, young)).startswith("+") and "worst of 2 figures: gemm[m=64]" in summarize_limits(
        (blind, young)
    )
    assert summarize_limits((young,)) == "none detectable (gemm[m=64]@cpu/bf16 relative_time, threshold +5.0%)"


WIDE = Interval(1.0, 0.9, 1.11, 0.99)


@for_each(
    ("change", "outcome", "why"),
    [
        (figure(1.0, noise=DUEL), GateOutcome.WITHIN_THRESHOLD, ""),
        (figure(0.9, noise=DUEL), GateOutcome.BETTER, ""),
        # Too much noise, an interval beyond the threshold, and no interval.
        (
            figure(1.0, ratio=WIDE, noise=Noise(0.04, 11), direction=Direction.UNSURE),
            GateOutcome.CANNOT_TELL,
            "that would have been found is +",
        ),
        (figure(1.045, noise=DUEL), GateOutcome.CANNOT_TELL, "its interval reaches +5.5%, and the threshold is +5.0%"),
        (figure(1.0, ratio=Interval(1.0, 0.0, math.inf, 0.99), p_value=None), GateOutcome.CANNOT_TELL, "--sessions"),
        (figure(1.0, direction=Direction.NONE, ratio=None, why="another version"), GateOutcome.CANNOT_TELL, "another"),
        (stored(1.0, noise=Noise(0.003, 0, 1, 1)), GateOutcome.CANNOT_TELL, "at least +"),
        # Not a time: it is listed and affects no exit code.
        (
            figure(1.0, ratio=WIDE, noise=Noise(0.04, 11), direction=Direction.UNSURE, metric="energy", unit="J"),
            GateOutcome.OPEN,
            "",
        ),
        (figure(1.0, direction=Direction.NONE, ratio=None, metric="energy"), GateOutcome.NONE, ""),
    ],
)
def test_a_time_that_could_be_slower_unseen(change: Comparison, outcome: GateOutcome, why: str) -> None:
    source = GateSource(
        "b against a", (change,), lambda suspects: SecondMeasurement({}), remeasurement=RemeasurementMethod.DUEL
    )
    verdict = judge_comparisons(replace(source, expected_cases=frozenset({change.case})), (), True, SILENT)
    (found,) = verdict.judged
    assert found.outcome is outcome and why in found.why
    assert verdict.exit_code == (4 if outcome is GateOutcome.CANNOT_TELL else 0)
    assert ("no regression" in verdict.headline) == (verdict.exit_code == 0)


def test_a_suspect_is_measured_again_until_it_is_settled_or_the_time_is_up() -> None:
    suspect = figure(1.36, noise=DUEL)
    unsettled = figure(1.3, direction=Direction.UNSURE, ratio=WIDE)

    def looks(answers: Sequence[Comparison], adds_up: bool = True, budget: float | None = None) -> tuple[int, int]:
        left = iter(answers)

        def confirm(_: object) -> SecondMeasurement:
            return SecondMeasurement({case_and_metric(suspect): next(left)}, "in duel x", pools_samples=adds_up)

        source = GateSource("b against a", (suspect,), confirm, remeasurement=RemeasurementMethod.DUEL, budget=budget)
        code = judge_comparisons(source, (), True, SILENT).exit_code
        return code, len(answers) - len(list(left))

    assert looks([unsettled, unsettled, figure(1.36), suspect]) == (1, 3)
    assert looks([unsettled] * 9) == (4, MAX_SUSPECT_REMEASUREMENTS)
    assert looks([unsettled] * 9, budget=0.0) == (4, 1) and looks([unsettled] * 9, adds_up=False) == (4, 1)
    assert looks([figure(1.0)]) == (0, 1)


def test_an_interval_beyond_the_threshold_is_suspected_among_however_many() -> None:
    beyond = figure(1.36, p_value=0.03, ratio=Interval(1.36, 1.16, 12.4, 0.99))
    others = [figure(1.0, case=f"gemm[m={n}]@cpu/bf16") for n in range(99)]
    assert judge_first_look([beyond, *others])[0].outcome is GateOutcome.SUSPECTED


def test_sessions_of_second_duels_add_up() -> None:
    remeasurer = SuspectRemeasurer(Path(), SILENT)
    measured = result("bf16", CaseSession((steady(1000, 5),), (steady(1100, 5),)))
    counts = [len(remeasurer.add_earlier_sessions(measured, commit).sessions) for commit in "aaba"]
    assert counts == [1, 2, 1, 3]


# Spread of processes within a side, and the slow-down of one case.
@counts(1, 12)
@for_each(("spread", "planted"), [(0.003, 0.16), (0.01, 0.05), (0.01, 0.08), (0.03, 0.1), (0.1, 0.16), (0.3, 0.1)])
def test_a_planted_slow_down_never_passes(count: int, spread: float, planted: float) -> None:
    for seed in range(count):
        draw = random.Random(seed)
        assert duel_verdict(draw, 1 + planted, spread).exit_code in (1, 4)
        assert stored_verdict(Setting(1, 1, spread), draw, 1 + planted).exit_code in (1, 4)


def test_an_unchanged_quiet_build_passes() -> None:
    draw = random.Random(0)
    assert duel_verdict(draw, 1.0, 0.002).exit_code == 0
    assert stored_verdict(Setting(5, 5, 0.003), draw, 1.0).exit_code == 0
