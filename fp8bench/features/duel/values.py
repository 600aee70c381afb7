"""A duel as values: its sides, and what each case came to on both, which is kept, and verdicts are not."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.errors import Fp8benchError, UsageError
from fp8bench.model import DeviceFacts, Environment, Record, Request, Status, Timing

# What asv, tables and gates call the sides: A is what was, B is what is.
BEFORE, AFTER = "A", "B"


@dataclass(frozen=True)
class DuelSide:
    """One side: what a person calls it, its interpreter, and what that found itself to be.

    `commit` is that of the code which makes the sides differ, '' where no revision was asked for;
    `settings` are those of allocators that it was started under.
    """

    name: str
    title: str
    python: str
    commit: str
    environment: Environment
    devices: tuple[DeviceFacts, ...]
    settings: tuple[tuple[str, str], ...] = ()


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
    before: DuelSide
    after: DuelSide
    cases: tuple[str, ...]
    sessions: int
    notes: tuple[str, ...] = ()
    results: tuple[CaseResult, ...] = ()
    path: str = ""
    finished: bool = False
    troubles: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return any(result.measured for result in self.results) and not any(result.failed for result in self.results)


class NothingInCommon(UsageError):
    """The sides would measure no case both."""


class DuelCutOff(Fp8benchError):
    """What ended it before its end, with what was measured until then."""

    def __init__(self, error: Fp8benchError, duel: Duel) -> None:
        super().__init__(str(error))
        self.exit_code, self.duel = error.exit_code, duel
