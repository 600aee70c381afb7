"""The sides of a duel, and the samples of each case on both sides. Verdicts are not stored, but computed from these."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.errors import Fp8benchError, UsageError
from fp8bench.model import DeviceFacts, Environment, Record, Request, Status, Timing

# The names of the sides: A is before, B is after.
BEFORE, AFTER = "A", "B"


@dataclass(frozen=True)
class DuelSide:
    """One side: its name and title, its interpreter, and the environment that the interpreter reported. `commit` is
    the commit of the code that differs between the sides; '' if no revision was given."""

    name: str
    title: str
    python: str
    commit: str
    environment: Environment
    devices: tuple[DeviceFacts, ...]


@dataclass(frozen=True)
class CaseSession:
    """The samples of one case in one session. They come from several processes per side, all measured in the same
    rounds.
    """

    before: tuple[Timing, ...]
    after: tuple[Timing, ...]
    stopped: str = ""


@dataclass(frozen=True)
class CaseResult:
    """The results of one case on both sides: its records, and its times in each session."""

    before: Record
    after: Record
    sessions: tuple[CaseSession, ...] = ()

    @property
    def has_failed(self) -> bool:
        return Status.FAILED in (self.before.status, self.after.status)

    @property
    def is_refused_by_both(self) -> bool:
        """Whether both sides refuse the case, even if for different reasons."""
        # The reason names each side that skips the case in this form.
        return all(f"side {name}: " in self.after.reason for name in (BEFORE, AFTER))

    @property
    def is_measured(self) -> bool:
        return bool(self.sessions) and not self.has_failed


@dataclass(frozen=True)
class Duel:
    """A duel: its header and results. `cases` are the ids of all planned cases, and `sessions` is the number of
    sessions planned for each case. `troubles` are problems that were found when the file was read.
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
        return any(result.is_measured for result in self.results) and not any(
            result.has_failed for result in self.results
        )


class NoCommonCases(UsageError):
    """Raised if the sides have no case in common."""


class DuelCutOff(Fp8benchError):
    """An error that ended a duel early. `duel` holds the results up to then."""

    def __init__(self, error: Fp8benchError, duel: Duel) -> None:
        super().__init__(str(error))
        self.exit_code = error.exit_code
        self.duel = duel
