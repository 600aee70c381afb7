"""The process that starts all ranks, and reports which of them failed.

measure.process.WorkerProcess starts it, and it ends with its parent, as workers do. Its warden ends processes that
the ranks left running, and removes the folder of their files, whether the parent exits or is killed. torch's launcher
is not used, because it listens on all network interfaces and unpickles the bytes that it receives.
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

from fp8bench.model.ranks import RANKS_LAUNCH_VARIABLE
from fp8bench.worker.main import close_connections_in_forks, die_with_parent

# Seconds between SIGTERM and SIGKILL for ranks.
_TERMINATION_WAIT_SECONDS = 1.0
# Seconds to wait for killed processes, which usually end at once.
_KILL_WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.005


def launch(ranks: int, module: str, folder: str, wait_seconds: float) -> dict[int, int]:
    """Runs a module in `ranks` processes until they end. Ends all ranks as soon as one has failed. Returns the exit
    statuses of failed ranks by rank; SIGTERM for those that were ended.
    """
    environment = {
        **os.environ,
        RANKS_LAUNCH_VARIABLE: Path(folder).name,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    # With -P, a file in the working directory cannot replace a module.
    command = [sys.executable, "-P", "-m", module, folder, str(wait_seconds)]
    rank_by_pid: dict[int, int] = {}
    for rank in range(ranks):
        rank_environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        rank_by_pid[subprocess.Popen(command, stdin=subprocess.DEVNULL, env=rank_environment).pid] = rank
    while rank_by_pid:
        pid, status = os.wait()  # `wait` also returns orphans of the ranks, which this process has adopted
        if pid in rank_by_pid:
            rank = rank_by_pid.pop(pid)
            if status:
                return {rank: os.waitstatus_to_exitcode(status), **_terminate_ranks(rank_by_pid)}
    return {}


def _terminate_ranks(running: dict[int, int]) -> dict[int, int]:
    """Ends all running ranks. Returns the exit statuses of failed ranks: SIGTERM if ended here, or the exit code of an
    earlier failure.
    """
    failed_statuses = {}
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running:
            os.kill(pid, signal_number)
        deadline = time.monotonic() + _TERMINATION_WAIT_SECONDS
        while running and time.monotonic() < deadline:
            for pid in list(running):
                ended_pid, status = os.waitpid(pid, os.WNOHANG)
                if ended_pid:
                    # Report SIGTERM also for a rank that had to be killed.
                    is_our_signal = status == signal_number
                    failed_statuses[running.pop(pid)] = (
                        -signal.SIGTERM if is_our_signal else os.waitstatus_to_exitcode(status)
                    )
            time.sleep(_POLL_SECONDS)
    return {rank: status for rank, status in failed_statuses.items() if status}


def _find_marked_processes(mark: bytes) -> Iterator[int]:
    """Yields the processes of ranks and their descendants, in any session. They are recognised by the name of the
    launch, which the environment of every rank has. Yields none without /proc.
    """
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process belongs to a different user, or has ended
            if mark in file.read_bytes().split(b"\0"):
                yield int(file.parent.name)


def _end_rank_processes(folder: str, launcher: int) -> None:
    """Ends the ranks and the processes that they left running, then removes the folder. The launcher ends without a
    signal, after its ranks.
    """
    deadline = time.monotonic() + _KILL_WAIT_SECONDS
    launch_id_assignment = f"{RANKS_LAUNCH_VARIABLE}={Path(folder).name}".encode()
    while (remaining := list(_find_marked_processes(launch_id_assignment))) and time.monotonic() < deadline:
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    while _process_exists(launcher) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _process_exists(pid: int) -> bool:
    """Returns whether a process exists. A zombie does: the launcher is one until the parent reads its status."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    lifeline_descriptor = int(sys.argv[2])
    ranks, module, folder, wait_seconds = connection.recv()
    die_with_parent(lifeline_descriptor, connection, partial(_end_rank_processes, folder, os.getpid()))
    close_connections_in_forks(lifeline_descriptor, connection)
    connection.send(launch(ranks, module, folder, wait_seconds))


if __name__ == "__main__":
    main()
