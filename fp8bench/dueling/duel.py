"""A duel as values: its sides, and what each case came to on both. All of it is kept, and verdicts are not."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model import DeviceFacts, Environment, Record, Request, Status

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
class Bout:
    """One case on both sides. The control of a record is the same case in another process of the same side."""

    before: Record
    after: Record

    @property
    def failed(self) -> bool:
        return Status.FAILED in (self.before.status, self.after.status)

    @property
    def measured(self) -> bool:
        """Whether both sides have times."""
        return self.before.timing is not None and self.after.timing is not None


@dataclass(frozen=True)
class Duel:
    """A duel: header and bouts. `cases` are the ids of all planned ones; `troubles` were met by the file's reader."""

    id: str
    started: str
    command: str
    request: Request
    before: Side
    after: Side
    cases: tuple[str, ...]
    notes: tuple[str, ...] = ()
    bouts: tuple[Bout, ...] = ()
    path: str = ""
    finished: bool = False
    troubles: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether something was measured and nothing failed."""
        return any(one.measured for one in self.bouts) and not any(one.failed for one in self.bouts)
