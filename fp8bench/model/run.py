"""A run, and what it was made under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fp8bench.model.fleet import OperationBits
from fp8bench.model.measured import Record
from fp8bench.model.planned import DeviceFacts, Plan, Scalar
from fp8bench.model.request import Request
from fp8bench.model.words import Status

# The door of runs of a model of one's own.
PROFILE = "profile"


@dataclass(frozen=True)
class Overheads:
    """What looking costs on this machine, in seconds; None where it could not be measured."""

    marker_on: float
    marker_off: float
    stamp: float
    event_pair: float | None = None


@dataclass(frozen=True)
class Environment:
    """The machine, the software and the settings a run was made under: names to plain values."""

    facts: Mapping[str, Scalar | None]

    def get(self, name: str) -> Scalar | None:
        return self.facts.get(name)

    def also(self, facts: Mapping[str, Scalar | None]) -> Environment:
        """The same and some more."""
        return Environment({**self.facts, **facts})


@dataclass(frozen=True)
class Resumption:
    """When and under what an unfinished run was gone on with."""

    started: str
    command: str
    environment: Environment


@dataclass(frozen=True)
class Run:
    """One run: header and records. `path` is where it is stored ('' if it is not), `origin` the door it came in by.

    `cell` is the part of a fleet's plan that it is ('8f3a2c1d/4'), '' where it is none; of such a run `bits` say what
    its devices computed before anything was measured, and `clock_ahead` how many seconds this machine's clock was ahead
    of the one that stamps the store's files, None where it gave no time.

    `notes` were taken while it ran; `troubles` were met by whoever read the file.
    """

    id: str
    started: str
    command: str
    request: Request
    plan: Plan
    environment: Environment
    devices: tuple[DeviceFacts, ...]
    overheads: tuple[tuple[str, Overheads], ...] = ()
    records: tuple[Record, ...] = ()
    path: str = ""
    finished: bool = False
    troubles: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    resumptions: tuple[Resumption, ...] = ()
    origin: str = "suite"
    cell: str = ""
    bits: tuple[OperationBits, ...] = ()
    clock_ahead: float | None = None

    def __repr__(self) -> str:
        """On one line: all the samples would fill pages."""
        state = "finished" if self.finished else "unfinished"
        return f"<Run {self.id}: {self.request.suite}, {len(self.records)} cases, {state}, {self.path or 'not stored'}>"

    @property
    def fleet_plan(self) -> str:
        """The id of the plan that it is a cell of, '' for none."""
        return self.cell.rpartition("/")[0]

    @property
    def ok(self) -> bool:
        """Whether something was measured and nothing failed."""
        statuses = {record.status for record in self.records}
        return Status.OK in statuses and Status.FAILED not in statuses
