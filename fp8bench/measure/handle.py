"""The parent's side of a worker: typed requests, time limits, and errors for a worker that has ended. ProcessWorker
runs the bench in a separate process; LocalWorker runs it in this one (notebooks, --no-isolation), where a crash cannot
be survived and a hang cannot be ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from fp8bench.errors import ImportFailed, UsageError, WorkerFault, WorkerHung, WorkerLost
from fp8bench.measure.limits import HANG_SECONDS
from fp8bench.measure.process import Unreadable, WorkerProcess
from fp8bench.model import DeviceFacts, Request, Scalar
from fp8bench.model.raw import Settings
from fp8bench.model.run import LOWERING

if TYPE_CHECKING:  # a parent of a worker process would import what only the worker needs
    from fp8bench.worker.bench import Bench

    # Calls of its methods become requests to the worker.
    AskedBench = Bench

START_SECONDS = 300.0
BENCH_MODULE = "fp8bench.worker.main"
RANK_MODULE = "fp8bench.worker.ranks.main"
# Modules whose requests --case-timeout limits.
TIMED_MODULES = (BENCH_MODULE, RANK_MODULE)


_claims: list[bool] = []
_claiming = threading.Lock()


@contextmanager
def claim_process(isolation: bool) -> Iterator[None]:
    """Registers a run of this process for the body. Raises UsageError if two runs would be measured in one process.

    Several runs may go on at once if each has a worker process. One without changes switches, stdout and the number of
    threads of this process, in which the others' code is imported.
    """
    with _claiming:
        if _claims and not (isolation and all(_claims)):
            which = "has no process of its own" if not isolation else "is measured beside one that has none"
            raise UsageError(
                f"another run is going on in this process, and this one {which} (isolation=False): each would change "
                "what the other measures. Wait until that is done, or leave isolation on for both."
            )
        _claims.append(isolation)
    try:
        yield
    finally:
        with _claiming:
            _claims.remove(isolation)


class Worker(ABC):
    """Where a bench runs. Every request may raise WorkerFault, WorkerLost or WorkerHung."""

    @abstractmethod
    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        """Sends one request and waits up to `limit` seconds for the answer."""

    @abstractmethod
    def close(self) -> None:
        """Ends the worker. Safe to call twice."""

    @abstractmethod
    def restart(self) -> None:
        """Starts a fresh worker with the same settings; all states are gone."""

    def begin(self) -> None:
        """Lets a process import torch while the caller goes on."""

    @property
    def pid(self) -> int | None:
        return os.getpid()

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that the process has held so far; None if unknown."""
        with suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) << 10
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def within(self, seconds: float) -> AskedBench:
        return cast("AskedBench", _Asked(self, seconds))

    def probe(self) -> tuple[DeviceFacts, ...]:
        return self.within(START_SECONDS).probe()

    def software(self) -> dict[str, Scalar | None]:
        return self.within(START_SECONDS).software()

    def modules_under(self, folder: Path) -> tuple[str, ...]:
        return self.within(HANG_SECONDS).modules_under(str(folder))

    def release(self, key: str) -> tuple[str, ...]:
        return self.within(HANG_SECONDS).release(key)


@dataclass(frozen=True)
class _Asked:
    worker: Worker
    limit: float

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.worker.ask, self.limit, name)


