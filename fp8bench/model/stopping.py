"""When a group has been measured enough, and when a device has settled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, linear_regression

# An emulated step's time is only shown, so it needs no more rounds than a best case is the mean of, and one to spare.
EMULATED_ROUNDS = 4
LEAST_ROUNDS = 24
QUICK_ROUNDS = 10
BUDGET_SECONDS = 6.0
# Limits of a brisk group's rounds. A budget that leaves a group less than _SHORT_SECONDS makes it brisk.
BRISK_SECONDS = 2.0
_SHORT_SECONDS = 20.0
CEILING_SECONDS = 120.0
# With this number of candidates or more the fastest is timed again.
LEAST_CANDIDATES = 3


@dataclass(frozen=True)
class StoppingRule:
    """From `least` rounds on, look now and then whether the question is answered; stop after `most`.

    After `budget` seconds, emulated steps not counted, measuring ends although nothing is decided, once `least` rounds
    are done; `ceiling` ends it even before that. `fixed` rounds replace all of it but the ceiling. Seconds are those of
    measuring; with `whole`, since the group was begun, preparing included.
    """

    least: int = LEAST_ROUNDS
    most: int = 4096
    budget: float = BUDGET_SECONDS
    ceiling: float = CEILING_SECONDS
    fixed: int | None = None
    whole: bool = False

    def after(self, seconds: float, sessions: int = 1) -> StoppingRule:
        """The rule of the next of `sessions` sessions, when `seconds` of the group have gone."""
        if not self.whole:
            return self
        # Sessions share what is left equally, because nobody knows which of them needs most.
        remaining = (max(0.0, limit - seconds) / sessions for limit in (self.budget, self.ceiling))
        return replace(self, budget=next(remaining), ceiling=next(remaining))

    def looks(self, rounds: int) -> bool:
        """Whether to judge after this number of rounds: every 8 rounds up to 128, then at steps of about an eighth.

        Sparser looks later keep the number of looks, and so the chance of a false alarm, small.
        """
        if self.fixed is not None or rounds < self.least:
            return False
        stride = 8 if rounds <= 64 else 1 << (rounds.bit_length() - 4)
        return rounds % stride == 0

    def reason_to_end(self, rounds: int, seconds: float, emulating: float = 0.0) -> str:
        """Returns why measuring must end after these seconds, of which some went to emulations; '' if it need not."""
        if self.fixed is not None and rounds >= self.fixed:
            return f"{_count_rounds(self.fixed)}, a fixed number"
        if self.fixed is None and rounds >= self.most:
            return f"{_count_rounds(rounds)}, the most a group gets"
        enough = self.fixed is None and rounds >= self.least and seconds - emulating >= self.budget
        return f"time was up after {_count_rounds(rounds)}" if enough or (rounds and seconds >= self.ceiling) else ""


def _count_rounds(rounds: int) -> str:
    return "1 round" if rounds == 1 else f"{rounds} rounds"


def is_brisk(requested: bool, budget: float | None, groups: int) -> bool:
    """Whether groups are measured in about 10 s each: on request, or because the run's budget leaves them no more."""
    return requested or (budget is not None and budget < _SHORT_SECONDS * groups)


def rule_for(quick: bool, rounds: int | None, budget: float | None, brisk: bool = False) -> StoppingRule:
    """The rule of one group; `budget` is its share of the seconds the user gave for the whole run, if any."""
    is_whole = budget is not None
    # A fixed number of rounds beats every budget, but not the time limit.
    if rounds is not None:
        return StoppingRule(fixed=rounds, ceiling=math.inf if budget is None else budget, whole=is_whole)
    ceiling = CEILING_SECONDS if budget is None else budget
    if quick:
        return StoppingRule(fixed=QUICK_ROUNDS, ceiling=ceiling, whole=is_whole)
    if brisk and budget is None:
        return StoppingRule(least=QUICK_ROUNDS, budget=BRISK_SECONDS)
    return StoppingRule(budget=BUDGET_SECONDS if budget is None else budget, ceiling=ceiling, whole=is_whole)


# Slopes are those of straight lines through the looks of the last STRETCH seconds, at least _FEWEST looks.
STRETCH = 4.0
# The same for a brisk group: the clock of a GPU at its power cap wavers by 2% from look to look, about a level that it
# reaches within a second.
_BRISK_STRETCH = 0.9
_BRISK_SLOPE = 0.02
_FEWEST = 5
# Share of the mean per second; degrees per second.
CLOCK_SLOPE = 0.002
TEMPERATURE_SLOPE = 0.3


@dataclass(frozen=True)
class ClockLook:
    """Hertz and degrees Celsius `at` a time in seconds; None where unknown."""

    at: float
    clock: float | None
    temperature: float | None


@dataclass(frozen=True)
class Settling:
    """Looks at a device while a case warmed it up, the first one before it ran at all.

    `settled` is whether clock and temperature were steady in the end, `limit` the seconds that it might have run.
    """

    looks: tuple[ClockLook, ...] = ()
    settled: bool = False
    limit: float = 0.0

    @property
    def seconds(self) -> float:
        return self.looks[-1].at - self.looks[0].at if self.looks else 0.0


@dataclass(frozen=True)
class Slopes:
    """How fast a clock moves, relative to itself, and a temperature, in degrees, per second; None where unknown."""

    clock: float | None
    temperature: float | None

    @property
    def flat(self) -> bool:
        """Whether the known slopes are small enough; False if none is known."""
        bounds = ((self.clock, CLOCK_SLOPE), (self.temperature, TEMPERATURE_SLOPE))
        within_bounds = [abs(slope) <= bound for slope, bound in bounds if slope is not None]
        return bool(within_bounds) and all(within_bounds)


def is_clock_flat(looks: Sequence[ClockLook]) -> bool:
    """Whether the clock has stood still for about a second, by looks at a device that may still grow warmer."""
    clock = slopes(looks, _BRISK_STRETCH).clock
    return clock is not None and abs(clock) <= _BRISK_SLOPE


def slopes(looks: Sequence[ClockLook], stretch: float = STRETCH) -> Slopes:
    """Returns the slopes over the last stretch; unknown before a whole stretch has passed."""
    last = [look for look in looks if look.at >= looks[-1].at - stretch]
    if not looks or looks[-1].at - looks[0].at < stretch:
        return Slopes(None, None)
    clocks = [(look.at, look.clock) for look in last if look.clock is not None and 0 < look.clock < math.inf]
    heats = [(look.at, look.temperature) for look in last if look.temperature is not None]
    clock = _slope(clocks)
    return Slopes(None if clock is None else clock / fmean(hertz for _, hertz in clocks), _slope(heats))


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    if len({at for at, _ in points}) < _FEWEST:
        return None
    return linear_regression(*zip(*points, strict=True)).slope
