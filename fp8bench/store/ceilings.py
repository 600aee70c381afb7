"""What a machine's devices can do at most, kept in `<store>/ceilings`: a file for each device with its software.

A quick look and whole ceilings lie in files of their own, the latter with the settings that they hold for; they come
first. Whole ones are measured piece by piece, each of which is kept: what an interruption leaves is gone on with. All
of them stand in `history.jsonl`, a line each, which says whether a machine became slower.
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
# Facts of the environment that say whose ceilings they are, or change them; of whole ones the settings too, and what
# the driver says of the device.
_FACTS = ("machine", "torch", "env_ONEDNN_MAX_CPU_ISA", "env_NVIDIA_TF32_OVERRIDE")
_SETTINGS = ("threads", SWITCHES_SET, "cpu_governor", "cpu_turbo_off", "cgroup_cpu_max")
# Before the name of a file in which pieces are kept until all have been measured.
_BEGUN = "begun "
_OF_DEVICE = ("driver", "power_cap", "sm_clock_max", "memory_clock_max", "mig", "partition")


def ceilings_of(
    store: Path, environment: Environment, device: DeviceFacts, measure: Callable[[], Ceilings] | None
) -> Ceilings | None:
    """What is known of a device: whole ceilings, or a quick look; what is not is measured and kept, where somebody
    measures.

    Two runs that ask at once measure one after the other, which would disturb each other otherwise, and the second one
    finds what the first one kept.
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
    """Whole ones, measured now, whatever is known, and kept.

    `measure` is given what an interrupted measurement has come to under the same settings, None where there is none,
    and whom to hand each piece that it measures, which is then on the disk.
    """
    with locked(store / "ceilings"):
        begun = _log(store, _BEGUN + machine_file(environment, device, True))
        ceilings = _keep(store, environment, device, measure(_read(begun), partial(_try_writing, begun)))
        with contextlib.suppress(OSError):
            begun.path.unlink()
        return ceilings


def _keep(store: Path, environment: Environment, device: DeviceFacts, ceilings: Ceilings) -> Ceilings:
    """With the moment and the settings; whole ones are one more of their history, too."""
    under = tuple(
        (name, setting) for name, setting in _settings(environment, device, True).items() if setting is not None
    )
    kept = replace(ceilings, when=datetime.now(UTC).isoformat(timespec="seconds"), under=under)
    log = _log(store, machine_file(environment, device, ceilings.whole))
    before = _read(log)
    if ceilings.whole:  # those of an fp8bench that kept no history are the first of it
        first = [before] if before is not None and before not in history_of_ceilings(store) else []
        with contextlib.suppress(StoreError):
            _log(store).append([*first, kept])
    _try_writing(log, kept)
    return kept


def history_of_ceilings(store: Path) -> list[Ceilings]:
    """All whole ceilings that were measured in a store, oldest first; lines that are broken are left out."""
    # Those of another store were taken in behind ours.
    return sorted(_log(store).values(), key=lambda ceilings: ceilings.when)


def merge_ceilings(store: Path, other: Path) -> int:
    """Take in those of another store that are not here, or newer than ours; returns how many those are."""
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
    """What is in a file of the folder: one value, but for the history."""
    return Log(store / "ceilings" / name, {"ceilings": Ceilings}, "ceilings", _VERSION)


def _read(log: Log[Ceilings]) -> Ceilings | None:
    """None where there is no such file, or it is broken: then it is measured once more."""
    try:
        content, _ = unsealed_line(log.path.read_bytes().strip())  # of several lines, where an older version wrote it
        return log.read(content)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _try_writing(log: Log[Ceilings], ceilings: Ceilings) -> None:
    with contextlib.suppress(OSError):  # whoever cannot keep it can use it
        _write(log, ceilings)


def _write(log: Log[Ceilings], ceilings: Ceilings) -> None:
    write_whole(log.path, f"{sealed_line(log.written(ceilings))}\n")


def _settings(environment: Environment, device: DeviceFacts, whole: bool) -> dict[str, Scalar | None]:
    names = (*_FACTS, *_SETTINGS, *(f"{device.key} {name}" for name in _OF_DEVICE)) if whole else _FACTS
    return {name: environment.get(name) for name in names} | {"device": device.key, "name": device.name}


def machine_file(environment: Environment, device: DeviceFacts, whole: bool = True) -> str:
    """The name of a file on a device: other software is another file, and where it is `whole` other settings are."""
    words = [str(setting) for setting in _settings(environment, device, whole).values() if setting not in (None, "")]
    return f"{safe(' '.join([*(['whole'] if whole else []), *words]))}.json"
