"""Who is told how things go: the markers of a step's phases, those that mark nothing, and the observer of a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fp8bench.model import PHASES, Case, Plan, Record


class Phases(Protocol):
    """The markers a workload sees: `with phase.gemm: ...`. Nested markers are exclusive."""

    @property
    def data_load(self) -> AbstractContextManager[None]: ...
    @property
    def decode(self) -> AbstractContextManager[None]: ...
    @property
    def cast(self) -> AbstractContextManager[None]: ...
    @property
    def gemm(self) -> AbstractContextManager[None]: ...
    @property
    def attention(self) -> AbstractContextManager[None]: ...
    @property
    def accumulate(self) -> AbstractContextManager[None]: ...
    @property
    def optimizer_step(self) -> AbstractContextManager[None]: ...
    @property
    def elementwise(self) -> AbstractContextManager[None]: ...
    @property
    def communication(self) -> AbstractContextManager[None]: ...


Marker = TypeVar("Marker", bound=AbstractContextManager[None])


class Markers(Generic[Marker]):
    """A marker for each phase, by its name. A plain object, because backward may run on another thread."""

    __slots__ = (
        "accumulate", "attention", "cast", "communication", "data_load", "decode", "elementwise", "gemm",
        "optimizer_step",
    )  # fmt: skip

    data_load: Marker
    decode: Marker
    cast: Marker
    gemm: Marker
    attention: Marker
    accumulate: Marker
    optimizer_step: Marker
    elementwise: Marker
    communication: Marker

    def __init__(self, make: Callable[[str], Marker]) -> None:
        for name in PHASES:
            setattr(self, name, make(str(name)))


@dataclass(slots=True, eq=False)
class TellingMarker:
    """One phase's context manager: tells with what a step goes on. Nested ones are exclusive, as under the clock."""

    _name: str
    _stack: list[str]
    _told: Callable[[str], None]

    def __enter__(self) -> None:
        self._stack.append(self._name)
        self._told(self._name)

    def __exit__(self, *exc: object) -> None:
        self._stack.pop()
        self._told(self._stack[-1])


class SilentPhases(Markers[AbstractContextManager[None]]):
    """Phases that mark nothing, for untimed passes."""

    __slots__ = ()

    def __init__(self) -> None:
        marker = nullcontext()
        super().__init__(lambda name: marker)


class Observer(Protocol):
    """Told how a run goes along; measuring code reports here and never prints."""

    def planned(self, plan: Plan) -> None:
        """The plan stands."""

    def working(self, case: Case, doing: str, share: float) -> None:
        """A case is being worked on; `share` of its group's time has gone."""

    def finished(self, record: Record) -> None:
        """A record is complete."""


class SilentObserver:
    """An observer that ignores everything."""

    def planned(self, plan: Plan) -> None:
        return None

    def working(self, case: Case, doing: str, share: float) -> None:
        return None

    def finished(self, record: Record) -> None:
        return None
