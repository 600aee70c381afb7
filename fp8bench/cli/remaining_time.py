"""Predicts how long a run still takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from fp8bench.model.words import MEASURING_CEILINGS

ROUNDS = "measuring"
# Before anything is known: what ceilings take, the rounds and the passes of a group in a default run, a whole group, of
# which many are decided early, and what comes after the last one (asv's view, the report).
_CEILINGS_SECONDS, _ROUNDS_SECONDS, _PASSES_SECONDS, _GROUP_SECONDS, _END_SECONDS = 15.0, 12.0, 7.0, 15.0, 2.0
# The passes of a group took 1.5 to 6 times as long as preparing it, compiling apart, in suites on a CPU.
_PASSES = 4.0
# The share of the passes that is over when one begins.
_BEGINNINGS = {"checking what steps do": 0.3, "measuring memory": 0.55, "counting operators": 0.9}
# A smaller share of the rounds would make the prediction jump.
_LEAST_SHARE = 0.05
# Where passes take longer than predicted, this part of them is always still to come.
_LEAST_LEFT = 0.1


@dataclass
class _Group:
    """When a group began, its rounds and its passes, by the same clock, and what these take as far as it is known.

    `learned` is what the passes of earlier groups took, None in the first group.
    """

    setting: str
    begun: float
    learned: float | None = None
    doing: str = ""
    doing_since: float = 0.0
    compiling: float = 0.0
    rounds_begun: float | None = None
    passes_begun: float | None = None
    rounds: float = _ROUNDS_SECONDS
    passes: float = _PASSES_SECONDS

    def follow(self, doing: str, share: float, now: float) -> None:
        if doing == ROUNDS:
            if self.rounds_begun is None:
                self.rounds_begun = now
                self.passes = self.learned or _PASSES * (now - self.begun - self.compiling)
            if _LEAST_SHARE <= share <= 1:
                self.rounds = (now - self.rounds_begun) / share
        elif self.rounds_begun is not None and self.passes_begun is None:
            self.passes_begun, self.rounds = now, now - self.rounds_begun
        if doing != self.doing:
            if self.doing.startswith("compiling"):
                self.compiling += now - self.doing_since
            if self.passes_begun is not None and doing in _BEGINNINGS and self.learned is None:
                self.passes = (now - self.passes_begun) / _BEGINNINGS[doing]
            self.doing, self.doing_since = doing, now

    def left(self, now: float) -> float:
        if self.passes_begun is not None:
            return max(self.passes - (now - self.passes_begun), _LEAST_LEFT * self.passes)
        begun = now if self.rounds_begun is None else self.rounds_begun
        return max(self.rounds - (now - begun), 0.0) + self.passes


@dataclass
class RemainingTime:
    """Follows what a run of `groups` does. The rounds of a group end by their budget, so their share is known; how long
    the passes after them take is learned from earlier groups, and from the first passes of a group."""

    groups: int
    _group: _Group | None = None
    _ceilings_begun: float | None = None
    _seconds: list[float] = field(default_factory=list)
    _passes: list[float] = field(default_factory=list)

    def follow(self, setting: str, doing: str, share: float, now: float) -> None:
        if doing == MEASURING_CEILINGS:
            self._ceilings_begun = now if self._ceilings_begun is None else self._ceilings_begun
            return
        group = self._group
        if group is None or group.setting != setting:
            if group is not None:
                self._finish(group, now)
            group = self._group = _Group(setting, now, fmean(self._passes) if self._passes else None)
        group.follow(doing, share, now)

    def _finish(self, group: _Group, now: float) -> None:
        self._seconds.append(now - group.begun)
        if group.passes_begun is not None:
            self._passes.append(now - group.passes_begun)

    def predict(self, now: float) -> float:
        """Returns the seconds that are left."""
        group, durations = self._group, [_GROUP_SECONDS, *self._seconds]
        if group is None:
            begun = self._ceilings_begun
            ceilings = 0.0 if begun is None else max(0.0, begun + _CEILINGS_SECONDS - now)
            return ceilings + self.groups * fmean(durations) + _END_SECONDS
        this_group = group.left(now)
        later = self.groups - len(self._seconds) - 1
        return this_group + max(0, later) * fmean([*durations, now - group.begun + this_group]) + _END_SECONDS
