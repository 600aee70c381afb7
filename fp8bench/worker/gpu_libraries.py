"""Libraries of products that torch has loaded, asked for their versions, which torch does not tell."""

from __future__ import annotations

import ctypes
from pathlib import Path

from fp8bench.model import Scalar

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


def torch_build() -> dict[str, Scalar | None]:
    import torch

    cudnn = torch.backends.cudnn
    return {
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "torch_config": torch.__config__.show().strip(),
        "cudnn": cudnn.version() if torch.cuda.is_available() else None,  # type: ignore[no-untyped-call]
        "cublaslt": cublaslt_version(),
    }
