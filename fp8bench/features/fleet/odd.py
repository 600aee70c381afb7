"""Machines that stand out from others: by clocks that are provably wrong, by other bits, or by their times.

A clock is wrong by times that cannot be true, and by a shared file system's clock: each is held against whoever made
the plan, wrote the file, or keeps the store. Where most machines differ from one of these, that one is wrong, and no
machine is named for it.

Slower or faster than others of its kind is a machine by the same cases on all of them. Its distance is from the median
of all, in units of their median absolute deviation, so that a few odd machines do not hide themselves. How far is too
far for so many machines is found by simulating machines of which none is odd: a report names an honest machine in at
most `FALSE_ALARMS` of all reports, where the machines' times scatter normally (in their logarithms). Half of that
belongs to the machines' middle over all cases, half to the single cases together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from itertools import pairwise
from statistics import median

import numpy as np

from fp8bench.analysis.stats import Floats
from fp8bench.features.fleet.machines import Deviation, MachineAlarm, MachineRun, Oddity
from fp8bench.model.run import FleetPlan
from fp8bench.report.panels import together

# Clocks of machines that are set by a time server differ by less.
CLOCK_SECONDS = 60.0
# Of fewer nobody can say that they are most.
_LEAST_MACHINES = 3
# By how many seconds a run of a machine is off, and what it would be named for.
_Hit = tuple[float, MachineAlarm]


def of_clocks(
    seen: Sequence[MachineRun], plans: Sequence[FleetPlan]
) -> tuple[tuple[MachineAlarm, ...], tuple[str, ...]]:
    """A machine's worst one, and sentences on counterparts that most machines differ from."""
    machines = {run.machine for run in seen}
    against = {
        "that of whoever made the plan": list(_before_plan(seen, plans)),
        "that of whoever wrote the files": [_began(run, run.ahead, "after its file was written") for run in seen],
    }
    doubts = [f"most machines' clocks differ from {who}: that one may be wrong"
              for who, hits in against.items() if _are_most(hits, machines)]  # fmt: skip
    hits = [hit for found in against.values() if not _are_most(found, machines) for hit in found]
    hits += _set_back(seen)
    common, of_stores = _against_stores(seen)
    if abs(common) > CLOCK_SECONDS:
        doubts.append(f"the clock of the stores' file system is {_long(common)} {_side(-common)} that of most machines")
    worst: dict[str, MachineAlarm] = {}
    for seconds, alarm in sorted((*hits, *of_stores), key=lambda hit: -hit[0]):
        if seconds > CLOCK_SECONDS:
            worst.setdefault(alarm.machine, alarm)
    return tuple(worst.values()), tuple(doubts)


def _before_plan(seen: Sequence[MachineRun], plans: Sequence[FleetPlan]) -> Iterator[_Hit]:
    made = {plan.id: datetime.fromisoformat(plan.created) for plan in plans}
    for run in seen:
        begun = made.get(run.cell.rpartition("/")[0])
        early = (begun - run.started[0]).total_seconds() if begun is not None and run.started else 0.0
        yield _began(run, early, "before its plan was made")


def _began(run: MachineRun, off: float, words: str) -> _Hit:
    words = f"run {run.run} says that it began {_long(off)} {words}: its clock is wrong, or that of the other"
    return off, MachineAlarm(run.machine, Oddity.CLOCK, words)


def _set_back(seen: Sequence[MachineRun]) -> Iterator[_Hit]:
    for run in seen:
        for before, after in pairwise(run.started):
            back = (before - after).total_seconds()
            words = f"run {run.run} says that it was gone on with {_long(back)} before it began: its clock was set"
            yield back, MachineAlarm(run.machine, Oddity.CLOCK, words)


def _against_stores(seen: Sequence[MachineRun]) -> tuple[float, list[_Hit]]:
    """What most machines' clocks are ahead of their stores' file systems, and how far each is from that.

    On a disk of its own a machine stamps files itself, and is not ahead by anything.
    """
    known = [(run, run.clock_ahead) for run in seen if run.clock_ahead is not None]
    common = _common(together((run.machine, ahead) for run, ahead in known))
    alike = abs(common) > CLOCK_SECONDS
    hits = []
    for run, ahead in known:
        off, where = ahead - common, "that most other machines have" if alike else "of its store's file system"
        words = f"its clock was {_long(off)} {_side(off)} that {where} when run {run.run} began"
        hits.append((abs(off), MachineAlarm(run.machine, Oddity.CLOCK, words if alike else f"{words}: one is wrong")))
    return common, hits


def _common(own: Mapping[str, Sequence[float]]) -> float:
    """0 unless most machines are ahead by the same."""
    middles = [median(values) for values in own.values()]
    middle = median(middles) if len(middles) >= _LEAST_MACHINES else 0.0
    return middle if 2 * sum(abs(value - middle) <= CLOCK_SECONDS for value in middles) > len(middles) else 0.0


