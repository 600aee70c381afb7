"""Builds this folder's library with gcc and controls it through a mapped file.

In this process: `load()` before any use of NVML. For a new process: `environment()`, which puts the library first in
LD_LIBRARY_PATH, so that `import pynvml` finds it. README.md explains how to run a suite with it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
from ctypes import c_char, c_double, c_int64
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
STATE = "FP8BENCH_TEST_NVML"
SONAME = "libnvidia-ml.so.1"
FOREVER = 2**63 - 1
GIGABYTE = 2**30
CONSTANT, SQUARE, SINE, TOLD = range(4)
_DEVICES, _INSTANCES, _PROCESSES, _FAULTS, _FUNCTIONS, _VIOLATIONS, CHANGES = 4, 4, 4, 4, 64, 5, 32768


class Instance(ctypes.Structure):
    """A MIG instance, as in state.h."""

    _fields_ = (("uuid", c_char * 96), ("memory_total", c_int64), ("memory_used", c_int64))


class Device(ctypes.Structure):
    """A device, as in state.h."""

    _fields_ = (
        *(("name", c_char * 96), ("uuid", c_char * 96), ("pci", c_char * 32), ("curve", c_int64)),
        *((name, c_double) for name in ("low", "high", "hertz", "phase")),
        *((name, c_int64) for name in ("period_ns", "jitter_ns", "offset_ns", "base_mj", "drop_at_ns", "drop_mj")),
        *((name, c_int64) for name in ("sensor_ns", "average_ns", "lost_at_ns")),
        *((name, c_int64) for name in ("reasons", "more_reasons", "more_from_ns", "more_until_ns")),
        *((name, c_int64) for name in ("sm_mhz", "memory_mhz", "max_sm_mhz", "max_memory_mhz", "celsius")),
        *((name, c_int64) for name in ("cap_mw", "default_cap_mw", "enforced_cap_mw")),
        *((name, c_int64) for name in ("ecc", "mig", "persistence", "busy_percent", "memory_busy_percent")),
        *((name, c_int64) for name in ("memory_total", "memory_used", "memory_reserved")),
        ("violation", c_double * _VIOLATIONS),
        *(("processes", c_int64), ("pid", c_int64 * _PROCESSES), ("process_bytes", c_int64 * _PROCESSES)),
        *(("instances", c_int64), ("instance", Instance * _INSTANCES)),
    )


class Fault(ctypes.Structure):
    """A fault, as in state.h."""

    _fields_ = (("function", c_char * 64), *((name, c_int64) for name in ("code", "first", "last", "delay_ns")))


class Change(ctypes.Structure):
    """Another power, as in state.h."""

    _fields_ = (("at_ns", c_int64), ("joules", c_double), ("watts", c_double))


class State(ctypes.Structure):
    """The library's whole state, as in state.h."""

    _fields_ = (
        *((name, c_int64) for name in ("size", "is_virtual", "now_ns", "call_ns", "inits", "shutdowns")),
        *(("devices", c_int64), ("faults", c_int64)),
        *(("device", Device * _DEVICES), ("fault", Fault * _FAULTS), ("calls", c_int64 * _FUNCTIONS)),
        *(("changes", c_int64), ("change", Change * CHANGES)),
    )


def why_not() -> str:
    """Why the library cannot be built here; '' if it can."""
    return "" if shutil.which("gcc") else "needs gcc (Debian: apt-get install gcc), and this machine has none"


def build(folder: Path, *options: str) -> Path:
    """Builds the library into a folder; `-DOLD_DRIVER` omits functions that older drivers lack."""
    path = folder / SONAME
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", *options, f"-Wl,-soname,{SONAME}"]
    subprocess.run(["gcc", *flags, "-o", str(path), str(SOURCE), "-lm"], check=True)
    return path


