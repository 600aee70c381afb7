"""Workers of tests are forked from a process that has imported torch, which saves 2 s of CPU time each.

The worker runs its module as `python -m` does, in a separate session, with the given descriptors, environment and
folder. Only the interpreter's start and end are skipped. Real processes start for other interpreters, for a path that
customises the interpreter, and for workers of command lines in separate processes, except those that `started` starts.
For variables read at interpreter start there are separate servers.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.machinery
import os
import pickle
import runpy
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Prefixes of variables that an interpreter, its C library or torch read while they start.
_READ_AT_START = ("PYTHON", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "ATEN_", "ONEDNN_", "DNNL_", "MALLOC_", "LD_")
_MOST_BYTES = 1 << 20
_ROOT = str(Path(__file__).resolve().parents[1])


def _read_at_start(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    kept = {(name, text) for name, text in environment.items() if name.startswith(_READ_AT_START)}
    return frozenset((name, text) for name, text in kept if name != "PYTHONPATH")


def _customised(environment: Mapping[str, str]) -> bool:
    """Whether a folder of the path has code that an interpreter runs at start."""
    return any(Path(folder, "sitecustomize.py").exists() for folder in environment["PYTHONPATH"].split(os.pathsep))


class Forks:
    """The process that workers are forked off, from this side."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._asking = threading.Lock()

    def ask(self, *request: object, descriptors: tuple[int, ...] = ()) -> Any:
        with self._asking:
            socket.send_fds(self._connection, [pickle.dumps(request)], descriptors)
            return pickle.loads(self._connection.recv(_MOST_BYTES))

    def close(self) -> None:
        self._connection.close()


class OwnForks(Forks):
    """One that this process has started, for itself and for command lines that it starts."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)
        own = {name: text for name, text in environment.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            env=own,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def for_another(self) -> socket.socket:
        """A connection for a process that this one starts."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ask("join", descriptors=(theirs.fileno(),))
        theirs.close()
        return ours

    def close(self) -> None:
        super().close()
        self._process.wait()


class Forked:
    """A forked worker with the interface of Popen."""

    def __init__(self, forks: Forks, command: list[str], environment: Mapping[str, str], printed: int) -> None:
        *_, module, connection, lifeline = command
        self._forks = forks
        self.pid = forks.ask(
            "start",
            os.getpid(),
            module,
            dict(environment),
            str(Path.cwd()),
            descriptors=(int(connection), int(lifeline), printed),
        )

    def poll(self) -> int | None:
        status: int | None = self._forks.ask("status", self.pid)
        return status

    def wait(self, timeout: float = float("inf")) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a worker", timeout)
            time.sleep(0.002)
        return status


_forks: dict[frozenset[tuple[str, str]], OwnForks] = {}


def _own(environment: Mapping[str, str]) -> OwnForks:
    settings = _read_at_start(environment)
    if settings not in _forks:
        _forks[settings] = OwnForks(environment)
    return _forks[settings]


@contextmanager
def forked(forks_of: Callable[[Mapping[str, str]], Forks | None] = _own) -> Iterator[None]:
    """Forks the workers that this process starts in the body, if a fork is equivalent."""
    from fp8bench.measure import process

    def start(command: list[str], *, env: Mapping[str, str], stdout: Any, **options: Any) -> Any:
        same = command[0] == sys.executable and not _customised(env)
        if not same or (forks := forks_of(env)) is None:
            return subprocess.Popen(command, env=env, stdout=stdout, **options)
        return Forked(forks, command, env, stdout.fileno())

    ours = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    process.subprocess, before = ours, process.subprocess  # type: ignore[assignment]
    try:
        yield
    finally:
        process.subprocess = before
        while _forks:
            _forks.popitem()[1].close()


