"""What options save: alone, cumulative, left out, by Shapley.

Arms take turns in the same rounds, so that the same draws of rounds say what any two of them differ by.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from fp8bench.analysis.stats import Floats, Resampled, best_case
from fp8bench.features.ablate.values import AblatedArm, Ablation
from fp8bench.model import Interval
from fp8bench.model.stopping import LEAST_ROUNDS

LEVEL = 0.99
_ENDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)


@dataclass(frozen=True)
class Savings:
    """In seconds of a step, with intervals; None of arms whose time is no speed."""

    ablation: Ablation

    def alone(self, name: str) -> Interval | None:
        """What it saves by itself, in seconds of a step, as all that follow."""
        return self.saved((((), 1), ((name,), -1)))

    def cumulative(self, name: str) -> Interval | None:
        place = self.ablation.names.index(name)
        return self.saved(((self.ablation.names[:place], 1), (self.ablation.names[: place + 1], -1)))

    def left_out(self, name: str) -> Interval | None:
        """What is lost where it alone is left out of the whole."""
        return self.saved(((self._but(name), 1), (self.ablation.names, -1)))

    def beside(self, name: str) -> Interval | None:
        """What it saves more where all others are on than alone: above 0 it needs them, below 0 they overlap."""
        return self.saved(((self._but(name), 1), (self.ablation.names, -1), ((), -1), ((name,), 1)))

    def interaction(self) -> Interval | None:
        alone = [((name,), 1.0) for name in self.ablation.names]
        return self.saved((*alone, (self.ablation.names, -1), ((), 1.0 - len(alone))))

    def average(self, name: str) -> Interval | None:
        """Shapley's share of the whole: what it saves, averaged over all orders in which options can be added."""
        others = self._but(name)
        terms: list[tuple[Sequence[str], float]] = []
        for count in range(len(others) + 1):
            weight = 1 / (len(self.ablation.names) * math.comb(len(others), count))
            for subset in itertools.combinations(others, count):
                terms += [(subset, weight), ((*subset, name), -weight)]
        return self.saved(terms)

    def speed_up(self, arm: AblatedArm) -> Interval | None:
        first = self.ablation.arms[0]
        if not arm.timed or not first.timed or arm is first:
            return None
        return _ratio(first.rounds, arm.rounds)

    def saved(self, terms: Sequence[tuple[Sequence[str], float]]) -> Interval | None:
        """The sum of arms' seconds, each so many times; None unless all are timed."""
        arms = [(self.ablation.arm(options), times) for options, times in terms]
        if not all(arm.timed for arm, _ in arms):
            return None
        known = [(resampled(arm.rounds), times) for arm, times in arms]
        point = sum(times * math.exp(case.point) for case, times in known)
        draws: Floats = np.sum([times * np.exp(case.resampled) for case, times in known], axis=0)
        by_round: Floats = np.sum([times * np.array(arm.rounds) for arm, times in arms], axis=0)
        return _interval(point, draws, by_round)

    @property
    def floor(self) -> float | None:
        """By what share identical code differs in these rounds: how far its interval reaches."""
        first = self.ablation.arms[0]
        if not self.ablation.control or not first.timed:
            return None
        return _ratio(self.ablation.control, first.rounds).reach

    def _but(self, name: str) -> tuple[str, ...]:
        return tuple(other for other in self.ablation.names if other != name)


def seconds_of(arm: AblatedArm) -> float | None:
    """Of the fastest quarter of the rounds."""
    return math.exp(resampled(arm.rounds).point) if arm.rounds else None


@cache
def resampled(rounds: tuple[float, ...]) -> Resampled:
    """The best case of whole steps; arms with as many rounds draw the same ones."""
    return best_case(np.array(rounds, dtype=np.float64)[:, None])


def _ratio(one: tuple[float, ...], other: tuple[float, ...]) -> Interval:
    own, base = resampled(one), resampled(other)
    draws: Floats = np.exp(own.resampled - base.resampled)
    return _interval(math.exp(own.point - base.point), draws, np.array(one) / np.array(other))


def _interval(point: float, draws: Floats, by_round: Floats) -> Interval:
    """Between the outer half-percents of the resamples; of few rounds, whose resamples say little, their range."""
    if few := len(by_round) < LEAST_ROUNDS:
        low, high = by_round.min(), by_round.max()
    else:
        low, high = np.quantile(draws, _ENDS)
    return Interval(point, min(float(low), point), max(float(high), point), 0.0 if few else LEVEL)
