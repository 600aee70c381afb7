"""The errors whose text is meant for the user; each has the exit code of the command that it ends.

A message says what was given, what was expected and what to do. Exit codes 1 (a regression) and 4 (no baseline) are
verdicts of a gate, not errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fp8bench.suggestions import explaining_command, meant_name

EXIT_OK = 0
EXIT_REGRESSION = 1
EXIT_USAGE = 2
EXIT_FAILED = 3
EXIT_BASELINE = 4
EXIT_INTERRUPTED = 130


class Fp8benchError(Exception):
    """Base of all errors whose text is meant for the user.

    `given` is the wrong word, and `nearest` a likely correction; `instead` is a whole command line, printed for
    pasting: the corrected one, or one that lists valid values.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, given: str = "", nearest: str | None = None, instead: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.given = given
        self.nearest = nearest
        self.instead = tuple(instead)


class UsageError(Fp8benchError):
    """The command line or a call asks for something impossible."""


class UnknownName(UsageError):
    """A name that is not registered. `shown` replaces the list of known names if that is too long."""

    def __init__(self, kind: str, given: str, known: Iterable[str], shown: str = "") -> None:
        names = sorted(known)
        nearest = meant_name(kind, given, names)
        hint = f" Did you mean {nearest!r}?" if nearest else ""
        message = f"unknown {kind} {given!r}.{hint} Known: {shown or ', '.join(names) or 'none'}."
        super().__init__(message, given, nearest, explaining_command(kind).split())
        self.known = names


class NotRepeatable(Fp8benchError):
    """A model gives different numbers from the same seed, so that an error would not come from the precision."""


class RecipeRefused(UsageError):
    """Formats, scalings or factors that do not form a valid recipe."""


class BackendMissing(Fp8benchError):
    """A backend that is installed but cannot be imported."""

    def __init__(self, backend: str, cause: BaseException) -> None:
        words = " ".join(str(cause).split())[:300]
        super().__init__(f"{backend} is installed and cannot be imported ({type(cause).__name__}: {words})")


class ImportFailed(UsageError):
    """A module given to --import cannot be imported."""


class NotPrinted(Fp8benchError):
    """stdout cannot be written."""


class StoreError(Fp8benchError):
    """The store cannot be read or written."""


class OpenStore(UserWarning):
    """Every user of the machine can write to the store."""


class NotKept(StoreError):
    """The store failed during measuring; `run` holds everything that was measured."""

    def __init__(self, message: str, run: object) -> None:
        super().__init__(message)
        self.run = run


class RunNotFound(StoreError):
    """No run has that id, file stem or path."""

    def __init__(self, message: str, given: str = "", nearest: str | None = None) -> None:
        super().__init__(message, given, nearest, explaining_command("run").split())


class AsvFileError(StoreError):
    """A file of asv cannot be read or written."""


class AsvFileAbsent(AsvFileError):
    """There is no such file."""


class AsvFileOfOtherVersion(AsvFileError):
    """A file in the format of another version, which may be intact: it is left unchanged."""


class AsvFileBroken(AsvFileError):
    """A file with unexpected content: it may be set aside."""


class AsvFileTorn(AsvFileBroken):
    """A file that is not JSON; another process may be writing it."""


class WorkerError(Fp8benchError):
    """The measuring process cannot be used.

    With several ranks, `rank` is the one that failed (fp8bench.model.FailedRank); `undecided` if it is unknown.
    """

    exit_code = EXIT_FAILED
    rank: object = None
    undecided = False


class WorkerLost(WorkerError):
    """The measuring process crashed, or was killed (`killed`), as the system does when memory runs out."""

    def __init__(self, message: str, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class WorkerHung(WorkerError):
    """The measuring process did not answer in time."""


class WorkerFault(WorkerError):
    """The measuring process answered with an exception.

    `out_of_memory` is set if the device reported that; `trace` is the text of the traceback.
    """

    def __init__(self, kind: str, text: str, trace: str = "", out_of_memory: bool = False) -> None:
        super().__init__(f"{kind}: {text}" if text else kind)
        self.kind = kind
        self.trace = trace
        self.out_of_memory = out_of_memory


class RanksDisagree(Fp8benchError):
    """Ranks gave different answers where they must agree."""


class NotSent(UsageError):
    """A user's model cannot be sent to another process."""


def as_usage(fault: WorkerFault) -> Fp8benchError:
    """Converts a worker's refusal to the UsageError or NotSent that was raised there, and the loss of a worker's worker
    to WorkerLost or WorkerHung; other faults are unchanged."""
    words = str(fault).removeprefix(f"{fault.kind}: ")
    for kind in (WorkerLost, WorkerHung):
        if fault.kind == kind.__name__:
            return kind(words)
    if fault.kind == NotSent.__name__:
        return NotSent(words)
    return UsageError(words) if fault.kind in ("ImportFailed", "UsageError", "UnknownName") else fault
