"""Verifies by checksums that the files of a store are unchanged. Modifies nothing, not even broken files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import PARTIAL_FILE_SUFFIX, is_locked, parse_json, read_file, remove_checksum
from fp8bench.model import Fault, Run
from fp8bench.store.acks import get_acks_path, load_acks
from fp8bench.store.kept_lines import CHECKSUMMED_FILE_PATTERNS, parse_file_lines
from fp8bench.store.runs.listing import (
    REFUSAL_REMEDY,
    RunFileListing,
    describe_refusal,
    list_all_files,
    list_unreadable_folders,
    listing,
)
from fp8bench.store.runs.run_file import find_incomplete_groups, load_run_with_lines, make_run_file_name

_FOREIGN_FILE_REMEDY = "Check whether it is useful, and delete it"
_MAX_SHOWN_TROUBLES = 3
# Error texts begin with the file's path. If the rest begins with one of these, it gets the subject 'it'.
_SUBJECTLESS_ERROR_STARTS = ("is ", "was ", "cannot ")


@dataclass(frozen=True)
class StoreVerification:
    """The faults of a store, the number of its run files, and the number of run files without a fault."""

    faults: tuple[Fault, ...]
    files: int
    run_files_without_fault: int


def verify_store(store: Path) -> StoreVerification:
    """Reads every file of a store and returns its faults."""
    # 1. Check the run files.
    runs = listing(store)
    store_faults: list[Fault] = []
    broken_file_count = unsealed_file_count = 0
    for path in runs.all_files:
        is_sealed, run_faults = _check_run_file(path)
        run_faults += _check_run_copies(path, runs)
        broken_file_count += any(fault.broken for fault in run_faults)
        unsealed_file_count += not is_sealed
        store_faults += run_faults
    # 2. Report files of older versions, which have no checksums.
    if unsealed_file_count:
        problem = (
            f"{unsealed_file_count} of {len(runs.all_files)} run files have no checksums: an older fp8bench wrote them"
        )
        store_faults.append(Fault(str(store / "runs"), problem, "Changes in them cannot be detected", broken=False))
    # 3. Check all other files.
    store_faults += _check_other_files(store)
    return StoreVerification(tuple(store_faults), len(runs.all_files), len(runs.all_files) - broken_file_count)


def _check_run_copies(path: Path, runs: RunFileListing) -> Iterator[Fault]:
    if path in runs.copies:
        problem = f"it is the same run as {runs.copies[path]}, or its beginning, and counts once"
        yield Fault(str(path), problem, "Move it away")
    if path in runs.refused:
        yield Fault(str(path), describe_refusal(runs.refused[path]), REFUSAL_REMEDY)


def _check_run_file(path: Path) -> tuple[bool, list[Fault]]:
    """Returns whether the lines of a run file have checksums, and the faults of the file. Returns True for an
    unreadable file, so that it does not count as a file of an older version.
    """
    try:
        run, file_lines = load_run_with_lines(path)
        is_being_written = is_locked(path)
    except StoreError as error:
        remedy = "Upgrade fp8bench" if "newer" in str(error) else "Restore it from a copy, or move it away"
        return True, [_make_store_error_fault(path, error, remedy)]
    except OSError as error:
        return True, [Fault(str(path), f"it cannot be read ({error.strerror})", "Make it readable, or move it away")]
    # The last line of a file that is being written may be incomplete.
    faults_and_remarks = (
        [_make_broken_line_fault(run, file_lines.has_lost_line)] if run.troubles and not is_being_written else []
    )
    # Without a header, the correct file name is unknown, because it has the run's start and commit.
    if run.environment.facts and path.name != make_run_file_name(run):
        remedy = f"Rename it to {make_run_file_name(run)}: the runs of a commit are found by their names"
        faults_and_remarks.append(Fault(str(path), "its name does not fit the run in it", remedy))
    # Damage may have destroyed the checksums, so a file with troubles does not count as one of an older version.
    return file_lines.has_checksummed_lines or bool(run.troubles), faults_and_remarks


def _make_broken_line_fault(run: Run, lost: bool) -> Fault:
    """Returns the fault of a run with broken lines. `lost` is whether a completely written line is missing (not merely
    cut short).

    The fault is only a remark (`broken=False`) if a finished run has a record of every planned case, and no line is
    lost. If the run was resumed, lost lines do not matter, because resuming measured their cases again.
    """
    first_troubles_text = "; ".join(run.troubles[:_MAX_SHOWN_TROUBLES])
    unlisted_trouble_count = len(run.troubles) - _MAX_SHOWN_TROUBLES
    problem = (
        f"{first_troubles_text}; and {unlisted_trouble_count} more"
        if unlisted_trouble_count > 0
        else first_troubles_text
    )
    if not run.environment.facts:
        return Fault(run.path, problem, "Its records belong to no commit; restore it from a copy")
    if run.finished and not find_incomplete_groups(run):
        if lost and not run.resumptions:  # resuming the run measured the lost cases again
            return Fault(run.path, problem, "Every case of its plan still has a record; restore it from a copy")
        return Fault(run.path, problem, "Nothing is missing: every case of its plan has a record", broken=False)
    return Fault(run.path, problem, f"`fp8bench suite --resume {run.id}` measures what is missing")


def _check_other_files(store: Path) -> Iterator[Fault]:
    """Yields the faults of all files of a store except run files. Also yields files in the folders of runs that are not
    run files.
    """
    runs = set(list_all_files(store))
    for path in sorted((store / "runs").rglob("*")):
        # Report a folder only if its name ends like that of a run file.
        if path not in runs and (path.is_file() or path.is_symlink() or path.suffix == ".jsonl"):
            yield _make_foreign_file_fault(path)
    for path in list_unreadable_folders(store):
        problem = "it is not readable, so its runs are unknown"
        yield Fault(str(path), problem, "Make it readable (chmod u+rx)")
    for pattern in (*CHECKSUMMED_FILE_PATTERNS, "trainings/*/places.json", "reruns/*.json"):
        for path in sorted(store.glob(pattern)):
            yield from _check_checksums(path)
    for trouble in load_acks(store).troubles:
        yield Fault(
            str(get_acks_path(store)),
            trouble,
            "Delete the line, and acknowledge again the changes that should not alarm",
        )


def _check_checksums(path: Path) -> Iterator[Fault]:
    """Yields a fault if a JSON document or a file of JSON lines is unreadable or was changed after it was written."""
    try:
        if path.suffix == ".jsonl":
            file_lines = parse_file_lines(read_file(path))
            broken_line_texts = [
                f"line {line.number} was changed after it was written ({line.why})" for line in file_lines.broken
            ]
            file_problems = [*broken_line_texts, *file_lines.troubles]
        else:
            document = parse_json(read_file(path))
            remove_checksum(document if isinstance(document, dict) else {})
            return
    except OSError as error:
        file_problems = [f"it cannot be read ({error.strerror})"]
    except ValueError as error:
        file_problems = [f"it was changed after it was written ({str(error)[:80]})"]
    if file_problems:
        yield Fault(
            str(path), "; ".join(file_problems[:_MAX_SHOWN_TROUBLES]), "Restore it from a copy, or measure it again"
        )


def _make_foreign_file_fault(path: Path) -> Fault:
    if path.name.endswith(PARTIAL_FILE_SUFFIX):
        return Fault(
            str(path),
            "it is an unfinished file of a run or a merge that was killed",
            _FOREIGN_FILE_REMEDY,
            broken=False,
        )
    return Fault(str(path), "it is not a run file and is ignored", _FOREIGN_FILE_REMEDY, broken=False)


def _make_store_error_fault(path: Path, error: StoreError, remedy: str) -> Fault:
    """Returns a fault with the problem that an error describes. Path and remedy, which are separate fields of the
    fault, are removed from the error's text.
    """
    error_text = str(error).removeprefix(f"the run file {path} ").removeprefix(f"{path} ")
    problem = error_text.partition(". ")[0].rstrip(".")
    return Fault(str(path), f"it {problem}" if problem.startswith(_SUBJECTLESS_ERROR_STARTS) else problem, remedy)
