"""Reads the energy of a processor from Linux files (RAPL), and its clock and temperature from files of the kernel.

The clock is that of the fastest core and the temperature that of the hottest sensor. Many virtual machines have
neither. A core's clock is not the clock of a case, because threads move from core to core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fp8bench.measure.sensors.nvml import AbsentDevice
from fp8bench.model.readings import NoReading, Reading, ReadingOrUnavailable, Readings, require_positive, try_reading

RAPL_FOLDER = Path("/sys/class/powercap")
_CPUINFO = Path("/proc/cpuinfo")
_JOULES_PER_MICROJOULE = 1e-6
# A counter with a smaller value than before has wrapped around. If this would mean more than this power in watts, it
# was reset instead.
_MAX_COUNTER_WATTS = 10e3


@dataclass(frozen=True)
class EnergyDomain:
    """A part of the machine with an energy counter: 'package-0', 'package-0/dram'.

    `range_uj` is the value at which the counter wraps around, None if unknown.
    """

    name: str
    counter: Path
    range_uj: int | None


def list_energy_domains(root: Path = RAPL_FOLDER, cpuinfo: Path = _CPUINFO) -> tuple[EnergyDomain, ...]:
    """Lists the processor packages, and memory that is counted separately. Raises NoReading without a package,
    or if a counter cannot be read.

    No energy is counted twice. So four names are left out: 'core' and 'uncore' are parts of their package, 'psys'
    contains the packages, and intel-rapl-mmio repeats them.
    """
    if not root.is_dir():
        raise NoReading(f"there is no {root}: {_explain_rapl_absence(cpuinfo)}")
    energy_domains = []
    for package in sorted(root.glob("intel-rapl:*")):
        name = read_text(package / "name")
        # The parts of a package are folders too: intel-rapl:0 has the part intel-rapl:0:0.
        if package.name.count(":") != 1 or not name.startswith("package"):
            continue
        parts = sorted(root.glob(f"{package.name}:*"))
        energy_domains += [_make_energy_domain(name, package)]
        energy_domains += [
            _make_energy_domain(f"{name}/dram", part) for part in parts if read_text(part / "name") == "dram"
        ]
    if not energy_domains:
        raise NoReading(f"{root} has no RAPL package: {_explain_rapl_absence(cpuinfo)}")
    # Read each counter once, so that a counter without permission fails here and not during a measurement.
    for domain in energy_domains:
        _read_energy_uj(domain)
    return tuple(energy_domains)


class EnergyCounter:
    """Adds up the joules of several domains since the first reading. A counter that wraps around is handled."""

    def __init__(self, parts: Sequence[EnergyDomain], now: Callable[[], float]) -> None:
        self._parts = tuple(parts)
        self._now = now
        self._last_energies: tuple[int, ...] | None = None
        self._read_at = 0.0
        self._total_uj = 0

    def read(self) -> float:
        """Returns the joules since the first reading. Raises NoReading if a counter cannot be read or was reset."""
        energies, now = tuple(_read_energy_uj(part) for part in self._parts), self._now()
        last_energies, elapsed = self._last_energies, now - self._read_at
        if last_energies is not None:
            for part, old, new in zip(self._parts, last_energies, energies, strict=True):
                self._total_uj += _measure_energy_growth_uj(part, old, new, elapsed)
        self._last_energies, self._read_at = energies, now
        return self._total_uj * _JOULES_PER_MICROJOULE


def _measure_energy_growth_uj(part: EnergyDomain, old: int, new: int, elapsed: float) -> int:
    if new >= old:
        return new - old
    if part.range_uj is not None:
        wrapped_growth_uj = new - old + part.range_uj
        if 0 <= wrapped_growth_uj * _JOULES_PER_MICROJOULE <= _MAX_COUNTER_WATTS * elapsed:
            return wrapped_growth_uj
    raise NoReading(f"the energy counter of {part.name} went back from {old} uJ to {new} uJ")


def _make_energy_domain(name: str, path: Path) -> EnergyDomain:
    counter_range_uj = None
    with suppress(NoReading, ValueError):
        # The counter wraps around after the value in this file.
        counter_range_uj = int(read_text(path / "max_energy_range_uj")) + 1
    return EnergyDomain(name, path / "energy_uj", counter_range_uj)


def _read_energy_uj(domain: EnergyDomain) -> int:
    text = read_text(domain.counter)
    if not text.isdecimal():
        raise NoReading(f"the energy counter of {domain.name} is {text[:40]!r}, which is not a number")
    return int(text)


def read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except PermissionError as error:
        raise NoReading(
            f"{path} may be read by root only (a kernel default since CVE-2020-8694): "
            "`sudo chmod o+r` on it allows you to read it until the next boot"
        ) from error
    except OSError as error:
        raise NoReading(f"{path} cannot be read: {error.strerror}") from error


def _explain_rapl_absence(cpuinfo: Path) -> str:
    with suppress(OSError):
        text = cpuinfo.read_text(errors="replace")
        if any(line.startswith("flags") and "hypervisor" in line.split() for line in text.splitlines()):
            return "this is a virtual machine, and its hypervisor does not pass RAPL on"
    return "this kernel or container does not show RAPL, or the CPU has none"


SYSTEM_FOLDER = Path("/sys")
CPU_CLOCK = "cpu_clock"
_CLOCK_FILES_PATTERN = "devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"
# Kernel drivers of temperature sensors in processors.
_PROCESSOR_CHIPS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal"})


class HostDevice(AbsentDevice):
    """Reads a processor's clock and temperature from files. AbsentDevice answers every other query with `reason`."""

    has_no_sensors = False  # meter.py uses a HostDevice only if it `has_sensor_files`

    def __init__(self, reason: str, root: Path = SYSTEM_FOLDER) -> None:
        super().__init__(reason)
        self._clocks, self._heats = sorted(root.glob(_CLOCK_FILES_PATTERN)), sorted(_list_temperature_sensors(root))

    @property
    def has_sensor_files(self) -> bool:
        return bool(self._clocks or self._heats)

    def read_changing_state(self) -> Readings:
        state = {
            CPU_CLOCK: _read_highest_value(self._clocks, 1e3, "Hz"),
            "temperature": _read_highest_value(self._heats, 1e-3, "degC"),
        }
        return {**super().read_changing_state(), **state}

    def read_in_this_thread(self) -> Readings:
        return self.read_changing_state()  # reads files, which needs no other thread


def _list_temperature_sensors(root: Path) -> Iterator[Path]:
    for name in root.glob("class/hwmon/hwmon*/name"):
        try:
            is_processor = name.read_text().strip() in _PROCESSOR_CHIPS
        except (OSError, UnicodeError):
            continue
        yield from name.parent.glob("temp*_input") if is_processor else ()


def _read_highest_value(files: list[Path], factor: float, unit: str) -> ReadingOrUnavailable:
    def read() -> Reading:
        values: list[float] = []
        for file in files:
            try:
                values.append(float(file.read_text()))
            except (OSError, ValueError):
                continue
        if not values:
            raise NoReading("the kernel has no file with it")
        return require_positive(max(values) * factor, unit, "sysfs")

    return try_reading(read)
