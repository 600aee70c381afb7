"""When an interrupt may strike: Ctrl-C, and the signals by which schedulers and closing terminals end a process.

Handlers are a matter of the main thread; elsewhere (a notebook's worker thread, say) nothing here does anything.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

# What `timeout`, service managers and CI send, and what a closing terminal sends.
_ENDS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


def ends_are_interrupts() -> AbstractContextManager[None]:
    """In the body, being asked to end is like Ctrl-C: what was measured is kept and shown. Ignored signals stay so."""
    return _handled_by(signal.default_int_handler, _ENDS, lambda old: old is signal.SIG_DFL)


@contextmanager
def only_once() -> Iterator[None]:
    """In the body the first interrupt counts and later ones do nothing: whoever presses twice wants no less."""
    struck: list[int] = []

    def strike(number: int, frame: FrameType | None) -> None:
        struck.append(number)
        if len(struck) == 1:
            raise KeyboardInterrupt

    with _handled_by(strike):
        yield


@contextmanager
def held_back() -> Iterator[None]:
    """An interrupt in the body strikes after it: what is begun there is finished."""
    noted: list[int] = []
    with _handled_by(lambda number, frame: noted.append(number)):
        yield
    if noted:
        raise KeyboardInterrupt


def ignored() -> AbstractContextManager[None]:
    """Interrupts in the body do nothing: there was one already, and what it asked for is being done."""
    return _handled_by(signal.SIG_IGN)


@contextmanager
def _handled_by(
    handler: Any,
    numbers: Iterable[signal.Signals] = (signal.SIGINT, *_ENDS),
    replaces: Callable[[Any], bool] = lambda old: old is not signal.SIG_IGN,
) -> Iterator[None]:
    """In the body the handler is that of the signals whose own one it replaces: not of those that are ignored."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers} if main else {}
    for number, old in before.items():
        if replaces(old):
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            if old is not None:  # one that was not set from Python cannot be set back from it
                signal.signal(number, old)
