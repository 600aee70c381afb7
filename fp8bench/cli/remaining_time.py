"""Predicts how long a run will still take."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from fp8bench.model.words import MEASURING_CEILINGS

MEASURING_ROUNDS = "measuring"
# The seconds of two parts of a run on an idle machine. The first is from its start to the plan. The second is after
# the last group, for asv's files and the report.
_SECONDS_BEFORE_GROUPS, _SECONDS_AFTER_GROUPS = 1.7, 0.5
# Typical seconds for measuring ceilings, for the untimed passes of a group, and for its rounds. Rounds have a time
# limit, and many groups are decided before it.
_CEILINGS_SECONDS, _PASSES_SECONDS, _ROUNDS_SECONDS = 15.0, 2.5, 7.0
# The ratio of a group's passes to its preparation, in time. It was 2 to 4 without compiling, and nearer to 2 with two
# workers.
_PASSES_PER_PREPARATION = 2.7
# The share of a group's passes that is done when an activity begins.
_SHARE_BEFORE_PASS = {"checking what steps do": 0.3, "measuring memory": 0.45, "counting operators": 0.85}
# Predictions are made from at least this share of the rounds, because they would otherwise jump.
_MIN_ROUNDS_SHARE = 0.05
# At least this share of the passes is assumed to remain, even if they take longer than predicted.
_MIN_REMAINING_SHARE = 0.1


@dataclass
class _GroupTimes:
    """The times of a group. Has the starts of its preparation, rounds and passes, and the known or predicted seconds
    of its rounds and passes. `learned_passes` has the mean seconds of the passes of earlier groups. It is None in the
    first group.
    """

    setting: str
    start: float
    learned_passes: float | None = None
    doing: str = ""
    doing_start: float = 0.0
    compiling_seconds: float = 0.0
    rounds_start: float | None = None
    passes_start: float | None = None
    rounds_seconds: float = _ROUNDS_SECONDS
    passes_seconds: float = _PASSES_SECONDS

    def follow(self, doing: str, share: float, now: float) -> None:
        if doing == MEASURING_ROUNDS:
            if self.rounds_start is None:
                self.rounds_start = now
                self.passes_seconds = self.learned_passes or _PASSES_PER_PREPARATION * (
                    now - self.start - self.compiling_seconds
                )
            if _MIN_ROUNDS_SHARE <= share <= 1:
                self.rounds_seconds = (now - self.rounds_start) / share
        elif self.rounds_start is not None and self.passes_start is None:
            self.passes_start, self.rounds_seconds = now, now - self.rounds_start
        if doing != self.doing:
            if self.doing.startswith("compiling"):
                self.compiling_seconds += now - self.doing_start
            if self.passes_start is not None and doing in _SHARE_BEFORE_PASS and self.learned_passes is None:
                self.passes_seconds = (now - self.passes_start) / _SHARE_BEFORE_PASS[doing]
            self.doing, self.doing_start = doing, now

    def predict_remaining(self, now: float) -> float:
        if self.passes_start is not None:
            return max(self.passes_seconds - (now - self.passes_start), _MIN_REMAINING_SHARE * self.passes_seconds)
        rounds_start = now if self.rounds_start is None else self.rounds_start
        return max(self.rounds_seconds - (now - rounds_start), 0.0) + self.passes_seconds


@dataclass
class RemainingTime:
    """Predicts the remaining time of a run of `groups`, whose planning took `start_seconds`.

    If planning was slow, untimed work is expected to be slow as well. The rounds of a group end with their budget, so
    their progress is known. The time of the passes after the rounds is learned from earlier groups, and from the
    first passes of the group.
    """

    groups: int
    start_seconds: float = _SECONDS_BEFORE_GROUPS
    _group: _GroupTimes | None = None
    _ceilings_start: float | None = None
    _seconds: list[float] = field(default_factory=list)
    _passes: list[float] = field(default_factory=list)

    def follow(self, setting: str, doing: str, share: float, now: float) -> None:
        if doing == MEASURING_CEILINGS:
            if self._ceilings_start is None:
                self._ceilings_start = now
            return
        group = self._group
        if group is None or group.setting != setting:
            if group is not None:
                self._finish(group, now)
            learned_passes = fmean(self._passes) if self._passes else None
            group = self._group = _GroupTimes(
                setting, now, learned_passes, passes_seconds=_PASSES_SECONDS * self._slowness
            )
        group.follow(doing, share, now)

    @property
    def _slowness(self) -> float:
        return max(1.0, self.start_seconds / _SECONDS_BEFORE_GROUPS)

    def _finish(self, group: _GroupTimes, now: float) -> None:
        self._seconds.append(now - group.start)
        if group.passes_start is not None:
            self._passes.append(now - group.passes_start)

    def predict(self, now: float) -> float:
        """Returns the predicted remaining seconds of the run."""
        group, end_seconds = self._group, _SECONDS_AFTER_GROUPS * self._slowness
        group_seconds = self._seconds or [_ROUNDS_SECONDS + _PASSES_SECONDS / 2 * self._slowness]
        if group is None:
            ceilings_start = self._ceilings_start
            ceilings = (
                0.0 if ceilings_start is None else max(0.0, ceilings_start + _CEILINGS_SECONDS * self._slowness - now)
            )
            return ceilings + self.groups * fmean(group_seconds) + end_seconds
        current_group = group.predict_remaining(now)
        num_later_groups = self.groups - len(self._seconds) - 1
        return (
            current_group
            + max(0, num_later_groups) * fmean([*group_seconds, now - group.start + current_group])
            + end_seconds
        )
