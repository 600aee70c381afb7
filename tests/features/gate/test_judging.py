"""What is suspected, what a second look makes of it, and what fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import false_discovery_control

from fp8bench.features.gate.judging import (
    LEAST_CASES,
    GateOutcome,
    GateVerdict,
    JudgedFigure,
    SecondLook,
    discoveries,
    first_look,
    key_of,
    second_look,
    spread_of,
)
from fp8bench.features.gate.thresholds import ThresholdRule
from fp8bench.model import Comparison, Direction, Evidence, Interval
from suites.gate import Setting, false_alarms, found
from tests.counts import for_each, sampled


def figure(times: float, **changes: object) -> Comparison:
    """A time of 1 ms that became so many times as long, sure to 1%, by a duel unless changed."""
    where = Direction.WORSE if times > 1.01 else Direction.BETTER if times < 0.99 else Direction.SAME
    one = Comparison(
        "gemm[m=64]@cpu/bf16", "gemm", "time", "s", where, Evidence.PAIRED, 1e-3, 1e-3 * times,
        Interval(times, times * 0.99, times * 1.01, 0.99), 1e-9 if where is not Direction.SAME else 0.8,
    )  # fmt: skip
    return replace(one, **changes)  # type: ignore[arg-type]


def stored(times: float, **changes: object) -> Comparison:
    """One stored run against another: what `compare` makes of it."""
    where = Direction.WORSE if times > 1.1 else Direction.UNSURE
    given = {"evidence": Evidence.CROSS_RUN, "p_value": None, "direction": where, "labels": ("cross-run",)}
    return figure(times, **{**given, **changes})


# Of a time that others may have made twice as long.
TAKEN: dict[str, object] = {"direction": Direction.UNSURE, "why": "steps waited", "others": 2.0}


def exact(times: float, **changes: object) -> Comparison:
    """Memory: the same whenever the same code runs."""
    given = {
        "metric": "peak_memory", "unit": "B", "before": 1e8, "after": 1e8 * times, "p_value": None,
        "ratio": Interval(times, times, times, 1.0), "evidence": Evidence.CROSS_RUN,
    }  # fmt: skip
    return figure(times, **{**given, **changes})


def settle(first: Comparison, again: Comparison | None, rules: tuple[ThresholdRule, ...] = ()) -> JudgedFigure:
    """Both looks at one figure."""
    judged = first_look([first], rules)
    assert judged[0].outcome is GateOutcome.TO_CONFIRM
    found = {key_of(first): again} if again is not None else {}
    return second_look(judged, SecondLook(found, "again", "" if again else "no device"), rules)[0]


@for_each(
    ("one", "outcome"),
    [
        (figure(1.0), GateOutcome.FINE),
        (figure(0.9), GateOutcome.BETTER),
        (figure(1.04), GateOutcome.FINE),
        (figure(1.06), GateOutcome.TO_CONFIRM),
        (figure(1.06, direction=Direction.UNSURE), GateOutcome.UNSURE),
        (figure(2.0, before=1e-6, after=2e-6), GateOutcome.FINE),
        (figure(1.06, p_value=0.03), GateOutcome.UNSURE),
        (stored(1.04), GateOutcome.UNSURE),
        (stored(1.06), GateOutcome.TO_CONFIRM),
        (stored(1.2), GateOutcome.TO_CONFIRM),
        (stored(1.06, ratio=Interval(1.06, 0.95, 1.2, 0.99)), GateOutcome.UNSURE),
        (exact(1.01), GateOutcome.FINE),
        (exact(1.03), GateOutcome.TO_CONFIRM),
        (figure(1.0, direction=Direction.NONE, before=None), GateOutcome.NONE),
        (figure(1.0, direction=Direction.NONE, failed=True), GateOutcome.FAILED),
        (figure(2.0, metric="x_error", before=0.0, after=0.1, ratio=None), GateOutcome.TO_CONFIRM),
    ],
)  # fmt: skip
def test_a_first_look(one: Comparison, outcome: GateOutcome) -> None:
    """Beyond both thresholds, sure to be worse, and no chance."""
    assert first_look([one])[0].outcome is outcome


def test_chance_among_many() -> None:
    """One p-value of 1% is news alone, and none among a hundred."""
    suspect = figure(1.06, p_value=0.01)
    others = [figure(1.0, case=f"gemm[m={n}]@cpu/bf16") for n in range(99)]
    assert first_look([suspect])[0].outcome is GateOutcome.TO_CONFIRM
    judged = first_look([suspect, *others])[0]
    assert judged.outcome is GateOutcome.UNSURE and "among 100 figures" in judged.why


def test_the_rule_of_benjamini_and_hochberg() -> None:
    """As scipy has it."""
    generator = np.random.default_rng(3)
    for _ in range(200):
        p_values = generator.uniform(size=generator.integers(1, 60)) ** generator.integers(1, 6)
        expected = false_discovery_control(p_values) <= 0.05
        assert discoveries(list(p_values), 0.05) == list(expected)
    assert discoveries([], 0.05) == []


FAILED = figure(1.0, failed=True, direction=Direction.NONE)
KNOWN = figure(1.08, evidence=Evidence.CROSS_RUN, p_value=1e-4)
STEP = figure(1.08, evidence=Evidence.HISTORY, p_value=1e-4)
RELATIVE = stored(1.2, metric="relative_time", unit="x", before=0.5, after=0.6)


@for_each(
    ("first", "again", "outcome"),
    [
        # It confirms, clears, or finds that it fails.
        (figure(1.06), figure(1.07), GateOutcome.REGRESSION),
        (figure(1.06), figure(1.02), GateOutcome.CLEARED),
        # What was seen and is not shown to be absent stays a suspect: an interval too wide, or none.
        (figure(1.06), figure(1.06, direction=Direction.UNSURE), GateOutcome.TO_CONFIRM),
        (
            figure(1.11),
            replace(figure(1.1, direction=Direction.UNSURE), ratio=Interval(1.1, 1.1, 1.1, 0.0)),
            GateOutcome.TO_CONFIRM,
        ),
        (figure(1.06), FAILED, GateOutcome.FAILED),
        (exact(1.05), exact(1.05), GateOutcome.REGRESSION),
        (exact(1.05), exact(1.0), GateOutcome.CLEARED),
        # Stored numbers never fail below 10%, not when repeated either: a duel may, and a spread that is known.
        (stored(1.08), stored(1.08), GateOutcome.TO_CONFIRM),
        (stored(1.08), stored(1.3), GateOutcome.REGRESSION),
        (stored(1.3), stored(1.08), GateOutcome.TO_CONFIRM),
        (stored(1.2), stored(1.2), GateOutcome.REGRESSION),
        # Nor do they where others may have made as much of nothing, and they clear what they exclude beside all that.
        (stored(1.2, **TAKEN), stored(1.2, **TAKEN), GateOutcome.TO_CONFIRM),
        (stored(1.2, **TAKEN), stored(1.2), GateOutcome.REGRESSION),
        (stored(1.2), stored(1.0), GateOutcome.TO_CONFIRM),
        (stored(1.2), stored(0.93), GateOutcome.CLEARED),
        (stored(1.2), stored(0.93, others=1.2), GateOutcome.TO_CONFIRM),
        (KNOWN, replace(KNOWN, ratio=Interval(1.0, 0.99, 1.01, 0.99), direction=Direction.SAME), GateOutcome.CLEARED),
        (
            KNOWN,
            replace(KNOWN, ratio=Interval(1.0, 0.99, 1.01, 0.99), direction=Direction.SAME, others=5.0),
            GateOutcome.TO_CONFIRM,
        ),
        (stored(1.08), figure(1.08), GateOutcome.REGRESSION),
        (KNOWN, KNOWN, GateOutcome.REGRESSION),
        (STEP, STEP, GateOutcome.REGRESSION),
        # A relative time is settled by a duel of times, whose difference is in seconds and not in shares.
        (RELATIVE, figure(1.2), GateOutcome.REGRESSION),
        (RELATIVE, figure(1.0), GateOutcome.CLEARED),
        # Without it what may fail fails.
        (stored(1.2), None, GateOutcome.REGRESSION),
    ],
)
def test_what_a_second_look_does(first: Comparison, again: Comparison | None, outcome: GateOutcome) -> None:
    settled = settle(first, again)
    assert settled.outcome is outcome
    assert outcome is not GateOutcome.TO_CONFIRM or again is None or again.why in settled.why


def test_without_a_second_look() -> None:
    """What may fail fails and says that nobody confirmed it; the rest stays a suspect."""
    for one, outcome in (
        (stored(1.2), GateOutcome.REGRESSION), (stored(1.08), GateOutcome.TO_CONFIRM),
        (figure(1.06), GateOutcome.REGRESSION), (exact(1.05), GateOutcome.REGRESSION),
        (stored(1.2, **TAKEN), GateOutcome.TO_CONFIRM),
    ):  # fmt: skip
        (judged,) = second_look(first_look([one]), SecondLook({}, refused="--no-rerun"))
        assert judged.outcome is outcome and "not measured again: --no-rerun" in judged.why


def test_a_time_is_judged_over_the_reference_where_it_can_be() -> None:
    """Unless a rule speaks of the time itself; in a duel there is no such figure."""
    both = [stored(1.5), stored(1.0, metric="relative_time", unit="x", before=0.5, after=0.5)]
    assert [one.outcome for one in first_look(both)] == [GateOutcome.IGNORED, GateOutcome.UNSURE]
    assert first_look(both, (ThresholdRule("gemm", "time", 0.1),))[0].outcome is GateOutcome.TO_CONFIRM
    assert first_look([figure(1.5)])[0].outcome is GateOutcome.TO_CONFIRM


def test_what_is_ignored_fails_all_the_same_where_the_case_fails() -> None:
    """A rule is about numbers."""
    rules = (ThresholdRule("*", "*", ignored=True),)
    assert first_look([figure(3.0)], rules)[0].outcome is GateOutcome.IGNORED
    assert first_look([figure(1.0, failed=True)], rules)[0].outcome is GateOutcome.FAILED


@for_each(
    ("outcomes", "code", "headline"),
    [
        ((), 0, "no regression"),
        (
            (GateOutcome.FINE, GateOutcome.TO_CONFIRM, GateOutcome.CLEARED, GateOutcome.UNSURE, GateOutcome.BETTER),
            4,
            "1 to confirm",
        ),
        ((GateOutcome.FINE, GateOutcome.CLEARED, GateOutcome.UNSURE, GateOutcome.BETTER), 0, "no regression"),
        ((GateOutcome.REGRESSION, GateOutcome.REGRESSION), 1, "2 regressions"),
        ((GateOutcome.REGRESSION, GateOutcome.TO_CONFIRM), 1, "1 regression and 1 to confirm"),
        ((GateOutcome.REGRESSION, GateOutcome.FAILED), 3, "1 failed and 1 regression"),
    ],
)
def test_exit_codes(outcomes: tuple[GateOutcome, ...], code: int, headline: str) -> None:
    """The first that fits."""
    judged = tuple(replace(first_look([figure(1.0)])[0], outcome=one) for one in outcomes)
    verdict = GateVerdict("b against a", judged)
    assert (verdict.exit_code, verdict.headline) == (code, headline)


def test_a_problem_is_never_green() -> None:
    """Nothing measured, or no baseline."""
    assert GateVerdict("", problem="no case", code=3).exit_code == 3
    assert GateVerdict("", problem="no baseline", code=4).headline == "no baseline to judge by"


# Of 100 builds with a rate of 1%, more than 4 fail in one of 300 trials; the seed makes it the same every time.
BUILDS = 100
MOST = 4 / BUILDS


USUAL = (Setting(1, 1, 0.02), Setting(5, 5, 0.02, noise="one-sided"))


@pytest.mark.parametrize(
    "setting",
    sampled(USUAL, [
        *USUAL, Setting(1, 1, 0.005), Setting(1, 1, 0.05), Setting(1, 1, 0.02, noise="one-sided"),
        Setting(1, 1, 0.02, 0.02), Setting(3, 1, 0.02), Setting(5, 5, 0.02),
    ]),
    ids=lambda setting: setting.words,
)  # fmt: skip
def test_of_100_cases_nothing_alarms(setting: Setting) -> None:
    """In at most one build of a hundred."""
    assert false_alarms(setting, BUILDS) <= MOST


@for_each("setting", [Setting(1, 1, 0.01), Setting(3, 1, 0.02), Setting(5, 5, 0.01)])
def test_what_was_planted_is_found(setting: Setting) -> None:
    """30%, among a hundred cases."""
    assert found(setting, 1.3, 20) >= 0.9


def test_a_spread_is_that_of_unchanged_cases() -> None:
    """Half of all cases becoming worse, or better, is no noise; nor is what all have in common."""
    usual = [0.02 * ((7 * n) % 20 - 9.5) / 6 for n in range(20)]
    even = spread_of(usual)
    assert even is not None and 0.01 < even.deviation < 0.04 and abs(even.shift) < 0.01
    for moved in (0.3, -0.3):
        half = spread_of([*usual, *(moved for _ in range(15))])
        assert half is not None and half.deviation < 2 * even.deviation and half.chance(0.3) < 1e-4
    shifted = spread_of([one + 0.05 for one in usual])
    assert shifted is not None and shifted.shift == pytest.approx(0.05, abs=0.01)
    assert shifted.deviation == pytest.approx(even.deviation)
    everything = spread_of([one + 0.3 for one in usual])
    assert everything is not None and everything.shift == 0 and everything.chance(0.3) < 1e-6
    assert spread_of([0.1] * (LEAST_CASES - 1)) is None
    alike = spread_of([0.0] * 20)
    assert alike is not None and alike.chance(0.0) == 1 and alike.chance(0.2) == 0
