"""The worker process: answers one request at a time until its parent is gone.

Started by handle.ProcessWorker as `python -m fp8bench.measure.worker FD LIFELINE`. FD is one end of a socket pair on
which requests arrive; LIFELINE is a pipe whose other end only the parent holds, so that its end-of-file means that
the parent is dead, however it died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from fp8bench.measure.bench import Bench


def die_with_parent(lifeline: int) -> None:
    """End this process as soon as the lifeline closes.

    On Linux the kernel also kills it when the parent dies, for the case that foreign code holds the interpreter and
    the watching thread cannot run.
    """

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def answer(bench: Bench | None, name: str, arguments: tuple[Any, ...]) -> tuple[Bench | None, tuple[Any, ...]]:
    """Serve one request; the single barrier where any exception becomes an answer."""
    try:
        if name == "open":
            return Bench(*arguments), ("ok", None)
        if bench is None:
            raise RuntimeError("the first request must be 'open'")
        return bench, ("ok", getattr(bench, name)(*arguments))
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        exhausted = bench is not None and bench.is_out_of_memory(error)
        reply = ("fault", type(error).__name__, str(error), trace, exhausted)
    # Out of the except block, so that the exception no longer holds the frames and their tensors.
    if bench is not None:
        bench.recover()
    return bench, reply


def serve(connection: Connection) -> None:
    """Answer until the other end closes."""
    bench: Bench | None = None
    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        bench, reply = answer(bench, name, arguments)
        if name == "open":
            # What is imported by now lives as long as this process: looking through it for garbage takes 0.1 s a time.
            gc.collect()
            gc.freeze()
        connection.send(reply)


def main() -> None:
    """Take the two descriptors off the command line and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    faulthandler.enable()
    descriptor, lifeline = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(lifeline)
    # What a workload prints must not mix with the parent's table. A file, so that what steps print can be noticed.
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 1)
        serve(Connection(descriptor))


if __name__ == "__main__":
    main()
