"""What a report of a fleet says, as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from statistics import median

import numpy as np

from fp8bench.model import DeviceFacts, Record, Run, Status, Timing, specs
from fp8bench.model.run import OperationBits

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
class MachineAlarm:
    """That a machine is named, and why."""

    machine: str
    what: Oddity
    words: str


@dataclass(frozen=True)
class MachineKind:
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
class FleetFigure:
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
    kinds: tuple[MachineKind, ...]
    figures: tuple[FleetFigure, ...]
    alarms: tuple[MachineAlarm, ...]
    settings: int
    lacking: tuple[str, ...]
    excluded: tuple[str, ...]
    why_not: Mapping[str, str]


def differences(own: Fields, theirs: Fields) -> Iterator[str]:
    """'torch 2.12.0, not 2.13.0'."""
    mine, yours = dict(own), dict(theirs)
    for name in dict.fromkeys((*mine, *yours)):
        if mine.get(name) != yours.get(name):
            yield f"{name} {mine.get(name, 'none'):.60}, not {yours.get(name, 'none'):.60}"


# Of the machine; beside them name, memory and cache of its devices.
_HARDWARE = ("asv_cpu", "asv_arch", "cpu_count", "cpu_affinity")
# Of what runs on it, and how it is set; beside them the variables that a run notes, and each device's settings.
_SOFTWARE = (
    "fp8bench", "python", "torch", "torch_git", "cudnn", "cublaslt", "threads", "switches_set", "cpu_governor",
    "cpu_turbo_off", "smt", "cgroup_cpu_max", "imports_sha256",
)  # fmt: skip
_SETTINGS = ("driver", "power_cap", "ecc", "mig", "clock_limit")
_ASKED = ("seed", "quick", "rounds", "budget", "isolation", "data", "ranks", "sustained")
_CAPABILITY = "CPU capability usage: "


@dataclass(frozen=True)
class MachineRun:
    """One run. `started` is when it began, and then was gone on with; `ahead` how many seconds the last of these lies
    after the time of its file, and `clock_ahead` what the run says. `whole` and `cut` are the settings of groups that
    it has all of, and not; `times` are seconds by case, `errors` what its numbers came to, as text, by case and name;
    `failed` cases with their reasons."""

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
    """The middle call: one that was disturbed says nothing, and more calls make it no shorter."""
    return float(np.median([sum(call) for slot in timing.slots for call in slot.calls_ns])) / 1e9


def _name(record: Record) -> str:
    return f"{record.case.id}, {record.support.level}, version {record.case.version}"


def _errors(record: Record) -> Iterator[tuple[str, str]]:
    """What depends on the numbers alone: the same seed gives the same to the last bit."""
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
