"""The phase clock: what a workload's markers write into.

A marker costs about a third of a microsecond, so it does two appends and nothing else; reading comes after the slot.
The state is one plain object that markers share. It is not thread-local on purpose: on CUDA, autograd runs backward
on a thread of its own, which sees an object's attributes but none of the main thread's locals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8bench.model import CELL_PHASES, PHASES, UNATTRIBUTED
from fp8bench.protocols import Stamper

UNATTRIBUTED_CODE = CELL_PHASES.index(UNATTRIBUTED)


class Marker:
    """One phase's context manager, made once and entered many times, nesting included."""

    __slots__ = ("_code", "_note", "_now", "_stamp", "_stack")

    def __init__(
        self,
        code: int,
        stack: list[int],
        note: Callable[[int], None],
        stamp: Callable[[Any], None],
        now: Callable[[], Any],
    ) -> None:
        self._code = code
        self._stack = stack
        self._note = note
        self._stamp = stamp
        self._now = now

    def __enter__(self) -> None:
        self._stamp(self._now())
        self._stack.append(self._code)
        self._note(self._code)

    def __exit__(self, *exc: object) -> None:
        self._stamp(self._now())
        stack = self._stack
        stack.pop()
        self._note(stack[-1])


class PhaseClock:
    """Markers by name, and the marks of the step in progress.

    A mark is a stamp and the code of the phase that begins there. `begin` opens a step in UNATTRIBUTED, `end`
    closes it and hands out (codes, stamps): codes[i] is the phase between stamps[i] and stamps[i + 1].
    """

    __slots__ = (
        "_codes", "_now", "_stack", "_stamps",
        "accumulate", "attention", "cast", "data_load", "elementwise", "gemm", "optimizer_step",
    )  # fmt: skip

    data_load: Marker
    cast: Marker
    gemm: Marker
    attention: Marker
    accumulate: Marker
    optimizer_step: Marker
    elementwise: Marker

    def __init__(self, stamper: Stamper) -> None:
        self._codes: list[int] = []
        self._stamps: list[Any] = []
        self._stack: list[int] = [UNATTRIBUTED_CODE]
        self._now = stamper.source()
        for code, name in enumerate(PHASES):
            setattr(self, name, Marker(code, self._stack, self._codes.append, self._stamps.append, self._now))

    def begin(self) -> None:
        """Start a step; whatever an aborted step left behind is dropped."""
        self._codes.clear()
        self._stamps.clear()
        self._stack[:] = [UNATTRIBUTED_CODE]
        self._codes.append(UNATTRIBUTED_CODE)
        self._stamps.append(self._now())

    def end(self) -> tuple[list[int], list[Any]]:
        """Finish the step. A marker still open here is a workload's bug and says so."""
        self._stamps.append(self._now())
        if len(self._stack) != 1:
            open_phases = ", ".join(CELL_PHASES[code] for code in self._stack[1:])
            raise RuntimeError(f"the step ended inside {open_phases}: every phase opened must be closed in the step")
        return self._codes.copy(), self._stamps.copy()
