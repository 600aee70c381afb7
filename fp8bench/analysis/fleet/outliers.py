"""Machines that are slower or faster than others of their kind, by the same cases on all of them.

A machine's distance is from the median of all, in units of their median absolute deviation, so that a few odd machines
do not hide themselves. How far is too far for so many machines is found by simulating machines of which none is odd: a
report names an honest machine in at most `FALSE_ALARMS` of all reports, where the machines' times scatter normally (in
their logarithms). Half of that belongs to the machines' middle over all cases, half to the single cases together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import numpy as np

from fp8bench.analysis.fleet.found import Deviation
from fp8bench.analysis.stats import Floats

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
