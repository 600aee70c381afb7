"""Checks by checksums that the files of a store are unchanged. It changes nothing, not even a broken file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import PARTIAL, is_locked, read_file, unseal
from fp8bench.model import Fault, Run
from fp8bench.store.acks import acks_of, load_acks
from fp8bench.store.kept_lines import BESIDE_RUNS, sheet_of
from fp8bench.store.runs.listing import REMEDY, Listing, all_files, closed_folders, listing, refusal
from fp8bench.store.runs.run_file import file_name, load_sheet, missing_groups

_LOOK = "Look whether it is of use, and delete it"
_MOST_TROUBLES = 3
# Words that follow the file's name in messages.
_VERBS = ("is ", "was ", "cannot ")


@dataclass(frozen=True)
class Verified:
    """The faults of a store, how many run files it has, and how many of these are sound."""

    faults: tuple[Fault, ...]
    files: int
    sound: int


def verify(store: Path) -> Verified:
    """Reads every file of a store."""
    # 1. Run files.
    runs = listing(store)
    faults: list[Fault] = []
    broken = old = 0
    for path in runs.everything:
        is_sealed, of_run = _check_run(path)
        of_run += _check_copies(path, runs)
        broken += any(fault.broken for fault in of_run)
        old += not is_sealed
        faults += of_run
    # 2. Files of older versions have no checksums.
    if old:
        words = f"{old} of {len(runs.everything)} run files have no checksums: an older fp8bench wrote them"
        faults.append(Fault(str(store / "runs"), words, "A digit that changes in one is not seen", broken=False))
    # 3. All other files.
    faults += _check_surroundings(store)
    return Verified(tuple(faults), len(runs.everything), len(runs.everything) - broken)


def _check_copies(path: Path, runs: Listing) -> Iterator[Fault]:
    if path in runs.copies:
        words = f"it is the same run as {runs.copies[path]}, or the beginning of it, and counts once"
        yield Fault(str(path), words, "Move it away")
    if path in runs.refused:
        yield Fault(str(path), refusal(runs.refused[path]), REMEDY)


def _check_run(path: Path) -> tuple[bool, list[Fault]]:
    """Returns whether the lines of a run file have checksums (True where it cannot be read), and its faults."""
    try:
        run, sheet = load_sheet(path)
        is_written = is_locked(path)
    except StoreError as error:
        remedy = "Upgrade fp8bench" if "newer" in str(error) else "Put it right from a copy, or move it away"
        return True, [_fault(path, error, remedy)]
    except OSError as error:
        return True, [Fault(str(path), f"it cannot be read ({error.strerror})", "Put it right, or move it away")]
    faults = [_lines(run, sheet.lost)] if run.troubles and not is_written else []
    if run.environment.facts and path.name != file_name(run):
        remedy = f"Rename it to {file_name(run)}: the runs of a commit are found by their names"
        faults.append(Fault(str(path), "its name is not that of the run in it", remedy))
    return sheet.sealed or bool(run.troubles), faults


def _lines(run: Run, lost: bool) -> Fault:
    """Returns the fault of broken lines; a mere remark if their content was measured again, or if a kill cut them."""
    shown = "; ".join(run.troubles[:_MOST_TROUBLES])
    unlisted = len(run.troubles) - _MOST_TROUBLES
    words = f"{shown}; and {unlisted} more" if unlisted > 0 else shown
    if not run.environment.facts:
        return Fault(run.path, words, "What it holds belongs to no commit; put it right from a copy")
    if run.finished and not missing_groups(run):
        if lost and not run.resumptions:  # a resumption has measured it again
            return Fault(run.path, words, "Every case of its plan has a record all the same; put it right from a copy")
        return Fault(run.path, words, "Nothing is missing: every case of its plan has a record", broken=False)
    return Fault(run.path, words, f"`fp8bench suite --resume {run.id}` measures what is missing")


def _check_surroundings(store: Path) -> Iterator[Fault]:
    """Yields faults of foreign files among the runs, and of the store's other files."""
    runs = set(all_files(store))
    for path in sorted((store / "runs").rglob("*")):
        if path not in runs and (path.is_file() or path.is_symlink() or path.suffix == ".jsonl"):
            yield _foreign(path)
    for path in closed_folders(store):
        words = "it may not be read, and nothing is known of the runs in it"
        yield Fault(str(path), words, "Make it readable (chmod u+rx)")
    for pattern in (*BESIDE_RUNS, "trainings/*/places.json", "reruns/*.json"):
        for path in sorted(store.glob(pattern)):
            yield from _check_seal(path)
    for trouble in load_acks(store).troubles:
        yield Fault(str(acks_of(store)), trouble, "Acknowledge again what alarms and should not, and delete the line")


def _check_seal(path: Path) -> Iterator[Fault]:
    """Yields a fault where a file is not what was written, whether it has lines or is one document."""
    try:
        if path.suffix == ".jsonl":
            sheet = sheet_of(read_file(path))
            broken = [f"line {line.number} is not as it was written ({line.why})" for line in sheet.broken]
            whats = [*broken, *sheet.troubles]
        else:
            plain = json.loads(read_file(path))
            unseal(plain if isinstance(plain, dict) else {})
            return
    except OSError as error:
        whats = [f"it cannot be read ({error.strerror})"]
    except (ValueError, RecursionError) as error:
        whats = [f"it is not as it was written ({str(error)[:80]})"]
    if whats:
        yield Fault(str(path), "; ".join(whats[:_MOST_TROUBLES]), "Put it right from a copy, or measure it again")


def _foreign(path: Path) -> Fault:
    if path.name.endswith(PARTIAL):
        return Fault(str(path), "it is what a run or a merge left that never began or ended", _LOOK, broken=False)
    return Fault(str(path), "it is not a run file, and nothing reads it", _LOOK, broken=False)


def _fault(path: Path, error: StoreError, remedy: str) -> Fault:
    """Converts an error, whose text names the file and perhaps a remedy."""
    words = str(error).removeprefix(f"the run file {path} ").removeprefix(f"{path} ")
    problem = words.partition(". ")[0].rstrip(".")
    return Fault(str(path), f"it {problem}" if problem.startswith(_VERBS) else problem, remedy)
