"""Studies of layers that a store keeps: `<store>/sensitivity/*.json`, as `fp8bench sensitivity` wrote them."""

from __future__ import annotations

import json
from pathlib import Path

from fp8bench.features.sensitivity.study import Study
from fp8bench.files import unsealed
from fp8bench.model.codec import Malformed, decode


def studies_of(store: Path) -> tuple[tuple[Study, ...], list[str]]:
    """Those that can be read, oldest first, and a sentence on each other file."""
    found, troubles = [], []
    for path in sorted((store / "sensitivity").glob("*.json")):
        try:
            found.append(decode(Study, {**unsealed(json.loads(path.read_bytes())), "path": str(path)}))
        except (OSError, ValueError, TypeError, RecursionError, Malformed) as error:
            troubles.append(f"{path} is no study and was left out ({str(error)[:120]})")
    return tuple(found), troubles
