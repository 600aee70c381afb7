"""Predicts how long a run will still take."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from fp8bench.model.words import MEASURING_CEILINGS

MEASURING_ROUNDS = "measuring"
# The seconds of two parts of a run on an idle machine. The first is from its start to the plan. The second is after
# the last group, for asv's files and the report.
_SECONDS_BEFORE_GROUPS = 1.7
_SECONDS_AFTER_GROUPS = 0.5
# Typical seconds for measuring ceilings, for the untimed passes of a group, and for its rounds. Rounds have a time
# limit, and many groups are decided before it.
_CEILINGS_SECONDS = 15.0
_PASSES_SECONDS = 2.5
_ROUNDS_SECONDS = 7.0
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
class RemainingTime:
    """Predicts the remaining time of a run of `groups`, whose planning took `start_seconds`.

    If planning was slow, untimed work is expected to be slow as well. The rounds of a group end with their budget, so
    their progress is known. The time of the passes after the rounds is predicted from the group's preparation and its
    first passes.
    """

    groups: int
    start_seconds: float = _SECONDS_BEFORE_GROUPS
    _ceilings_start: float | None = None
    _group_seconds: list[float] = field(default_factory=list)
    # The current group and its activity, and when they began.
    _setting: str = ""
    _group_start: float = 0.0
    _doing: str = ""
    _doing_start: float = 0.0
    _compiling_seconds: float = 0.0
    # When the rounds and the passes of the current group began, and how long they take, as far as is known.
    _rounds_start: float | None = None
    _passes_start: float | None = None
    _rounds_seconds: float = _ROUNDS_SECONDS
    _passes_seconds: float = _PASSES_SECONDS

    def follow(self, setting: str, doing: str, share: float, now: float) -> None:
        """Takes note of the current activity of a group, and of the share of the activity that is done."""
        if doing == MEASURING_CEILINGS:
            if self._ceilings_start is None:
                self._ceilings_start = now
            return
        if setting != self._setting:
            self._begin_group(setting, now)
        if doing == MEASURING_ROUNDS:
            if self._rounds_start is None:
                self._rounds_start = now
                self._passes_seconds = _PASSES_PER_PREPARATION * (now - self._group_start - self._compiling_seconds)
            if _MIN_ROUNDS_SHARE <= share <= 1:
                self._rounds_seconds = (now - self._rounds_start) / share
        elif self._rounds_start is not None and self._passes_start is None:
            self._passes_start = now
        if doing != self._doing:
            if self._doing.startswith("compiling"):
                self._compiling_seconds += now - self._doing_start
            if self._passes_start is not None and doing in _SHARE_BEFORE_PASS:
                self._passes_seconds = (now - self._passes_start) / _SHARE_BEFORE_PASS[doing]
            self._doing = doing
            self._doing_start = now

    def _begin_group(self, setting: str, now: float) -> None:
        if self._setting:
            self._group_seconds.append(now - self._group_start)
        self._setting = setting
        self._group_start = now
        self._doing = ""
        self._compiling_seconds = 0.0
        self._rounds_start = self._passes_start = None
        self._rounds_seconds = _ROUNDS_SECONDS
        self._passes_seconds = _PASSES_SECONDS * self._slowness

    @property
    def _slowness(self) -> float:
        return max(1.0, self.start_seconds / _SECONDS_BEFORE_GROUPS)

    def predict(self, now: float) -> float:
        """Returns the predicted remaining seconds of the run."""
        end_seconds = _SECONDS_AFTER_GROUPS * self._slowness
        # 1. Before the first group, add up typical times.
        if not self._setting:
            group_seconds = _ROUNDS_SECONDS + _PASSES_SECONDS / 2 * self._slowness
            ceilings_seconds = 0.0
            if self._ceilings_start is not None:
                ceilings_seconds = max(0.0, self._ceilings_start + _CEILINGS_SECONDS * self._slowness - now)
            return ceilings_seconds + self.groups * group_seconds + end_seconds
        # 2. Predict the rest of the current group.
        if self._passes_start is not None:
            current_seconds = self._passes_seconds - (now - self._passes_start)
            current_seconds = max(current_seconds, _MIN_REMAINING_SHARE * self._passes_seconds)
        else:
            rounds_start = now if self._rounds_start is None else self._rounds_start
            current_seconds = max(self._rounds_seconds - (now - rounds_start), 0.0) + self._passes_seconds
        # 3. Later groups are expected to take as long as earlier groups.
        num_later_groups = max(0, self.groups - len(self._group_seconds) - 1)
        return (
            current_seconds
            + num_later_groups * fmean([*self._group_seconds, now - self._group_start + current_seconds])
            + end_seconds
        )
