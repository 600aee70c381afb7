"""The worker process: answers one request at a time until its parent is gone.

The parent starts it as `python -m fp8bench.worker.main FD LIFELINE` (or another module, whose bench does more), in a
new session. FD is one end of a socket pair for requests. LIFELINE is a pipe whose other end only the parent holds: its
end-of-file means that the parent is dead, however it died. A worker under a different interpreter is first asked to
`greet`, which returns its protocol and versions.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import platform
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from fp8bench import __version__
from fp8bench.model import Scalar
from fp8bench.model.raw import PROTOCOL, Settings
from fp8bench.registry import devices
from fp8bench.worker.bench import Bench
from fp8bench.worker.faults import describe_fault
from fp8bench.worker.step_guards import own_this_process


def handshake() -> dict[str, Scalar | None]:
    """Returns the protocol, this Python, the location of fp8bench, and versions and locations of torch and numpy."""
    facts: dict[str, Scalar | None] = {
        "protocol": PROTOCOL,
        "fp8bench": __version__,
        "package": str(Path(__file__).resolve().parents[1]),
        "python": platform.python_version(),
        "executable": sys.executable,
        "prefix": sys.prefix,
    }
    for name in ("torch", "numpy"):
        try:
            module = importlib.import_module(name)
        except BaseException as error:
            words = " ".join(str(error).split())[:300]
            facts |= {name: None, f"{name}_missing": f"{type(error).__name__}: {words}"}
            continue
        facts |= {name: str(getattr(module, "__version__", "")), f"{name}_at": getattr(module, "__file__", None)}
    return facts


def die_with_parent(lifeline: int, connection: Connection, last: Callable[[], None] = lambda: None) -> None:
    """Ends this process, and what it has started, as soon as the lifeline closes, after calling `last`.

    A warden process waits for that. It is forked early, before there is much memory to copy; a thread would not run
    while foreign code holds the interpreter. It is not a child of this process, which then usually has none: that is
    quick to check. On Linux the kernel also kills this process when the parent dies, in case the warden is dead.
    """
    if (between := os.fork()) == 0:
        if os.fork():
            os._exit(0)
        try:
            connection.close()
            while os.read(lifeline, 1):
                pass
            last()
        finally:
            os.killpg(os.getpgrp(), signal.SIGKILL)
    os.waitpid(between, 0)
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        adopt_orphans = 36  # orphans of a workload's children become ours, so that we can end them
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
            ctypes.CDLL(None).prctl(adopt_orphans, 1)


def keep_from_children(lifeline: int, connection: Connection) -> None:
    """Closes our ends in the processes that a workload starts, so that these cannot answer for us."""

    def close_ends() -> None:
        connection.close()
        os.close(lifeline)

    os.set_inheritable(connection.fileno(), False)
    os.set_inheritable(lifeline, False)
    os.register_at_fork(after_in_child=close_ends)


Open = Callable[[Settings], Bench]


def answer(
    bench: Bench | None, name: str, arguments: tuple[Any, ...], opened: Open = Bench
) -> tuple[Bench | None, tuple[Any, ...]]:
    """Serves one request. This is the only place where an exception becomes an answer."""
    try:
        if name == "greet":
            return bench, ("ok", handshake())
        if name == "open":
            return opened(*arguments), ("ok", None)
        if bench is None:
            raise RuntimeError("the first request must be 'open'")
        return bench, ("ok", getattr(bench, name)(*arguments))
    except BaseException as error:  # also sys.exit(): a workload must not end this process
        fault = describe_fault(error, bench is not None)
    # Outside the except block, so that the exception no longer holds the frames and their tensors.
    return bench, ("fault", *(fault if bench is None else bench.recover(fault)))


def serve(connection: Connection, opened: Open, report: Callable[[str], None]) -> None:
    """Answers until the other end closes; `report` is called with the name of each request before it is answered."""
    bench: Bench | None = None
    ourselves = os.getpid()
    while True:
        try:
            number, name, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        report(name)
        bench, reply = answer(bench, name, arguments, opened)
        if os.getpid() != ourselves:
            os._exit(0)  # a workload has forked, and this is the child
        if name == "open":
            # Imported objects are permanent; each garbage collection would spend 0.1 s on them.
            gc.collect()
            gc.freeze()
            keep_within_memory()
        connection.send((number, reply))


def keep_within_memory() -> None:
    """Limits memory on a CPU, where the kernel would otherwise end this process, or another one."""
    try:
        import torch
    except ImportError:
        return  # a request that needs torch fails with the reason
    if not torch.accelerator.is_available():
        devices.get("cpu").end_where_memory_does(int(os.environ.get("WORLD_SIZE", "1")))


def main(opened: Open = Bench) -> None:
    run(Connection(int(sys.argv[1])), int(sys.argv[2]), opened, early="torch")


def run(
    connection: Connection,
    lifeline: int,
    opened: Open,
    report: Callable[[str], None] = lambda name: None,
    early: str = "",
) -> None:
    """Serves until the other end closes; imports the module `early` before the first request comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    faulthandler.enable()
    die_with_parent(lifeline, connection)
    keep_from_children(lifeline, connection)
    own_this_process()
    # A workload's output must not mix with the parent's table; the size of this file shows whether a step printed.
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 1)
        if early:
            # Modules are permanent: searching them for garbage takes 0.1 s each time.
            gc.disable()
            with contextlib.suppress(Exception):  # the first request reports the reason
                importlib.import_module(early)
            gc.freeze()
            gc.enable()
        serve(connection, opened, report)
        leave()


def leave() -> NoReturn:
    """Ends this process like an interpreter, without tearing down all modules, which takes 0.15 s for torch's."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
