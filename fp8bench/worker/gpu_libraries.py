"""Libraries of products that torch has loaded, asked for their versions, which torch does not tell."""

from __future__ import annotations

import ctypes
from pathlib import Path

_MAPS = Path("/proc/self/maps")


def cublaslt_version() -> int | None:
    """As cuBLASLt counts it: 130100 is 13.1.0; None where torch has not loaded it, or the system does not say."""
    try:
        lines = _MAPS.read_text().splitlines()
        path = next(line[line.index("/") :] for line in lines if "/libcublasLt.so" in line)
        asked = ctypes.CDLL(path).cublasLtGetVersion
    except (OSError, StopIteration, AttributeError):
        return None
    asked.restype = ctypes.c_size_t
    return int(asked())
