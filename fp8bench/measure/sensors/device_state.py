"""What a device is set to, as far as its driver says: facts for the environment of a run, and lines for the doctor.

Names in the environment begin with the device's key ('cuda:0 power_cap'). Powers in watts, clocks in hertz, memory in
bytes. None is not known; '<key> unknown' says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp8bench import units
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import AbsentDevice, listed
from fp8bench.measure.sensors.nvml_library import LIBRARY, Library
from fp8bench.measure.sensors.sampler_thread import SourceKind
from fp8bench.model import DeviceFacts, Scalar
from fp8bench.model.consumed import reasons_in
from fp8bench.model.readings import NoReading, Readings, Unavailable

# Of what the driver says that does not change while a run lasts; names of devices are known already.
_FACTS = (
    "driver", "cuda_driver", "uuid", "pci", "vbios", "power_cap", "power_cap_default", "sm_clock_max",
    "memory_clock_max", "persistence", "ecc", "mig",
)  # fmt: skip


def device_state_of(facts: DeviceFacts, meter: Meter) -> dict[str, Scalar | None]:
    """What a run on this device is made under; of a processor that has no driver, where its energy comes from."""
    found: dict[str, Scalar | None] = {}
    if facts.accelerated or not isinstance(meter.device, AbsentDevice):
        read = {name: one for name, one in meter.device.facts().items() if name in _FACTS}
        found = {name: None if isinstance(one, Unavailable) else one.value for name, one in read.items()}
        found["unknown"] = "; ".join(_reasons(read)) or None
    found["energy_source"] = meter.kind.value
    found["energy_period"] = _period(meter)
    found["energy_call"] = meter.call_seconds
    found["energy_why"] = meter.why or None
    return {f"{facts.key} {name}": value for name, value in found.items()}


def device_lines(meter: Meter) -> Iterator[str]:
    """Driver, limits, modes and how the device is just now; then where its energy comes from, or why it has none."""
    if not isinstance(meter.device, AbsentDevice):
        facts, state = _values(meter.device.facts()), _values(meter.device.state())
        yield f"driver    {_joined(_driver(facts))}"
        yield f"settings  {_joined(_settings(facts))}"
        yield f"now       {_joined(_now(state))}"
        reasons = _reasons({**meter.device.facts(), **meter.device.state()})
        if reasons:
            yield f"unknown   {'; '.join(reasons)}"
    yield f"energy    {energy_source(meter)}"


def driver_state(library: Library = LIBRARY) -> str:
    """Whether NVIDIA's driver is there and what it lists, whatever torch sees of it."""
    try:
        library.open()
    except NoReading as failure:
        return f"NVML says: {failure.reason}"
    try:
        driver = library.bounded(lambda: library.call("nvmlSystemGetDriverVersion"))
        devices, reasons = library.bounded(lambda: listed(library.call))
    except NoReading as failure:
        return f"NVML says: {failure.reason}"
    finally:
        library.close()
    return "; ".join([f"driver {driver}, {len(devices)} device(s)", *reasons])


def energy_source(meter: Meter) -> str:
    """'counter, changes every 100 ms; one look takes 1.2 us', or why there is none."""
    if meter.kind is SourceKind.NONE:
        return f"cannot be measured: {meter.why}"
    period, call = _period(meter), meter.call_seconds
    parts = [meter.kind.value + (f", changes every {units.seconds(period)}" if period else "")]
    parts += [f"one look takes {units.seconds(call)}"] if call else []
    parts += [f"no better one: {meter.why}"] if meter.why else []
    return "; ".join(parts)


def _period(meter: Meter) -> float | None:
    source = meter.source
    return source.rhythm.period if source is not None and source.rhythm is not None else None


def _reasons(readings: Readings) -> list[str]:
    """'ecc, mig: not supported', by reason."""
    names: dict[str, list[str]] = {}
    for name, read in readings.items():
        if isinstance(read, Unavailable):
            names.setdefault(read.reason, []).append(name)
    return [f"{', '.join(found)}: {reason}" for reason, found in names.items()]


def _values(readings: Readings) -> dict[str, Scalar]:
    return {name: read.value for name, read in readings.items() if not isinstance(read, Unavailable)}


def _joined(parts: Iterator[str]) -> str:
    return ", ".join(parts) or "not known"


def _driver(facts: Mapping[str, Scalar]) -> Iterator[str]:
    if "driver" in facts:
        yield str(facts["driver"])
    if "cuda_driver" in facts:
        yield f"CUDA up to {facts['cuda_driver']}"
    if "uuid" in facts:
        yield str(facts["uuid"])
    if "pci" in facts:
        yield f"PCI {facts['pci']}"


def _settings(facts: Mapping[str, Scalar]) -> Iterator[str]:
    cap, default = facts.get("power_cap"), facts.get("power_cap_default")
    if cap is not None:
        of = f" of {default:g} W" if default is not None and default != cap else ""
        yield f"power cap {cap:g} W{of}"
    if "sm_clock_max" in facts:
        yield f"SM clock up to {units.count(float(facts['sm_clock_max']), 'Hz')}"
    for name, words in (("ecc", "ECC"), ("mig", "MIG"), ("persistence", "persistence mode")):
        if name in facts:
            yield f"{words} {facts[name]}"


def _now(state: Mapping[str, Scalar]) -> Iterator[str]:
    if "power" in state:
        yield f"{state['power']:.0f} W"
    if "sm_clock" in state:
        yield f"SM clock {units.count(float(state['sm_clock']), 'Hz')}"
    if "temperature" in state:
        yield f"{state['temperature']:g} degC"
    if "memory_used" in state:
        yield f"{units.size(float(state['memory_used']))} used"
    if "throttle" in state:
        held = reasons_in(int(state["throttle"]))
        yield f"clocks held back by {', '.join(held)}" if held else "clocks not held back"
