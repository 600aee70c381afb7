"""The errors whose messages are written for users. Each error has the exit code with which a command then ends.

A message states what was given, what was expected and what to do. Exit codes 1 (a regression) and 4 (no baseline) are
verdicts of the gate and not errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fp8bench.suggestions import explaining_command, guess_intended_name

EXIT_OK = 0
EXIT_REGRESSION = 1
EXIT_USAGE = 2
EXIT_FAILED = 3
EXIT_BASELINE = 4
# Shells report 128 plus the number of the signal, here SIGINT (2).
EXIT_INTERRUPTED = 130


class Fp8benchError(Exception):
    """The base of all errors whose text is meant for users.

    `given` is the wrong name that the user gave, and `nearest` a likely correction. `instead` is a command line that
    the user can paste: the corrected command, or a command that lists valid names.
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
    """A name that is not registered. In the message, `shown` replaces the list of known names if that is too long."""

    def __init__(self, kind: str, given: str, known: Iterable[str], shown: str = "") -> None:
        names = sorted(known)
        nearest_name = guess_intended_name(kind, given, names)
        hint = f" Did you mean {nearest_name!r}?" if nearest_name else ""
        message = f"unknown {kind} {given!r}.{hint} Known: {shown or ', '.join(names) or 'none'}."
        super().__init__(message, given, nearest_name, explaining_command(kind).split())
        self.known = names


class NotRepeatable(Fp8benchError):
    """A model gives different numbers with the same seed, so errors cannot be attributed to the precision."""


class RecipeRefused(UsageError):
    """Formats, scales or factors that do not form a valid recipe."""


class BackendMissing(Fp8benchError):
    """A backend that is installed but cannot be imported."""

    def __init__(self, backend: str, cause: BaseException) -> None:
        reason = " ".join(str(cause).split())[:300]
        super().__init__(f"{backend} is installed and cannot be imported ({type(cause).__name__}: {reason})")


class ImportFailed(UsageError):
    """A module given to --import cannot be imported."""


class NotPrinted(Fp8benchError):
    """stdout cannot be written."""


class StoreError(Fp8benchError):
    """The store cannot be read or written."""


class OpenStore(UserWarning):
    """Warns that every user of the machine can write to the store."""


class NotKept(StoreError):
    """The store could not be written while a run was measured. `run` has everything that was measured until then."""

    def __init__(self, message: str, run: object) -> None:
        super().__init__(message)
        self.run = run


class RunNotFound(StoreError):
    """No run has that id, name or path."""

    def __init__(self, message: str, given: str = "", nearest: str | None = None) -> None:
        super().__init__(message, given, nearest, explaining_command("run").split())


class AsvFileError(StoreError):
    """A file of asv cannot be read or written."""


class AsvFileAbsent(AsvFileError):
    """A file of asv that does not exist."""


class AsvFileOfOtherVersion(AsvFileError):
    """A file in the format of a different version of asv. It may be intact, so it is left unchanged."""


class AsvFileBroken(AsvFileError):
    """A file of asv with unexpected content, which may be moved aside."""


class AsvFileTorn(AsvFileBroken):
    """A file of asv that is not JSON, perhaps because another process is writing it."""


class WorkerError(Fp8benchError):
    """The measuring process cannot be used.

    With several ranks, `rank` describes the rank that failed (fp8bench.model.FailedRank). `undecided` is True if it is
    unknown which rank failed.
    """

    exit_code = EXIT_FAILED
    rank: object = None
    undecided = False


class WorkerLost(WorkerError):
    """The measuring process crashed. `killed` is True if it was killed, for example by the system because memory ran
    out.
    """

    def __init__(self, message: str, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class WorkerHung(WorkerError):
    """The measuring process did not answer in time."""


class WorkerFault(WorkerError):
    """The measuring process answered with an exception.

    `out_of_memory` is True if the cause was exhausted memory of the device. `trace` is the text of the traceback.
    """

    def __init__(self, kind: str, text: str, trace: str = "", out_of_memory: bool = False) -> None:
        super().__init__(f"{kind}: {text}" if text else kind)
        self.kind = kind
        self.trace = trace
        self.out_of_memory = out_of_memory


class RanksDisagree(Fp8benchError):
    """Several ranks of a training reported different results that must be equal on all ranks."""


class ModelNotSendable(UsageError):
    """A user's model cannot be sent to another process."""


def to_original_error(fault: WorkerFault) -> Fp8benchError:
    """Converts a fault back to the error that the worker raised, if the worker refused the request (UsageError,
    ModelNotSendable) or lost a child process (WorkerLost, WorkerHung). Returns other faults unchanged.
    """
    message = str(fault).removeprefix(f"{fault.kind}: ")
    for error_class in (WorkerLost, WorkerHung):
        if fault.kind == error_class.__name__:
            return error_class(message)
    if fault.kind == ModelNotSendable.__name__:
        return ModelNotSendable(message)
    return UsageError(message) if fault.kind in ("ImportFailed", "UsageError", "UnknownName") else fault
