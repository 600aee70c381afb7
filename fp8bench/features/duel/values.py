"""The values of a duel: its sides, and the samples of each case on both. Verdicts are computed, not stored."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.errors import Fp8benchError, UsageError
from fp8bench.model import DeviceFacts, Environment, Record, Request, Status, Timing

# The sides' names everywhere: A is before, B is after.
BEFORE, AFTER = "A", "B"


@dataclass(frozen=True)
class DuelSide:
    """One side: its name and title, its interpreter, and the environment that this reported. `commit` is that of the
    code which makes the sides differ, '' without a revision."""

    name: str
    title: str
    python: str
    commit: str
    environment: Environment
    devices: tuple[DeviceFacts, ...]


@dataclass(frozen=True)
class Session:
    """The samples of one case in one session: of several processes per side, all in the same rounds."""

    before: tuple[Timing, ...]
    after: tuple[Timing, ...]
    stopped: str = ""


@dataclass(frozen=True)
class CaseResult:
    """One case on both sides: its records, and its times by session."""

    before: Record
    after: Record
    sessions: tuple[Session, ...] = ()

    @property
    def has_failed(self) -> bool:
        return Status.FAILED in (self.before.status, self.after.status)

    @property
    def refused_alike(self) -> bool:
        """Whether neither side can measure it, even if their reasons differ."""
        return all(f"side {name}: " in self.after.reason for name in (BEFORE, AFTER))

    @property
    def is_measured(self) -> bool:
        return bool(self.sessions) and not self.has_failed


@dataclass(frozen=True)
class Duel:
    """A duel: header and results. `cases` are the ids of all planned cases, each of which should have this many
    `sessions`; `troubles` were found when its file was read."""

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


class NothingInCommon(UsageError):
    """The sides have no case in common."""


class DuelCutOff(Fp8benchError):
    """An error that ended a duel early, with what was measured until then."""

    def __init__(self, error: Fp8benchError, duel: Duel) -> None:
        super().__init__(str(error))
        self.exit_code, self.duel = error.exit_code, duel
