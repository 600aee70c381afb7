"""The parent's side of a worker: typed requests, time limits, and what to make of a worker that is gone.

ProcessWorker runs the bench in a process of its own; LocalWorker runs the same bench here (notebooks,
--no-isolation), where a crash cannot be survived and a hang cannot be ended.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from abc import ABC, abstractmethod
from multiprocessing.connection import Connection
from typing import IO, Any, Self, cast

from fp8bench.errors import WorkerFault, WorkerHung, WorkerLost
from fp8bench.measure.bench import Bench, RawSlot, Settings
from fp8bench.measure.limits import HANG_SECONDS
from fp8bench.model import Case, DeviceFacts, Overheads, Scalar, TensorStatistics

START_SECONDS = 300.0


class Worker(ABC):
    """What can be asked of a bench. Every call may raise WorkerFault, WorkerLost or WorkerHung."""

    @abstractmethod
    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        """Send one request, wait up to `limit` seconds."""

    @abstractmethod
    def close(self) -> None:
        """End the worker. Safe to call twice."""

    @abstractmethod
    def restart(self) -> None:
        """A fresh worker with the same settings; all states are gone."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def probe(self) -> tuple[DeviceFacts, ...]:
        return cast(tuple[DeviceFacts, ...], self.ask(START_SECONDS, "probe"))

    def software(self) -> dict[str, Scalar | None]:
        return cast(dict[str, "Scalar | None"], self.ask(START_SECONDS, "software"))

    def prepare(self, key: str, case: Case, facts: DeviceFacts, limit: float) -> None:
        self.ask(limit, "prepare", key, case, facts)

    def slot(self, key: str, calls: int, discard: int, limit: float) -> RawSlot:
        return cast(RawSlot, self.ask(limit, "slot", key, calls, discard))

    def error(self, case: Case, facts: DeviceFacts, limit: float) -> dict[str, float]:
        return cast(dict[str, float], self.ask(limit, "error", case, facts))

    def statistics(self, case: Case, facts: DeviceFacts, limit: float) -> tuple[TensorStatistics, ...]:
        return cast(tuple[TensorStatistics, ...], self.ask(limit, "statistics", case, facts))

    def check(self, key: str, limit: float) -> str:
        return cast(str, self.ask(limit, "check", key))

    def release(self, key: str) -> tuple[str, ...]:
        """Forget a state; returns the names of threads that it leaves behind."""
        return cast(tuple[str, ...], self.ask(HANG_SECONDS, "release", key))

    def overheads(self, facts: DeviceFacts) -> Overheads:
        return cast(Overheads, self.ask(START_SECONDS, "overheads", facts))


class LocalWorker(Worker):
    """The bench in this very process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bench: Bench | None = None

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        try:
            if self._bench is None:
                self._bench = Bench(self._settings)
            return getattr(self._bench, name)(*arguments)
        except (Exception, SystemExit) as error:
            exhausted = self._bench is not None and self._bench.is_out_of_memory(error)
            trace = "".join(traceback.format_exception(error))
            fault = WorkerFault(type(error).__name__, str(error), trace, exhausted)
        if self._bench is not None:
            self._bench.recover()
        raise fault

    def close(self) -> None:
        if self._bench is not None:
            self._bench.close()
        self._bench = None

    def restart(self) -> None:
        self.close()


class ProcessWorker(Worker):
    """The bench in a child process, started on the first request."""

    def __init__(self, settings: Settings, python: str = sys.executable) -> None:
        self._settings = settings
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lifeline = -1
        self._log: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id, None before the first request."""
        return self._process.pid if self._process else None

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        if self._process is None:
            self._start()
            try:
                self._exchange(START_SECONDS, "open", self._settings)
            except WorkerFault:
                self.close()  # a process without a bench could only answer nonsense
                raise
        return self._exchange(limit, name, *arguments)

    def release(self, key: str) -> tuple[str, ...]:
        # A worker that is gone holds nothing, and need not be started to say so.
        return super().release(key) if self._process is not None else ()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if self._connection is not None:
            self._connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._log is not None:
            self._log.close()

    def restart(self) -> None:
        if self._process is not None:
            self._process.kill()
        self.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        lifeline_read, self._lifeline = os.pipe()
        self._log = tempfile.TemporaryFile()
        threads = str(self._settings.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        # It would turn TF32 on or off behind a precision's name; set it and nothing here means what it says.
        environment.pop("NVIDIA_TF32_OVERRIDE", None)
        # Its pool of compiling processes and threads would go on running beside what is timed.
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        try:
            self._process = subprocess.Popen(
                [self._python, "-P", "-m", "fp8bench.measure.worker", str(theirs.fileno()), str(lifeline_read)],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environment,
                pass_fds=(theirs.fileno(), lifeline_read),
            )  # fmt: skip
        finally:
            theirs.close()
            os.close(lifeline_read)
        self._connection = Connection(ours.detach())

    def _exchange(self, limit: float, name: str, *arguments: Any) -> Any:
        assert self._connection is not None
        try:
            self._connection.send((name, arguments))
            if not self._connection.poll(limit):
                self.restart()
                raise WorkerHung(
                    f"no answer to {name!r} within {limit:g} s; the worker was ended (--case-timeout sets the limit)"
                )
            reply = self._connection.recv()
        except (EOFError, OSError):
            raise self._lost(name) from None
        except KeyboardInterrupt:
            self.restart()  # its late answer would be taken for the next request's, and it may be in a long step
            raise
        if reply[0] == "fault":
            raise WorkerFault(*reply[1:])
        return reply[1]

    def _lost(self, name: str) -> WorkerLost:
        """What the exit status and the last words of a vanished worker say."""
        assert self._process is not None
        try:
            status = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            status = 0
        if status < 0:
            how = f"it was ended by {signal.Signals(-status).name}"
            if -status == signal.SIGKILL:
                how += " (the system ends processes so when memory runs out)"
        else:
            how = f"it exited with status {status}"
        words = self._last_words()
        self.restart()
        return WorkerLost(f"the worker crashed during {name!r}: {how}{words}")

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 2000))
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        # faulthandler leads with the error; plain Python tracebacks end with it.
        telling = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1] if lines else "")
        return f": {telling}" if telling else ""
