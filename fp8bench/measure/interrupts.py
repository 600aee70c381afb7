"""Handles Ctrl-C, and the signals by which schedulers and closing terminals end a process.

Only the main thread can have signal handlers. In other threads, such as a notebook's, this module has no effect.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

# Signals that `timeout`, service managers, CI and closing terminals send to end a process.
_TERMINATION_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


def treat_end_signals_as_interrupts() -> AbstractContextManager[None]:
    """Within the `with` block, SIGTERM and SIGHUP raise KeyboardInterrupt, so that results are stored. A signal that
    the process already ignores or handles keeps its handler.
    """

    def has_default_handler(previous_handler: Any) -> bool:
        return previous_handler is signal.SIG_DFL

    return _set_signal_handler(signal.default_int_handler, _TERMINATION_SIGNALS, should_replace=has_default_handler)


@contextmanager
def interrupt_only_once() -> Iterator[None]:
    """Within the `with` block, the first interrupt raises KeyboardInterrupt, and later interrupts do nothing."""
    received_signals: list[int] = []

    def handle_signal(number: int, frame: FrameType | None) -> None:
        received_signals.append(number)
        if len(received_signals) == 1:
            raise KeyboardInterrupt

    with _set_signal_handler(handle_signal):
        yield


@contextmanager
def hold_back_interrupts() -> Iterator[None]:
    """Delays an interrupt that arrives within the `with` block until the block has ended."""
    delayed_signals: list[int] = []
    with _set_signal_handler(lambda number, frame: delayed_signals.append(number)):
        yield
    if delayed_signals:
        raise KeyboardInterrupt


def ignore_interrupts() -> AbstractContextManager[None]:
    """Ignores interrupts within the `with` block, which cleans up after an earlier interrupt."""
    return _set_signal_handler(signal.SIG_IGN)


@contextmanager
def _set_signal_handler(
    handler: Any,
    numbers: Iterable[signal.Signals] = (signal.SIGINT, *_TERMINATION_SIGNALS),
    # A signal that the process ignores stays ignored, such as SIGHUP under nohup.
    should_replace: Callable[[Any], bool] = lambda previous_handler: previous_handler is not signal.SIG_IGN,
) -> Iterator[None]:
    """Sets a signal handler within the `with` block. A signal keeps its present handler if `should_replace` returns
    False for this handler.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    previous_handlers = {number: signal.getsignal(number) for number in numbers} if is_main_thread else {}
    for number, previous_handler in previous_handlers.items():
        if should_replace(previous_handler):
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous_handler in previous_handlers.items():
            if previous_handler is not None:  # a handler that was not set from Python cannot be restored
                signal.signal(number, previous_handler)
