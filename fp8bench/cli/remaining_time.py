"""Predicts how long a run will still take."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from fp8bench.model.words import MEASURING_CEILINGS

MEASURING_ROUNDS_ACTIVITY = "measuring"
# The seconds that a run takes on an idle machine from its start to the plan, and after its last group (for asv's files
# and the report).
_SECONDS_UNTIL_PLAN = 1.7
_SECONDS_AFTER_LAST_GROUP = 0.5
# Typical seconds for measuring ceilings, for the untimed passes of a group after its rounds, and for its rounds. Rounds
# have a time limit, but many groups are decided earlier.
_TYPICAL_CEILINGS_SECONDS = 15.0
_TYPICAL_PASSES_SECONDS = 2.5
_TYPICAL_ROUNDS_SECONDS = 7.0
# The seconds of a group's untimed passes (such as measuring memory), divided by the seconds of its preparation without
# compiling. Measured ratios were 2 to 4, and nearer to 2 with two workers.
_PASS_TO_PREPARATION_TIME_RATIO = 2.7
# When one of these activities begins, this share of the total time of a group's untimed passes has elapsed.
_ELAPSED_SHARE_BY_ACTIVITY = {"checking what steps do": 0.3, "measuring memory": 0.45, "counting operators": 0.85}
# The end of the rounds is predicted only after this share of them, because an earlier prediction would jump.
_MIN_FINISHED_ROUNDS_SHARE = 0.05
# If a group's untimed passes take longer than estimated, predict that this share of the estimate still remains.
_MIN_REMAINING_PASSES_SHARE = 0.1


@dataclass
class RemainingTime:
    """Predicts the remaining time of a run with `groups` groups of cases. Planning the run took `start_seconds`.

    If planning was slow, untimed work is expected to be slow as well. The rounds of a group have a time budget, so
    their progress is known. The time of the untimed passes after the rounds is predicted from the time of the group's
    preparation and of its first passes.
    """

    groups: int
    start_seconds: float = _SECONDS_UNTIL_PLAN
    _ceilings_start_time: float | None = None
    _finished_group_seconds: list[float] = field(default_factory=list)
    _group_setting: str = ""
    _group_start_time: float = 0.0
    _current_activity: str = ""
    _activity_start_time: float = 0.0
    _compiling_seconds: float = 0.0
    # A start time is None until the rounds, or the untimed passes, of the current group begin. The expected seconds are
    # estimates.
    _rounds_start_time: float | None = None
    _passes_start_time: float | None = None
    _expected_rounds_seconds: float = _TYPICAL_ROUNDS_SECONDS
    _expected_passes_seconds: float = _TYPICAL_PASSES_SECONDS

    def record_activity(self, setting: str, activity: str, share: float, now: float) -> None:
        """Records what a run is doing now: its group (`setting`), the activity, and the finished share of the
        rounds.
        """
        # 1. Ceilings are measured before the first group.
        if activity == MEASURING_CEILINGS:
            if self._ceilings_start_time is None:
                self._ceilings_start_time = now
            return
        # 2. Begin the next group, and then its rounds and its untimed passes.
        if setting != self._group_setting:
            self._begin_group(setting, now)
        if activity == MEASURING_ROUNDS_ACTIVITY:
            if self._rounds_start_time is None:
                self._rounds_start_time = now
                self._expected_passes_seconds = _PASS_TO_PREPARATION_TIME_RATIO * (
                    now - self._group_start_time - self._compiling_seconds
                )
            if _MIN_FINISHED_ROUNDS_SHARE <= share <= 1:
                self._expected_rounds_seconds = (now - self._rounds_start_time) / share
        elif self._rounds_start_time is not None and self._passes_start_time is None:
            self._passes_start_time = now
        # 3. When the activity changes, correct the estimate of the untimed passes.
        if activity != self._current_activity:
            if self._current_activity.startswith("compiling"):
                # Leave compiling out of the preparation, because it does not show how long the untimed passes will
                # take.
                self._compiling_seconds += now - self._activity_start_time
            if self._passes_start_time is not None and activity in _ELAPSED_SHARE_BY_ACTIVITY:
                self._expected_passes_seconds = (now - self._passes_start_time) / _ELAPSED_SHARE_BY_ACTIVITY[activity]
            self._current_activity = activity
            self._activity_start_time = now

    def _begin_group(self, setting: str, now: float) -> None:
        if self._group_setting:
            self._finished_group_seconds.append(now - self._group_start_time)
        self._group_setting = setting
        self._group_start_time = now
        self._current_activity = ""
        self._compiling_seconds = 0.0
        self._rounds_start_time = self._passes_start_time = None
        self._expected_rounds_seconds = _TYPICAL_ROUNDS_SECONDS
        self._expected_passes_seconds = _TYPICAL_PASSES_SECONDS * self._planning_slowness_factor

    @property
    def _planning_slowness_factor(self) -> float:
        return max(1.0, self.start_seconds / _SECONDS_UNTIL_PLAN)

    def predict(self, now: float) -> float:
        """Returns the predicted remaining seconds of the run."""
        seconds_after_last_group = _SECONDS_AFTER_LAST_GROUP * self._planning_slowness_factor
        # 1. Before the first group, add up the typical times of all groups.
        if not self._group_setting:
            typical_group_seconds = (
                _TYPICAL_ROUNDS_SECONDS + _TYPICAL_PASSES_SECONDS / 2 * self._planning_slowness_factor
            )
            remaining_ceilings_seconds = 0.0
            if self._ceilings_start_time is not None:
                remaining_ceilings_seconds = max(
                    0.0, self._ceilings_start_time + _TYPICAL_CEILINGS_SECONDS * self._planning_slowness_factor - now
                )
            return remaining_ceilings_seconds + self.groups * typical_group_seconds + seconds_after_last_group
        # 2. Predict the rest of the current group.
        if self._passes_start_time is not None:
            remaining_group_seconds = self._expected_passes_seconds - (now - self._passes_start_time)
            remaining_group_seconds = max(
                remaining_group_seconds, _MIN_REMAINING_PASSES_SHARE * self._expected_passes_seconds
            )
        else:
            rounds_start_time = now if self._rounds_start_time is None else self._rounds_start_time
            remaining_group_seconds = (
                max(self._expected_rounds_seconds - (now - rounds_start_time), 0.0) + self._expected_passes_seconds
            )
        # 3. Expect each later group to take as long as the mean of the earlier groups and the current one.
        unstarted_group_count = max(0, self.groups - len(self._finished_group_seconds) - 1)
        return (
            remaining_group_seconds
            + unstarted_group_count
            * fmean([*self._finished_group_seconds, now - self._group_start_time + remaining_group_seconds])
            + seconds_after_last_group
        )
