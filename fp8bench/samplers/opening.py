"""The meter of a device: NVML for NVIDIA's, RAPL for the processor, and a reason for all others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fp8bench.model import DeviceFacts
from fp8bench.samplers import nvml_queries as queries
from fp8bench.samplers import rapl
from fp8bench.samplers.absent import AbsentDevice
from fp8bench.samplers.clock import HOST, Clock
from fp8bench.samplers.matching import Identity
from fp8bench.samplers.meter import Meter
from fp8bench.samplers.nvml import NvmlDevice
from fp8bench.samplers.nvml_library import LIBRARY, Library
from fp8bench.samplers.readings import NoReading
from fp8bench.samplers.sources import Source, SourceKind

# The NVML device (UUID or PCI address) to read whatever the device of the cases is.
NVML_DEVICE = "FP8BENCH_NVML_DEVICE"
_UNWANTED = "--no-energy was given"
# What power readings of the average kind are an average over.
_AVERAGED = 1.0


def meter_for(facts: DeviceFacts, environ: Mapping[str, str] = os.environ, energy: bool = True) -> Meter:
    """The meter of a device that cases run on; opens it. Takes up to 3 s per source that has to be tried.

    Without `energy` none is tried: the device can be asked how it is, and its windows say that nobody wanted them.
    """
    named = environ.get(NVML_DEVICE, "")
    if named:
        by_address = named.count(":") > 0
        identity = Identity(uuid="" if by_address else named, pci=named if by_address else "")
        return nvml_meter(identity, environ, energy=energy)
    if facts.kind == "cpu":
        return rapl_meter(energy=energy)
    if facts.hip:
        return Meter((), AbsentDevice("NVML knows NVIDIA's devices only"), "NVML knows NVIDIA's devices only")
    return nvml_meter(Identity(facts.index, facts.uuid, facts.pci), environ, energy=energy)


def nvml_meter(
    identity: Identity,
    environ: Mapping[str, str] = os.environ,
    clock: Clock = HOST,
    library: Library = LIBRARY,
    energy: bool = True,
) -> Meter:
    """The meter of the device that CUDA knows by that identity."""
    try:
        device = NvmlDevice(identity, environ, library)
    except NoReading as failure:
        return Meter((), AbsentDevice(failure.reason), failure.reason, clock)
    if not energy:
        return Meter((), device, _UNWANTED, clock)
    if device.shared_by > 1:
        why = f"{device.shared_by} MIG instances share the GPU, and its energy is known as a whole only"
        return Meter((), device, why, clock)
    sources = (
        Source(SourceKind.COUNTER, lambda: queries.energy(device.ask).number),
        Source(SourceKind.INSTANT, lambda: queries.instant_power(device.ask).number),
        Source(SourceKind.AVERAGE, lambda: queries.average_power(device.ask).number, settle=_AVERAGED),
    )
    return Meter(sources, device, "", clock, library.patience, library.give_up)


def rapl_meter(root: Path = rapl.ROOT, clock: Clock = HOST, energy: bool = True) -> Meter:
    """The meter of the processor's packages and their memory."""
    absent = AbsentDevice("a processor has no NVML")
    if not energy:
        return Meter((), absent, _UNWANTED, clock)
    try:
        counter = rapl.Counter(rapl.domains(root), clock.now)
    except NoReading as failure:
        return Meter((), absent, failure.reason, clock)
    return Meter((Source(SourceKind.RAPL, counter.read),), absent, "", clock)
