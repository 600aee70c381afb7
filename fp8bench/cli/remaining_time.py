"""Predicts how long a run still takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from fp8bench.model.words import MEASURING_CEILINGS

ROUNDS = "measuring"
# Seconds on an idle machine: from the command to the plan, and after the last group (asv's view, the report).
_START_SECONDS, _END_SECONDS = 1.7, 0.5
# The same for ceilings, a group's passes and its rounds. Rounds have a time limit, and many groups are decided early.
_CEILINGS_SECONDS, _PASSES_SECONDS, _ROUNDS_SECONDS = 15.0, 2.5, 7.0
# The passes of a group took 2 to 4 times as long as preparing it, without compiling: the less with two workers.
_PASSES = 2.7
# The share of the passes that is done when each begins.
_BEGINNINGS = {"checking what steps do": 0.3, "measuring memory": 0.45, "counting operators": 0.85}
# A smaller share of the rounds would make the prediction jump.
_LEAST_SHARE = 0.05
# If passes take longer than predicted, this share of them is always assumed to remain.
_LEAST_LEFT = 0.1


@dataclass
class _Group:
    """When a group, its rounds and its passes began, and how long these take as far as known.

    `learned` is the time of the passes of earlier groups, None in the first group.
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
    """Follows a run of `groups`, planned after `start_seconds`: slow planning predicts slow untimed work. The rounds of
    a group end by their budget, so their progress is known; the duration of the passes after them is learned from
    earlier groups, and from the first passes of a group."""

    groups: int
    start_seconds: float = _START_SECONDS
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
            learned = fmean(self._passes) if self._passes else None
            group = self._group = _Group(setting, now, learned, passes=_PASSES_SECONDS * self._slowness)
        group.follow(doing, share, now)

    @property
    def _slowness(self) -> float:
        return max(1.0, self.start_seconds / _START_SECONDS)

    def _finish(self, group: _Group, now: float) -> None:
        self._seconds.append(now - group.begun)
        if group.passes_begun is not None:
            self._passes.append(now - group.passes_begun)

    def predict(self, now: float) -> float:
        """Returns the remaining seconds."""
        group, end = self._group, _END_SECONDS * self._slowness
        whole = self._seconds or [_ROUNDS_SECONDS + _PASSES_SECONDS / 2 * self._slowness]
        if group is None:
            begun = self._ceilings_begun
            ceilings = 0.0 if begun is None else max(0.0, begun + _CEILINGS_SECONDS * self._slowness - now)
            return ceilings + self.groups * fmean(whole) + end
        here = group.left(now)
        later = self.groups - len(self._seconds) - 1
        return here + max(0, later) * fmean([*whole, now - group.begun + here]) + end
