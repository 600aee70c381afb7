"""When an interrupt may strike: Ctrl-C, and the signals by which schedulers and closing terminals end a process.

Only the main thread can have handlers, so this module has no effect in other threads (such as a notebook's).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

# Signals that `timeout`, service managers, CI and a closing terminal send.
_ENDS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


def ends_are_interrupts() -> AbstractContextManager[None]:
    """In the body SIGTERM and SIGHUP act like Ctrl-C: what was measured is kept and shown. Ignored signals stay so."""
    return _handled_by(signal.default_int_handler, _ENDS, lambda old: old is signal.SIG_DFL)


@contextmanager
def only_once() -> Iterator[None]:
    """In the body the first interrupt raises KeyboardInterrupt and later ones do nothing."""
    struck: list[int] = []

    def strike(number: int, frame: FrameType | None) -> None:
        struck.append(number)
        if len(struck) == 1:
            raise KeyboardInterrupt

    with _handled_by(strike):
        yield


@contextmanager
def hold_back_interrupts() -> Iterator[None]:
    """Delays an interrupt in the body until the body is done."""
    noted: list[int] = []
    with _handled_by(lambda number, frame: noted.append(number)):
        yield
    if noted:
        raise KeyboardInterrupt


def ignore_interrupts() -> AbstractContextManager[None]:
    """Interrupts in the body do nothing: one has struck already, and the body is handling it."""
    return _handled_by(signal.SIG_IGN)


@contextmanager
def _handled_by(
    handler: Any,
    numbers: Iterable[signal.Signals] = (signal.SIGINT, *_ENDS),
    replaces: Callable[[Any], bool] = lambda old: old is not signal.SIG_IGN,
) -> Iterator[None]:
    """Sets the handler for the body, on those signals whose present handler `replaces` accepts."""
    main = threading.current_thread() is threading.main_thread()
    earlier = {number: signal.getsignal(number) for number in numbers} if main else {}
    for number, old in earlier.items():
        if replaces(old):
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in earlier.items():
            if old is not None:  # a handler that was not set from Python cannot be set back
                signal.signal(number, old)
