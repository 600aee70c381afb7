"""Phases that tell when a step goes on in another: for the pass that measures memory."""

from __future__ import annotations

from collections.abc import Callable

from fp8bench.model import PHASES, UNATTRIBUTED


class TellingMarker:
    """One phase's context manager; nested ones are exclusive, as under the clock."""

    __slots__ = ("_name", "_stack", "_told")

    def __init__(self, name: str, stack: list[str], told: Callable[[str], None]) -> None:
        self._name = name
        self._stack = stack
        self._told = told

    def __enter__(self) -> None:
        self._stack.append(self._name)
        self._told(self._name)

    def __exit__(self, *exc: object) -> None:
        self._stack.pop()
        self._told(self._stack[-1])


class TellingPhases:
    """Markers by name. Their state is one plain object, as the clock's is: backward may run on another thread."""

    __slots__ = ("accumulate", "attention", "cast", "data_load", "elementwise", "gemm", "optimizer_step")

    data_load: TellingMarker
    cast: TellingMarker
    gemm: TellingMarker
    attention: TellingMarker
    accumulate: TellingMarker
    optimizer_step: TellingMarker
    elementwise: TellingMarker

    def __init__(self, told: Callable[[str], None]) -> None:
        stack: list[str] = [UNATTRIBUTED]
        for name in PHASES:
            setattr(self, name, TellingMarker(str(name), stack, told))
