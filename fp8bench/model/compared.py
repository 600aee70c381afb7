"""What a figure of a case came to on two sides: two runs, two interpreters, two commits. Lower is better, always."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fp8bench.model.measured import Interval


class Direction(StrEnum):
    """Where a figure went from the first side to the second. NONE: there is nothing to compare, and `why` says why."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    UNSURE = "unsure"
    NONE = "none"


class Evidence(StrEnum):
    """How the two sides were measured, the most telling first: it decides what a gate may believe."""

    PAIRED = "paired"  # in the same rounds
    CROSS_RUN = "cross-run"  # at different times
    HISTORY = "history"  # a step in a series of commits


@dataclass(frozen=True)
class Comparison:
    """One figure of one case on both sides.

    `before` and `after` are in `unit`, None where that side has none; `ratio` is after over before with its interval.
    `p_value` is the chance of such a difference or a greater one if nothing had changed, None where nobody can say.
    `since` and `until` are the commits between which a step of a series lies, '' elsewhere. `failed` says that the case
    failed on the second side, where it had not on the first.
    """

    case: str
    suite: str
    metric: str
    unit: str
    direction: Direction
    evidence: Evidence
    before: float | None = None
    after: float | None = None
    ratio: Interval | None = None
    p_value: float | None = None
    labels: tuple[str, ...] = ()
    why: str = ""
    since: str = ""
    until: str = ""
    failed: bool = False
