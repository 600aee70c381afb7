"""What a report of a fleet says, as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

# Names with values: what two machines have to have in common.
Fields = tuple[tuple[str, str], ...]


class Oddity(StrEnum):
    """What a machine is named for."""

    SLOW = "slow"
    FAST = "fast"
    BITS = "other bits"
    UNSTABLE = "unstable bits"
    SOFTWARE = "other software"
    CUT_OFF = "cut off"
    MISSING = "missing"
    FAILED = "failed"
    CLOCK = "clock"


@dataclass(frozen=True)
class Alarm:
    """That a machine is named, and why."""

    machine: str
    what: Oddity
    words: str


@dataclass(frozen=True)
class Kind:
    """Machines that compare: hardware, software and settings are the same. `differs` are the fields in which it is
    another than the first kind; `seen_from` is the change of time from which on one of its machines would be named."""

    name: str
    machines: tuple[str, ...]
    hardware: Fields
    software: Fields
    differs: tuple[str, ...] = ()
    seen_from: float | None = None


@dataclass(frozen=True)
class Machine:
    """`kinds` it was of, how many cells it has `whole` and cases `failed`, and how far its time is from the others'."""

    name: str
    kinds: tuple[str, ...]
    runs: int
    whole: int
    failed: int
    change: float | None


@dataclass(frozen=True)
class Deviation:
    """How far a machine is from the others of its kind: `change` of its time (0.1: 10% more than their median), `score`
    in spreads, and whether that is too far. `case` is '' for the middle over all cases."""

    machine: str
    case: str
    change: float
    score: float
    odd: bool


@dataclass(frozen=True)
class Figure:
    """One case on a kind's machines: seconds by machine, and how far each is from the others."""

    case: str
    kind: str
    seconds: Mapping[str, float]
    deviations: Mapping[str, Deviation]

    @property
    def middle(self) -> float:
        return median(self.seconds.values())


@dataclass(frozen=True)
class FleetReport:
    """`why_not` says of kinds other than the first why their times are not held against the first one's; `lacking`
    are settings that nobody has measured whole; `excluded` are sentences on what is in no figure."""

    machines: tuple[Machine, ...]
    kinds: tuple[Kind, ...]
    figures: tuple[Figure, ...]
    alarms: tuple[Alarm, ...]
    settings: int
    lacking: tuple[str, ...]
    excluded: tuple[str, ...]
    why_not: Mapping[str, str]


def differences(one: tuple[Fields, Fields], other: tuple[Fields, Fields]) -> Iterator[str]:
    """'torch 2.12.0, not 2.13.0'."""
    for own, theirs in zip(one, other, strict=True):
        mine, yours = dict(own), dict(theirs)
        for name in dict.fromkeys((*mine, *yours)):
            if mine.get(name) != yours.get(name):
                yield f"{name} {mine.get(name, 'none'):.60}, not {yours.get(name, 'none'):.60}"
