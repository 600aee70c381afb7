"""Machines whose clocks are provably wrong: by times that cannot be true, and by a shared file system's clock.

A time is held against a counterpart: the clock of whoever made the plan, wrote the file, or keeps the store. Where most
machines differ from one counterpart, that one is wrong, and no machine is named for it.

Machines that are slower or faster than others of their kind, by the same cases on all of them.

A machine's distance is from the median of all, in units of their median absolute deviation, so that a few odd machines
do not hide themselves. How far is too far for so many machines is found by simulating machines of which none is odd: a
report names an honest machine in at most `FALSE_ALARMS` of all reports, where the machines' times scatter normally (in
their logarithms). Half of that belongs to the machines' middle over all cases, half to the single cases together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import pairwise
from statistics import median

import numpy as np

from fp8bench.analysis.stats import Floats
from fp8bench.features.fleet.machines import Alarm, Deviation, Oddity, Seen
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
        yield _wrong_clock(one, early, "before its plan was made")


def _after_file(seen: Sequence[Seen]) -> Iterator[_Hit]:
    for one in seen:
        yield _wrong_clock(one, one.ahead, "after its file was written")


def _wrong_clock(one: Seen, seconds: float, words: str) -> _Hit:
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


# Names that stand in one sentence.
_MOST = 4


@dataclass(frozen=True)
class Dissent:
    """What a machine gives other bits for: operations, or errors of cases. `unstable`: they differ from its own;
    `others`: from those of most machines of its kind; `torn`: from some, and nobody has most on their side."""

    machine: str
    unstable: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    torn: tuple[str, ...] = ()


def dissents(kind: Sequence[Seen]) -> tuple[Dissent, ...]:
    """Of the machines of one kind, by all of their runs."""
    found: dict[str, dict[str, list[str]]] = {}

    def note(machine: str, which: str, what: str) -> None:
        found.setdefault(machine, {}).setdefault(which, []).append(what)

    for what, told in sorted(_answers(kind).items()):
        steady = {machine: next(iter(values)) for machine, values in told.items() if len(values) == 1}
        for machine in sorted(told.keys() - steady.keys()):
            note(machine, "unstable", what)
        votes = Counter(steady.values())
        if len(votes) < 2:
            continue
        most, count = votes.most_common(1)[0]
        for machine, value in steady.items():
            if 2 * count <= len(steady):
                note(machine, "torn", what)
            elif value != most:
                note(machine, "others", what)
    return tuple(
        Dissent(machine, **{which: tuple(names) for which, names in by.items()})
        for machine, by in sorted(found.items())
    )


def _answers(kind: Sequence[Seen]) -> dict[str, dict[str, set[str]]]:
    """What was told of each operation and error: all that a machine ever gave, by machine."""
    told: dict[str, dict[str, set[str]]] = {}
    for one in kind:
        for what, values in _said(one):
            if values:
                told.setdefault(what, {}).setdefault(one.machine, set()).update(values)
    return told


def _said(one: Seen) -> Iterator[tuple[str, tuple[str, ...]]]:
    for bits in one.bits:
        yield f"{bits.dtype} {bits.operation} on {bits.device}", bits.digests
    for name, value in one.errors.items():
        yield name, (value,)


def shortened(names: Sequence[str]) -> str:
    """'float32 product on cpu, ... and 3 more'."""
    more = len(names) - _MOST
    return ", ".join(names[:_MOST]) + (f" and {more} more" if more > 0 else "")


# Of fewer nobody can say which one is odd.
LEAST_MACHINES = 4
FALSE_ALARMS = 0.01
# What is less than this from the others is nobody's concern, however alike they are.
LEAST_CHANGE = 0.05
# Of a normal distribution, over its median absolute deviation.
_NORMAL = 1.4826
_DRAWS = 100_000
# Rates that so many draws still tell; rarer ones by the power law that the tail follows between them, or falls below.
_SEEN = (1e-2, 1e-3)


def deviations(times: Mapping[str, Mapping[str, float]]) -> tuple[Deviation, ...]:
    """Of every machine, over all cases and in each; `times` are seconds by case and machine, of one kind.

    Cases and middles that fewer than LEAST_MACHINES have are left out.
    """
    logs = _logs(times)
    found = [one for case, seen in logs.items() for one in _in_case(case, seen, FALSE_ALARMS / 2 / len(logs))]
    middles = _middles(logs)
    overall = _in_case("", middles, FALSE_ALARMS / 2) if middles else []
    return (*overall, *found)


def seen_from(times: Mapping[str, Mapping[str, float]]) -> float | None:
    """How much more time than the others a machine has to take in its middle case to be named; None for too few."""
    middles = _middles(_logs(times))
    if not middles:
        return None
    _, spread = _distances(np.array(list(middles.values()))[None, :])
    return max(LEAST_CHANGE, math.expm1(min(critical(len(middles), FALSE_ALARMS / 2) * float(spread[0]), 50.0)))


def _logs(times: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Of the cases that enough machines have."""
    return {
        case: {machine: math.log(value) for machine, value in seen.items()}
        for case, seen in times.items() if len(seen) >= LEAST_MACHINES
    }  # fmt: skip


def _middles(logs: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """How far each machine is from the mean in its middle case; of those that have at least half of the cases.

    Not from the median, which is one of an odd number of machines: that one's distance would be 0, and their spread too
    small.
    """
    centred: dict[str, list[float]] = {}
    for seen in logs.values():
        middle = float(np.mean(list(seen.values())))
        for machine, value in seen.items():
            centred.setdefault(machine, []).append(value - middle)
    found = {name: float(np.median(values)) for name, values in centred.items() if 2 * len(values) >= len(logs)}
    return found if len(found) >= LEAST_MACHINES else {}


def _in_case(case: str, logs: Mapping[str, float], rate: float) -> list[Deviation]:
    values = np.array(list(logs.values()))
    distances, spread = _distances(values[None, :])
    limit = critical(len(logs), rate)
    found = []
    for machine, distance in zip(logs, distances[0], strict=True):
        score = float(distance / spread[0]) if spread[0] > 0 else (math.inf if distance else 0.0)
        odd = abs(score) > limit and abs(math.expm1(float(distance))) > LEAST_CHANGE
        found.append(Deviation(machine, case, math.expm1(float(distance)), score, odd))
    return found


def _distances(logs: Floats) -> tuple[Floats, Floats]:
    """From the median of a row, and the row's spread."""
    distances = logs - np.median(logs, axis=1, keepdims=True)
    return distances, _NORMAL * np.median(np.abs(distances), axis=1)


@cache
def critical(machines: int, rate: float) -> float:
    """The score that the farthest of so many honest machines exceeds at that rate."""
    farthest = _simulated(machines)
    if rate >= _SEEN[1]:
        return float(np.quantile(farthest, 1 - rate))
    often, seldom = (float(np.quantile(farthest, 1 - seen)) for seen in _SEEN)
    slope = math.log(seldom / often) / math.log(_SEEN[0] / _SEEN[1])
    return float(seldom * (_SEEN[1] / rate) ** slope)


@cache
def _simulated(machines: int) -> Floats:
    """The farthest score among honest machines; the same draws every time."""
    random = np.random.default_rng(machines)
    parts = []
    for _ in range(10):
        distances, spread = _distances(random.standard_normal((_DRAWS // 10, machines)))
        parts.append(np.abs(distances).max(axis=1) / spread)
    return np.concatenate(parts)
