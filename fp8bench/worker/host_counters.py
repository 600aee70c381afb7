"""Counters of the operating system for this process and the machine: memory, and who had the core."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from fp8bench.model.readings import NoReading, Read, Reading, Readings, attempt

PROC = Path("/proc")
_KIB = 1024
# 'cpu' and the numbers after it: user, nice, system, idle, iowait, irq, softirq, steal.
_STEAL = 8
_FIRST_LINE = 512
_TICKS = os.sysconf("SC_CLK_TCK")
_RESET_HIGH_WATER = "5"


def counters(proc: Path = PROC) -> Readings:
    """Returns counts that only grow; `readings.grown` gives their growth over an interval.

    `preemptions` counts how often the system took the core away although the process had work. `steal` is how long a
    hypervisor ran something else while this machine wanted to work, summed over its processors. `waited` is how long
    the calling thread had work and no core; a sleeping step does not wait.
    """
    return {
        "preemptions": Reading(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, "", "getrusage"),
        "steal": attempt(lambda: _steal_time(proc)),
        "waited": attempt(lambda: _wait_time(proc)),
    }


def memory(proc: Path = PROC) -> Readings:
    return {"rss": _resident(proc, "VmRSS"), "rss_high_water": _resident(proc, "VmHWM")}


def reset_high_water(proc: Path = PROC) -> Read:
    """Resets the peak to the present resident size; returns the new peak, or why it was not reset."""
    return attempt(lambda: _reset(proc))


def _reset(proc: Path) -> Reading:
    path = proc / "self" / "clear_refs"
    old_mark = _status(proc, "VmHWM")
    try:
        path.write_text(_RESET_HIGH_WATER)
    except OSError as error:
        raise NoReading(f"{path} cannot be written: {error.strerror}") from error
    mark, resident = _status(proc, "VmHWM"), _status(proc, "VmRSS")
    if mark >= old_mark and mark > 1.01 * resident:
        raise NoReading(f"{path} was written, but the peak stayed at {mark} B")
    return Reading(mark, "B", str(path))


def _resident(proc: Path, name: str) -> Read:
    return attempt(lambda: Reading(_status(proc, name), "B", f"{proc}/self/status {name}"))


def _status(proc: Path, name: str) -> int:
    """Returns the bytes of a line such as 'VmHWM:  1644 kB'."""
    for line in _lines(proc / "self" / "status"):
        words = line.split()
        if words[:1] == [f"{name}:"] and len(words) == 3 and words[1].isdecimal():
            return int(words[1]) * _KIB
    raise NoReading(f"{proc}/self/status has no {name}")


def _steal_time(proc: Path) -> Reading:
    words = _first_words(path := f"{proc}/stat")
    if words[:1] == [b"cpu"] and len(words) > _STEAL and words[_STEAL].isdigit():
        return Reading(int(words[_STEAL]) / _TICKS, "s", path)
    raise NoReading(f"{path} does not report stolen time")


def _wait_time(proc: Path) -> Reading:
    # The file holds nanoseconds on a core, nanoseconds in the queue for one, and turns.
    words = _first_words(path := f"{proc}/thread-self/schedstat")
    if len(words) == 3 and words[1].isdigit():
        return Reading(int(words[1]) * 1e-9, "s", path)
    raise NoReading(f"{path} does not report how long a thread waited")


def _first_words(path: str) -> list[bytes]:
    """Splits a file's first line. Avoids pathlib, which takes three times as long, because this runs around every
    slot."""
    try:
        opened = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise NoReading(f"{path} cannot be read: {error.strerror}") from error
    try:
        return os.read(opened, _FIRST_LINE).partition(b"\n")[0].split()
    except OSError as error:
        raise NoReading(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(opened)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise NoReading(f"{path} cannot be read: {error.strerror}") from error
