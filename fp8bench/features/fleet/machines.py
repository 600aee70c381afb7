"""The values of a fleet report, what it reads of each run, and how far a machine deviates from others of its kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from fp8bench.model import DeviceFacts, Record, Run, Status, Timing

# Names and values that all machines of a kind share.
Fields = tuple[tuple[str, str], ...]


class Oddity(StrEnum):
    """Why a machine stands out."""

    SLOW = "slow"
    FAST = "fast"
    SOFTWARE = "other software"
    CUT_OFF = "cut off"
    MISSING = "missing"
    FAILED = "failed"


@dataclass(frozen=True)
class MachineAlarm:
    """A machine that stands out, and why."""

    machine: str
    what: Oddity
    words: str


@dataclass(frozen=True)
class Deviation:
    """How far a machine is from the others of its kind.

    `ratio` is its time over their median, in its median case. `score` is the distance of that ratio from the kind's
    median ratio, in median absolute deviations; `odd` marks an outlier.
    """

    ratio: float
    score: float
    odd: bool


@dataclass(frozen=True)
class MachineKind:
    """Machines with the same hardware, software and settings.

    `differs` describes how the kind differs from the first one. `deviations`, by machine, are empty if the kind has too
    few machines.
    """

    name: str
    machines: tuple[str, ...]
    hardware: Fields
    software: Fields
    differs: tuple[str, ...] = ()
    deviations: Mapping[str, Deviation] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """One machine: its kinds, the numbers of its complete cells and failed cases, and its latest deviation."""

    name: str
    kinds: tuple[str, ...]
    runs: int
    whole: int
    failed: int
    ratio: float | None
    score: float | None


@dataclass(frozen=True)
class FleetFigure:
    """The seconds of one case on each machine of a kind."""

    case: str
    kind: str
    seconds: Mapping[str, float]

    @property
    def middle(self) -> float:
        return median(self.seconds.values())


@dataclass(frozen=True)
class FleetReport:
    """A comparison of the machines of a fleet.

    `settings` counts the planned settings, and `lacking` are those that no machine measured completely. `excluded` has
    sentences on runs in no figure; `why_not` has the reasons, by kind, why its times are not compared with the first
    kind's.
    """

    machines: tuple[Machine, ...]
    kinds: tuple[MachineKind, ...]
    figures: tuple[FleetFigure, ...]
    alarms: tuple[MachineAlarm, ...]
    settings: int
    lacking: tuple[str, ...]
    excluded: tuple[str, ...]
    why_not: Mapping[str, str]


def find_differences(fields: Fields, reference: Fields) -> Iterator[str]:
    """Yields the differences, like 'torch 2.12.0, not 2.13.0'."""
    values, expected = dict(fields), dict(reference)
    for name in values | expected:
        if values.get(name) != expected.get(name):
            yield f"{name} {values.get(name, 'none'):.60}, not {expected.get(name, 'none'):.60}"


# Facts that identify a machine's hardware, in addition to the names and memory of its devices.
_HARDWARE = ("asv_cpu", "asv_arch", "cpu_count", "cpu_affinity")
# Facts that identify its software, in addition to environment variables and the settings of devices.
_SOFTWARE = (
    "fp8bench",
    "python",
    "torch",
    "torch_git",
    "cudnn",
    "cublaslt",
    "threads",
    "switches_set",
    "cpu_governor",
    "cpu_turbo_off",
    "smt",
    "cgroup_cpu_max",
    "imports_sha256",
)
_SETTINGS = ("driver", "power_cap", "ecc", "mig", "clock_limit")
_REQUESTED = ("seed", "quick", "brisk", "rounds", "budget", "isolation", "data", "ranks", "sustained")
_CAPABILITY = "CPU capability usage: "


@dataclass(frozen=True)
class MachineRun:
    """The facts of one run that a fleet report needs.

    `whole` and `cut` are the settings of its complete and incomplete groups. `times` are seconds by case; `failed` are
    reasons by case.
    """

    run: str
    machine: str
    hardware: Fields
    software: Fields
    whole: tuple[str, ...]
    cut: tuple[str, ...]
    times: Mapping[str, float]
    failed: Mapping[str, str]


def summarize_run(run: Run) -> MachineRun:
    # A setting is complete if every case of it was measured, with any outcome.
    measured = {record.case.id for record in run.records}
    complete: list[str] = []
    cut: list[str] = []
    for group in run.plan:
        is_whole = all(planned.case.id in measured for planned in group.cases)
        (complete if is_whole else cut).append(group.setting)
    # Only the median call is kept: memory may not hold the runs of a fleet.
    times: dict[str, float] = {}
    failed: dict[str, str] = {}
    for record in run.records:
        if record.is_ok and record.timing:
            times[_name(record)] = _median_call(record.timing)
        if record.status is Status.FAILED:
            failed[_name(record)] = record.reason
    return MachineRun(
        run=run.id,
        machine=str(run.environment.get("machine") or "unknown"),
        hardware=tuple(_hardware(run)),
        software=tuple(_software(run)),
        whole=tuple(complete),
        cut=tuple(cut),
        times=times,
        failed=failed,
    )


def _median_call(timing: Timing) -> float:
    """Returns seconds. Disturbed calls hardly move the median, and it does not depend on the number of calls."""
    calls: list[int] = []
    for slot in timing.slots:
        calls += [sum(segments) for segments in slot.calls_ns]
    return median(calls) / 1e9


def _name(record: Record) -> str:
    return f"{record.case.id}, {record.support.level}, version {record.case.version}"


def _hardware(run: Run) -> Iterator[tuple[str, str]]:
    for name in _HARDWARE:
        yield name, _describe_value(run.environment.get(name))
    config = str(run.environment.get("torch_config") or "")
    yield "instructions of the processor", config.partition(_CAPABILITY)[2].partition("\n")[0] or "unknown"
    for device in _find_devices(run):
        memory = f", {device.memory_bytes >> 30} GiB" if device.accelerated else ""
        yield f"device {device.key}", f"{device.name}{memory}"


def _software(run: Run) -> Iterator[tuple[str, str]]:
    facts = run.environment.facts
    variables = sorted(name for name in facts if name.startswith("env_"))
    for name in (*_SOFTWARE, *variables):
        yield name, _describe_value(facts.get(name))
    for device in _find_devices(run):
        if device.accelerated:
            yield f"cuda of {device.key}", _describe_value(device.cuda or device.hip)
            for name in _SETTINGS:
                yield f"{name} of {device.key}", _describe_value(facts.get(f"{device.key} {name}"))
    for name in _REQUESTED:
        yield f"asked: {name}", _describe_value(getattr(run.request, name))


def _find_devices(run: Run) -> list[DeviceFacts]:
    keys: set[str] = set()
    for group in run.plan:
        keys |= {planned.case.device for planned in group.cases}
    return [device for device in run.devices if device.key in keys]


def _describe_value(value: object) -> str:
    return "none" if value is None else " ".join(str(value).split())


# With fewer machines the outlier cannot be identified.
LEAST_MACHINES = 6
# A machine is an outlier beyond this many median absolute deviations from its kind's median. If the times of healthy
# machines scatter by 1%, none is ever named; by 10%, one is named in 7% of fleets of 7 machines and in 1% of 17.
LIMIT = 10.0
# Smaller differences are not reported, even if the other machines agree much better.
LEAST_CHANGE = 0.05


def find_deviations(times: Mapping[str, Mapping[str, float]]) -> dict[str, Deviation]:
    """Returns the deviations of the machines of one kind, from their seconds by case; none for too few machines.

    Cases that few machines have are left out, and machines that have less than half of the remaining cases.
    """
    # 1. Divide each time by the median over the machines that have the case.
    cases = [seconds for seconds in times.values() if len(seconds) >= LEAST_MACHINES]
    by_machine: dict[str, list[float]] = {}
    for seconds in cases:
        middle = median(seconds.values())
        for machine, value in seconds.items():
            by_machine.setdefault(machine, []).append(value / middle)
    # 2. Each machine's ratio is that of its median case.
    ratios = {machine: median(values) for machine, values in by_machine.items() if 2 * len(values) >= len(cases)}
    if len(ratios) < LEAST_MACHINES:
        return {}
    # 3. Measure the distance from the median ratio by the median distance of all.
    middle = median(ratios.values())
    spread = median(abs(ratio - middle) for ratio in ratios.values())
    deviations = {}
    for machine, ratio in ratios.items():
        distance = ratio - middle
        score = 0.0
        if distance:
            score = distance / spread if spread else math.copysign(math.inf, distance)
        deviations[machine] = Deviation(ratio, score, abs(score) > LIMIT and abs(distance) > LEAST_CHANGE)
    return deviations
