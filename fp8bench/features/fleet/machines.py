"""The values of a fleet's report, what it reads of a run, and how far a machine is from others of its kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from statistics import median

import numpy as np

from fp8bench.analysis.stats import Floats
from fp8bench.model import DeviceFacts, Record, Run, Status, Timing, specs
from fp8bench.model.run import OperationBits
from fp8bench.report.panels import together

# Names with values, which machines of a kind have in common.
Fields = tuple[tuple[str, str], ...]


class Oddity(StrEnum):
    """Why a machine stands out."""

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
class MachineAlarm:
    """A machine that stands out, and why."""

    machine: str
    what: Oddity
    words: str


@dataclass(frozen=True)
class MachineKind:
    """Machines with the same hardware, software and settings. `differs` are the fields in which it differs from the
    first kind. A machine of it would be named if it took longer by the share `seen_from`."""

    name: str
    machines: tuple[str, ...]
    hardware: Fields
    software: Fields
    differs: tuple[str, ...] = ()
    seen_from: float | None = None


@dataclass(frozen=True)
class Machine:
    """One machine: the kinds it was of, its `whole` cells, its `failed` cases, and its change of time from its
    kind's median."""

    name: str
    kinds: tuple[str, ...]
    runs: int
    whole: int
    failed: int
    change: float | None


@dataclass(frozen=True)
class Deviation:
    """How far a machine is from the others of its kind. `change` is the share by which its time is above their
    median, `score` the same in spreads; `odd` if that is too far. `case` is '' for the middle over all cases."""

    machine: str
    case: str
    change: float
    score: float
    odd: bool


@dataclass(frozen=True)
class FleetFigure:
    """One case on the machines of a kind: seconds, and deviations, by machine."""

    case: str
    kind: str
    seconds: Mapping[str, float]
    deviations: Mapping[str, Deviation]

    @property
    def middle(self) -> float:
        return median(self.seconds.values())


@dataclass(frozen=True)
class FleetReport:
    """`why_not` says why times of other kinds are not compared with the first one's; `lacking` are settings that
    nobody has measured whole; `excluded` are sentences on what is in no figure."""

    machines: tuple[Machine, ...]
    kinds: tuple[MachineKind, ...]
    figures: tuple[FleetFigure, ...]
    alarms: tuple[MachineAlarm, ...]
    settings: int
    lacking: tuple[str, ...]
    excluded: tuple[str, ...]
    why_not: Mapping[str, str]


def differences(own: Fields, theirs: Fields) -> Iterator[str]:
    """Yields for example 'torch 2.12.0, not 2.13.0'."""
    mine, yours = dict(own), dict(theirs)
    for name in dict.fromkeys((*mine, *yours)):
        if mine.get(name) != yours.get(name):
            yield f"{name} {mine.get(name, 'none'):.60}, not {yours.get(name, 'none'):.60}"


# Facts that make a machine's hardware, beside its devices' names and memory.
_HARDWARE = ("asv_cpu", "asv_arch", "cpu_count", "cpu_affinity")
# Facts that make its software, beside the environment variables that a run notes and each device's settings.
_SOFTWARE = (
    "fp8bench", "python", "torch", "torch_git", "cudnn", "cublaslt", "threads", "switches_set", "cpu_governor",
    "cpu_turbo_off", "smt", "cgroup_cpu_max", "imports_sha256",
)  # fmt: skip
_SETTINGS = ("driver", "power_cap", "ecc", "mig", "clock_limit")
_ASKED = ("seed", "quick", "rounds", "budget", "isolation", "data", "ranks", "sustained")
_CAPABILITY = "CPU capability usage: "


@dataclass(frozen=True)
class MachineRun:
    """What a report reads of one run. `started` are its beginning and its resumptions; `ahead` is by how many
    seconds the last of these lies after the file's time, `clock_ahead` what the run itself found. `whole` and `cut`
    are settings of groups that it has completely, and not; `times` are seconds by case, `errors` its numerical
    results as text, by case and name; `failed` are cases with reasons."""

    run: str
    machine: str
    cell: str
    started: tuple[datetime, ...]
    ahead: float
    clock_ahead: float | None
    hardware: Fields
    software: Fields
    whole: tuple[str, ...]
    cut: tuple[str, ...]
    times: Mapping[str, float]
    errors: Mapping[str, str]
    failed: Mapping[str, str]
    bits: tuple[OperationBits, ...]


def seen_of(run: Run, file_time: float) -> MachineRun:
    known = {record.case.id for record in run.records}
    lacking = [group.setting for group in run.plan if not all(planned.case.id in known for planned in group.cases)]
    moments = [_moment(text) for text in (run.started, *(resumption.started for resumption in run.resumptions))]
    started = tuple(moment for moment in moments if moment is not None)
    good = [record for record in run.records if record.status is Status.OK]
    return MachineRun(
        run.id, str(run.environment.get("machine") or "unknown"), run.cell, started,
        started[-1].timestamp() - file_time if started else 0.0, run.clock_ahead, tuple(_hardware(run)),
        tuple(_software(run)), tuple(group.setting for group in run.plan if group.setting not in lacking),
        tuple(lacking), {_name(record): _seconds_of(record.timing) for record in good if record.timing},
        {name: value for record in good for name, value in _errors(record)},
        {_name(record): record.reason for record in run.records if record.status is Status.FAILED}, run.bits,
    )  # fmt: skip


def _seconds_of(timing: Timing) -> float:
    """Returns the median call: a disturbed one says nothing, and more calls make it no shorter."""
    return float(np.median([sum(call) for slot in timing.slots for call in slot.calls_ns])) / 1e9


