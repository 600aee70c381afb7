"""The parent process's side of a worker: sends typed requests, limits their time, and raises an error if the worker
has ended.

ProcessWorker runs the bench in a child process. LocalWorker runs the bench in this process (notebooks,
--no-isolation), which cannot survive a crash or end a hang.
"""

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
from fp8bench.measure.process import UnreadableAnswer, WorkerProcess
from fp8bench.model import DeviceFacts, Request, Scalar
from fp8bench.model.raw import Settings
from fp8bench.model.run import PRECISION_LOWERING_VARIABLES
from fp8bench.registry import devices

if TYPE_CHECKING:  # at run time, this import would load modules that only the worker needs
    from fp8bench.worker.bench import Bench

    # The type that `Worker.with_time_limit` returns. Calling a method of Bench on it sends a request to the worker.
    RemoteBench = Bench

START_SECONDS = 300.0
BENCH_MODULE = "fp8bench.worker.main"
RANK_MODULE = "fp8bench.worker.ranks.main"
# Modules of workers whose requests are limited by --case-timeout.
TIME_LIMITED_MODULES = (BENCH_MODULE, RANK_MODULE)


# For each active run of this process: whether it has a worker process (isolation).
_active_runs: list[bool] = []
_runs_lock = threading.Lock()


@contextmanager
def register_process_run(isolation: bool) -> Iterator[None]:
    """Registers a run of this process until the `with` block ends. Raises UsageError if the run would disturb another
    run in this process.

    Several runs may be active at the same time if each has a worker process. A run without a worker process changes
    switches, stdout and the number of threads of this process.
    """
    with _runs_lock:
        if _active_runs and not (isolation and all(_active_runs)):
            run_without_worker = "that run" if isolation else "this one"
            raise UsageError(
                f"another run is active in this process, and {run_without_worker} has no worker process "
                "(isolation=False): each would disturb the other's measurement. Wait until it has ended, or leave "
                "isolation on for both."
            )
        _active_runs.append(isolation)
    try:
        yield
    finally:
        with _runs_lock:
            _active_runs.remove(isolation)


class Worker(ABC):
    """Runs a bench, an object whose methods answer requests. The class Bench, for example, prepares and times cases.
    Every request may raise WorkerFault, WorkerLost or WorkerHung.
    """

    @abstractmethod
    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        """Sends the request `name` with its arguments, and waits up to `limit` seconds for the answer."""

    @abstractmethod
    def close(self) -> None:
        """Ends the worker. Safe to call twice."""

    @abstractmethod
    def restart(self) -> None:
        """Starts a fresh worker with the same settings. All states of the old worker are lost."""

    def begin(self) -> None:
        """Starts the worker's process, which imports torch in the background. Does nothing if the worker has no
        process.
        """

    @property
    def pid(self) -> int | None:
        """The id of the process in which the bench runs: this process, unless a subclass starts another one. None if
        that process is not running.
        """
        return os.getpid()

    @property
    def peak_bytes(self) -> int | None:
        """The most memory in bytes that the process has ever held; None if unknown."""
        with suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) << 10
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def with_time_limit(self, seconds: float) -> RemoteBench:
        """Returns a proxy for the worker's Bench. Each method sends a request, and waits up to `seconds` for the
        answer.
        """
        return cast("RemoteBench", _RequestSender(self, seconds))

    def probe(self) -> tuple[DeviceFacts, ...]:
        return self.with_time_limit(START_SECONDS).probe()

    def software(self) -> dict[str, Scalar | None]:
        return self.with_time_limit(START_SECONDS).software()

    def modules_under(self, folder: Path) -> tuple[str, ...]:
        return self.with_time_limit(HANG_SECONDS).modules_under(str(folder))

    def release(self, key: str) -> tuple[str, ...]:
        """Frees a state. Returns the names of the threads and processes that the state leaves running."""
        return self.with_time_limit(HANG_SECONDS).release(key)


@dataclass(frozen=True)
class _RequestSender:
    worker: Worker
    limit: float

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.worker.ask, self.limit, name)


