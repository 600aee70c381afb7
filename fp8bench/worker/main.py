"""The worker process: answers one request at a time until its parent is gone.

Started by process.WorkerProcess as `python -m fp8bench.worker.main FD LIFELINE` (or another module, whose bench does
more), the first of a session of its own.
FD is one end of a socket pair on which requests arrive; LIFELINE is a pipe whose other end only the parent holds, so
that its end-of-file means that the parent is dead, however it died.

A worker of another interpreter says who it is, and how it talks, before it is asked for anything else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fp8bench import __version__
from fp8bench.model import Scalar
from fp8bench.model.raw import PROTOCOL, Settings
from fp8bench.registry import devices
from fp8bench.worker.bench import Bench
from fp8bench.worker.beside import everything_is_the_workloads
from fp8bench.worker.faults import described


def handshake() -> dict[str, Scalar | None]:
    """The protocol, this Python, where fp8bench comes from, and torch: its version and place, or why there is none."""
    said: dict[str, Scalar | None] = {
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
            said |= {name: None, f"{name}_missing": f"{type(error).__name__}: {words}"}
            continue
        said |= {name: str(getattr(module, "__version__", "")), f"{name}_at": getattr(module, "__file__", None)}
    return said


def die_with_parent(lifeline: int, connection: Connection, last: Callable[[], None] = lambda: None) -> None:
    """End this process, and what it has started, as soon as the lifeline closes; `last` is done before.

    A warden waits for that: a process forked before there is anything to copy, because while foreign code holds the
    interpreter no thread of this one can run. It is no child of this one, which then usually has none: that is soon
    seen. On Linux the kernel also kills this one when the parent dies, in case the warden does not live.
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
        adopt_orphans = 36  # what a workload's child has started and left comes to us, who end it
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
            ctypes.CDLL(None).prctl(adopt_orphans, 1)


def keep_from_children(lifeline: int, connection: Connection) -> None:
    """What a workload starts shall not hold our end of the socket, nor answer on it."""

    def forked() -> None:
        connection.close()
        os.close(lifeline)

    os.set_inheritable(connection.fileno(), False)
    os.set_inheritable(lifeline, False)
    os.register_at_fork(after_in_child=forked)


# Opens what answers: a bench, or one that does more.
Open = Callable[[Settings], Bench]


def answer(
    bench: Bench | None, name: str, arguments: tuple[Any, ...], opened: Open = Bench
) -> tuple[Bench | None, tuple[Any, ...]]:
    """Serve one request; the single barrier where any exception becomes an answer."""
    try:
        if name == "greet":
            return bench, ("ok", handshake())
        if name == "open":
            return opened(*arguments), ("ok", None)
        if bench is None:
            raise RuntimeError("the first request must be 'open'")
        return bench, ("ok", getattr(bench, name)(*arguments))
    except BaseException as error:  # sys.exit() in a step too: whether to end is not the workload's to say
        fault = described(error, bench is not None)
    # Out of the except block, so that the exception no longer holds the frames and their tensors.
    return bench, ("fault", *(fault if bench is None else bench.recovered(fault)))


def serve(connection: Connection, opened: Open, told: Callable[[str], None]) -> None:
    """Answer until the other end closes; `told` hears of each request before it is answered."""
    bench: Bench | None = None
    ourselves = os.getpid()
    while True:
        try:
            number, name, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        told(name)
        bench, reply = answer(bench, name, arguments, opened)
        if os.getpid() != ourselves:
            os._exit(0)  # a workload has forked, and this is the child
        if name == "open":
            # What is imported by now lives as long as this process: looking through it for garbage takes 0.1 s a time.
            gc.collect()
            gc.freeze()
            keep_within_memory()
        connection.send((number, reply))


def keep_within_memory() -> None:
    """A GPU's says where its memory ends; on a processor the kernel would end this process, or another one."""
    try:
        import torch
    except ImportError:
        return  # whoever asks for something that takes it is told

    if not torch.accelerator.is_available():
        devices.get("cpu").end_where_memory_does(int(os.environ.get("WORLD_SIZE", "1")))


def main(opened: Open = Bench) -> None:
    run(Connection(int(sys.argv[1])), int(sys.argv[2]), opened)


def run(connection: Connection, lifeline: int, opened: Open, told: Callable[[str], None] = lambda name: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    faulthandler.enable()
    die_with_parent(lifeline, connection)
    keep_from_children(lifeline, connection)
    everything_is_the_workloads()
    # What a workload prints must not mix with the parent's table. A file, so that what steps print can be noticed.
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 1)
        serve(connection, opened, told)


if __name__ == "__main__":
    main()