class LocalWorker(Worker):
    """The bench in this process, for notebooks and debuggers.

    Its limits: a crash ends the caller; a hang is not ended and no time limit kept; Ctrl-C waits for the operation in
    progress; `restart` forgets states only (a broken GPU context and a full memory stay); threads and orphaned
    processes of a workload go on; output past Python's own stdout is seen only where that is a file; environment
    variables are the caller's.
    """

    def __init__(self, settings: Settings, opened: Callable[[Settings], Bench] | None = None) -> None:
        self._settings = settings
        self._opened = opened
        self._bench: Bench | None = None

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        from fp8bench.worker.bench import Bench
        from fp8bench.worker.faults import describe_fault

        if self._bench is None:
            self._bench = (self._opened or Bench)(self._settings)  # what refuses this process is no fault of a worker's
        try:
            return getattr(self._bench, name)(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            fault = describe_fault(error)
        # Out of the except block, so that the exception no longer holds the frames and their tensors.
        raise WorkerFault(*self._bench.recover(fault))

    def close(self) -> None:
        if self._bench is not None:
            self._bench.close()
        self._bench = None

    def restart(self) -> None:
        self.close()


class ProcessWorker(Worker):
    """The bench in a child process that runs `module`, started on the first request."""

    def __init__(self, settings: Settings, python: str = sys.executable, module: str = BENCH_MODULE) -> None:
        self.settings = settings
        self._python = python
        self._module = module
        self._process: WorkerProcess | None = None
        self._is_open = False
        self._number = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        self.begin()
        assert self._process is not None
        if not self._is_open:
            first = self._number == 0
            try:
                self._begin(self._process)
            except WorkerFault as fault:
                self.close()  # a process without a bench could only answer nonsense
                if first and fault.kind == ImportFailed.__name__:  # nothing is measured yet: the user's mistake
                    raise ImportFailed(str(fault).removeprefix(f"{fault.kind}: ")) from None
                raise
            self._is_open = True
        return self._exchange(self._process, limit, name, *arguments)

    def begin(self) -> None:
        if self._process is None:
            self._is_open = False
            try:
                self._process = self._start_process()
            except OSError as error:
                raise WorkerLost(
                    f"the worker could not be started ({error.strerror or error}): the system lets this process start "
                    "no other, or Python is not where it was. Make room, and try again."
                ) from None

    def release(self, key: str) -> tuple[str, ...]:
        # A worker that has ended holds nothing, and need not be started to answer this.
        return super().release(key) if self._process is not None else ()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._is_open:
            process.close()
        elif process is not None:
            process.kill()  # it imports torch, and would only then see that nobody asks

    def restart(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _start_process(self) -> WorkerProcess:
        return WorkerProcess(self._python, self._module, self._environment())

    def _begin(self, process: WorkerProcess) -> None:
        self._exchange(process, START_SECONDS, "open", self.settings)

    def _environment(self) -> dict[str, str]:
        threads = str(self.settings.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        for name in LOWERING:  # with one of them set, a precision is not what its name promises
            environment.pop(name, None)
        # Its pool of compiling processes and threads would keep running during timing.
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        return environment

    def _exchange(self, process: WorkerProcess, limit: float, name: str, *arguments: Any) -> Any:
        # The number distinguishes a late answer from the expected one.
        self._number += 1
        try:
            process.send((self._number, name, arguments))
            if not process.wait_for_answer(limit):
                late = process.delay_in_words()
                self.restart()
                raise WorkerHung(
                    f"no answer to {name!r} within {limit:g} s{late}; the worker was ended"
                    + (" (--case-timeout sets the limit)" if self._module in TIMED_MODULES else "")
                )
            number, reply = _split_answer(process.receive())
        # A worker that may be anywhere in its work is ended on every way out, so that the next request meets a fresh
        # one.
        except (EOFError, OSError):
            words, killed = process.end_in_words(), process.was_killed
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


@contextmanager
def workers_ahead(request: Request, second: bool) -> Iterator[tuple[ProcessWorker, ...]]:
    """Yields workers that already import torch for a run: one that times and, with `second` and cores for it, another.

    A run by ranks or in this process gets none. Their `settings` may still change.
    """
    count = 0
    if request.isolation and request.ranks is None:
        count = 2 if second and _has_cores_for_two(request) else 1
    with ExitStack() as stack:
        settings = Settings(request.threads, request.seed, request.imports)
        workers = [stack.enter_context(ProcessWorker(settings)) for _ in range(count)]
        for worker in workers:
            with suppress(WorkerLost):  # the first request reports the reason
                worker.begin()
        yield tuple(workers)


def _has_cores_for_two(request: Request) -> bool:
    """Whether each of two workers has its cores; nobody knows where the system does not say how many there are."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) >= 2 * request.threads


def _split_answer(answer: Any) -> tuple[int, tuple[Any, ...]]:
    match answer:
        case (int(number), ("ok", _) | ("fault", str(), str(), str(), bool()) as reply):
            return number, reply
    raise Unreadable(f"it is {str(answer)[:60]!r}")


SOURCE = Path(__file__).with_name("allocator_probe.c")
_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 60.0


class CountingWorker(ProcessWorker):
    """A worker under the allocator probe; `why` is the reason if the probe is missing."""

    def __init__(self, settings: Settings, probe: Path | None, reason: str = "") -> None:
        super().__init__(settings)
        self.why = reason
        self._probe = probe

    def _environment(self) -> dict[str, str]:
        environment = super()._environment()
        if self._probe is not None:
            ahead = [str(self._probe), *environment.get("LD_PRELOAD", "").split()]
            environment["LD_PRELOAD"] = " ".join(ahead)
        return environment


@contextmanager
def counting_worker(settings: Settings) -> Iterator[CountingWorker]:
    with tempfile.TemporaryDirectory(prefix="fp8bench-probe-") as folder:
        probe = built(Path(folder))
        reason = probe if isinstance(probe, str) else ""
        worker = CountingWorker(settings, None if isinstance(probe, str) else probe, reason)
        try:
            yield worker
        finally:
            worker.close()


def built(folder: Path, system: str = sys.platform) -> Path | str:
    if system != "linux":
        return f"calls of the allocator are counted on Linux only, and this is {system}"
    # $CC first: somebody who sets it means it.
    named = os.environ.get("CC", "").split()[:1]
    compiler = next(filter(None, map(shutil.which, (*named, *_COMPILERS))), None)
    if compiler is None:
        return "counting calls of the allocator needs a C compiler, and there is none: install gcc"
    probe = folder / "allocator_probe.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(probe), str(SOURCE), "-ldl"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} made no probe of the allocator: {error}"
    # The compiler's first error is the most useful; the rest usually follows from it.
    if done.returncode:
        words = next((line for line in done.stderr.splitlines() if "error" in line), "it gave no reason")
        return f"{compiler} made no probe of the allocator: {words[:200]}"
    return probe
