"""What a machine's devices can do at most, kept in `<store>/ceilings`: a file for each device with its software.

A quick look and whole ceilings lie in files of their own, the latter with the settings that they hold for; they come
first. Whole ones are measured piece by piece, each of which is kept: what an interruption leaves is gone on with. All
of them stand in `history.jsonl`, a line each, which says whether a machine became slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fp8bench.files import append, end_line, locked, safe, sealed_line, unsealed_line, write_whole
from fp8bench.model import Ceilings, DeviceFacts, Environment, Scalar
from fp8bench.model.codec import Malformed, decode, encode
from fp8bench.model.run import SWITCHES_SET

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
        kept = ((_read(_path(store, environment, device, whole)), whole) for whole in (True, False))
        known = next((one for one, whole in kept if one is not None and one.whole is whole), None)
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
        begun = _begun(store, environment, device)

        def keep(found: Ceilings) -> None:
            _write(begun, found)

        found = _keep(store, environment, device, measure(_read(begun), keep))
        with contextlib.suppress(OSError):
            begun.unlink()
        return found


def _keep(store: Path, environment: Environment, device: DeviceFacts, found: Ceilings) -> Ceilings:
    """With the moment and the settings; whole ones are one more of their history, too."""
    under = tuple((name, one) for name, one in _settings(environment, device, True).items() if one is not None)
    kept = replace(found, when=datetime.now(UTC).isoformat(timespec="seconds"), under=under)
    path, history = _path(store, environment, device, found.whole), history_of_ceilings(store)
    before = _read(path)
    if found.whole:  # those of an fp8bench that kept no history are the first of it
        with contextlib.suppress(OSError):
            _append(_history(store), [*([before] if before is not None and before not in history else []), kept])
    _write(path, kept)
    return kept


def history_of_ceilings(store: Path) -> list[Ceilings]:
    """All whole ceilings that were measured in a store, oldest first; lines that are broken are left out."""
    try:
        lines = _history(store).read_bytes().splitlines()
    except OSError:
        return []
    found = (one for line in lines if (one := _read_text(line)) is not None)
    return sorted(found, key=lambda one: one.when)  # those of another store were taken in behind ours


def merge_ceilings(store: Path, other: Path) -> int:
    """Take in those of another store that are not here, or newer than ours; returns how many those are."""
    theirs = {path.name: found for path in sorted((other / "ceilings").glob("*.json")) if (found := _read(path))}
    past = history_of_ceilings(other)
    if not theirs and not past:
        return 0
    with locked(store / "ceilings"):
        known = history_of_ceilings(store)
        new = [one for one in past if one not in known]
        if new:
            _append(_history(store), new)
        for name, found in theirs.items():
            ours = _read(store / "ceilings" / name)
            if not name.startswith(_BEGUN) and (ours is None or ours.when < found.when):
                write_whole(store / "ceilings" / name, _text(found))
                new += [] if found in new else [found]
    return len(new)


def _history(store: Path) -> Path:
    return store / "ceilings" / "history.jsonl"


def _begun(store: Path, environment: Environment, device: DeviceFacts) -> Path:
    path = _path(store, environment, device, True)
    return path.with_name(f"{_BEGUN}{path.name}")


def _text(found: Ceilings) -> str:
    return sealed_line({"version": _VERSION, "ceilings": encode(found)}) + "\n"


def _write(path: Path, found: Ceilings) -> None:
    with contextlib.suppress(OSError):  # whoever cannot keep it can use it
        write_whole(path, _text(found))


def _append(path: Path, found: Sequence[Ceilings]) -> None:
    with path.open("a+b") as file:
        end_line(file)
        append(file, "".join(map(_text, found)))


def _settings(environment: Environment, device: DeviceFacts, whole: bool) -> dict[str, Scalar | None]:
    names = (*_FACTS, *_SETTINGS, *(f"{device.key} {name}" for name in _OF_DEVICE)) if whole else _FACTS
    return {name: environment.get(name) for name in names} | {"device": device.key, "name": device.name}


def _path(store: Path, environment: Environment, device: DeviceFacts, whole: bool) -> Path:
    """Other software or other settings are another file."""
    words = [str(one) for one in _settings(environment, device, whole).values() if one not in (None, "")]
    return store / "ceilings" / f"{safe(' '.join([*(['whole'] if whole else []), *words]))}.json"


def _read(path: Path) -> Ceilings | None:
    """None where there is no such file, or it is broken: then it is measured once more."""
    try:
        return _read_text(path.read_bytes())
    except OSError:
        return None


def _read_text(text: bytes) -> Ceilings | None:
    try:
        content, _ = unsealed_line(text.strip())
        return decode(Ceilings, content["ceilings"]) if content["version"] == _VERSION else None
    except (ValueError, TypeError, KeyError, RecursionError, Malformed):
        return None
