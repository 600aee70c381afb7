"""What a machine's devices can do at most, kept in `<store>/ceilings`: a file for each device with its software."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from fp8bench.files import locked, safe, write_whole
from fp8bench.model import Ceilings, DeviceFacts, Environment
from fp8bench.model.codec import Malformed, decode, encode

# Raised when something else is measured under the same names.
_VERSION = 1
# Facts of the environment that say whose ceilings they are, or change them.
_FACTS = ("machine", "torch", "env_ONEDNN_MAX_CPU_ISA", "env_NVIDIA_TF32_OVERRIDE")


def ceilings_of(
    store: Path, environment: Environment, device: DeviceFacts, measure: Callable[[], Ceilings] | None
) -> Ceilings | None:
    """What is known of a device; what is not is measured and kept, where somebody measures.

    Two runs that ask at once measure one after the other, which would disturb each other otherwise, and the second one
    finds what the first one kept.
    """
    named = {name: environment.get(name) for name in _FACTS} | {"device": device.key, "name": device.name}
    path = store / "ceilings" / f"{safe(' '.join(str(one) for one in named.values() if one))}.json"
    with locked(path.parent):
        known = _read(path)
        if known is None and measure is not None:
            known = measure()
            content = {"version": _VERSION, "of": named, "ceilings": encode(known)}
            with contextlib.suppress(OSError):  # whoever cannot keep it can use it
                write_whole(path, json.dumps(content, indent=1) + "\n")
        return known


def _read(path: Path) -> Ceilings | None:
    """None where there is no such file, or it is broken: then it is measured once more."""
    try:
        content = json.loads(path.read_bytes())
        return decode(Ceilings, content["ceilings"]) if content["version"] == _VERSION else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, Malformed):
        return None
