"""Reads a device's settings from its driver: facts for the environment of a run, and lines for the doctor.

Names in the environment begin with the device's key ('cuda:0 power_cap'). Power is in watts, clocks in hertz, memory
in bytes. An unknown value is None, and '<key> unknown' has the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing

from fp8bench import units
from fp8bench.measure.sensors.energy import SourceKind
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import NVML_LIBRARY, AbsentDevice, Library, list_devices
from fp8bench.model import DeviceFacts, Scalar
from fp8bench.model.consumed import list_throttle_reasons
from fp8bench.model.readings import NoReading, Reading, UnavailableReading, describe_missing_readings

# The facts from the driver that are stored in the environment. The device's name is stored elsewhere.
_STORED_FACT_NAMES = (
    "driver",
    "cuda_driver",
    "uuid",
    "pci",
    "vbios",
    "power_cap",
    "power_cap_default",
    "sm_clock_max",
    "memory_clock_max",
    "persistence",
    "ecc",
    "mig",
)

# For each line of `fp8bench doctor`: the driver's values in this line, and a template for the text of each value.
_DOCTOR_LINE_TEMPLATES = {
    "driver": {"driver": "{}", "cuda_driver": "CUDA up to {}", "uuid": "{}", "pci": "PCI {}"},
    "settings": {
        "power_cap": "power cap {}",
        "sm_clock_max": "clock up to {}",
        "ecc": "ECC {}",
        "mig": "MIG {}",
        "persistence": "persistence mode {}",
    },
    "now": {
        "power": "{}",
        "sm_clock": "clock {}",
        "temperature": "{}",
        "memory_used": "{} used",
        "throttle": "clocks {}",
    },
}


def _format_reading(name: str, readings: Mapping[str, Reading]) -> str:
    value, unit = readings[name].value, readings[name].unit
    if name == "power_cap":
        default_power_cap = readings["power_cap_default"].value if "power_cap_default" in readings else value
        return f"{value:g} W" + (f" of {default_power_cap:g} W" if default_power_cap != value else "")
    if unit == "mask":
        limiting_reasons = ", ".join(list_throttle_reasons(int(value)))
        return f"held back by {limiting_reasons}" if limiting_reasons else "not held back"
    if unit == "B":
        return units.size(readings[name].number)
    if unit == "Hz":
        return units.count(readings[name].number, unit)
    if unit == "degC":
        return f"{value:g} degC"
    return f"{value:.0f} W" if unit == "W" else str(value)


def read_device_settings(facts: DeviceFacts, meter: Meter) -> dict[str, Scalar | None]:
    """Returns a device's settings and energy source. A processor without a driver has only an energy source."""
    state: dict[str, Scalar | None] = {}
    if facts.accelerated or not isinstance(meter.device, AbsentDevice):
        stored_facts = {name: fact for name, fact in meter.device.facts().items() if name in _STORED_FACT_NAMES}
        state = {
            name: None if isinstance(fact, UnavailableReading) else fact.value for name, fact in stored_facts.items()
        }
        state["unknown"] = "; ".join(describe_missing_readings(stored_facts)) or None
    state["energy_source"] = meter.kind.value
    state["energy_period"] = _find_counter_period(meter)
    state["energy_why"] = meter.why or None
    return {f"{facts.key} {name}": value for name, value in state.items()}


def format_device_lines(meter: Meter) -> Iterator[str]:
    """Yields lines about driver, limits, modes and present state, and about the energy source or why it is missing."""
    if not isinstance(meter.device, AbsentDevice):
        facts, state = meter.device.facts(), meter.device.state()
        readings = {name: read for name, read in {**facts, **state}.items() if isinstance(read, Reading)}
        for title, templates in _DOCTOR_LINE_TEMPLATES.items():
            value_texts = [
                template.format(_format_reading(name, readings))
                for name, template in templates.items()
                if name in readings
            ]
            yield f"{title:10}{', '.join(value_texts) or 'no values'}"
        if reasons := describe_missing_readings(facts, state):
            yield f"unknown   {'; '.join(reasons)}"
    yield f"energy    {describe_energy_source(meter)}"


def describe_driver(library: Library = NVML_LIBRARY) -> str:
    """Returns a text about NVIDIA's driver and the number of devices that it lists, which torch may not see."""
    try:
        library.open()
        with closing(library):
            driver_version = library.call_within_timeout(lambda: library.call("nvmlSystemGetDriverVersion"))
            devices, reasons = library.call_within_timeout(lambda: list_devices(library.call))
    except NoReading as failure:
        return f"NVML says: {failure.reason}"
    return "; ".join([f"driver {driver_version}, {len(devices)} device(s)", *reasons])


def describe_energy_source(meter: Meter) -> str:
    """Describes the energy source, for example 'counter, changes every 100 ms', or why it is missing."""
    if meter.kind is SourceKind.NONE:
        return f"cannot be measured: {meter.why}"
    energy_counter_period = _find_counter_period(meter)
    energy_source_phrases = [
        meter.kind.value + (f", changes every {units.seconds(energy_counter_period)}" if energy_counter_period else "")
    ]
    energy_source_phrases += [f"no better source: {meter.why}"] if meter.why else []
    return "; ".join(energy_source_phrases)


def _find_counter_period(meter: Meter) -> float | None:
    source = meter.source
    return source.counter_rhythm.period if source is not None and source.counter_rhythm is not None else None
