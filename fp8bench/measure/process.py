"""A worker's process as its parent holds it: starting, requests and answers, ending it with all it has started."""

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

# A process that the worker left behind may hold its end of the socket: so its exit status is checked as well.
_GLANCE_SECONDS = 0.5
_POLITE_SECONDS = 2.0
# A process that has closed its socket is about to end; on a loaded machine it waits for a core before it can.
_ENDING_SECONDS = 20.0
# An answer is sent in one go: one that stops half-way for this long will not go on.
_HALF_WAY_SECONDS = 30
_TELLING = ("what():", "Fatal Python error")


class Unreadable(Exception):
    """The worker sent something that is not an answer."""


class WorkerProcess:
    """The child process, the socket to it, the lifeline whose end shows it that we have ended, and its log."""

    def __init__(self, python: str, module: str, environment: Mapping[str, str]) -> None:
        # Sockets carry requests; the pipe shows the child that its parent has ended, even by SIGKILL.
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _HALF_WAY_SECONDS, 0))
        lifeline_read, self._lifeline = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._connection = Connection(ours.detach())
        try:
            self._popen = subprocess.Popen(
                [python, "-P", "-m", module, str(theirs.fileno()), str(lifeline_read)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                pass_fds=(theirs.fileno(), lifeline_read),
                # A separate session keeps the terminal's Ctrl+C from the child: the parent decides when it ends.
                start_new_session=True,
            )
        except BaseException:
            self._close_all()
            raise
        finally:
            theirs.close()
            os.close(lifeline_read)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, request: object) -> None:
        self._connection.send(request)

    def wait_for_answer(self, limit: float) -> bool:
        """Whether there is something to receive within `limit` seconds. Raises EOFError if the process has ended
        without."""
        end = time.monotonic() + limit
        while not self._connection.poll(min(_GLANCE_SECONDS, max(0.0, end - time.monotonic()))):
            if self._popen.poll() is not None and not self._connection.poll(0.0):
                raise EOFError
            if time.monotonic() >= end:
                return False
        return True

    def receive(self) -> Any:
        return plain_value(self._connection.recv_bytes())

    def close(self) -> None:
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_POLITE_SECONDS)
        self.kill()

    def kill(self) -> None:
        # The session holds the worker, its warden, and what a workload has started and left behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left, or (macOS) only the dead are
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._close_all()

    @property
    def was_killed(self) -> bool:
        return self._popen.poll() == -signal.SIGKILL

    def end_in_words(self) -> str:
        try:
            status = self._popen.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it closed its socket and went on{last_words(self._log)}"
        return f"it {describe_exit(status)}{last_words(self._log)}"

    def delay_in_words(self) -> str:
        """Who keeps an answer waiting, where several might; continues a sentence."""
        return ""

    def _close_all(self) -> None:
        self._connection.close()
        self._close_lifeline()
        self._log.close()

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def describe_exit(status: int) -> str:
    """An exit status in words: 'exited with status 7', 'was ended by SIGSEGV'."""
    if status >= 0:
        return f"exited with status {status}"
    names = {Signal.value: Signal.name for Signal in signal.Signals}  # real-time signals have numbers only
    how = f"was ended by {names.get(-status, f'signal {-status}')}"
    return how + " (the system ends processes so when memory runs out)" * (-status == signal.SIGKILL)


def last_words(log: IO[bytes]) -> str:
    """The most useful line of a vanished process's log, to continue a sentence; '' if the log is empty."""
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - 2000))
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    # C++ exceptions and faulthandler have lines with the cause; plain Python tracebacks end with it.
    telling = next((line for line in lines if line.lstrip().startswith(_TELLING)), lines[-1] if lines else "").strip()
    return f": {telling}" if telling else ""


def plain_value(received: bytes) -> Any:
    """Unpickles an answer. Raises Unreadable for anything but plain values: unpickling a tensor would import torch."""
    try:
        return PlainUnpickler(io.BytesIO(received)).load()
    except Exception as error:  # bytes that are not a pickle raise anything
        raise Unreadable(f"{type(error).__name__}: {error}") from error
