"""A plan that is cut into cells: what many machines, or one after the other, measure of one request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fp8bench.model.request import Request


@dataclass(frozen=True)
class Cell:
    """One group of the plan, by its setting: its cases are measured together, by one process. `cases` names them.

    `kind` is what it was planned for, 'cpu' or 'h200', '' where that is not known; a machine that measures it needs so
    many `gpus` for its device to be among them.
    """

    setting: str
    cases: tuple[str, ...] = ()
    kind: str = ""
    gpus: int = 0


@dataclass(frozen=True)
class FleetPlan:
    """A request, and the cells that it was cut into where it was planned, by that version of fp8bench."""

    id: str
    created: str
    command: str
    request: Request
    cells: tuple[Cell, ...]
    fp8bench: str

    def name_of(self, number: int) -> str:
        """What a run of that cell says it is."""
        return f"{self.id}/{number}"


@dataclass(frozen=True)
class Attempt:
    """That a worker had a cell measured: where, when, and how the process ended; None while it has not."""

    host: str
    process: int
    started: str
    seconds: float = 0.0
    code: int | None = None


@dataclass(frozen=True)
class OperationBits:
    """What an operation on a device gave for fixed numbers: a digest of its bits, several where they were not the same
    every time."""

    device: str
    dtype: str
    operation: str
    digests: tuple[str, ...]


class CellStatus(StrEnum):
    """DONE has a whole run; BEGUN was cut off; FAILED ended without one."""

    DONE = "done"
    RUNNING = "running"
    BEGUN = "begun"
    FAILED = "failed"
    WAITING = "waiting"


@dataclass(frozen=True)
class CellState:
    """Where a cell stands. `run` is that of its newest run, `machine` where that was measured; `why` it failed, or
    which cases of a run that is done did. `cases` counts what became of that run's, by their status."""

    number: int
    cell: Cell
    status: CellStatus
    run: str = ""
    machine: str = ""
    why: str = ""
    attempts: tuple[Attempt, ...] = ()
    cases: tuple[tuple[str, int], ...] = ()
