"""What a machine's devices can do at most, kept in `<store>/ceilings`: a file for each device with its software.

A quick look and whole ceilings lie in files of their own, the latter with the settings that they hold for; they come
first.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fp8bench.files import locked, safe, write_whole
from fp8bench.model import Ceilings, DeviceFacts, Environment, Scalar
from fp8bench.model.codec import Malformed, decode, encode
from fp8bench.model.variables import SWITCHES_SET

# Raised when something else is measured under the same names.
_VERSION = 2
# Facts of the environment that say whose ceilings they are, or change them; of whole ones the settings too, and what
# the driver says of the device.
_FACTS = ("machine", "torch", "env_ONEDNN_MAX_CPU_ISA", "env_NVIDIA_TF32_OVERRIDE")
_SETTINGS = ("threads", SWITCHES_SET, "cpu_governor", "cpu_turbo_off", "cgroup_cpu_max")
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
        kept = (_read(_path(store, environment, device, whole), whole) for whole in (True, False))
        known = next((one for one in kept if one is not None), None)
        return known if known is not None or measure is None else _keep(store, environment, device, measure())


def new_ceilings(
    store: Path, environment: Environment, device: DeviceFacts, measure: Callable[[], Ceilings]
) -> Ceilings:
    """Measured now, whatever is known, and kept."""
    with locked(store / "ceilings"):
        return _keep(store, environment, device, measure())


def _keep(store: Path, environment: Environment, device: DeviceFacts, found: Ceilings) -> Ceilings:
    """With the moment and the settings."""
    under = tuple((name, one) for name, one in _settings(environment, device, True).items() if one is not None)
    kept = replace(found, when=datetime.now(UTC).isoformat(timespec="seconds"), under=under)
    content = {"version": _VERSION, "ceilings": encode(kept)}
    with contextlib.suppress(OSError):  # whoever cannot keep it can use it
        write_whole(_path(store, environment, device, found.whole), json.dumps(content, indent=1) + "\n")
    return kept


def _settings(environment: Environment, device: DeviceFacts, whole: bool) -> dict[str, Scalar | None]:
    names = (*_FACTS, *_SETTINGS, *(f"{device.key} {name}" for name in _OF_DEVICE)) if whole else _FACTS
    return {name: environment.get(name) for name in names} | {"device": device.key, "name": device.name}


def _path(store: Path, environment: Environment, device: DeviceFacts, whole: bool) -> Path:
    """Other software or other settings are another file."""
    words = [str(one) for one in _settings(environment, device, whole).values() if one not in (None, "")]
    return store / "ceilings" / f"{safe(' '.join([*(['whole'] if whole else []), *words]))}.json"


def _read(path: Path, whole: bool) -> Ceilings | None:
    """None where there is no such file, or it is broken: then it is measured once more."""
    try:
        content = json.loads(path.read_bytes())
        found = decode(Ceilings, content["ceilings"]) if content["version"] == _VERSION else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, Malformed):
        return None
    return found if found is not None and found.whole is whole else None
