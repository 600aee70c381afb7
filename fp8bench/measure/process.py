"""A worker's process as its parent holds it: started, spoken to, ended with all it has started, its last words."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

# A worker that is gone is noticed by its status if a process that it left behind still holds its end of the socket.
_GLANCE_SECONDS = 0.5
_POLITE_SECONDS = 2.0
# An answer is sent in one go: one that stops half-way for so long will not go on.
_HALF_WAY_SECONDS = 30


class Unreadable(Exception):
    """What came from the worker is no answer."""


class WorkerProcess:
    """The child, the socket to it, the lifeline that tells it that we live, and the file it prints into."""

    def __init__(self, python: str, module: str, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _HALF_WAY_SECONDS, 0))
        lifeline_read, self._lifeline = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._connection = Connection(ours.detach())
        try:
            self._popen = subprocess.Popen(
                [python, "-P", "-m", module, str(theirs.fileno()), str(lifeline_read)],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environment,
                pass_fds=(theirs.fileno(), lifeline_read), start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self._let_go()
            raise
        finally:
            theirs.close()
            os.close(lifeline_read)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, request: object) -> None:
        self._connection.send(request)

    def answered(self, limit: float) -> bool:
        """Whether there is something to receive within so many seconds; EOFError if the process has ended without."""
        end = time.monotonic() + limit
        while not self._connection.poll(min(_GLANCE_SECONDS, max(0.0, end - time.monotonic()))):
            if self._popen.poll() is not None and not self._connection.poll(0.0):
                raise EOFError
            if time.monotonic() >= end:
                return False
        return True

    def receive(self) -> Any:
        """The next answer. Unreadable for anything but plain values: whoever unpickles a tensor imports torch."""
        received = self._connection.recv_bytes()
        try:
            return _PlainUnpickler(io.BytesIO(received)).load()
        except Exception as error:  # bytes that are no pickle raise anything
            raise Unreadable(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Let it end by itself, for a while; then end it."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_POLITE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End it now, whatever it does, and what it has left behind."""
        # What belongs to the session: the worker, its warden, and what a workload has started and left behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left, or (macOS) only the dead are
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._let_go()

    @property
    def killed(self) -> bool:
        """Whether it was ended as the system ends processes when memory runs out."""
        return self._popen.poll() == -signal.SIGKILL

    def end_in_words(self) -> str:
        """What the exit status and the last words of a process that has vanished say."""
        try:
            status = self._popen.wait(_POLITE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it closed its socket and went on{self._last_words()}"
        if status >= 0:
            return f"it exited with status {status}{self._last_words()}"
        known = {one.value: one.name for one in signal.Signals}  # real-time signals have numbers only
        how = f"it was ended by {known.get(-status, f'signal {-status}')}"
        if -status == signal.SIGKILL:
            how += " (the system ends processes so when memory runs out)"
        return how + self._last_words()

    def _last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 2000))
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        # faulthandler leads with the error; plain Python tracebacks end with it.
        telling = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1] if lines else "")
        return f": {telling}" if telling else ""

    def _let_go(self) -> None:
        self._connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        self._log.close()


class _PlainUnpickler(pickle.Unpickler):
    """Knows the frozen values that requests are answered with, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("fp8bench.model.") or module == "fp8bench.model.raw":
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")
