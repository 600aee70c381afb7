"""The parent's side of a worker: typed requests, time limits, and what to make of a worker that is gone.

ProcessWorker runs the bench in a process of its own; LocalWorker runs the same bench here (notebooks,
--no-isolation), where a crash cannot be survived and a hang cannot be ended.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, cast

from fp8bench.errors import WorkerFault, WorkerHung, WorkerLost
from fp8bench.measure.limits import COMPILE_SECONDS, HANG_SECONDS
from fp8bench.measure.process import Unreadable, WorkerProcess
from fp8bench.model import Case, DeviceFacts, LayerScale, MemoryUse, OperatorTime, Overheads, Scalar, TensorStatistics
from fp8bench.model.raw import RawSlot, Settings
from fp8bench.worker.bench import Bench, described, recovered

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

    @property
    def pid(self) -> int | None:
        """The process that the bench runs in, None while there is none."""
        return os.getpid()

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

    def calibrate(self, case: Case, facts: DeviceFacts, limit: float) -> None:
        self.ask(limit, "calibrate", case, facts)

    def quantisers(self) -> tuple[int, str]:
        """How many quantisers wait to be compiled; why others stay eager, '' if none does."""
        return cast(tuple[int, str], self.ask(HANG_SECONDS, "quantisers"))

    def compiler(self, facts: DeviceFacts) -> str:
        """Whether quantisers compile for a device, in words."""
        return cast(str, self.ask(COMPILE_SECONDS, "compiler", facts))

    def compile_quantisers(self, key: str, limit: float) -> None:
        """Compile those that wait, and run a state's untimed step again."""
        self.ask(limit, "compile_quantisers", key)

    def slot(self, key: str, calls: int, discard: int, limit: float) -> RawSlot:
        return cast(RawSlot, self.ask(limit, "slot", key, calls, discard))

    def loop(self, key: str, steps: int, limit: float) -> None:
        """Run so many steps back to back, untimed."""
        self.ask(limit, "loop", key, steps)

    def error(self, case: Case, facts: DeviceFacts, limit: float) -> dict[str, float]:
        return cast(dict[str, float], self.ask(limit, "error", case, facts))

    def statistics(self, case: Case, facts: DeviceFacts, limit: float) -> tuple[TensorStatistics, ...]:
        return cast(tuple[TensorStatistics, ...], self.ask(limit, "statistics", case, facts))

    def memory(self, case: Case, facts: DeviceFacts, limit: float, key: str = "") -> MemoryUse | str:
        """What a step's memory is made of, or why nobody can say. With a key its state stays until it is released."""
        return cast("MemoryUse | str", self.ask(limit, "memory", case, facts, key))

    def try_batch(self, case: Case, facts: DeviceFacts, memory_limit: int | None, limit: float) -> int | None:
        """Prepare a case and run two steps in so many bytes; those of its tensors at the highest point."""
        return cast("int | None", self.ask(limit, "try_batch", case, facts, memory_limit))

    def trace(self, case: Case, facts: DeviceFacts, limit: float, file: Path) -> tuple[OperatorTime, ...]:
        return cast(tuple[OperatorTime, ...], self.ask(limit, "trace", case, facts, str(file)))

    def losses(self, case: Case, facts: DeviceFacts, steps: int, draw: int, limit: float) -> tuple[float, ...]:
        return cast(tuple[float, ...], self.ask(limit, "losses", case, facts, steps, draw))

    def gradient_error(self, case: Case, reference: Case, facts: DeviceFacts, limit: float) -> float | None:
        return cast("float | None", self.ask(limit, "gradient_error", case, reference, facts))

    def check(self, key: str, limit: float) -> str:
        return cast(str, self.ask(limit, "check", key))

    def scales(self, key: str, limit: float) -> tuple[LayerScale, ...]:
        return cast(tuple[LayerScale, ...], self.ask(limit, "scales", key))

    def versions(self, suites: Sequence[str]) -> dict[str, str]:
        """The versions of suites as the worker has them; those that it does not know are left out."""
        return cast(dict[str, str], self.ask(HANG_SECONDS, "versions", tuple(suites)))

    def modules_under(self, folder: Path) -> tuple[str, ...]:
        """The modules that the worker has loaded from below a folder."""
        return cast(tuple[str, ...], self.ask(HANG_SECONDS, "modules_under", str(folder)))

    def release(self, key: str) -> tuple[str, ...]:
        """Forget a state; returns the names of threads that it leaves behind."""
        return cast(tuple[str, ...], self.ask(HANG_SECONDS, "release", key))

    def overheads(self, facts: DeviceFacts) -> Overheads:
        return cast(Overheads, self.ask(START_SECONDS, "overheads", facts))