class Simulation:
    """The devices, the clock and the faults of one library, in a file; `state` is what the library sees."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self.path = library.with_suffix(".state")
        self.path.write_bytes(bytes(ctypes.sizeof(State)))
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(State))
        self.state = State.from_buffer(self._map)
        self.reset()

    def load(self) -> ctypes.CDLL:
        """Loads the library. Its soname makes pynvml's search find it too."""
        os.environ[STATE] = str(self.path)
        self.loaded = loaded = ctypes.CDLL(str(self.library))
        loaded.fp8bench_function.restype = ctypes.c_char_p
        loaded.fp8bench_joules.restype = loaded.fp8bench_watts.restype = c_double
        return loaded

    def environment(self) -> dict[str, str]:
        """Environment variables by which a process finds the library, and the library its state."""
        folders = [str(self.library.parent), *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
        return {**os.environ, STATE: str(self.path), "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}

    def reset(self) -> Device:
        """One healthy device of 300 W, the host's clock, no faults; counters are zero."""
        ctypes.memset(ctypes.byref(self.state), 0, ctypes.sizeof(State))
        self.state.size = ctypes.sizeof(State)
        return self.add("Test GPU", 1)

    def add(self, name: str, number: int) -> Device:
        """Adds a device; UUID and PCI address are derived from the number."""
        device = self.state.device[self.state.devices]
        self.state.devices += 1
        device.name, device.uuid, device.pci = name.encode(), uuid_of(number).encode(), pci_of(number).encode()
        device.curve, device.low, device.high, device.hertz = CONSTANT, 300.0, 300.0, 1.0
        device.period_ns, device.base_mj, device.drop_at_ns = 100_000_000, 1_000_000, FOREVER
        device.sensor_ns, device.average_ns, device.lost_at_ns = 20_000_000, 1_000_000_000, FOREVER
        device.sm_mhz, device.memory_mhz, device.max_sm_mhz, device.max_memory_mhz = 1755, 2619, 1980, 2619
        device.celsius, device.persistence, device.ecc, device.mig = 55, 1, 1, 0
        device.cap_mw, device.default_cap_mw, device.enforced_cap_mw = 700_000, 700_000, 650_000
        device.busy_percent, device.memory_busy_percent = 98, 40
        device.memory_total, device.memory_used, device.memory_reserved = 80 * GIGABYTE, 3 * GIGABYTE, GIGABYTE
        device.processes, device.pid[0], device.process_bytes[0] = 1, os.getpid(), 2 * GIGABYTE
        return device

    def split(self, device: Device, count: int) -> None:
        """Adds MIG instances to a device; their UUIDs are derived from the device's."""
        device.mig, device.instances = 1, count
        for number, instance in enumerate(device.instance[:count]):
            instance.uuid = device.uuid.replace(b"GPU-", b"MIG-").replace(b"-4000-", b"-5%03d-" % number)
            instance.memory_total, instance.memory_used = 10 * GIGABYTE, GIGABYTE

    def fail(self, function: str, code: int = 0, first: int = 0, last: int = FOREVER, delay: float = 0.0) -> None:
        """Makes calls `first` to `last` of a function return an error, or take `delay` seconds longer."""
        fault = self.state.fault[self.state.faults]
        self.state.faults += 1
        fault.function, fault.code, fault.first, fault.last = function.encode(), code, first, last
        fault.delay_ns = round(delay * 1e9)

    def release(self) -> None:
        """Makes delayed calls return."""
        for fault in self.state.fault:
            fault.delay_ns = 0

    def calls(self) -> dict[str, int]:
        """Call counts by function, without zeros."""
        names = (self.loaded.fp8bench_function(number) for number in range(_FUNCTIONS))
        counts = {name.decode(): self.state.calls[number] for number, name in enumerate(names) if name}
        return {name: count for name, count in counts.items() if count}

    def joules(self, start: float, end: float, device: int = 0) -> float:
        """The true energy between two instants in seconds of the clock."""
        return self.loaded.fp8bench_joules(device, c_double(start), c_double(end))

    def watts(self, at: float, device: int = 0) -> float:
        """The true power at an instant."""
        return self.loaded.fp8bench_watts(device, c_double(at))


def uuid_of(number: int) -> str:
    """The UUID of a device in NVML's format; the first digits differ by device."""
    return f"GPU-{number:08x}-0000-4000-8000-000000000000"


def pci_of(number: int) -> str:
    """The PCI address of a device in NVML's format."""
    return f"00000000:{number * 16:02X}:00.0"
