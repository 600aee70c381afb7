"""Several workers on this machine, beside each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def crew(file: Path, store: Path, count: int, retry: bool) -> tuple[int, ...]:
    """How each of so many workers ended. They end with this process where that is interrupted."""
    words = [sys.executable, "-m", "fp8bench", "fleet", "work", str(file), "--store", str(store)]
    words += ["--retry"] if retry else []
    workers = [subprocess.Popen(words, stdin=subprocess.DEVNULL) for _ in range(count)]
    try:
        return tuple(worker.wait() for worker in workers)
    except BaseException:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
        raise
