"""Everything fp8bench raises for a person to read, and the exit code each one ends with.

    Fp8benchError                 2
    |-- UsageError                2   the command line or a call asks for something that cannot be
    |   |-- UnknownName           2   a name nobody registered; carries the nearest known one
    |   |-- RecipeRefused         2   a low-precision recipe that cannot be
    |   |-- ImportFailed          2   a module given to --import does not import
    |   `-- NotSent               2   a model of the user's own cannot be sent to another process
    |-- BackendMissing            2   a backend that is installed, and does not import all the same
    |-- NotPrinted                2   stdout takes nothing
    |-- RanksDisagree             2   ranks that should have answered the same did not
    |-- StoreError                2   the store cannot be read or written
    |   |-- NotKept               2   the store failed while measuring (carries the run)
    |   |-- RunNotFound           2   no run by that id, stem or path
    |   `-- AsvFileError          2   a file of asv's cannot be read or written
    |       |-- AsvFileAbsent     2   it is not there
    |       |-- AsvFileOfOtherVersion   2   it is to be left alone
    |       `-- AsvFileBroken     2   it does not hold what it should, and may be set aside
    |           `-- AsvFileTorn   2   it is no JSON, and may be in the middle of being written
    `-- WorkerError               3   the measuring process cannot be used at all
        |-- WorkerLost            3   it crashed or was killed
        |-- WorkerHung            3   it did not answer in time
        `-- WorkerFault           3   it answered with an exception (kept as type, text, traceback)

A message says what was given, what was expected and what to do. 1 (a regression) and 4 (no baseline) are verdicts of a
gate, which no exception ends with.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_OK = 0
EXIT_REGRESSION = 1
EXIT_USAGE = 2
EXIT_FAILED = 3
EXIT_BASELINE = 4
EXIT_INTERRUPTED = 130


class Fp8benchError(Exception):
    """Base of all errors whose text is meant for the user."""

    exit_code = EXIT_USAGE


class UsageError(Fp8benchError):
    """The command line or a call asks for something that cannot be."""


class UnknownName(UsageError):
    """A name nobody registered. `shown` is what the sentence lists, where all that are known would be too many."""

    def __init__(self, kind: str, given: str, known: Iterable[str], shown: str = "") -> None:
        names = sorted(known)
        near = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.6)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"unknown {kind} {given!r}.{hint} Known: {shown or ', '.join(names) or 'none'}.")
        self.given = given
        self.known = names
        self.nearest = near[0] if near else None


class RecipeRefused(UsageError):
    """Formats, scalings or factors that do not make a recipe."""


class BackendMissing(Fp8benchError):
    """A backend that is installed, and does not import all the same."""

    def __init__(self, backend: str, cause: BaseException) -> None:
        words = " ".join(str(cause).split())[:300]
        super().__init__(f"{backend} is installed and cannot be imported ({type(cause).__name__}: {words})")


class ImportFailed(UsageError):
    """A module given to --import does not import."""


class NotPrinted(Fp8benchError):
    """stdout takes nothing."""


class StoreError(Fp8benchError):
    """The store cannot be read or written."""


class NotKept(StoreError):
    """The store failed while measuring; `run` holds all that was measured, what is not in the store included."""

    def __init__(self, message: str, run: object) -> None:
        super().__init__(message)
        self.run = run


class RunNotFound(StoreError):
    """No run by that id, file stem or path."""


class AsvFileError(StoreError):
    """A file of asv's cannot be read or written."""


class AsvFileAbsent(AsvFileError):
    """There is no such file."""


class AsvFileOfOtherVersion(AsvFileError):
    """Sound perhaps, but in a format of another version: it is to be left alone."""


class AsvFileBroken(AsvFileError):
    """It does not hold what such a file holds: it may be set aside."""


class AsvFileTorn(AsvFileBroken):
    """It is no JSON at all, and may be in the middle of being written."""


class WorkerError(Fp8benchError):
    """The measuring process cannot be used.

    Of several, `rank` is the one that failed (fp8bench.model.FailedRank), None where it is `undecided` which did.
    """

    exit_code = EXIT_FAILED
    rank: object = None
    undecided = False


class WorkerLost(WorkerError):
    """The measuring process crashed or was killed; `killed` as the system does it when memory runs out."""

    def __init__(self, message: str, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class WorkerHung(WorkerError):
    """The measuring process did not answer in time."""


class WorkerFault(WorkerError):
    """The measuring process answered with an exception.

    `out_of_memory` is what the device said of it; `trace` is the traceback's text.
    """

    def __init__(self, kind: str, text: str, trace: str = "", out_of_memory: bool = False) -> None:
        super().__init__(f"{kind}: {text}" if text else kind)
        self.kind = kind
        self.trace = trace
        self.out_of_memory = out_of_memory


class RanksDisagree(Fp8benchError):
    """Ranks that should have answered the same did not."""


class NotSent(UsageError):
    """A model of the user's own cannot be sent to another process."""


def as_usage(fault: WorkerFault) -> Fp8benchError:
    """What a worker refused, as here: any other fault stays one."""
    words = str(fault).removeprefix(f"{fault.kind}: ")
    if fault.kind == NotSent.__name__:
        return NotSent(words)
    return UsageError(words) if fault.kind in ("ImportFailed", "UsageError", "UnknownName") else fault
