"""Several workers on this machine, beside each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def crew(file: Path, store: Path, count: int, retry: bool) -> None:
    """Until so many workers have ended; the store says what came of it. They end where this process is interrupted."""
    words = [sys.executable, "-m", "fp8bench", "fleet", "work", str(file), "--store", str(store)]
    words += ["--retry"] if retry else []
    workers = [subprocess.Popen(words, stdin=subprocess.DEVNULL) for _ in range(count)]
    try:
        for worker in workers:
            worker.wait()
    except BaseException:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
        raise
