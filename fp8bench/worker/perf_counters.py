"""Counters of the processor by Linux's perf_event_open: instructions, cycles, loads and misses of caches.

Of the calling thread, in user mode, one event after another: several at once may have to share counters, and what is
then told is an estimate. An event that cannot be counted has a reason.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fp8bench.model import specs
from fp8bench.model.readings import NoReading

# PERF_TYPE_*.
HARDWARE, SOFTWARE, CACHE = 0, 1, 3
_LAST_LEVEL, _READ, _ACCESS, _MISS = 2, 0, 0, 1
_NUMBERS = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319, "s390x": 331}
# Of the first version of perf_event_attr, which every kernel takes.
_ATTRIBUTE = struct.Struct("=IIQQQQQIIQ")
_ENABLED_AND_RUNNING = 1 | 2
_EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 8
_COUNTS = struct.Struct("=QQQ")
DEVICES = Path("/sys/bus/event_source/devices")
PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")


@dataclass(frozen=True)
class PerfEvent:
    """What a kernel is asked for; `name` is that of the figure."""

    name: str
    kind: int
    config: int


EVENTS = (
    PerfEvent(specs.INSTRUCTIONS.name, HARDWARE, 1),
    PerfEvent(specs.CYCLES.name, HARDWARE, 0),
    PerfEvent(specs.CACHE_LOADS.name, CACHE, _LAST_LEVEL | _READ << 8 | _ACCESS << 16),
    PerfEvent(specs.CACHE_LOAD_MISSES.name, CACHE, _LAST_LEVEL | _READ << 8 | _MISS << 16),
    PerfEvent(specs.CACHE_REFERENCES.name, HARDWARE, 2),
    PerfEvent(specs.CACHE_MISSES.name, HARDWARE, 3),
)
# The attribute of an event to a file descriptor; raises OSError.
Open = Callable[[bytes], int]


def _opened(attribute: bytes) -> int:
    number = _NUMBERS.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        raise NoReading(f"perf events are Linux's, on {', '.join(_NUMBERS)}")
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    # This thread, on any processor, in no group.
    found = call(ctypes.c_long(number), attribute, 0, -1, -1, ctypes.c_ulong(_CLOSE_ON_EXEC))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


class Counter:
    """An event that is being counted, until it is closed."""

    def __init__(self, event: PerfEvent, opened: Open = _opened, devices: Path = DEVICES) -> None:
        """Raise NoReading with the reason where it cannot be."""
        flags = 0 if event.kind == SOFTWARE else _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
        attribute = _ATTRIBUTE.pack(
            event.kind, _ATTRIBUTE.size, event.config, 0, 0, _ENABLED_AND_RUNNING, flags, 0, 0, 0
        )
        try:
            self._file = opened(attribute)
        except OSError as error:
            raise NoReading(why_not(error, devices)) from None

    def read(self) -> int:
        """The count so far. Raises NoReading where the counter was somebody else's for a part of the time."""
        found = os.read(self._file, _COUNTS.size)
        if len(found) != _COUNTS.size:
            raise NoReading(f"a perf event gave {len(found)} bytes in the place of {_COUNTS.size}")
        count, enabled, running = _COUNTS.unpack(found)
        if running < enabled:
            raise NoReading("another program holds the processor's counters: end it (perf, a watchdog) and ask again")
        return int(count)

    def close(self) -> None:
        os.close(self._file)


def why_not(error: OSError, devices: Path = DEVICES, paranoid: Path = PARANOID) -> str:
    """Why the kernel counts no such event, and what can be done."""
    if error.errno in (errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL):
        if not any(devices.glob("cpu*")) and not any(devices.glob("armv*")):
            return (
                "the kernel sees no counters of a processor here: a virtual machine whose host passes none on. Ask on "
                "the machine itself, or have the host pass a PMU on"
            )
        return f"this processor has no such counter, or counts it for all programs together ({error.strerror})"
    if error.errno in (errno.EACCES, errno.EPERM):
        try:
            level = int(paranoid.read_text())
        except (OSError, ValueError):
            level = 0
        if level > 2:
            return f"kernel.perf_event_paranoid is {level}: `sysctl kernel.perf_event_paranoid=2`, or CAP_PERFMON"
        return (
            "a filter of system calls forbids perf_event_open, as containers' usual ones do: allow it (docker run "
            "--security-opt seccomp=FILE, or --cap-add PERFMON)"
        )
    if error.errno == errno.ENOSYS:
        return "this kernel, or the sandbox around it, has no perf events"
    return f"the kernel counts no such event: {error.strerror}"


def counted(steps: Callable[[], object], event: PerfEvent, opened: Open = _opened) -> int | str:
    """What an event comes to while `steps` run; or why nobody can say."""
    try:
        counter = Counter(event, opened)
    except NoReading as none:
        return none.reason
    try:
        before = counter.read()
        steps()
        return counter.read() - before
    except NoReading as none:
        return none.reason
    finally:
        counter.close()
