"""The process that torch's elastic launcher runs in: starts the ranks, never again, and says which of them failed.

Started by measure.process.WorkerProcess, and ends with its parent as a worker does. It is told once what to start. Its
warden ends what the ranks have left, and removes the folder of their files: whether the parent lets go or was killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from fp8bench.worker.faults import described
from fp8bench.worker.main import die_with_parent, keep_from_children

# A rank that does not end when it is asked to is ended; torch's own patience is half a minute.
_ENDING_SECONDS = 1
# What is killed is gone at once, unless the system is in its way.
_GONE_SECONDS = 5.0
_POLL_SECONDS = 0.005


def launched(ranks: int, module: str, folder: str, wait_seconds: float) -> dict[int, int]:
    """Run a module in so many ranks to their end; the exit codes of those that failed of themselves, by rank."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=Path(folder).name, rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1", max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    if hasattr(config, "shutdown_timeout"):  # torch 2.13
        config.shutdown_timeout = _ENDING_SECONDS
    try:
        elastic_launch(config, sys.executable)("-P", "-m", module, folder, str(wait_seconds))
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def _marked(mark: bytes) -> Iterator[int]:
    """Processes that were started by ranks, or by what these have started, in whatever session: torch gives every rank
    the name of its launch in the environment. None where the system has no /proc."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if mark in file.read_bytes().split(b"\0"):
                yield int(file.parent.name)


def _end_all(folder: str, launcher: int) -> None:
    """Ranks, what they have left, and then the folder; the launcher ends by itself once it has seen their ends."""
    end = time.monotonic() + _GONE_SECONDS
    mark = f"TORCHELASTIC_RUN_ID={Path(folder).name}".encode()
    while (left := list(_marked(mark))) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    while _is_there(launcher) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)


def _is_there(pid: int) -> bool:
    """Also one that has ended, until it is asked how: it has seen to its ranks then, and is waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Take the two descriptors off the command line, be told, launch, and tell."""
    connection, lifeline = Connection(int(sys.argv[1])), int(sys.argv[2])
    ranks, module, folder, wait_seconds = connection.recv()
    die_with_parent(lifeline, connection, partial(_end_all, folder, os.getpid()))
    keep_from_children(lifeline, connection)
    logging.disable()  # what torch logs of a rank's end would stand behind the rank's own last words
    tempfile.tempdir = folder  # torch leaves an empty folder of logs there
    try:
        failed = launched(ranks, module, folder, wait_seconds)
    except ModuleNotFoundError as error:
        sys.exit(f"{type(error).__name__}: {described(error, known=False).text}")
    connection.send(failed)


if __name__ == "__main__":
    main()
