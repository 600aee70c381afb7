"""Machines whose clocks are provably wrong: by times that cannot be true, and by a shared file system's clock.

A time is held against a counterpart: the clock of whoever made the plan, wrote the file, or keeps the store. Where most
machines differ from one counterpart, that one is wrong, and no machine is named for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median

from fp8bench.analysis.fleet.found import Alarm, Oddity
from fp8bench.analysis.fleet.seen import Seen
from fp8bench.model.fleet import FleetPlan

# Clocks of machines that are set by a time server differ by less.
CLOCK_SECONDS = 60.0
# Of fewer nobody can say that they are most.
_LEAST_MACHINES = 3


@dataclass(frozen=True)
class _Hit:
    """That a run of a machine is off by that much, in words."""

    machine: str
    seconds: float
    words: str


def of_clocks(seen: Sequence[Seen], plans: Sequence[FleetPlan]) -> tuple[tuple[Alarm, ...], tuple[str, ...]]:
    """A machine's worst one, and sentences on counterparts that most machines differ from."""
    machines = {one.machine for one in seen}
    against = {
        "that of whoever made the plan": list(_before_plan(seen, plans)),
        "that of whoever wrote the files": list(_after_file(seen)),
    }
    doubts = [f"most machines' clocks differ from {who}: that one may be wrong"
              for who, hits in against.items() if _are_most(hits, machines)]  # fmt: skip
    hits = [one for found in against.values() if not _are_most(found, machines) for one in found]
    hits += _set_back(seen)
    common, of_stores = _against_stores(seen)
    if abs(common) > CLOCK_SECONDS:
        doubts.append(f"the clock of the stores' file system is {_long(common)} {_side(-common)} that of most machines")
    worst: dict[str, _Hit] = {}
    for one in (*hits, *of_stores):
        if one.seconds > CLOCK_SECONDS and one.seconds > getattr(worst.get(one.machine), "seconds", 0.0):
            worst[one.machine] = one
    return tuple(Alarm(one.machine, Oddity.CLOCK, one.words) for one in worst.values()), tuple(doubts)


def _before_plan(seen: Sequence[Seen], plans: Sequence[FleetPlan]) -> Iterator[_Hit]:
    made = {plan.id: datetime.fromisoformat(plan.created) for plan in plans}
    for one in seen:
        begun = made.get(one.cell.rpartition("/")[0])
        early = (begun - one.started[0]).total_seconds() if begun is not None and one.started else 0.0
        yield _told(one, early, "before its plan was made")


def _after_file(seen: Sequence[Seen]) -> Iterator[_Hit]:
    for one in seen:
        yield _told(one, one.ahead, "after its file was written")


def _told(one: Seen, seconds: float, words: str) -> _Hit:
    words = f"run {one.run} says that it began {_long(seconds)} {words}: its clock is wrong, or that of the other"
    return _Hit(one.machine, seconds, words)


def _set_back(seen: Sequence[Seen]) -> Iterator[_Hit]:
    """Runs that were gone on with before they began."""
    for one in seen:
        for before, after in pairwise(one.started):
            back = (before - after).total_seconds()
            words = f"run {one.run} says that it was gone on with {_long(back)} before it began: its clock was set"
            yield _Hit(one.machine, back, words)


def _against_stores(seen: Sequence[Seen]) -> tuple[float, list[_Hit]]:
    """What most machines' clocks are ahead of their stores' file systems, and how far each is from that.

    On a disk of its own a machine stamps files itself, and is not ahead by anything.
    """
    known = [(one, one.clock_ahead) for one in seen if one.clock_ahead is not None]
    own: dict[str, list[float]] = {}
    for one, ahead in known:
        own.setdefault(one.machine, []).append(ahead)
    common = _common(own)
    hits = []
    for one, ahead in known:
        off = ahead - common
        where = "that most other machines have" if abs(common) > CLOCK_SECONDS else "of its store's file system"
        words = f"its clock was {_long(off)} {_side(off)} that {where} when run {one.run} began"
        hits.append(_Hit(one.machine, abs(off), words if abs(common) > CLOCK_SECONDS else f"{words}: one is wrong"))
    return common, hits


def _common(own: Mapping[str, Sequence[float]]) -> float:
    """0 unless most machines are ahead by the same."""
    middles = [median(values) for values in own.values()]
    middle = median(middles) if len(middles) >= _LEAST_MACHINES else 0.0
    return middle if 2 * sum(abs(one - middle) <= CLOCK_SECONDS for one in middles) > len(middles) else 0.0


def _are_most(hits: Sequence[_Hit], machines: Collection[str]) -> bool:
    named = {one.machine for one in hits if one.seconds > CLOCK_SECONDS}
    return len(machines) >= _LEAST_MACHINES and 2 * len(named) > len(machines)


def _side(seconds: float) -> str:
    return "ahead of" if seconds > 0 else "behind"


def _long(seconds: float) -> str:
    size = abs(seconds)
    if size < 2 * CLOCK_SECONDS:
        return f"{size:.0f} seconds"
    return f"{size / 3600:.1f} hours" if size >= 3600 else f"{size / 60:.0f} minutes"