class LocalWorker(Worker):
    """Runs the bench in this process, for notebooks and debuggers.

    A crash ends the caller. Time limits have no effect, so a hang does not end. Ctrl-C waits for the operation in
    progress. `restart` only forgets states: a broken GPU context and used memory remain. Threads and orphaned processes
    of a workload keep running. Output that bypasses Python's stdout is noticed only if stdout is a file. Environment
    variables are the caller's.

    `opened` is the function that makes the bench from the settings, by default the class Bench.
    """

    def __init__(self, settings: Settings, opened: Callable[[Settings], Bench] | None = None) -> None:
        self._settings = settings
        self._opened = opened
        self._bench: Bench | None = None

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        from fp8bench.worker.bench import Bench
        from fp8bench.worker.faults import describe_fault

        if self._bench is None:
            # if making the bench fails, this process cannot be used at all, so this error is not a WorkerFault
            self._bench = (self._opened or Bench)(self._settings)
        try:
            return getattr(self._bench, name)(*arguments)
        except KeyboardInterrupt:  # no fault of the workload: the user ends the run
            raise
        except BaseException as error:
            worker_fault = describe_fault(error)
        # Raise outside of the except block: there the exception would keep the frames and their tensors in memory.
        raise WorkerFault(*self._bench.recover(worker_fault))

    def close(self) -> None:
        if self._bench is not None:
            self._bench.close()
        self._bench = None

    def restart(self) -> None:
        self.close()


