"""Predicts how long a run still takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

ROUNDS = "measuring"
# Before the share of a group's rounds tells more: what a default run gives them.
_ROUNDS_SECONDS = 12.0
# Passes for errors, memory and operators took 0.7 and 0.8 times as long as the rounds of two suites on a CPU.
_PASSES = 0.75
# A smaller share would make the prediction jump.
_LEAST_SHARE = 0.05
# Where passes take longer than predicted, this part of them is always still to come.
_LEAST_LEFT = 0.1


@dataclass
class _Group:
    """When a group began, and when its rounds began and ended, by the same clock; `rounds_seconds` is predicted."""

    setting: str
    begun: float
    rounds_begun: float | None = None
    rounds_ended: float | None = None
    rounds_seconds: float = _ROUNDS_SECONDS


@dataclass
class RemainingTime:
    """Follows what a run of `groups` does. The rounds of a group end by their budget, so their share is known; how long
    the passes after them take is learned from earlier groups."""

    groups: int
    _group: _Group | None = None
    _seconds: list[float] = field(default_factory=list)
    _passes: list[float] = field(default_factory=list)

    def follow(self, setting: str, doing: str, share: float, now: float) -> None:
        group = self._group
        if group is None or group.setting != setting:
            if group is not None and group.rounds_begun is not None:  # else only the device's ceilings were measured
                self._finish(group, now)
            group = self._group = _Group(setting, now)
        if doing == ROUNDS:
            if group.rounds_begun is None:
                group.rounds_begun = now
            if _LEAST_SHARE <= share <= 1:
                group.rounds_seconds = (now - group.rounds_begun) / share
        elif group.rounds_begun is not None and group.rounds_ended is None:
            group.rounds_ended = now
            group.rounds_seconds = now - group.rounds_begun

    def _finish(self, group: _Group, now: float) -> None:
        self._seconds.append(now - group.begun)
        if group.rounds_ended is not None and group.rounds_seconds > 0:
            self._passes.append((now - group.rounds_ended) / group.rounds_seconds)

    def predict(self, now: float) -> float:
        """Returns the seconds that are left."""
        group = self._group
        if group is None:
            return self.groups * _ROUNDS_SECONDS * (1 + _PASSES)
        passes = group.rounds_seconds * (fmean(self._passes) if self._passes else _PASSES)
        if group.rounds_ended is not None:
            here = max(passes - (now - group.rounds_ended), _LEAST_LEFT * passes)
        elif group.rounds_begun is not None:
            here = max(group.rounds_seconds - (now - group.rounds_begun), 0.0) + passes
        else:
            here = group.rounds_seconds + passes
        whole = fmean(self._seconds) if self._seconds else now - group.begun + here
        return here + max(0, self.groups - len(self._seconds) - 1) * whole
