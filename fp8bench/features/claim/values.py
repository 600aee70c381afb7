"""Claims, which are rows of a claims file, and the answers to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fp8bench.model.codec import encode

# The metric of time from which each speed-up is computed: the time of the reference divided by that of the case.
SPEEDUPS = {"speedup": "time", "sustained_speedup": "sustained_time"}


class ClaimKind(StrEnum):
    """The basis of an answer: an expression over facts, a figure of a run, or other claims."""

    ARITHMETIC = "arithmetic"
    MEASURED_FIGURE = "measured"
    ALL_OF = "all of"


class ClaimOutcome(StrEnum):
    """The answer to a claim. The last four members compare a published figure with a measured one."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    CANNOT_TELL = "cannot tell here"
    WITHIN_RANGE = "within"
    ABOVE_RANGE = "above"
    BELOW_RANGE = "below"
    OTHER_CONDITIONS = "other conditions"


@dataclass(frozen=True)
class Source:
    """Where a sentence was published. `address` is a web address, or the path of a file of this project.

    `key` is the name of the source in the claims file; '' if the source is written in the row of the claim.
    """

    title: str
    publisher: str
    year: int
    address: str
    key: str = ""


@dataclass(frozen=True)
class Claim:
    """One row of a claims file. For arithmetic, `figure` is an expression over facts. For a measured claim, it is a
    column of the run's CSV: a speed-up, a metric (`NAME`), or its ratio to the reference (`NAME ratio`). `case` selects
    one case of a run or one arm of a training. With `sum`, it may select several cases, whose figures are added.
    `device` holds `any`, `cpu`, `cuda` or names of cards. `limit` is an expression for the highest possible rate or the
    shortest possible time, in the figure's unit. `seconds` is the approximate duration of the run. A `published` row
    may name the `card`, its `power` limit in watts and the `library` of the published measurement.
    """

    id: str
    sentence: str
    source: Source
    kind: ClaimKind
    figure: str = ""
    relation: str = ""
    bound: tuple[float, ...] = ()
    tolerance: float = 0.0
    unit: str = ""
    run: str = ""
    case: tuple[tuple[str, str], ...] = ()
    sum: bool = False
    device: tuple[str, ...] = ()
    limit: str = ""
    parts: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    note: str = ""
    seconds: float = 0.0
    published: bool = False
    card: str = ""
    power: float | None = None
    library: str = ""

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest value for which the claim's sentence is true."""
        if self.relation in ("<", "<="):
            return -math.inf, self.bound[0]
        if self.relation in (">", ">="):
            return self.bound[0], math.inf
        low = self.bound[0]
        high = self.bound[-1]
        return low - self.tolerance * abs(low), high + self.tolerance * abs(high)

    def find_side(self, value: float) -> int:
        """Returns 0 if the claim's sentence is true for this value, -1 if the value is too low, 1 if it is too high."""
        low, high = self.range
        if value < low or (self.relation == ">" and value == low):
            return -1
        return int(value > high or (self.relation == "<" and value == high))

    @property
    def is_ratio(self) -> bool:
        return self.figure in SPEEDUPS or self.figure.endswith(" ratio")

    @property
    def metric(self) -> str:
        """The metric, or the figure of a training, from which the claim's figure is computed."""
        return SPEEDUPS.get(self.figure, self.figure.removesuffix(" ratio"))


@dataclass(frozen=True)
class FigureReading:
    """A figure with its interval."""

    value: float
    low: float
    high: float


class CannotDecide(Exception):
    """Raised if a claim cannot be measured here, or if its run decides nothing. `remedy` names a command and what to
    change; '' if no command helps. `value` is the figure of the run if it has no interval.
    """

    def __init__(self, why: str, remedy: str = "", value: float | None = None) -> None:
        super().__init__(why)
        self.remedy = remedy
        self.value = value


@dataclass(frozen=True)
class ClaimAnswer:
    """The answer to a claim, and the figure that decides it. `why` explains the answer. `remedy` names a command that
    can decide a claim whose answer is open.
    """

    claim: Claim
    answer: ClaimOutcome
    value: float | None = None
    low: float | None = None
    high: float | None = None
    runs: tuple[str, ...] = ()
    why: str = ""
    remedy: str = ""

    def as_value(self) -> dict[str, Any]:
        """Returns the fields for JSON. Only three fields of the claim are included: its id, sentence and unit."""
        values = encode(self)
        row = values.pop("claim")
        return {**{name: row[name] for name in ("id", "sentence", "unit")}, **values}


class AnswerCheckOutcome(StrEnum):
    """Whether a stored answer is the same if it is computed again from its claim and its runs."""

    ANSWER_HOLDS = "holds"
    ANSWER_FAILS = "does not hold"
    CANNOT_JUDGE = "cannot be judged"


@dataclass(frozen=True)
class CheckedAnswer:
    """Whether the stored answer to one claim holds, and why."""

    id: str
    sentence: str
    standing: AnswerCheckOutcome
    why: str