class ProcessWorker(Worker):
    """Runs the bench in a child process, which executes `module`. The first request starts the process."""

    def __init__(self, settings: Settings, python: str = sys.executable, module: str = BENCH_MODULE) -> None:
        self.settings = settings
        self._python = python
        self._module = module
        self._process: WorkerProcess | None = None
        self._is_open = False
        self._request_number = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        self.begin()
        assert self._process is not None
        if not self._is_open:
            is_first_request = self._request_number == 0
            try:
                self._open_bench(self._process)
            except WorkerFault as fault:
                self.close()  # the process has no Bench object, so it cannot answer any request
                # a failed import is the user's mistake, if nothing was measured before it
                if is_first_request and fault.kind == ImportFailed.__name__:
                    raise ImportFailed(str(fault).removeprefix(f"{fault.kind}: ")) from None
                raise
            self._is_open = True
        return self._exchange_request(self._process, limit, name, *arguments)

    def begin(self) -> None:
        if self._process is None:
            self._is_open = False
            try:
                self._process = self._start_process()
            except OSError as error:
                raise WorkerLost(
                    f"the worker process could not be started ({error.strerror or error}): the system has no room for "
                    "another process, or Python was moved. End other programs, and try again."
                ) from None

    def release(self, key: str) -> tuple[str, ...]:
        # A worker that has ended holds no states, so there is nothing to release. Do not start a new worker for this.
        return super().release(key) if self._process is not None else ()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._is_open:
            process.close()
        elif process is not None:
            process.kill()  # while the process imports torch, it does not notice that the socket was closed

    def restart(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _start_process(self) -> WorkerProcess:
        return WorkerProcess(self._python, self._module, self._environment())

    def _open_bench(self, process: WorkerProcess) -> None:
        self._exchange_request(process, START_SECONDS, "open", self.settings)

    def _environment(self) -> dict[str, str]:
        thread_count = str(self.settings.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": thread_count, "MKL_NUM_THREADS": thread_count}
        # these variables would lower the precision of products below the one in the case's name
        for name in PRECISION_LOWERING_VARIABLES:
            environment.pop(name, None)
        # Inductor's pool of compiling processes would keep running during the timing.
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        # Let the worker import the user's modules too. '' in sys.path is the current folder.
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        return environment

    def _exchange_request(self, process: WorkerProcess, limit: float, name: str, *arguments: Any) -> Any:
        # The request's number reveals late answers to earlier requests.
        self._request_number += 1
        try:
            process.send_request((self._request_number, name, arguments))
            if not process.wait_for_answer(limit):
                delay_text = process.describe_delay()
                self.restart()
                raise WorkerHung(
                    f"no answer to {name!r} within {limit:g} s{delay_text}; the worker was ended"
                    + (" (--case-timeout sets the limit)" if self._module in TIME_LIMITED_MODULES else "")
                )
            number, reply = _parse_worker_answer(process.receive_answer())
        # On every failure the worker is ended, because its state is unknown. The next request gets a new worker.
        except (EOFError, OSError):
            end_description, was_killed = process.describe_end(), process.was_killed
            self.restart()
            raise WorkerLost(f"the worker crashed during {name!r}: {end_description}", was_killed) from None
        except UnreadableAnswer as error:
            self.restart()
            raise WorkerLost(f"the worker's answer to {name!r} could not be read ({error}); it was ended") from None
        except KeyboardInterrupt:
            # the worker may be in a long step, and its late answer would be taken for the next request's answer
            self.restart()
            raise
        if number != self._request_number:
            self.restart()
            raise WorkerLost(
                f"an answer to {name!r} belongs to another request (number {number}, not {self._request_number}): "
                "other code in the worker wrote to its socket. The worker was ended"
            )
        if reply[0] == "fault":
            raise WorkerFault(*reply[1:])
        return reply[1]


@contextmanager
def start_workers_early(request: Request, with_second: bool) -> Iterator[tuple[ProcessWorker, ...]]:
    """Yields workers that have begun to import torch: the worker that times, and a second worker if `with_second` is
    true and the machine has cores and memory for two.

    Yields no workers for a run with ranks, or for a run in this process. The caller may still change the `settings` of
    the workers.
    """
    worker_count = 0
    if request.isolation and request.ranks is None:
        worker_count = 2 if with_second and _has_room_for_two_workers(request) else 1
    with ExitStack() as stack:
        settings = Settings(request.threads, request.seed, request.imports)
        workers = [stack.enter_context(ProcessWorker(settings)) for _ in range(worker_count)]
        for worker in workers:
            # If a process cannot start now, the worker's first request tries again and reports why.
            with suppress(WorkerLost):
                worker.begin()
        yield tuple(workers)


# The free memory that a second worker needs, in bytes. A worker takes 0.5 GiB without any state.
_MIN_FREE_BYTES = 2 << 30


def _has_room_for_two_workers(request: Request) -> bool:
    """Returns whether the machine has cores and memory for two workers. False if the system does not report its
    cores.
    """
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2 * request.threads:
        return False
    return devices.get("cpu").free_bytes() >= _MIN_FREE_BYTES


def _parse_worker_answer(answer: Any) -> tuple[int, tuple[Any, ...]]:
    match answer:
        case (int(number), ("ok", _) | ("fault", str(), str(), str(), bool()) as reply):
            return number, reply
    raise UnreadableAnswer(f"it is {str(answer)[:60]!r}")


PROBE_SOURCE = Path(__file__).with_name("allocator_probe.c")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_SECONDS = 60.0


class CountingWorker(ProcessWorker):
    """A worker with the allocator probe preloaded, a library that counts memory allocations. `why` is the reason if
    the probe is missing.
    """

    def __init__(self, settings: Settings, probe: Path | None, reason: str = "") -> None:
        super().__init__(settings)
        self.why = reason
        self._probe = probe

    def _environment(self) -> dict[str, str]:
        environment = super()._environment()
        if self._probe is not None:
            # Keep the libraries that the user preloads.
            preloaded_libraries = [str(self._probe), *environment.get("LD_PRELOAD", "").split()]
            environment["LD_PRELOAD"] = " ".join(preloaded_libraries)
        return environment


@contextmanager
def open_counting_worker(settings: Settings) -> Iterator[CountingWorker]:
    with tempfile.TemporaryDirectory(prefix="fp8bench-probe-") as folder:
        probe_or_reason = compile_allocator_probe(Path(folder))
        reason = probe_or_reason if isinstance(probe_or_reason, str) else ""
        worker = CountingWorker(settings, None if isinstance(probe_or_reason, str) else probe_or_reason, reason)
        try:
            yield worker
        finally:
            worker.close()


def compile_allocator_probe(folder: Path, system: str = sys.platform) -> Path | str:
    """Compiles the allocator probe into `folder`. Returns its path, or the reason why it could not be compiled."""
    if system != "linux":
        return f"allocator calls can be counted on Linux only, and this is {system}"
    # $CC comes first, because the user has chosen that compiler.
    user_compiler = os.environ.get("CC", "").split()[:1]
    compiler_path = next(filter(None, map(shutil.which, (*user_compiler, *_COMPILERS))), None)
    if compiler_path is None:
        return "counting allocator calls needs a C compiler, and none was found: install gcc"
    probe_library = folder / "allocator_probe.so"
    command = [compiler_path, "-O2", "-shared", "-fPIC", "-o", str(probe_library), str(PROBE_SOURCE), "-ldl"]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler_path} could not compile the allocator probe: {error}"
    # The first error is the most useful one; later errors usually follow from it.
    if result.returncode:
        error_line = next((line for line in result.stderr.splitlines() if "error" in line), "it gave no reason")
        return f"{compiler_path} could not compile the allocator probe: {error_line[:200]}"
    return probe_library
