"""Values of a fleet report: the facts of each run, and how far each machine deviates from the other machines of its
kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from fp8bench.model import DeviceFacts, Record, Run, Status, Timing

# Names and values of facts that are equal on all machines of a kind.
EnvironmentFields = tuple[tuple[str, str], ...]


class MachineOddity(StrEnum):
    """Why a machine is reported as odd."""

    TOO_SLOW = "slow"
    TOO_FAST = "fast"
    OTHER_SOFTWARE = "other software"
    CUT_OFF = "cut off"
    CELLS_MISSING = "missing"
    FAILED = "failed"


@dataclass(frozen=True)
class MachineAlarm:
    """A machine that is reported as odd, and why."""

    machine: str
    what: MachineOddity
    words: str


@dataclass(frozen=True)
class MachineDeviation:
    """How far a machine is from other machines of its kind.

    In each case, the machine's time is divided by the median time of its kind. `ratio` is the median of these
    quotients over the cases. `score` is the distance of `ratio` from the median ratio of the kind, in median absolute
    deviations. `odd` marks an outlier.
    """

    ratio: float
    score: float
    odd: bool


@dataclass(frozen=True)
class MachineKind:
    """Machines with the same hardware, software and settings. `differs` lists how they differ from the machines of the
    first kind. `deviations` maps the name of each machine to its deviation. It is empty if the kind has too few
    machines.
    """

    name: str
    machines: tuple[str, ...]
    hardware: EnvironmentFields
    software: EnvironmentFields
    differs: tuple[str, ...] = ()
    deviations: Mapping[str, MachineDeviation] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """A machine of the fleet. `kinds` are those to which its runs belong. `whole` is the number of settings that it
    measured completely, `failed` the number of failed cases. `ratio` and `score` are its `MachineDeviation` in the last
    of its kinds that has one.
    """

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
    def median_seconds(self) -> float:
        return median(self.seconds.values())


@dataclass(frozen=True)
class FleetReport:
    """A comparison of the machines of a fleet.

    `settings` is the number of all settings, and `lacking` are the settings that no machine measured
    completely. `excluded` explains which runs do not count. `why_not` maps a kind of machine to the reason why its
    times are not compared with those of the first kind.
    """

    machines: tuple[Machine, ...]
    kinds: tuple[MachineKind, ...]
    figures: tuple[FleetFigure, ...]
    alarms: tuple[MachineAlarm, ...]
    settings: int
    lacking: tuple[str, ...]
    excluded: tuple[str, ...]
    why_not: Mapping[str, str]


def describe_field_differences(fields: EnvironmentFields, reference: EnvironmentFields) -> Iterator[str]:
    """Yields a text for each field that differs from the reference, such as 'torch 2.12.0, not 2.13.0'."""
    values, expected_values = dict(fields), dict(reference)
    for name in values | expected_values:
        if values.get(name) != expected_values.get(name):
            yield f"{name} {values.get(name, 'none'):.60}, not {expected_values.get(name, 'none'):.60}"


# Facts that identify a machine's hardware, besides the names and memory sizes of its devices.
_HARDWARE_FACT_NAMES = ("asv_cpu", "asv_arch", "cpu_count", "cpu_affinity")
# Facts that identify a machine's software, besides environment variables and settings of devices.
_SOFTWARE_FACT_NAMES = (
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
_DEVICE_SETTING_NAMES = ("driver", "power_cap", "ecc", "mig", "clock_limit")
# Options of a run. Machines that ran with different ones belong to different kinds.
_MACHINE_REQUEST_FIELDS = ("seed", "quick", "brisk", "rounds", "budget", "isolation", "data", "ranks", "sustained")
_CAPABILITY_PREFIX = "CPU capability usage: "


@dataclass(frozen=True)
class MachineRun:
    """The facts of one run that a fleet report needs.

    A setting is the text for what all cases of a group have in common. `complete_group_settings` are the settings of
    the groups in which every case has a record, and `incomplete_settings` are those of all other groups. `times` are
    seconds by case, and `failure_reasons` are reasons by case.
    """

    run: str
    machine: str
    hardware: EnvironmentFields
    software: EnvironmentFields
    complete_group_settings: tuple[str, ...]
    incomplete_settings: tuple[str, ...]
    times: Mapping[str, float]
    failure_reasons: Mapping[str, str]


def summarize_run(run: Run) -> MachineRun:
    # A setting is complete if each of its cases has a record, with any outcome.
    ids_of_recorded_cases = {record.case.id for record in run.records}
    complete_group_settings: list[str] = []
    incomplete_settings: list[str] = []
    for group in run.plan:
        is_complete = all(planned.case.id in ids_of_recorded_cases for planned in group.cases)
        (complete_group_settings if is_complete else incomplete_settings).append(group.setting)
    # Store only the median call of each case, because memory may not hold all calls of a fleet.
    time_by_case: dict[str, float] = {}
    failure_reasons: dict[str, str] = {}
    for record in run.records:
        if record.is_ok and record.timing:
            time_by_case[_name_case_with_version(record)] = _compute_median_call_seconds(record.timing)
        if record.status is Status.FAILED:
            failure_reasons[_name_case_with_version(record)] = record.reason
    return MachineRun(
        run=run.id,
        machine=str(run.environment.get("machine") or "unknown"),
        hardware=tuple(_hardware_fields(run)),
        software=tuple(_iterate_software_facts(run)),
        complete_group_settings=tuple(complete_group_settings),
        incomplete_settings=tuple(incomplete_settings),
        times=time_by_case,
        failure_reasons=failure_reasons,
    )


def _compute_median_call_seconds(timing: Timing) -> float:
    """Returns the median seconds of all calls. A few disturbed calls hardly change the median, and it does not depend
    on the number of calls.
    """
    calls: list[int] = []
    for slot in timing.slots:
        calls += [sum(segments) for segments in slot.calls_ns]
    return median(calls) / 1e9


def _name_case_with_version(record: Record) -> str:
    return f"{record.case.id}, {record.support.level}, version {record.case.version}"


def _hardware_fields(run: Run) -> Iterator[tuple[str, str]]:
    for name in _HARDWARE_FACT_NAMES:
        yield name, _describe_value(run.environment.get(name))
    torch_config = str(run.environment.get("torch_config") or "")
    yield "instructions of the processor", torch_config.partition(_CAPABILITY_PREFIX)[2].partition("\n")[0] or "unknown"
    for device in _find_devices(run):
        device_memory_text = f", {device.memory_bytes >> 30} GiB" if device.accelerated else ""
        yield f"device {device.key}", f"{device.name}{device_memory_text}"


def _iterate_software_facts(run: Run) -> Iterator[tuple[str, str]]:
    facts = run.environment.facts
    variable_names = sorted(name for name in facts if name.startswith("env_"))
    for name in (*_SOFTWARE_FACT_NAMES, *variable_names):
        yield name, _describe_value(facts.get(name))
    for device in _find_devices(run):
        if device.accelerated:
            yield f"cuda of {device.key}", _describe_value(device.cuda or device.hip)
            for name in _DEVICE_SETTING_NAMES:
                yield f"{name} of {device.key}", _describe_value(facts.get(f"{device.key} {name}"))
    for name in _MACHINE_REQUEST_FIELDS:
        yield f"asked: {name}", _describe_value(getattr(run.request, name))


def _find_devices(run: Run) -> list[DeviceFacts]:
    keys: set[str] = set()
    for group in run.plan:
        keys |= {planned.case.device for planned in group.cases}
    return [device for device in run.devices if device.key in keys]


def _describe_value(value: object) -> str:
    return "none" if value is None else " ".join(str(value).split())


# The fewest machines of a kind among which an outlier can be identified.
MIN_MACHINES = 6
# A machine is an outlier if it is further than this many median absolute deviations from the median of its kind. If
# the times of healthy machines scatter by 1%, no healthy machine is reported. If they scatter by 10%, one is reported
# in 7% of fleets of 7 machines, and in 1% of fleets of 17.
OUTLIER_DEVIATIONS = 10.0
# An outlier must also differ from the median by this share, because the median deviation is tiny if all other machines
# agree closely.
MIN_OUTLIER_CHANGE = 0.05


def find_machine_deviations(times: Mapping[str, Mapping[str, float]]) -> dict[str, MachineDeviation]:
    """Returns how far each machine of one kind deviates from the others. `times` has the seconds of each case on each
    machine. Returns {} for too few machines.

    Cases that fewer than MIN_MACHINES machines have are left out. Then machines that have less than half of the
    remaining cases are left out.
    """
    # 1. Divide each time by the median over all machines that measured the case.
    cases = [seconds for seconds in times.values() if len(seconds) >= MIN_MACHINES]
    ratios_by_machine: dict[str, list[float]] = {}
    for seconds in cases:
        median_seconds = median(seconds.values())
        for machine, value in seconds.items():
            ratios_by_machine.setdefault(machine, []).append(value / median_seconds)
    # 2. The ratio of a machine is the median over its cases.
    ratio_by_machine = {
        machine: median(values) for machine, values in ratios_by_machine.items() if 2 * len(values) >= len(cases)
    }
    if len(ratio_by_machine) < MIN_MACHINES:
        return {}
    # 3. Express each machine's distance from the median ratio in median absolute deviations.
    median_machine_ratio = median(ratio_by_machine.values())
    median_ratio_deviation = median(abs(ratio - median_machine_ratio) for ratio in ratio_by_machine.values())
    deviation_by_machine = {}
    for machine, ratio in ratio_by_machine.items():
        ratio_distance = ratio - median_machine_ratio
        deviation_score = 0.0
        if ratio_distance:
            # If more than half of the machines agree exactly, any difference is infinitely many deviations.
            deviation_score = (
                ratio_distance / median_ratio_deviation
                if median_ratio_deviation
                else math.copysign(math.inf, ratio_distance)
            )
        is_outlier = abs(deviation_score) > OUTLIER_DEVIATIONS and abs(ratio_distance) > MIN_OUTLIER_CHANGE
        deviation_by_machine[machine] = MachineDeviation(ratio, deviation_score, is_outlier)
    return deviation_by_machine
