"""The peak rates of a machine's devices: a file in `<store>/ceilings` for each device, software and settings.

Measurements of the last week are current. `history.jsonl` has all measurements, one a line, and so shows whether a
machine became slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import lock_folder, read_file, sealed_line, unsealed_line, write_whole
from fp8bench.model import Ceilings, DeviceFacts, Environment, Scalar
from fp8bench.model.file_names import safe
from fp8bench.model.run import SWITCHES_SET
from fp8bench.store.kept_lines import Log

# Raised when something else is measured under the same names.
_VERSION = 2
CURRENT_DAYS = 7
# Facts of the environment that distinguish ceilings, and those of each device.
_FACTS = (
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
_OF_DEVICE = ("driver", "power_cap", "sm_clock_max", "memory_clock_max", "mig")


def current_ceilings(
    store: Path, environment: Environment, device: DeviceFacts, measure: Callable[[], Ceilings] | None
) -> Ceilings | None:
    """Returns a device's ceilings of the last week, else those that `measure` takes, which are then stored; None if
    `measure` is None.

    It holds a lock, so that of two simultaneous runs the second uses the measurement of the first.
    """
    with lock_folder(store / "ceilings"):
        stored = _read(_log(store, machine_file(environment, device)))
        if stored is not None and _is_current(stored):
            return stored
        return None if measure is None else _keep(store, environment, device, measure())


def new_ceilings(
    store: Path, environment: Environment, device: DeviceFacts, measure: Callable[[], Ceilings]
) -> Ceilings:
    """Measures ceilings, even if there are current ones, and stores them."""
    with lock_folder(store / "ceilings"):
        return _keep(store, environment, device, measure())


def _is_current(ceilings: Ceilings) -> bool:
    return datetime.now(UTC) - datetime.fromisoformat(ceilings.when) < timedelta(days=CURRENT_DAYS)


def _keep(store: Path, environment: Environment, device: DeviceFacts, ceilings: Ceilings) -> Ceilings:
    """Adds the time and the settings, and writes the file and a line of the history."""
    under = tuple((name, setting) for name, setting in _settings(environment, device).items() if setting is not None)
    stamped = replace(ceilings, when=datetime.now(UTC).isoformat(timespec="seconds"), under=under)
    with contextlib.suppress(StoreError):
        _log(store).append([stamped])
    with contextlib.suppress(OSError):  # they can be used without being kept
        _write(_log(store, machine_file(environment, device)), stamped)
    return stamped


def history_of_ceilings(store: Path) -> list[Ceilings]:
    """Returns all ceilings that were measured in a store, oldest first. Raises StoreError."""
    return _log(store).lines()[0]


def _log(store: Path, name: str = "history.jsonl") -> Log[Ceilings]:
    return Log(store / "ceilings" / name, {"ceilings": Ceilings}, "ceilings", _VERSION)


def _read(log: Log[Ceilings]) -> Ceilings | None:
    """Returns None if the file is missing or broken; both mean that the device is measured again."""
    try:
        return log.read(unsealed_line(read_file(log.path).strip())[0])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _write(log: Log[Ceilings], ceilings: Ceilings) -> None:
    write_whole(log.path, f"{sealed_line(log.content_of(ceilings))}\n")


def _settings(environment: Environment, device: DeviceFacts) -> dict[str, Scalar | None]:
    names = (*_FACTS, *(f"{device.key} {name}" for name in _OF_DEVICE))
    return {name: environment.get(name) for name in names} | {"device": device.key, "name": device.name}


def machine_file(environment: Environment, device: DeviceFacts) -> str:
    """Returns the name of a device's file, which differs by software and settings."""
    words = [str(setting) for setting in _settings(environment, device).values() if setting not in (None, "")]
    return f"{safe(' '.join(['whole', *words]))}.json"
