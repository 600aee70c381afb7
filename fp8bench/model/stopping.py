"""Decides when the rounds of a group end, and when the clock and temperature of a device have settled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, linear_regression

# The number of rounds for emulated cases, whose times get no verdict. The best case of four rounds is computed from
# the fastest three, so four are enough.
EMULATED_ROUNDS = 4
LEAST_ROUNDS = 24
QUICK_ROUNDS = 10
BUDGET_SECONDS = 6.0
# A brisk run has a shorter warm-up and shorter energy windows. A run is brisk with the option --brisk, or if --budget
# leaves less than _BRISK_GROUP_BUDGET_SECONDS for each group. With --brisk and without --budget, the rounds of each
# group take about BRISK_SECONDS in total.
BRISK_SECONDS = 2.0
_BRISK_GROUP_BUDGET_SECONDS = 20.0
CEILING_SECONDS = 120.0
# If at least this many cases are compared with the reference, emulated ones not counted, the fastest is timed again.
MIN_RETIMING_CANDIDATES = 3


@dataclass(frozen=True)
class StoppingRule:
    """Decides when to stop timing rounds. From `least` rounds on, the results are judged now and then, and timing
    stops once all comparisons are decided. It stops after `most` rounds in any case.

    After `budget` seconds (without emulated steps) and at least `least` rounds, timing stops even if nothing is
    decided. After `ceiling` seconds it stops in any case. `fixed` is a number of rounds that replaces all limits
    except `ceiling`. The seconds count only the timing; if `whole` is True, they also count the preparation of the
    group.
    """

    least: int = LEAST_ROUNDS
    most: int = 4096
    budget: float = BUDGET_SECONDS
    ceiling: float = CEILING_SECONDS
    fixed: int | None = None
    whole: bool = False

    def after(self, seconds: float, sessions: int = 1) -> StoppingRule:
        """Returns the stopping rule for the next session of a group that has already taken `seconds`: an equal part of
        the remaining time for each of the remaining `sessions`, because it is unknown which of them will need most. A
        session times those cases of a group that fit into memory together.
        """
        if not self.whole:
            return self
        budget, ceiling = (max(0.0, limit - seconds) / sessions for limit in (self.budget, self.ceiling))
        return replace(self, budget=budget, ceiling=ceiling)

    def looks(self, rounds: int) -> bool:
        """Returns whether the results are judged after this number of rounds: every 8 rounds up to 128 rounds, then
        every 16 up to 256 rounds, every 32 up to 512 rounds, and so on. There are few such judgements, because each one
        adds to the chance of a wrong verdict.
        """
        if self.fixed is not None or rounds < self.least:
            return False
        if rounds < 128:
            return rounds % 8 == 0
        largest_power_of_two = 1 << (rounds.bit_length() - 1)  # at most `rounds`
        return rounds % (largest_power_of_two // 8) == 0

    def reason_to_end(self, rounds: int, seconds: float, emulating: float = 0.0) -> str:
        """Returns why timing must end after this number of rounds and seconds, or '' if it may go on. `emulating` is
        how many of these seconds emulated steps took.
        """
        if self.fixed is not None and rounds >= self.fixed:
            return f"{_format_round_count(self.fixed)}, a fixed number"
        if self.fixed is None and rounds >= self.most:
            return f"{_format_round_count(rounds)}, the most a group gets"
        is_budget_spent = self.fixed is None and rounds >= self.least and seconds - emulating >= self.budget
        # At least one round is timed, even if the preparation took longer than the ceiling.
        is_ceiling_reached = rounds > 0 and seconds >= self.ceiling
        return f"time was up after {_format_round_count(rounds)}" if is_budget_spent or is_ceiling_reached else ""


def _format_round_count(rounds: int) -> str:
    return "1 round" if rounds == 1 else f"{rounds} rounds"


def is_run_brisk(requested: bool, budget: float | None, groups: int) -> bool:
    """Returns whether a run is brisk, because the user requested it or because the budget of the run leaves too little
    time for each of its `groups`.
    """
    return requested or (budget is not None and budget < _BRISK_GROUP_BUDGET_SECONDS * groups)


def make_stopping_rule(quick: bool, rounds: int | None, budget: float | None, brisk: bool = False) -> StoppingRule:
    """Returns the stopping rule of a group. `budget` is the group's part of the seconds that the user allowed for the
    run, or None.
    """
    budget_covers_preparation = budget is not None
    # A fixed number of rounds overrides a budget, but not the time limit.
    if rounds is not None:
        return StoppingRule(
            fixed=rounds, ceiling=math.inf if budget is None else budget, whole=budget_covers_preparation
        )
    ceiling = CEILING_SECONDS if budget is None else budget
    if quick:
        return StoppingRule(fixed=QUICK_ROUNDS, ceiling=ceiling, whole=budget_covers_preparation)
    if brisk and budget is None:
        return StoppingRule(least=QUICK_ROUNDS, budget=BRISK_SECONDS)
    return StoppingRule(
        budget=BUDGET_SECONDS if budget is None else budget, ceiling=ceiling, whole=budget_covers_preparation
    )


# The slopes of clock and temperature are fitted to the samples of the last SLOPE_FIT_SECONDS, if these are at least
# _MIN_SLOPE_SAMPLES samples.
SLOPE_FIT_SECONDS = 4.0
# In a brisk run, the slope of the clock is fitted to the samples of only _BRISK_SLOPE_FIT_SECONDS, and may be larger.
# The clock of a GPU at its power cap reaches its level within a second, and then varies by 2% between samples.
_BRISK_SLOPE_FIT_SECONDS = 0.9
_MAX_BRISK_CLOCK_SLOPE = 0.02
_MIN_SLOPE_SAMPLES = 5
# The largest slopes of a settled device: of its clock (relative to the clock, per second) and of its temperature
# (degrees per second).
MAX_CLOCK_SLOPE = 0.002
MAX_TEMPERATURE_SLOPE = 0.3


@dataclass(frozen=True)
class ClockSample:
    """A sample of a device's clock in hertz and its temperature in degrees Celsius (None if unknown). `at` is the time
    of the sample in seconds.
    """

    at: float
    clock: float | None
    temperature: float | None


@dataclass(frozen=True)
class DeviceSettling:
    """The clock and temperature of a device while a case warmed it up.

    `looks` are samples of both. The first one is from before the case ran. `settled` is whether clock and temperature
    were constant at the end. `limit` is the number of seconds that the device was given to settle.
    """

    looks: tuple[ClockSample, ...] = ()
    settled: bool = False
    limit: float = 0.0

    @property
    def seconds(self) -> float:
        return self.looks[-1].at - self.looks[0].at if self.looks else 0.0


@dataclass(frozen=True)
class DeviceSlopes:
    """How fast the clock of a device changes (relative to itself) and how fast its temperature changes (in degrees),
    per second; None if unknown.
    """

    clock: float | None
    temperature: float | None

    @property
    def is_flat(self) -> bool:
        """Whether clock and temperature have settled: every known slope is small, and at least one slope is known."""
        slopes_with_bounds = ((self.clock, MAX_CLOCK_SLOPE), (self.temperature, MAX_TEMPERATURE_SLOPE))
        are_slopes_small = [abs(slope) <= bound for slope, bound in slopes_with_bounds if slope is not None]
        return bool(are_slopes_small) and all(are_slopes_small)


def is_clock_flat(samples: Sequence[ClockSample]) -> bool:
    """Returns whether the clock was constant for about a second. The device may still get warmer."""
    clock = fit_device_slopes(samples, _BRISK_SLOPE_FIT_SECONDS).clock
    return clock is not None and abs(clock) <= _MAX_BRISK_CLOCK_SLOPE


def fit_device_slopes(samples: Sequence[ClockSample], stretch: float = SLOPE_FIT_SECONDS) -> DeviceSlopes:
    """Returns the slopes of clock and temperature over the last `stretch` seconds. They are None if the samples cover
    fewer seconds than that.
    """
    if not samples or samples[-1].at - samples[0].at < stretch:
        return DeviceSlopes(None, None)
    recent_samples = [sample for sample in samples if sample.at >= samples[-1].at - stretch]
    clocks = [
        (sample.at, sample.clock)
        for sample in recent_samples
        if sample.clock is not None and 0 < sample.clock < math.inf
    ]
    temperatures = [(sample.at, sample.temperature) for sample in recent_samples if sample.temperature is not None]
    clock_slope = _fit_line_slope(clocks)
    return DeviceSlopes(
        None if clock_slope is None else clock_slope / fmean(hertz for _, hertz in clocks),
        _fit_line_slope(temperatures),
    )


def _fit_line_slope(points: Sequence[tuple[float, float]]) -> float | None:
    if len({point_time for point_time, _ in points}) < _MIN_SLOPE_SAMPLES:
        return None
    return linear_regression(*zip(*points, strict=True)).slope
