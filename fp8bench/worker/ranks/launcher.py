"""The process that starts the ranks, once, and reports which of them failed.

measure.process.WorkerProcess starts it, and it ends with its parent like a worker. Its warden ends leftover processes
of the ranks and removes the folder of their files, whether the parent finishes or is killed. torch's launcher is not
used: it listens on all interfaces, and unpickles what it receives.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from fp8bench.model.ranks import MARK
from fp8bench.worker.main import die_with_parent, keep_from_children

# Seconds that ranks have to end after SIGTERM, before SIGKILL.
_ENDING_SECONDS = 1.0
# Seconds to wait for killed processes, which usually end at once.
_GONE_SECONDS = 5.0
_POLL_SECONDS = 0.005


def launch(ranks: int, module: str, folder: str, wait_seconds: float) -> dict[int, int]:
    """Runs a module in `ranks` processes to their end; returns the statuses of failed ones, by rank. As soon as one has
    failed the others are ended, which is returned as SIGTERM."""
    environment = {**os.environ, MARK: Path(folder).name, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-P", "-m", module, folder, str(wait_seconds)]
    started: dict[int, int] = {}
    for rank in range(ranks):
        numbered = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        started[subprocess.Popen(command, stdin=subprocess.DEVNULL, env=numbered).pid] = rank
    while started:
        pid, status = os.wait()  # also returns orphans of the ranks, which this process adopts
        if pid in started:
            rank = started.pop(pid)
            if status:
                return {rank: os.waitstatus_to_exitcode(status), **_end_ranks(started)}
    return {}


def _end_ranks(running: dict[int, int]) -> dict[int, int]:
    """Ends ranks, and returns the statuses of failed ones, with their exit codes if they failed by themselves."""
    failed = {}
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running:
            os.kill(pid, number)
        end = time.monotonic() + _ENDING_SECONDS
        while running and time.monotonic() < end:
            for pid in list(running):
                ended_pid, status = os.waitpid(pid, os.WNOHANG)
                if ended_pid:
                    by_us = status == number
                    failed[running.pop(pid)] = -signal.SIGTERM if by_us else os.waitstatus_to_exitcode(status)
            time.sleep(_POLL_SECONDS)
    return {rank: status for rank, status in failed.items() if status}


def _marked_processes(mark: bytes) -> Iterator[int]:
    """Yields the processes started by ranks or their descendants, in any session; none without /proc. Every rank has
    the name of its launch in the environment."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or already ended
            if mark in file.read_bytes().split(b"\0"):
                yield int(file.parent.name)


def _end_all(folder: str, launcher: int) -> None:
    """Ends ranks and their leftover processes, then removes the folder. The launcher ends by itself after its ranks."""
    end = time.monotonic() + _GONE_SECONDS
    mark = f"{MARK}={Path(folder).name}".encode()
    while (remaining := list(_marked_processes(mark))) and time.monotonic() < end:
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    while _is_there(launcher) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)


def _is_there(pid: int) -> bool:
    """Whether a process exists, including zombies: the launcher is one until the parent has read its exit code."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    connection, lifeline = Connection(int(sys.argv[1])), int(sys.argv[2])
    ranks, module, folder, wait_seconds = connection.recv()
    die_with_parent(lifeline, connection, partial(_end_all, folder, os.getpid()))
    keep_from_children(lifeline, connection)
    connection.send(launch(ranks, module, folder, wait_seconds))


if __name__ == "__main__":
    main()
