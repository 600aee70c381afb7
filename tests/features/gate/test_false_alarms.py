"""How often a build fails for nothing: seeded, over the code that judges. `python -m suites.gate` prints it all."""

from __future__ import annotations

import pytest

from fp8bench.features.gate.judging import LEAST_CASES, spread_of
from suites.gate import Setting, false_alarms, found
from tests.counts import sampled

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


@pytest.mark.parametrize("setting", [Setting(1, 1, 0.01), Setting(3, 1, 0.02), Setting(5, 5, 0.01)])
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
