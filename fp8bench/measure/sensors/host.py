"""How a processor is just now, by files of the kernel: the clock of its fastest core, the heat of its hottest sensor.

Many virtual machines have neither. No clock of a core is that of a case: a thread moves from core to core.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fp8bench.measure.sensors.nvml import AbsentDevice
from fp8bench.model.readings import NoReading, Read, Reading, Readings, attempt, positive

ROOT = Path("/sys")
CLOCK = "cpu_clock"
_CLOCKS = "devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"
# The kernel's drivers of sensors in processors.
_CHIPS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal"})


class HostDevice(AbsentDevice):
    """A processor; what only a driver could tell it answers with the reason."""

    silent = False

    def __init__(self, why: str, root: Path = ROOT) -> None:
        super().__init__(why)
        self._clocks, self._heats = sorted(root.glob(_CLOCKS)), sorted(_sensors(root))

    @property
    def tells(self) -> bool:
        return bool(self._clocks or self._heats)

    def glance(self) -> Readings:
        told = {CLOCK: _highest(self._clocks, 1e3, "Hz"), "temperature": _highest(self._heats, 1e-3, "degC")}
        return {**super().glance(), **told}

    def changing(self) -> Readings:
        return self.glance()


def _sensors(root: Path) -> Iterator[Path]:
    for name in root.glob("class/hwmon/hwmon*/name"):
        try:
            known = name.read_text().strip() in _CHIPS
        except (OSError, UnicodeError):
            continue
        yield from name.parent.glob("temp*_input") if known else ()


def _highest(files: list[Path], factor: float, unit: str) -> Read:
    def read() -> Reading:
        found = []
        for file in files:
            try:
                found.append(float(file.read_text()))
            except (OSError, ValueError):
                continue
        if not found:
            raise NoReading("the kernel has no file that tells it")
        return positive(max(found) * factor, unit, "sysfs")

    return attempt(read)
