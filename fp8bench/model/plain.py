"""Unpickling what another process sends: plain values and fp8bench's own, and nothing that could run anything."""

from __future__ import annotations

import pickle
import re
from typing import Any

# Modules of values: those of the core, and of features.
_VALUES = re.compile(r"fp8bench\.(model\.\w+|features\.\w+\.values)")


class PlainUnpickler(pickle.Unpickler):
    """Knows the frozen values that requests are answered with, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if _VALUES.fullmatch(module) and "." not in name:  # a dot leads into what a module has imported
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")
