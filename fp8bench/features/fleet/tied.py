"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

# Asks the kernel for SIGTERM when the parent dies, and becomes the program. preexec_fn would not do: Ray has threads.
_TIE = """
import ctypes, os, signal, sys
set_parent_death_signal = 1
ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this one is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def tied(
    words: Sequence[str],
    output: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.Popen[bytes]:
    """A process without input; on Linux it is interrupted when the thread that calls this dies, even of SIGKILL.

    Else a cell would go on beside the next one, on the same device. The first word is the path of a program.
    """
    tie = [sys.executable, "-ISc", _TIE, str(os.getpid())] if sys.platform == "linux" else []
    error = None if output is None else subprocess.STDOUT
    return subprocess.Popen(
        [*tie, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=error, env=environment, cwd=folder
    )


def ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; an interrupt of this process is one of it."""
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