class LocalWorker(Worker):
    """The bench in this very process, for notebooks and debuggers.

    What does not hold here: a crash ends the caller, a hang is not ended and no time limit kept, Ctrl-C waits for the
    operation in progress, `restart` forgets states and nothing else (a broken GPU context and a full memory stay),
    threads and processes that a workload leaves go on, what is printed past Python's own stdout is seen only where
    that is a file, and environment variables (OMP_NUM_THREADS, NVIDIA_TF32_OVERRIDE) are as the caller has them.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bench: Bench | None = None

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        try:
            if self._bench is None:
                self._bench = Bench(self._settings)
            return getattr(self._bench, name)(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            fault = WorkerFault(*described(error, self._bench))
        # Out of the except block, so that the exception no longer holds the frames and their tensors.
        recovered(self._bench)
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
        self._process: WorkerProcess | None = None
        self._number = 0

    @property
    def pid(self) -> int | None:
        """The process id, None before the first request."""
        return self._process.pid if self._process else None

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        if self._process is None:
            try:
                self._process = WorkerProcess(self._python, self._environment())
            except OSError as error:
                raise WorkerLost(
                    f"the worker could not be started ({error.strerror}): the system lets this process start no other, "
                    "or Python is not where it was. Make room, and try again."
                ) from None
            try:
                self._begin(self._process)
            except WorkerFault:
                self.close()  # a process without a bench could only answer nonsense
                raise
        return self._exchange(self._process, limit, name, *arguments)

    def release(self, key: str) -> tuple[str, ...]:
        # A worker that is gone holds nothing, and need not be started to say so.
        return super().release(key) if self._process is not None else ()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def restart(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _begin(self, process: WorkerProcess) -> None:
        """What a fresh process is told first."""
        self._exchange(process, START_SECONDS, "open", self._settings)

    def _environment(self) -> dict[str, str]:
        threads = str(self._settings.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        # It would turn TF32 on or off behind a precision's name; set it and nothing here means what it says.
        environment.pop("NVIDIA_TF32_OVERRIDE", None)
        # Its pool of compiling processes and threads would go on running beside what is timed.
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        return environment

    def _exchange(self, process: WorkerProcess, limit: float, name: str, *arguments: Any) -> Any:
        self._number += 1
        try:
            process.send((self._number, name, arguments))
            if not process.answered(limit):
                self.restart()
                raise WorkerHung(
                    f"no answer to {name!r} within {limit:g} s; the worker was ended (--case-timeout sets the limit)"
                )
            number, reply = _numbered(process.receive())
        except (EOFError, OSError):
            words, killed = process.end_in_words(), process.killed
            self.restart()
            raise WorkerLost(f"the worker crashed during {name!r}: {words}", killed) from None
        except Unreadable as garbage:
            self.restart()
            raise WorkerLost(f"the worker's answer to {name!r} could not be read ({garbage}); it was ended") from None
        except KeyboardInterrupt:
            self.restart()  # it may be in a long step, and its late answer would be the first to the next request
            raise
        if number != self._number:
            self.restart()
            raise WorkerLost(
                f"an answer to {name!r} belongs to another request (number {number}, not {self._number}): something in "
                "the worker answers beside it; it was ended"
            )
        if reply[0] == "fault":
            raise WorkerFault(*reply[1:])
        return reply[1]


def _numbered(answer: Any) -> tuple[int, tuple[Any, ...]]:
    """The number of the request that is answered, and the reply."""
    match answer:
        case (int(number), ("ok", _) | ("fault", str(), str(), str(), bool()) as reply):
            return number, reply
    raise Unreadable(f"it is {str(answer)[:60]!r}")
