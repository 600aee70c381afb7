"""What Intel's drivers count of a GPU's energy, as Linux shows it under /sys/class/hwmon."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fp8bench.measure.sensors.rapl import Domain, text_of
from fp8bench.model.readings import NoReading

ROOT = Path("/sys/class/hwmon")
_DRIVERS = ("i915", "xe")


def gpu_domain(root: Path = ROOT) -> Domain:
    """The counter of the only Intel GPU, in microjoules. Raises NoReading, also where there are several.

    torch tells no address of a device, and another one's energy would be taken for its own. The first counter is the
    whole card's, or the package's where the driver has one for it alone. It has 64 bits and wraps nowhere.
    """
    found = []
    for sensors in sorted(root.glob("hwmon*")):
        with suppress(NoReading):
            if text_of(sensors / "name") in _DRIVERS and (sensors / "energy1_input").exists():
                found.append(sensors)
    if not found:
        raise NoReading(f"{root} has no energy counter of an Intel GPU (drivers {' and '.join(_DRIVERS)})")
    if len(found) > 1:
        raise NoReading(f"{len(found)} Intel GPUs count their energy, and torch does not tell which of them this is")
    domain = Domain(f"{text_of(found[0] / 'name')} {found[0].name}", found[0] / "energy1_input", None)
    if not text_of(domain.counter).isdecimal():
        raise NoReading(f"the energy counter of {domain.name} says {text_of(domain.counter)[:40]!r}, no number")
    return domain