def _are_most(hits: Sequence[_Hit], machines: Collection[str]) -> bool:
    named = {alarm.machine for seconds, alarm in hits if seconds > CLOCK_SECONDS}
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


# What a machine is named for whose bits differ: from its own, from those of most machines of its kind, or from some
# where nobody has most on their side.
_DISSENTS = {
    "own": (Oddity.UNSTABLE, "does not repeat its own bits for the same numbers"),
    "most": (Oddity.BITS, "gives other bits than most of its kind for the same numbers"),
    "some": (
        Oddity.BITS,
        "its bits and those of others of its kind differ, none with most on its side, so that either may be wrong",
    ),
}


def of_bits(kind: Sequence[MachineRun]) -> Iterator[MachineAlarm]:
    """Of the machines of one kind, by all of their runs: operations, and errors of cases."""
    differing: dict[tuple[str, str], list[str]] = {}
    for what, told in sorted(_answers(kind).items()):
        steady = {machine: next(iter(values)) for machine, values in told.items() if len(values) == 1}
        for machine in told.keys() - steady.keys():
            differing.setdefault((machine, "own"), []).append(what)
        votes = Counter(steady.values())
        most, count = votes.most_common(1)[0] if votes else ("", 0)
        for machine, value in steady.items():
            if len(votes) > 1 and (2 * count <= len(steady) or value != most):
                differing.setdefault((machine, "some" if 2 * count <= len(steady) else "most"), []).append(what)
    for machine in sorted({machine for machine, _ in differing}):
        for which, (oddity, words) in _DISSENTS.items():
            if whats := differing.get((machine, which)):
                yield MachineAlarm(machine, oddity, f"{words}: {shortened(whats)}")


def _answers(kind: Sequence[MachineRun]) -> dict[str, dict[str, set[str]]]:
    """What was told of each operation and error: all that a machine ever gave, by machine."""
    told: dict[str, dict[str, set[str]]] = {}
    for run in kind:
        said = [(f"{bits.dtype} {bits.operation} on {bits.device}", bits.digests) for bits in run.bits if bits.digests]
        for what, values in (*said, *((name, (value,)) for name, value in run.errors.items())):
            told.setdefault(what, {}).setdefault(run.machine, set()).update(values)
    return told


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


def deviations(times: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Deviation]]:
    """By case and machine, and over all cases as the case ''; `times` are seconds likewise, of one kind.

    Cases and middles that fewer than LEAST_MACHINES have are left out.
    """
    logs = _logs(times)
    found = {case: _in_case(case, seen, FALSE_ALARMS / 2 / len(logs)) for case, seen in logs.items()}
    middles = _middles(logs)
    return found | ({"": _in_case("", middles, FALSE_ALARMS / 2)} if middles else {})


def seen_from(times: Mapping[str, Mapping[str, float]]) -> float | None:
    """How much more time than the others a machine has to take in its middle case to be named; None for too few."""
    middles = _middles(_logs(times))
    if not middles:
        return None
    _, spread = _distances(np.array(list(middles.values()))[None, :])
    return max(LEAST_CHANGE, math.expm1(min(critical(len(middles), FALSE_ALARMS / 2) * float(spread[0]), 50.0)))


def _logs(times: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {
        case: {machine: math.log(value) for machine, value in seen.items()}
        for case, seen in times.items() if len(seen) >= LEAST_MACHINES
    }  # fmt: skip


def _middles(logs: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """How far each machine is from the mean in its middle case; of those that have at least half of the cases.

    Not from the median, which is one of an odd number of machines: that one's distance would be 0, and their spread too
    small.
    """
    centred = together(
        (machine, value - middle)
        for seen in logs.values() for middle in [float(np.mean(list(seen.values())))] for machine, value in seen.items()
    )  # fmt: skip
    found = {name: float(np.median(values)) for name, values in centred.items() if 2 * len(values) >= len(logs)}
    return found if len(found) >= LEAST_MACHINES else {}


def _in_case(case: str, logs: Mapping[str, float], rate: float) -> dict[str, Deviation]:
    values = np.array(list(logs.values()))
    distances, spread = _distances(values[None, :])
    limit = critical(len(logs), rate)
    found = {}
    for machine, distance in zip(logs, distances[0], strict=True):
        score = float(distance / spread[0]) if spread[0] > 0 else (math.inf if distance else 0.0)
        odd = abs(score) > limit and abs(math.expm1(float(distance))) > LEAST_CHANGE
        found[machine] = Deviation(machine, case, math.expm1(float(distance)), score, odd)
    return found


def _distances(logs: Floats) -> tuple[Floats, Floats]:
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
