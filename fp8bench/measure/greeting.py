"""What a worker of another interpreter says before it is asked for anything: who it is, and how it talks."""

from __future__ import annotations

import importlib
import platform
import sys
from pathlib import Path

from fp8bench import __version__
from fp8bench.model import Scalar

# Raised whenever a request, or a value that goes to a worker or comes back, changes so that an older worker and a newer
# parent, or the other way round, would misunderstand each other. tests/measure/test_greeting.py holds what this
# number stands for.
PROTOCOL = 1


def greeting() -> dict[str, Scalar | None]:
    """The protocol, this Python, where fp8bench comes from, and torch: its version and place, or why there is none."""
    said: dict[str, Scalar | None] = {
        "protocol": PROTOCOL,
        "fp8bench": __version__,
        "package": str(Path(__file__).resolve().parents[1]),
        "python": platform.python_version(),
        "executable": sys.executable,
        "prefix": sys.prefix,
    }
    for name in ("torch", "numpy"):
        try:
            module = importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - a broken build raises anything
            words = " ".join(str(error).split())[:300]
            said |= {name: None, f"{name}_missing": f"{type(error).__name__}: {words}"}
            continue
        said |= {name: str(getattr(module, "__version__", "")), f"{name}_at": getattr(module, "__file__", None)}
    return said
