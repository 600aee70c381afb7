"""The parent's view of a worker process. It starts the process, sends requests, and ends the process with all
processes that it started.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import IO, Any

from fp8bench.model.codec import PlainUnpickler

# Seconds between two checks of whether the worker has exited. The socket is not enough, because an orphan of the worker
# may keep it open.
_POLL_SECONDS = 0.5
# A worker whose socket was closed ends by itself. After this many seconds it is killed.
_WORKER_CLOSE_WAIT_SECONDS = 2.0
# How long to wait for the end of a process that has closed its socket. On a loaded machine the process must wait for
# a core.
_EXIT_SECONDS = 20.0
# If an answer stops half-way for this many seconds, the rest will not come.
_PARTIAL_ANSWER_SECONDS = 30
_CRASH_CAUSE_LINE_PREFIXES = ("what():", "Fatal Python error")


class UnreadableAnswer(Exception):
    """The worker sent something that is not an answer."""


class WorkerProcess:
    """The child process with its socket, its log and the lifeline. The lifeline is a pipe that closes when this process
    ends, and so makes the child end.
    """

    def __init__(self, python: str, module: str, environment: Mapping[str, str]) -> None:
        # The socket carries requests. The pipe closes when this process ends, even by SIGKILL, which the child notices.
        parent_socket, child_socket = socket.socketpair()
        # Without this timeout, reading an answer that stops half-way would never end.
        parent_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _PARTIAL_ANSWER_SECONDS, 0))
        lifeline_read, self._lifeline = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._connection = Connection(parent_socket.detach())
        try:
            self._popen = subprocess.Popen(
                # -P keeps the current folder out of the worker's module path, which PYTHONPATH sets.
                [python, "-P", "-m", module, str(child_socket.fileno()), str(lifeline_read)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                pass_fds=(child_socket.fileno(), lifeline_read),
                # In a separate session, the terminal's Ctrl+C does not reach the child: the parent decides when the
                # child ends.
                start_new_session=True,
            )
        except BaseException:
            self._close_connections_and_log()
            raise
        finally:
            child_socket.close()
            os.close(lifeline_read)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send_request(self, request: object) -> None:
        self._connection.send(request)

    def wait_for_answer(self, limit: float) -> bool:
        """Returns whether an answer can be received within `limit` seconds. Raises EOFError if the process ended
        before it answered.
        """
        deadline = time.monotonic() + limit
        while not self._connection.poll(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
            # Look again after the exit: the answer may have arrived just before it.
            if self._popen.poll() is not None and not self._connection.poll(0.0):
                raise EOFError
            if time.monotonic() >= deadline:
                return False
        return True

    def receive_answer(self) -> Any:
        return unpickle_answer(self._connection.recv_bytes())

    def close(self) -> None:
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_WORKER_CLOSE_WAIT_SECONDS)
        self.kill()

    def kill(self) -> None:
        # The process group contains the worker, its warden, and processes that a workload has left running.
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is alive any more
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._close_connections_and_log()

    @property
    def was_killed(self) -> bool:
        return self._popen.poll() == -signal.SIGKILL

    def describe_end(self) -> str:
        try:
            exit_status = self._popen.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it closed its socket and went on{describe_last_line(self._log)}"
        return f"it {describe_exit(exit_status)}{describe_last_line(self._log)}"

    def describe_delay(self) -> str:
        """Returns a text that names the ranks that may delay the answer; '' if there is only one process."""
        return ""

    def _close_connections_and_log(self) -> None:
        self._connection.close()
        self._close_lifeline_descriptor()
        self._log.close()

    def _close_lifeline_descriptor(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def describe_exit(status: int) -> str:
    """Returns an exit status in words: 'exited with status 7', 'was ended by SIGSEGV'."""
    if status >= 0:
        return f"exited with status {status}"
    signal_name_by_number = {Signal.value: Signal.name for Signal in signal.Signals}  # real-time signals have no names
    description = f"was ended by {signal_name_by_number.get(-status, f'signal {-status}')}"
    return description + " (the system does this when memory runs out)" * (-status == signal.SIGKILL)


def describe_last_line(log: IO[bytes]) -> str:
    """Returns the line of an ended process's log that explains its end best, as ': line'. Returns '' if the log is
    empty.
    """
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - 2000))
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    # C++ exceptions and faulthandler print a line with the cause. In a Python traceback, the last line is the cause.
    error_cause_line = next(
        (line for line in lines if line.lstrip().startswith(_CRASH_CAUSE_LINE_PREFIXES)), lines[-1] if lines else ""
    ).strip()
    return f": {error_cause_line}" if error_cause_line else ""


def unpickle_answer(received: bytes) -> Any:
    """Unpickles an answer. Raises UnreadableAnswer unless it consists of plain values, because unpickling a tensor
    would import torch.
    """
    try:
        return PlainUnpickler(io.BytesIO(received)).load()
    except Exception as error:  # a broken pickle can raise exceptions of any type
        raise UnreadableAnswer(f"{type(error).__name__}: {error}") from error