def started(words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts `python -m fp8bench` with these words as a process whose workers are forked too."""
    options["env"] = {**os.environ, **options.get("env", {}), "PYTHONPATH": _ROOT}
    if sys.platform != "linux":
        return subprocess.Popen([sys.executable, "-m", "fp8bench", *words], **options)
    with _own(_of_workers()).for_another() as connection:
        descriptor = connection.fileno()
        line = [sys.executable, "-c", "from tests.forked_workers import command; command()", str(descriptor), *words]
        return subprocess.Popen(line, pass_fds=(descriptor,), **options)


def workers(command: int) -> list[int]:
    """The workers of a command line from `started`; `suites.kill.children` finds those of others."""
    pids: list[int] = []
    for forks in _forks.values():
        pids += forks.ask("workers", command)
    return pids


def command() -> None:
    """Main function of the process that `started` starts: runs the command line."""
    connection = socket.socket(fileno=int(sys.argv.pop(1)))
    connection.set_inheritable(False)
    forks, settings = Forks(connection), _read_at_start(_of_workers())
    sys.path[0] = str(Path.cwd())  # as for `python -m`
    with forked(lambda environment: forks if _read_at_start(environment) == settings else None):
        runpy.run_module("fp8bench", run_name="__main__", alter_sys=True)


def _of_workers() -> dict[str, str]:
    """The environment of workers with default settings."""
    from fp8bench.measure.handle import ProcessWorker
    from fp8bench.model.raw import Settings

    return ProcessWorker(Settings())._environment()


def _become(module: str, environment: Mapping[str, str], folder: str, descriptors: list[int]) -> None:
    """Turns this forked process into a worker."""
    connection, lifeline, printed = descriptors
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(printed)
    sys.path[:] = dict.fromkeys([*environment["PYTHONPATH"].split(os.pathsep), *sys.path])  # as `site` does
    _forget_other_checkouts()
    sys.argv = [module, str(connection), str(lifeline)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    _end()


def _forget_other_checkouts() -> None:
    """Unloads fp8bench if the path leads to another checkout, so that it is imported from there."""
    found = importlib.machinery.PathFinder.find_spec("fp8bench", sys.path)
    if found is None or found.origin != sys.modules["fp8bench"].__file__:
        for name in [name for name in sys.modules if name.partition(".")[0] == "fp8bench"]:
            del sys.modules[name]


def _end() -> None:
    """Ends like an interpreter, but without collecting torch's objects, which takes 0.2 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Server:
    """The process that forks: its clients, and the workers with their clients."""

    def __init__(self, first: socket.socket) -> None:
        self._first, self._asking = first, {first}
        self._askers: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def serve(self) -> None:
        """Serves until the first client leaves; command lines come and go."""
        while self._first in self._asking:
            for connection in select.select([*self._asking], [], [])[0]:
                received, descriptors = b"", list[int]()
                with contextlib.suppress(OSError):  # a killed command line
                    received, descriptors, *_ = socket.recv_fds(connection, _MOST_BYTES, 3)
                if received:
                    self._answer(connection, *pickle.loads(received), descriptors=descriptors)
                else:
                    connection.close()
                    self._asking.discard(connection)

    def _answer(self, connection: socket.socket, what: str, *details: Any, descriptors: list[int]) -> None:
        self._reap()
        if what == "start":
            self._start(connection, *details, descriptors=descriptors)
            return
        if what == "join":
            self._asking.add(socket.socket(fileno=descriptors[0]))
            answer: object = None
        elif what == "workers":
            answer = [pid for pid, asker in self._askers.items() if asker == details[0] and pid not in self._ends]
        else:
            answer = self._ends.get(details[0])
        _send(connection, answer)

    def _start(self, connection: socket.socket, asker: int, *details: Any, descriptors: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            os.setsid()  # before anyone knows its id and could end its session
            _send(connection, os.getpid())
            for one in self._asking:
                one.close()
            _become(*details, descriptors)
        self._askers[pid] = asker
        self._ends.pop(pid, None)
        for descriptor in descriptors:
            os.close(descriptor)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._ends[ended[0]] = os.waitstatus_to_exitcode(ended[1])


def _send(connection: socket.socket, answer: object) -> None:
    with contextlib.suppress(OSError):  # a killed command line, whose workers notice by their lifelines
        connection.send(pickle.dumps(answer))


def serve(first: socket.socket) -> None:
    """Imports what forks share, then serves."""
    sys.path.insert(0, _ROOT)
    import torch  # noqa: F401

    import fp8bench.worker.bench  # noqa: F401

    sys.path.remove(_ROOT)
    gc.collect()
    gc.freeze()
    Server(first).serve()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    _end()
