"""Stores the ceilings (measured peak rates) of a machine's devices. `<store>/ceilings` has one file for each
combination of device, software and settings.

Ceilings from the last week are used again. `history.jsonl` has all measured ceilings, one measurement per line, so it
shows whether a machine became slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import format_checksummed_line, lock_folder, parse_checksummed_line, read_file, write_whole
from fp8bench.model import Ceilings, DeviceFacts, Environment, Scalar
from fp8bench.model.file_names import make_safe_file_name
from fp8bench.model.run import SWITCHES_SET
from fp8bench.store.kept_lines import Log

# Increase this version when a rate is measured differently under the same name.
_CEILINGS_VERSION = 2
MAX_CEILINGS_AGE_DAYS = 7
# Ceilings (measured peak rates) are stored separately for each combination of these facts of environment and device.
_CEILING_CONDITION_FACTS = (
    "machine",
    "torch",
    "env_ONEDNN_MAX_CPU_ISA",
    "env_NVIDIA_TF32_OVERRIDE",
    "threads",
    SWITCHES_SET,
    "cpu_governor",
    "cpu_turbo_off",
    "cgroup_cpu_max",
)
_CEILING_DEVICE_FACTS = ("driver", "power_cap", "sm_clock_max", "memory_clock_max", "mig")


def find_or_measure_ceilings(
    store: Path, environment: Environment, device: DeviceFacts, measure: Callable[[], Ceilings] | None
) -> Ceilings | None:
    """Returns a device's ceilings from the last week. If there are none, measures and stores them, or returns None if
    `measure` is None.

    Holds a lock, so that the second of two simultaneous runs uses the measurement of the first.
    """
    with lock_folder(store / "ceilings"):
        stored_ceilings = _read_ceilings(_open_ceilings_log(store, ceilings_file_name(environment, device)))
        if stored_ceilings is not None and _are_ceilings_current(stored_ceilings):
            return stored_ceilings
        return None if measure is None else _store_ceilings(store, environment, device, measure())


def remeasure_ceilings(
    store: Path, environment: Environment, device: DeviceFacts, measure: Callable[[], Ceilings]
) -> Ceilings:
    """Measures and stores ceilings (peak rates of a device), even if the stored ceilings are recent."""
    with lock_folder(store / "ceilings"):
        return _store_ceilings(store, environment, device, measure())


def _are_ceilings_current(ceilings: Ceilings) -> bool:
    return datetime.now(UTC) - datetime.fromisoformat(ceilings.when) < timedelta(days=MAX_CEILINGS_AGE_DAYS)


def _store_ceilings(store: Path, environment: Environment, device: DeviceFacts, ceilings: Ceilings) -> Ceilings:
    """Adds the time and settings to ceilings, and writes them to the device's file and to `history.jsonl`."""
    settings = tuple(
        (name, setting)
        for name, setting in _collect_ceiling_settings(environment, device).items()
        if setting is not None
    )
    timestamped_ceilings = replace(ceilings, when=datetime.now(UTC).isoformat(timespec="seconds"), under=settings)
    with contextlib.suppress(StoreError):
        _open_ceilings_log(store).append([timestamped_ceilings])
    with contextlib.suppress(OSError):  # ceilings that cannot be stored are still valid for this run
        log = _open_ceilings_log(store, ceilings_file_name(environment, device))
        write_whole(log.path, f"{format_checksummed_line(log.encode_value(timestamped_ceilings))}\n")
    return timestamped_ceilings


def load_ceilings_history(store: Path) -> list[Ceilings]:
    """Returns all ceilings that were measured in a store, oldest first. Raises StoreError."""
    return _open_ceilings_log(store).lines()[0]


def _open_ceilings_log(store: Path, name: str = "history.jsonl") -> Log[Ceilings]:
    return Log(store / "ceilings" / name, {"ceilings": Ceilings}, "ceilings", _CEILINGS_VERSION)


def _read_ceilings(log: Log[Ceilings]) -> Ceilings | None:
    """Returns the ceilings in a file, or None if the file is missing or broken: then the device is measured
    again.
    """
    try:
        return log.decode_line_value(parse_checksummed_line(read_file(log.path).strip())[0])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _collect_ceiling_settings(environment: Environment, device: DeviceFacts) -> dict[str, Scalar | None]:
    names = (*_CEILING_CONDITION_FACTS, *(f"{device.key} {name}" for name in _CEILING_DEVICE_FACTS))
    return {name: environment.get(name) for name in names} | {"device": device.key, "name": device.name}


def ceilings_file_name(environment: Environment, device: DeviceFacts) -> str:
    """Returns the name of the file with a device's ceilings. It is different for each combination of device, software
    and settings.
    """
    setting_texts = [
        str(setting) for setting in _collect_ceiling_settings(environment, device).values() if setting not in (None, "")
    ]
    return f"{make_safe_file_name(' '.join(['whole', *setting_texts]))}.json"
