"""Claims as rows of data, and the answers to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fp8bench.model.codec import encode

# Speed-ups, and the time that each is a ratio of: the reference's over the case's.
SPEEDUPS = {"speedup": "time", "sustained_speedup": "sustained_time"}


class ClaimKind(StrEnum):
    """The basis of a claim: an expression over facts, a figure of a run, or other claims."""

    ARITHMETIC = "arithmetic"
    MEASURED = "measured"
    ALL_OF = "all of"


class Answer(StrEnum):
    """The answer to a claim. The last four compare a published figure with one measured here."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    CANNOT_TELL = "cannot tell here"
    WITHIN = "within"
    ABOVE = "above"
    BELOW = "below"
    OTHER_CONDITIONS = "other conditions"


@dataclass(frozen=True)
class Source:
    """Where a sentence was published. `address` is a web address, or the path of a file of this project.

    `key` is the source's name in the claims file, '' for a source that is written out in its row.
    """

    title: str
    publisher: str
    year: int
    address: str
    key: str = ""


@dataclass(frozen=True)
class Claim:
    """One row of a claims file.

    `figure` is an expression over facts (arithmetic), or a figure of the run's CSV (measured): a speed-up, `NAME`, or
    `NAME ratio`, which is over the reference. `case` selects one case of a run or one arm of a training; with `sum` all
    cases that fit are added up. `device` has `any`, `cpu`, `cuda` or names of cards. `limit` is an expression for the
    highest possible rate or the shortest possible time, in the figure's unit. `seconds` is about how long the run
    takes. Rows that are `published` may name the `card`, its `power` limit in watts and the `library` of the published
    measurement.
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
        """The values for which the sentence is true, from the lowest to the highest."""
        if self.relation in ("<", "<="):
            return -math.inf, self.bound[0]
        if self.relation in (">", ">="):
            return self.bound[0], math.inf
        low, high = self.bound[0], self.bound[-1]
        return low - self.tolerance * abs(low), high + self.tolerance * abs(high)

    def side(self, value: float) -> int:
        """Returns 0 for a value for which the sentence is true, -1 for one below these, and 1 for one above."""
        low, high = self.range
        if value < low or (self.relation == ">" and value == low):
            return -1
        return int(value > high or (self.relation == "<" and value == high))

    @property
    def is_ratio(self) -> bool:
        return self.figure in SPEEDUPS or self.figure.endswith(" ratio")

    @property
    def metric(self) -> str:
        """The name of the metric, or of the training's figure, that the claim's figure is computed from."""
        return SPEEDUPS.get(self.figure, self.figure.removesuffix(" ratio"))


@dataclass(frozen=True)
class Reading:
    """A figure with its interval, and the id of its run. With a `why` the figure decides nothing."""

    value: float | None
    low: float | None = None
    high: float | None = None
    run: str = ""
    why: str = ""


@dataclass(frozen=True)
class ClaimAnswer:
    """The answer to a claim, with the figure behind it. `why` explains it, and `remedy` is how to decide it."""

    claim: Claim
    answer: Answer
    value: float | None = None
    low: float | None = None
    high: float | None = None
    runs: tuple[str, ...] = ()
    why: str = ""
    remedy: str = ""

    def as_value(self) -> dict[str, Any]:
        """Returns the fields for JSON, with the claim's id and sentence in place of its row."""
        values = encode(self)
        row = values.pop("claim")
        return {**{name: row[name] for name in ("id", "sentence", "unit")}, **values}


class Standing(StrEnum):
    """Whether a stored answer follows from its row and its runs."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNKNOWN = "cannot be judged"


@dataclass(frozen=True)
class CheckedAnswer:
    """Whether the stored answer of one claim holds, and why."""

    id: str
    sentence: str
    standing: Standing
    why: str
