"""A duel as values: its sides, and what each case came to on both, which is kept, and verdicts are not; who is told."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from fp8bench.jobs.observer import JobObserver
from fp8bench.model import DeviceFacts, Environment, Record, Request, Status, Timing
from fp8bench.protocols import Observer

# What asv, tables and gates call the sides: A is what was, B is what is.
BEFORE, AFTER = "A", "B"


@dataclass(frozen=True)
class Side:
    """One side: what a person calls it, its interpreter, and what that found itself to be.

    `commit` is that of the code which makes the sides differ, '' where no revision was asked for.
    """

    name: str
    title: str
    python: str
    commit: str
    environment: Environment
    devices: tuple[DeviceFacts, ...]


@dataclass(frozen=True)
class Session:
    """The samples of one case in one session: of each side some processes, all in the same rounds."""

    before: tuple[Timing, ...]
    after: tuple[Timing, ...]
    stopped: str = ""


@dataclass(frozen=True)
class CaseResult:
    """One case on both sides: what became of it, its values, and its times, a session at a time."""

    before: Record
    after: Record
    sessions: tuple[Session, ...] = ()

    @property
    def failed(self) -> bool:
        return Status.FAILED in (self.before.status, self.after.status)

    @property
    def measured(self) -> bool:
        return bool(self.sessions) and not self.failed


@dataclass(frozen=True)
class Duel:
    """A duel: header and results. `cases` are the ids of all planned ones; `troubles` were met by the file's reader.

    `sessions` is how many there should be of each case.
    """

    id: str
    started: str
    command: str
    request: Request
    before: Side
    after: Side
    cases: tuple[str, ...]
    sessions: int
    notes: tuple[str, ...] = ()
    results: tuple[CaseResult, ...] = ()
    path: str = ""
    finished: bool = False
    troubles: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return any(one.measured for one in self.results) and not any(one.failed for one in self.results)


class DuelObserver(Observer, Protocol):
    """Told of every session of a duel too."""

    def starts(self) -> None:
        """Workers are started, which takes a while."""

    def in_session(self, session: int, sessions: int, place: int, cases: int) -> None:
        """A case is measured, counted from 0."""

    def close(self) -> None:
        """Nothing more comes. May be called twice."""


class DuelJobObserver(JobObserver, Protocol):
    """An observer of a job that measures duels."""

    def duelling(self) -> AbstractContextManager[DuelObserver]:
        """A duel is measured."""

    def cut_off(self, duel: Duel) -> None:
        """What was measured of a duel before it failed."""
