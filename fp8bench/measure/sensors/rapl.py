"""Energy that a processor counts in files of Linux (RAPL).

And its state by files of the kernel: the clock of its fastest core, the heat of its hottest sensor. Many
virtual machines have neither. A core's clock is not that of a case, because threads move from core to core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fp8bench.measure.sensors.nvml import AbsentDevice
from fp8bench.model.readings import NoReading, Read, Reading, Readings, attempt, positive

ROOT = Path("/sys/class/powercap")
_CPUINFO = Path("/proc/cpuinfo")
_MICRO = 1e-6
# A counter that has fallen has wrapped around, unless that would mean more power than this.
_HIGHEST_WATTS = 10e3


@dataclass(frozen=True)
class Domain:
    """A part of the machine with a counter: 'package-0', 'package-0/dram'. `range_uj` is where it wraps, if known."""

    name: str
    counter: Path
    range_uj: int | None


def domains(root: Path = ROOT, cpuinfo: Path = _CPUINFO) -> tuple[Domain, ...]:
    """The packages, and the memory where it is counted apart; they do not overlap. Raises NoReading.

    Left out: 'core' and 'uncore' lie within their package, 'psys' holds the packages, and intel-rapl-mmio repeats them.
    """
    if not root.is_dir():
        raise NoReading(f"there is no {root}: {_why_absent(cpuinfo)}")
    packages = []
    for package in sorted(root.glob("intel-rapl:*")):
        name = text_of(package / "name")
        if package.name.count(":") != 1 or not name.startswith("package"):
            continue
        parts = sorted(root.glob(f"{package.name}:*"))
        packages += [_domain(name, package)]
        packages += [_domain(f"{name}/dram", part) for part in parts if text_of(part / "name") == "dram"]
    if not packages:
        raise NoReading(f"{root} has no RAPL package: {_why_absent(cpuinfo)}")
    for domain in packages:
        _energy_uj(domain)
    return tuple(packages)


class EnergyCounter:
    """The joules of several domains together since the first reading, across wraps of their counters."""

    def __init__(self, parts: Sequence[Domain], now: Callable[[], float]) -> None:
        self._parts = tuple(parts)
        self._now = now
        self._last: tuple[int, ...] | None = None
        self._read_at = 0.0
        self._total_uj = 0

    def read(self) -> float:
        """Raises NoReading where a counter cannot be read or was set back."""
        energies, now = tuple(_energy_uj(part) for part in self._parts), self._now()
        earlier, elapsed = self._last, now - self._read_at
        if earlier is not None:
            for part, old, new in zip(self._parts, earlier, energies, strict=True):
                self._total_uj += _growth_uj(part, old, new, elapsed)
        self._last, self._read_at = energies, now
        return self._total_uj * _MICRO


def _growth_uj(part: Domain, old: int, new: int, elapsed: float) -> int:
    if new >= old:
        return new - old
    around = new - old + (part.range_uj or 0)
    if part.range_uj is None or not 0 <= around * _MICRO <= _HIGHEST_WATTS * elapsed:
        raise NoReading(f"the energy counter of {part.name} went back from {old} uJ to {new} uJ")
    return around


def _domain(name: str, path: Path) -> Domain:
    limit = None
    with suppress(NoReading, ValueError):
        # The largest value, which the counter still takes.
        limit = int(text_of(path / "max_energy_range_uj")) + 1
    return Domain(name, path / "energy_uj", limit)


def _energy_uj(domain: Domain) -> int:
    text = text_of(domain.counter)
    if not text.isdecimal():
        raise NoReading(f"the energy counter of {domain.name} says {text[:40]!r}, which is not a number")
    return int(text)


def text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except PermissionError as error:
        raise NoReading(
            f"{path} may be read by root only (as kernels have had it since CVE-2020-8694): "
            "`sudo chmod o+r` on it lets you, until the next boot"
        ) from error
    except OSError as error:
        raise NoReading(f"{path} cannot be read: {error.strerror}") from error


def _why_absent(cpuinfo: Path) -> str:
    with suppress(OSError):
        text = cpuinfo.read_text(errors="replace")
        if any(line.startswith("flags") and "hypervisor" in line.split() for line in text.splitlines()):
            return "this is a virtual machine, and its hypervisor does not pass RAPL on"
    return "this kernel or container does not show RAPL, or the CPU has none"


SYSTEM = Path("/sys")
CLOCK = "cpu_clock"
_CLOCKS = "devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"
# Kernel drivers of sensors in processors.
_CHIPS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal"})


class HostDevice(AbsentDevice):
    """A processor: clock and temperature by files; other queries have a reason instead."""

    silent = False

    def __init__(self, reason: str, root: Path = SYSTEM) -> None:
        super().__init__(reason)
        self._clocks, self._heats = sorted(root.glob(_CLOCKS)), sorted(_sensors(root))

    @property
    def tells(self) -> bool:
        return bool(self._clocks or self._heats)

    def glance(self) -> Readings:
        state = {CLOCK: _highest(self._clocks, 1e3, "Hz"), "temperature": _highest(self._heats, 1e-3, "degC")}
        return {**super().glance(), **state}

    def changing(self) -> Readings:
        return self.glance()


def _sensors(root: Path) -> Iterator[Path]:
    for name in root.glob("class/hwmon/hwmon*/name"):
        try:
            is_processor = name.read_text().strip() in _CHIPS
        except (OSError, UnicodeError):
            continue
        yield from name.parent.glob("temp*_input") if is_processor else ()


def _highest(files: list[Path], factor: float, unit: str) -> Read:
    def read() -> Reading:
        values: list[float] = []
        for file in files:
            try:
                values.append(float(file.read_text()))
            except (OSError, ValueError):
                continue
        if not values:
            raise NoReading("the kernel has no file for it")
        return positive(max(values) * factor, unit, "sysfs")

    return attempt(read)
