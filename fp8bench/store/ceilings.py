"""What a machine's devices can do at most: `<store>/ceilings` has a file for each device with its software.

Quick looks and whole ceilings are in separate files. Whole ones are measured piece by piece under stated settings; each
piece is kept, so that an interrupted measurement goes on. `history.jsonl` has all whole ceilings, one a line, and so
shows whether a machine became slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import locked, safe, sealed_line, unsealed_line, write_whole
from fp8bench.model import Ceilings, DeviceFacts, Environment, Scalar
from fp8bench.model.run import SWITCHES_SET
from fp8bench.store.kept_lines import Log

# Raised when something else is measured under the same names.
_VERSION = 2
# Facts of the environment that tell ceilings apart.
_FACTS = ("machine", "torch", "env_ONEDNN_MAX_CPU_ISA", "env_NVIDIA_TF32_OVERRIDE")
# Whole ceilings also depend on these, the latter for each device, by its driver.
_SETTINGS = ("threads", SWITCHES_SET, "cpu_governor", "cpu_turbo_off", "cgroup_cpu_max")
_OF_DEVICE = ("driver", "power_cap", "sm_clock_max", "memory_clock_max", "mig", "partition")
# The name of a file of pieces begins so until all have been measured.
_BEGUN = "begun "


def ceilings_of(
    store: Path, environment: Environment, device: DeviceFacts, measure: Callable[[], Ceilings] | None
) -> Ceilings | None:
    """Returns the whole ceilings that are kept of a device, else a quick look at it, which `measure` takes and which is
    then kept; None if nothing is kept and there is no `measure`.

    It holds a lock: of two runs that ask at once the second finds what the first has measured.
    """
    with locked(store / "ceilings"):
        kept = ((_read(_log(store, machine_file(environment, device, whole))), whole) for whole in (True, False))
        known = next((ceilings for ceilings, whole in kept if ceilings is not None and ceilings.whole is whole), None)
        return known if known is not None or measure is None else _keep(store, environment, device, measure())


def new_ceilings(
    store: Path,
    environment: Environment,
    device: DeviceFacts,
    measure: Callable[[Ceilings | None, Callable[[Ceilings], None]], Ceilings],
) -> Ceilings:
    """Measures whole ceilings, whatever is kept, and keeps them.

    `measure` is given the pieces that an interrupted measurement under the same settings left, None without one, and a
    function that keeps each new piece.
    """
    with locked(store / "ceilings"):
        begun = _log(store, _BEGUN + machine_file(environment, device, True))
        ceilings = _keep(store, environment, device, measure(_read(begun), partial(_try_writing, begun)))
        with contextlib.suppress(OSError):
            begun.path.unlink()
        return ceilings


def _keep(store: Path, environment: Environment, device: DeviceFacts, ceilings: Ceilings) -> Ceilings:
    """Adds the time and the settings, and writes the file; whole ceilings go into the history, too."""
    under = tuple(
        (name, setting) for name, setting in _settings(environment, device, True).items() if setting is not None
    )
    kept = replace(ceilings, when=datetime.now(UTC).isoformat(timespec="seconds"), under=under)
    if ceilings.whole:
        with contextlib.suppress(StoreError):
            _log(store).append([kept])
    _try_writing(_log(store, machine_file(environment, device, ceilings.whole)), kept)
    return kept


def history_of_ceilings(store: Path) -> list[Ceilings]:
    """Returns all whole ceilings that were measured in a store, oldest first."""
    # A merge appends another store's, which may be older.
    return sorted(_log(store).values(), key=lambda ceilings: ceilings.when)


def merge_ceilings(store: Path, other: Path) -> int:
    """Takes ceilings of another store that are not here or are newer; returns how many those are."""
    names = [path.name for path in sorted((other / "ceilings").glob("*.json")) if not path.name.startswith(_BEGUN)]
    theirs = {name: ceilings for name in names if (ceilings := _read(_log(other, name)))}
    past = _log(other).lines()[0]
    if not theirs and not past:
        return 0
    with locked(store / "ceilings"):
        new = _log(store).merge(past)
        for name, ceilings in theirs.items():
            ours = _read(_log(store, name))
            if ours is None or ours.when < ceilings.when:
                _write(_log(store, name), ceilings)
                new += [] if ceilings in new else [ceilings]
    return len(new)


def _log(store: Path, name: str = "history.jsonl") -> Log[Ceilings]:
    return Log(store / "ceilings" / name, {"ceilings": Ceilings}, "ceilings", _VERSION)


def _read(log: Log[Ceilings]) -> Ceilings | None:
    """Returns None where there is no such file or it is broken; both mean that the device is measured again."""
    try:
        return log.read(unsealed_line(log.path.read_bytes().strip())[0])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _try_writing(log: Log[Ceilings], ceilings: Ceilings) -> None:
    with contextlib.suppress(OSError):  # they can be used without being kept
        _write(log, ceilings)


def _write(log: Log[Ceilings], ceilings: Ceilings) -> None:
    write_whole(log.path, f"{sealed_line(log.content_of(ceilings))}\n")


def _settings(environment: Environment, device: DeviceFacts, whole: bool) -> dict[str, Scalar | None]:
    names = (*_FACTS, *_SETTINGS, *(f"{device.key} {name}" for name in _OF_DEVICE)) if whole else _FACTS
    return {name: environment.get(name) for name in names} | {"device": device.key, "name": device.name}


def machine_file(environment: Environment, device: DeviceFacts, whole: bool = True) -> str:
    """Returns the name of a device's file, which differs by software, and for `whole` ceilings by settings."""
    words = [str(setting) for setting in _settings(environment, device, whole).values() if setting not in (None, "")]
    return f"{safe(' '.join([*(['whole'] if whole else []), *words]))}.json"
