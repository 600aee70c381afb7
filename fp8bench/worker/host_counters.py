"""Reads counters of the operating system for this process and the machine: memory, preemptions, time taken by a
hypervisor, and time spent waiting for a core.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from fp8bench.model.readings import NoReading, Reading, ReadingOrUnavailable, Readings, try_reading

PROC_FOLDER = Path("/proc")
_KIB = 1024
# The index of stolen time in a line of the file: 'cpu', user, nice, system, idle, iowait, irq, softirq, steal.
_STOLEN_TIME_FIELD_INDEX = 8
_MAX_LINE_BYTES = 512
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Writing this to clear_refs resets the peak of resident memory (VmHWM).
_RESET_PEAK_MEMORY_COMMAND = "5"


def read_counters(proc: Path = PROC_FOLDER) -> Readings:
    """Returns counters that only grow. `readings.subtract_counters` gives their growth over an interval.

    `preemptions` counts how often the system took the core away from this process while it had work. `steal` is the
    time in which a hypervisor ran something else while this machine had work, summed over its processors. `waited` is
    the time in which the calling thread had work but no core. A sleeping thread does not wait in this sense.
    """
    return {
        "preemptions": Reading(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, "", "getrusage"),
        "steal": try_reading(lambda: _read_steal_time(proc)),
        "waited": try_reading(lambda: _read_wait_time(proc)),
    }


def read_resident_memory(proc: Path = PROC_FOLDER) -> Readings:
    return {"rss": _read_memory_status(proc, "VmRSS"), "rss_high_water": _read_memory_status(proc, "VmHWM")}


def reset_peak_resident_memory(proc: Path = PROC_FOLDER) -> ReadingOrUnavailable:
    """Resets the highest resident memory that the system has recorded to the present size. Returns the new value, or
    the reason why it could not be reset.
    """
    return try_reading(lambda: _reset_peak_memory(proc))


def _reset_peak_memory(proc: Path) -> Reading:
    path = proc / "self" / "clear_refs"
    old_peak_bytes = _read_status_bytes(proc, "VmHWM")
    try:
        path.write_text(_RESET_PEAK_MEMORY_COMMAND)
    except OSError as error:
        raise NoReading(f"{path} cannot be written: {error.strerror}") from error
    new_peak_bytes = _read_status_bytes(proc, "VmHWM")
    resident_bytes = _read_status_bytes(proc, "VmRSS")
    # Some systems accept the command without resetting the peak. A peak of about the present size counts as reset.
    if new_peak_bytes >= old_peak_bytes and new_peak_bytes > 1.01 * resident_bytes:
        raise NoReading(f"{path} was written, but the peak stayed at {new_peak_bytes} B")
    return Reading(new_peak_bytes, "B", str(path))


def _read_memory_status(proc: Path, name: str) -> ReadingOrUnavailable:
    return try_reading(lambda: Reading(_read_status_bytes(proc, name), "B", f"{proc}/self/status {name}"))


def _read_status_bytes(proc: Path, name: str) -> int:
    """Reads the number of bytes from a line of /proc/self/status such as 'VmHWM: 1644 kB'."""
    path = proc / "self" / "status"
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise NoReading(f"{path} cannot be read: {error.strerror}") from error
    for line in lines:
        fields = line.split()
        if fields[:1] == [f"{name}:"] and len(fields) == 3 and fields[1].isdecimal():
            return int(fields[1]) * _KIB
    raise NoReading(f"{path} has no {name}")


def _read_steal_time(proc: Path) -> Reading:
    fields = _split_first_line(path := f"{proc}/stat")
    if fields[:1] == [b"cpu"] and len(fields) > _STOLEN_TIME_FIELD_INDEX and fields[_STOLEN_TIME_FIELD_INDEX].isdigit():
        return Reading(int(fields[_STOLEN_TIME_FIELD_INDEX]) / _TICKS_PER_SECOND, "s", path)
    raise NoReading(f"{path} does not report stolen time")


def _read_wait_time(proc: Path) -> Reading:
    # The file has three numbers: nanoseconds on a core, nanoseconds waiting for a core, and time slices.
    fields = _split_first_line(path := f"{proc}/thread-self/schedstat")
    if len(fields) == 3 and fields[1].isdigit():
        return Reading(int(fields[1]) * 1e-9, "s", path)
    raise NoReading(f"{path} does not report how long a thread waited")


def _split_first_line(path: str) -> list[bytes]:
    """Splits the first line of a file into words. It does not use pathlib, which takes three times as long, because it
    runs before and after each timed slot.
    """
    try:
        file_descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.read(file_descriptor, _MAX_LINE_BYTES).partition(b"\n")[0].split()
        finally:
            os.close(file_descriptor)
    except OSError as error:
        raise NoReading(f"{path} cannot be read: {error.strerror}") from error
