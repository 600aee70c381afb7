"""The worker process: answers one request at a time until its parent has ended.

The parent starts it as `python -m fp8bench.worker.main FD LIFELINE`, in a new session. If a feature has additional
requests, the parent starts the feature's module instead. That module calls `main` with a subclass of Bench. FD is one
end of a socket pair for requests. LIFELINE is a pipe whose other end only the parent holds. If this pipe ends, the
parent has ended, in whatever way.

A worker with a different interpreter first gets the request `greet`, which returns its protocol and versions.
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
from fp8bench.worker.step_guards import take_over_process


def handshake() -> dict[str, Scalar | None]:
    """Returns facts about this process: the protocol's version, the Python interpreter, and the versions and locations
    of fp8bench, torch and numpy.
    """
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
        except BaseException as error:  # a broken package may raise anything while it is imported
            error_text = " ".join(str(error).split())[:300]
            facts |= {name: None, f"{name}_missing": f"{type(error).__name__}: {error_text}"}
            continue
        facts |= {name: str(getattr(module, "__version__", "")), f"{name}_at": getattr(module, "__file__", None)}
    return facts


def die_with_parent(lifeline: int, connection: Connection, last: Callable[[], None] = lambda: None) -> None:
    """Ends this process and its descendants as soon as the lifeline closes, after calling `last`.

    A separate process, the warden, waits for the end of the lifeline. A thread could not do this, because it does not
    run while foreign code holds the interpreter. The warden is forked early, when there is little memory to copy. It
    is not a child of this process, so this process usually has no children. Therefore one system call usually
    shows that a step has left no process running. On Linux the kernel also kills this process when the parent dies, in
    case the warden has died.
    """
    # Fork twice: the first child ends at once, so that the warden is not a child of this process.
    if (intermediate_pid := os.fork()) == 0:
        if os.fork():
            os._exit(0)
        try:
            connection.close()
            while os.read(lifeline, 1):
                pass
            last()
        finally:
            os.killpg(os.getpgrp(), signal.SIGKILL)
    os.waitpid(intermediate_pid, 0)
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        child_subreaper_option = 36  # orphaned descendants become children of this process, so that it can end them
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
            ctypes.CDLL(None).prctl(child_subreaper_option, 1)


def close_connections_in_forks(lifeline: int, connection: Connection) -> None:
    """Closes the request socket and the lifeline in processes that a workload forks, so that these cannot answer the
    parent.
    """

    def close_ends() -> None:
        connection.close()
        os.close(lifeline)

    os.set_inheritable(connection.fileno(), False)
    os.set_inheritable(lifeline, False)
    os.register_at_fork(after_in_child=close_ends)


MakeBench = Callable[[Settings], Bench]


def answer(
    bench: Bench | None, name: str, arguments: tuple[Any, ...], make_bench: MakeBench = Bench
) -> tuple[Bench | None, tuple[Any, ...]]:
    """Answers one request. An exception of the request becomes the answer."""
    try:
        if name == "greet":
            return bench, ("ok", handshake())
        if name == "open":
            return make_bench(*arguments), ("ok", None)
        if bench is None:
            raise RuntimeError("the first request must be 'open'")
        return bench, ("ok", getattr(bench, name)(*arguments))
    except BaseException as error:  # this includes sys.exit(), because a workload must not end this process
        request_fault = describe_fault(error, bench is not None)
    # Recover outside of the except block: inside, the exception would keep the frames and their tensors in memory.
    if bench is not None:
        request_fault = bench.recover(request_fault)
    return bench, ("fault", *request_fault)


def serve(connection: Connection, make_bench: MakeBench, report: Callable[[str], None]) -> None:
    """Answers requests until the other end closes. `report` is called with the name of each request before its
    answer.
    """
    bench: Bench | None = None
    worker_pid = os.getpid()
    while True:
        try:
            request_number, name, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        report(name)
        bench, reply = answer(bench, name, arguments, make_bench)
        if os.getpid() != worker_pid:
            os._exit(0)  # this is a child that a workload has forked
        if name == "open":
            # Imported objects live as long as the process. Without freezing them, each garbage collection would spend
            # 0.1 s on them.
            gc.collect()
            gc.freeze()
            limit_memory()
        connection.send((request_number, reply))


def limit_memory() -> None:
    """Limits the memory of this process if cases run on the CPU. Otherwise the kernel would kill it, or a different
    process, when memory runs out.
    """
    try:
        import torch
    except ImportError:
        return  # the first request that needs torch reports the import error
    if not torch.accelerator.is_available():
        # Each local rank may use an equal share of the memory that is free now.
        devices.get("cpu").end_where_memory_does(int(os.environ.get("WORLD_SIZE", "1")))


def main(make_bench: MakeBench = Bench) -> None:
    run(Connection(int(sys.argv[1])), int(sys.argv[2]), make_bench, early_module="torch")


def run(
    connection: Connection,
    lifeline: int,
    make_bench: MakeBench,
    report: Callable[[str], None] = lambda name: None,
    early_module: str = "",
) -> None:
    """Answers requests until the other end closes. Imports `early_module` while waiting for the first request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    faulthandler.enable()  # prints the Python stack if C code crashes
    die_with_parent(lifeline, connection)
    close_connections_in_forks(lifeline, connection)
    # No other code runs in this process, so workloads have started the child processes of all its threads.
    take_over_process()
    # Redirect output to this file, so that a workload does not print into the parent's tables. The size of the file
    # shows whether a step printed.
    with tempfile.TemporaryFile() as output_file:
        os.dup2(output_file.fileno(), 1)
        if early_module:
            # While torch is imported, each garbage collection would take 0.1 s and find nothing.
            gc.disable()
            with contextlib.suppress(Exception):  # the first request that needs this module reports the error
                importlib.import_module(early_module)
            gc.freeze()
            gc.enable()
        serve(connection, make_bench, report)
        exit_process()


def exit_process() -> NoReturn:
    """Ends this process as Python does, but without freeing modules, which takes 0.15 s for torch."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
