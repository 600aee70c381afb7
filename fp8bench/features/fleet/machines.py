"""The values of a fleet's report, what it reads of a run, and how far a machine is from others of its kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from fp8bench.model import DeviceFacts, Record, Run, Status, Timing
from fp8bench.report.panels import together

# Names with values, which machines of a kind have in common.
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
    """How far a machine is from the others of its kind. `ratio` is its time over their median, in its median case;
    `score` is its distance from the middle ratio in median absolute deviations, and `odd` if that is too far."""

    ratio: float
    score: float
    odd: bool


@dataclass(frozen=True)
class MachineKind:
    """Machines with the same hardware, software and settings. `differs` are the fields in which it differs from the
    first kind, `deviations` are by machine; there are none of too few machines."""

    name: str
    machines: tuple[str, ...]
    hardware: Fields
    software: Fields
    differs: tuple[str, ...] = ()
    deviations: Mapping[str, Deviation] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """One machine: the kinds it was of, its `whole` cells, its `failed` cases, and its deviation from the last of its
    kinds that has one."""

    name: str
    kinds: tuple[str, ...]
    runs: int
    whole: int
    failed: int
    ratio: float | None
    score: float | None


@dataclass(frozen=True)
class FleetFigure:
    """Seconds of one case on the machines of a kind."""

    case: str
    kind: str
    seconds: Mapping[str, float]

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
    """What a report reads of one run. `whole` and `cut` are settings of groups that it has completely, and not;
    `times` are seconds by case, `failed` are cases with reasons."""

    run: str
    machine: str
    hardware: Fields
    software: Fields
    whole: tuple[str, ...]
    cut: tuple[str, ...]
    times: Mapping[str, float]
    failed: Mapping[str, str]


def seen_of(run: Run) -> MachineRun:
    measured = {record.case.id for record in run.records}
    whole: list[str] = []
    cut: list[str] = []
    for group in run.plan:
        is_whole = all(planned.case.id in measured for planned in group.cases)
        (whole if is_whole else cut).append(group.setting)
    times = {_name(record): _seconds_of(record.timing)
             for record in run.records if record.is_ok and record.timing}  # fmt: skip
    failed = {_name(record): record.reason for record in run.records if record.status is Status.FAILED}
    machine = str(run.environment.get("machine") or "unknown")
    return MachineRun(
        run.id, machine, tuple(_hardware(run)), tuple(_software(run)), tuple(whole), tuple(cut), times, failed
    )


def _seconds_of(timing: Timing) -> float:
    """Returns the median call: a disturbed one says nothing, and more calls make it no shorter."""
    return median(sum(call) for slot in timing.slots for call in slot.calls_ns) / 1e9


def _name(record: Record) -> str:
    return f"{record.case.id}, {record.support.level}, version {record.case.version}"


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


# With fewer machines nobody can say which one is odd.
LEAST_MACHINES = 6
# A machine is odd if it is further from the middle of its kind than so many median absolute deviations. Where times of
# machines without a fault scatter by 1% none is named, and by 10% one is in 7% of fleets of 7 machines, and 1% of 17.
LIMIT = 10.0
# Smaller differences are not reported, however alike the others are.
LEAST_CHANGE = 0.05


def deviations(times: Mapping[str, Mapping[str, float]]) -> dict[str, Deviation]:
    """Returns the deviations of the machines of one kind, from their seconds by case; none for too few machines. Cases
    that few machines have, and machines that have less than half of the other cases, are left out."""
    cases = [seconds for seconds in times.values() if len(seconds) >= LEAST_MACHINES]
    by_machine = together(
        (machine, value / median(seconds.values())) for seconds in cases for machine, value in seconds.items()
    )
    ratios = {machine: median(values) for machine, values in by_machine.items() if 2 * len(values) >= len(cases)}
    if len(ratios) < LEAST_MACHINES:
        return {}
    middle = median(ratios.values())
    spread = median(abs(ratio - middle) for ratio in ratios.values())
    found = {}
    for machine, ratio in ratios.items():
        distance = ratio - middle
        score = distance / spread if spread else math.copysign(math.inf, distance) if distance else 0.0
        found[machine] = Deviation(ratio, score, abs(score) > LIMIT and abs(distance) > LEAST_CHANGE)
    return found
