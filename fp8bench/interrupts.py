"""When an interrupt may strike: Ctrl-C, and the signals by which schedulers and closing terminals end a process.

Handlers are a matter of the main thread; elsewhere (a notebook's worker thread, say) nothing here does anything.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_INTERRUPT = signal.SIGINT
# What `timeout`, service managers and CI send, and what a closing terminal sends.
_ENDS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def ends_are_interrupts() -> Iterator[None]:
    """In the body, being asked to end is like Ctrl-C: what was measured is kept and shown. Ignored signals stay so."""
    if not _main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _ENDS}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, _raise)
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def only_once() -> Iterator[None]:
    """In the body the first interrupt counts and later ones do nothing: whoever presses twice wants no less."""
    if not _main_thread():
        yield
        return
    struck: list[int] = []

    def strike(number: int, frame: FrameType | None) -> None:
        struck.append(number)
        if len(struck) == 1:
            raise KeyboardInterrupt

    before = _handled_by(strike)
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def held_back() -> Iterator[None]:
    """An interrupt in the body strikes after it: what is begun there is finished."""
    if not _main_thread():
        yield
        return
    noted: list[int] = []
    before = _handled_by(lambda number, frame: noted.append(number))
    try:
        yield
    finally:
        _restore(before)
    if noted:
        raise KeyboardInterrupt


@contextmanager
def ignored() -> Iterator[None]:
    """Interrupts in the body do nothing: there was one already, and what it asked for is being done."""
    if not _main_thread():
        yield
        return
    before = _handled_by(signal.SIG_IGN)
    try:
        yield
    finally:
        _restore(before)


def _handled_by(handler: Any) -> dict[signal.Signals, Any]:
    """Set the handler for all of them but those that are ignored already; returns what was there."""
    before = {number: signal.getsignal(number) for number in (_INTERRUPT, *_ENDS)}
    for number, old in before.items():
        if old is not signal.SIG_IGN:
            signal.signal(number, handler)
    return before


def _restore(before: dict[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        if handler is not None:  # one that was not set from Python cannot be set back from it
            signal.signal(number, handler)
