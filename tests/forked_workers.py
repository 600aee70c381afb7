"""Workers that tests start are forked off a process that has imported torch already: 2 s of a processor less each.

A worker itself is what it always is: its module is run as `python -m` runs it, in a session of its own, with the
descriptors, environment and folder that it was given. Only the interpreter's own start and end are left out, and not
everywhere: another interpreter starts, and one whose path customises it, and so do all workers of command lines that
are processes of their own. Settings that are read at a start have a process of their own to be forked off.
"""

from __future__ import annotations

import atexit
import gc
import importlib.machinery
import os
import pickle
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Variables that an interpreter, its C library or torch read while they start, by how their names begin.
_READ_AT_START = ("PYTHON", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "ATEN_", "ONEDNN_", "DNNL_", "MALLOC_", "LD_")
_MOST_BYTES = 1 << 20
_ROOT = str(Path(__file__).resolve().parents[1])


def _read_at_start(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    kept = {(name, text) for name, text in environment.items() if name.startswith(_READ_AT_START)}
    return frozenset((name, text) for name, text in kept if name != "PYTHONPATH")


def _customised(environment: Mapping[str, str]) -> bool:
    """Whether a folder of the path has code that an interpreter runs at its start."""
    return any(Path(folder, "sitecustomize.py").exists() for folder in environment["PYTHONPATH"].split(os.pathsep))


class Forks:
    """The process that workers are forked off, from this side."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking = threading.Lock()
        own = {name: text for name, text in environment.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            env=own, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()

    def ask(self, *request: object, descriptors: tuple[int, ...] = ()) -> Any:
        with self._asking:
            socket.send_fds(self._connection, [pickle.dumps(request)], descriptors)
            return pickle.loads(self._connection.recv(_MOST_BYTES))

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


class Forked:
    """What a Popen is to who holds a worker."""

    def __init__(self, forks: Forks, command: list[str], environment: Mapping[str, str], printed: int) -> None:
        *_, module, connection, lifeline = command
        self._forks = forks
        self.pid = forks.ask(
            "start", module, dict(environment), str(Path.cwd()), descriptors=(int(connection), int(lifeline), printed)
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


@contextmanager
def forked() -> Iterator[None]:
    """Workers that this process starts in the body are, where a fork is the same."""
    from fp8bench.measure import process

    forks: dict[frozenset[tuple[str, str]], Forks] = {}

    def start(command: list[str], *, env: Mapping[str, str], stdout: Any, **options: Any) -> Any:
        if command[0] != sys.executable or _customised(env):
            return subprocess.Popen(command, env=env, stdout=stdout, **options)
        settings = _read_at_start(env)
        if settings not in forks:
            forks[settings] = Forks(env)
        return Forked(forks[settings], command, env, stdout.fileno())

    ours = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    process.subprocess, before = ours, process.subprocess  # type: ignore[assignment]
    try:
        yield
    finally:
        process.subprocess = before
        for one in forks.values():
            one.close()


def _become(module: str, environment: Mapping[str, str], folder: str, descriptors: list[int]) -> None:
    """This process, just forked, is a worker from here on."""
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
    """Where the path leads to another fp8bench than this one, that is what is imported."""
    found = importlib.machinery.PathFinder.find_spec("fp8bench", sys.path)
    if found is None or found.origin != sys.modules["fp8bench"].__file__:
        for name in [name for name in sys.modules if name.partition(".")[0] == "fp8bench"]:
            del sys.modules[name]


def _end() -> None:
    """As an interpreter ends, but for its looking through all of torch: 0.2 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(requests: socket.socket) -> None:
    """Fork a worker a request, and say how they ended, until nobody asks."""
    sys.path.insert(0, _ROOT)
    import torch  # noqa: F401 - what a fork is spared

    import fp8bench.worker.bench  # noqa: F401 - and this

    sys.path.remove(_ROOT)
    gc.collect()
    gc.freeze()
    ends: dict[int, int] = {}
    while (received := socket.recv_fds(requests, _MOST_BYTES, 3))[0]:
        descriptors = received[1]
        what, *details = pickle.loads(received[0])
        if what == "start":
            if os.fork() == 0:
                os.setsid()  # before it is known to anyone, who might end its session
                requests.send(pickle.dumps(os.getpid()))
                requests.close()
                _become(*details, descriptors)
                return
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            (pid,) = details
            if pid not in ends and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                ends[pid] = os.waitstatus_to_exitcode(ended[1])
            requests.send(pickle.dumps(ends.get(pid)))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