def _name(record: Record) -> str:
    return f"{record.case.id}, {record.support.level}, version {record.case.version}"


def _errors(record: Record) -> Iterator[tuple[str, str]]:
    """Yields what depends on numbers alone: with the same seed it is the same to the last bit."""
    for measurement in record.measurements:
        if measurement.metric not in specs.PEAKS:
            yield f"{measurement.metric} of {_name(record)}", " ".join(value.hex() for value in measurement.samples)


def _moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def _hardware(run: Run) -> Iterator[tuple[str, str]]:
    for name in _HARDWARE:
        yield name, _shown(run.environment.get(name))
    config = str(run.environment.get("torch_config") or "")
    yield "instructions of the processor", config.partition(_CAPABILITY)[2].partition("\n")[0] or "unknown"
    for device in _used(run):
        yield (
            f"device {device.key}",
            f"{device.name}, {device.memory_bytes >> 30} GiB" if device.accelerated else device.name,
        )


def _software(run: Run) -> Iterator[tuple[str, str]]:
    facts = run.environment.facts
    variables = sorted(name for name in facts if name.startswith("env_"))
    for name in (*_SOFTWARE, *variables):
        yield name, _shown(facts.get(name))
    for device in _used(run):
        if device.accelerated:
            yield f"cuda of {device.key}", _shown(device.cuda or device.hip)
            yield from ((f"{name} of {device.key}", _shown(facts.get(f"{device.key} {name}"))) for name in _SETTINGS)
    for name in _ASKED:
        yield f"asked: {name}", _shown(getattr(run.request, name))


def _used(run: Run) -> list[DeviceFacts]:
    used = {planned.case.device for group in run.plan for planned in group.cases}
    return [device for device in run.devices if device.key in used]


def _shown(value: object) -> str:
    return "none" if value is None else " ".join(str(value).split())


# Machines of a kind are compared by the cases that all of them have. A machine's distance is from the median of all, in
# units of their median absolute deviation, so that a few odd machines do not hide themselves. How far is too far is
# found by simulating machines of which none is odd: at most FALSE_ALARMS of all reports name an honest machine, if
# logarithms of times scatter normally. Half of that rate goes to the middle over all cases, half to all single cases.
# With fewer machines nobody can say which one is odd.
LEAST_MACHINES = 4
FALSE_ALARMS = 0.01
# Smaller changes are not reported, however alike the others are.
LEAST_CHANGE = 0.05
# The standard deviation of a normal distribution over its median absolute deviation.
_NORMAL = 1.4826
_DRAWS = 100_000
# So many draws still show these rates. Rarer ones follow the power law of the tail between them, or lie below it.
_SEEN = (1e-2, 1e-3)


def deviations(times: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Deviation]]:
    """Returns deviations by case and machine; the case '' is the middle over all cases. `times` are seconds of one
    kind. Cases and middles that fewer than LEAST_MACHINES machines have are left out."""
    logs = _logs(times)
    cases = {case: _in_case(case, seen, FALSE_ALARMS / 2 / len(logs)) for case, seen in logs.items()}
    middles = _middles(logs)
    return cases | ({"": _in_case("", middles, FALSE_ALARMS / 2)} if middles else {})


def seen_from(times: Mapping[str, Mapping[str, float]]) -> float | None:
    """Returns the share of time above the others from which a machine is named; None for too few machines."""
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
    """Returns how far each machine with at least half of the cases is from the mean, in its median case. Not from
    the median: of an odd number of machines one would lie at 0, and the spread would come out too small."""
    centred = together(
        (machine, value - middle)
        for seen in logs.values() for middle in [float(np.mean(list(seen.values())))] for machine, value in seen.items()
    )  # fmt: skip
    middles = {name: float(np.median(values)) for name, values in centred.items() if 2 * len(values) >= len(logs)}
    return middles if len(middles) >= LEAST_MACHINES else {}


def _in_case(case: str, logs: Mapping[str, float], rate: float) -> dict[str, Deviation]:
    values = np.array(list(logs.values()))
    distances, spread = _distances(values[None, :])
    limit = critical(len(logs), rate)
    own = {}
    for machine, distance in zip(logs, distances[0].tolist(), strict=True):
        score = float(distance / spread[0]) if spread[0] > 0 else (math.inf if distance else 0.0)
        change = math.expm1(distance)
        own[machine] = Deviation(machine, case, change, score, abs(score) > limit and abs(change) > LEAST_CHANGE)
    return own


def _distances(logs: Floats) -> tuple[Floats, Floats]:
    distances = logs - np.median(logs, axis=1, keepdims=True)
    return distances, _NORMAL * np.median(np.abs(distances), axis=1)


@cache
def critical(machines: int, rate: float) -> float:
    """Returns the score that the farthest of so many honest machines exceeds at that rate."""
    farthest = _simulated(machines)
    if rate >= _SEEN[1]:
        return float(np.quantile(farthest, 1 - rate))
    often, seldom = (float(np.quantile(farthest, 1 - seen)) for seen in _SEEN)
    slope = math.log(seldom / often) / math.log(_SEEN[0] / _SEEN[1])
    return float(seldom * (_SEEN[1] / rate) ** slope)


@cache
def _simulated(machines: int) -> Floats:
    """Returns the farthest scores among honest machines; always the same draws."""
    random = np.random.default_rng(machines)
    parts = []
    for _ in range(10):
        distances, spread = _distances(random.standard_normal((_DRAWS // 10, machines)))
        parts.append(np.abs(distances).max(axis=1) / spread)
    return np.concatenate(parts)
