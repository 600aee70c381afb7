"""What is wrong with each file of a store. Nothing is changed, not even a broken file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from fp8bench.errors import AsvFileAbsent, AsvFileError, AsvFileOfOtherVersion, StoreError
from fp8bench.files import PARTIAL, is_locked, unsealed
from fp8bench.model import Fault, Run
from fp8bench.store.acks import acks_of, load_acks
from fp8bench.store.asv.files import (
    ResultsFile,
    load_benchmarks,
    load_machine,
    load_results,
    results_files,
    settled_read,
)
from fp8bench.store.asv.rows import numbers
from fp8bench.store.commit_runs import moment_of
from fp8bench.store.kept_lines import BESIDE_RUNS, sheet_of
from fp8bench.store.runs.listing import all_files, closed_folders
from fp8bench.store.runs.run_file import file_name, load_sheet, missing_groups

# Clocks that differ by less are taken for right.
_CLOCKS_DIFFER = timedelta(minutes=1)
_REBUILD = "`fp8bench history rebuild` makes it again"
_LOOK = "Look whether it is of use, and delete it"
_MOST_TROUBLES = 3
T = TypeVar("T")
# The words after the file's name in the sentences of errors.
_VERBS = ("is ", "was ", "cannot ")


class Soundness(Enum):
    """What the checksums of a file say of it."""

    WHOLE = "it is what was written"
    DAMAGED = "something in it is not what was written"
    UNKNOWN = "it has none: an older fp8bench wrote it"


def check_run(path: Path, now: datetime) -> tuple[Run | None, Soundness, list[Fault]]:
    """Returns the run in a file, None if there is none, how sound the file is, and its faults."""
    try:
        run, sheet = load_sheet(path)
        written = is_locked(path)
    except StoreError as error:
        newer = "newer" in str(error)
        remedy = "Upgrade fp8bench" if newer else "Put it right from a copy, or move it away"
        return None, Soundness.DAMAGED, [_fault(path, error, remedy)]
    except OSError as error:
        what = f"it cannot be read ({error.strerror})"
        return None, Soundness.DAMAGED, [Fault(str(path), what, "Put it right, or move it away")]
    faults = list(_clocks(run, now))
    if run.troubles and not written:
        faults.insert(0, _lines(run, sheet.lost))
    if run.environment.facts and path.name != file_name(run):
        remedy = f"Rename it to {file_name(run)}: the runs of a commit are found by their names"
        faults.append(Fault(str(path), "its name is not that of the run in it", remedy))
    damaged = sheet.lost or (bool(run.troubles) and not run.environment.facts)
    sound = Soundness.DAMAGED if damaged else Soundness.WHOLE if sheet.sealed else Soundness.UNKNOWN
    return run, sound, faults


def _lines(run: Run, lost: bool) -> Fault:
    """Broken lines stay for good, so they are no fault once what they held was measured again, or if a kill cut them
    short."""
    shown = "; ".join(run.troubles[:_MOST_TROUBLES])
    more = len(run.troubles) - _MOST_TROUBLES
    what = f"{shown}; and {more} more" if more > 0 else shown
    if not run.environment.facts:
        return Fault(run.path, what, "What it holds belongs to no commit; put it right from a copy")
    if run.finished and not missing_groups(run):
        if lost and not run.resumptions:  # a resumption has measured it again
            return Fault(run.path, what, "Every case of its plan has a record all the same; put it right from a copy")
        return Fault(run.path, what, "Nothing is missing: every case of its plan has a record", broken=False)
    return Fault(run.path, what, f"`fp8bench suite --resume {run.id}` measures what is missing")


def _clocks(run: Run, now: datetime) -> Iterator[Fault]:
    """Yields signs of a wrong clock. They make no figure wrong, but the order of runs."""
    started = _time(run.started)
    if started is None:
        if run.environment.facts:
            yield Fault(run.path, f"its start, {run.started!r:.40}, is no time", "It is in no commit's figures")
        return
    remedy = "Set the clock right (NTP); the figures themselves are of another clock"
    if started > now + _CLOCKS_DIFFER:
        yield Fault(run.path, f"it was started at {_shown(started)}, which is yet to come", remedy, broken=False)
    written = _commit_time(run)
    if written is not None and started < written - _CLOCKS_DIFFER:
        what = f"it was started at {_shown(started)}, before its commit was written ({_shown(written)})"
        yield Fault(run.path, f"{what}: one of the two clocks was wrong", remedy, broken=False)
    before = started
    for resumption in run.resumptions:
        later = _time(resumption.started)
        if later is not None and later < before - _CLOCKS_DIFFER:
            what = f"it was resumed at {_shown(later)}, before it had been started or left ({_shown(before)})"
            yield Fault(run.path, what, remedy, broken=False)
        before = later or before


def _time(text: str) -> datetime | None:
    try:
        return moment_of(text)
    except ValueError:
        return None


def _commit_time(run: Run) -> datetime | None:
    date = run.environment.get("commit_date")
    try:
        return datetime.fromtimestamp(date / 1000, UTC) if isinstance(date, int) else None
    except (OverflowError, ValueError, OSError):
        return None


def _shown(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def check_surroundings(store: Path) -> list[Fault]:
    """Returns faults of what is among the runs and is none, and of files beside the runs."""
    runs = set(all_files(store))
    faults = [
        _foreign(path) for path in sorted((store / "runs").rglob("*"))
        if path not in runs and (path.is_file() or path.is_symlink())
    ]  # fmt: skip
    faults += [_foreign(path) for path in sorted((store / "runs").glob("*/*.jsonl")) if path.is_dir()]
    words = "it may not be read, and nothing is known of the runs in it"
    faults += [Fault(str(path), words, "Make it readable (chmod u+rx)") for path in closed_folders(store)]
    patterns = (*BESIDE_RUNS, "trainings/*/places.json", "reruns/*.json")
    for path in sorted(path for pattern in patterns for path in store.glob(pattern)):
        faults += _unsealed(path)
    remedy = "Acknowledge again what alarms and should not, and delete the line"
    return faults + [Fault(str(acks_of(store)), trouble, remedy) for trouble in load_acks(store).troubles]


def _unsealed(path: Path) -> Iterator[Fault]:
    """Yields a fault where a file is not what was written, whether it has lines or is one document."""
    try:
        if path.suffix == ".jsonl":
            sheet = sheet_of(path.read_bytes())
            broken = [f"line {line.number} is not as it was written ({line.why})" for line in sheet.broken]
            whats = [*broken, *sheet.troubles]
        else:
            plain = json.loads(path.read_bytes())
            unsealed(plain if isinstance(plain, dict) else {})
            return
    except (OSError, ValueError, RecursionError) as error:
        whats = [f"it is not as it was written ({str(error)[:80]})"]
    if whats:
        yield Fault(str(path), "; ".join(whats[:_MOST_TROUBLES]), "Put it right from a copy, or measure it again")


def _foreign(path: Path) -> Fault:
    if path.name.endswith(PARTIAL):
        return Fault(str(path), "it is what a run or a merge left that never began or ended", _LOOK, broken=False)
    if path.name.startswith(".probe-"):
        return Fault(str(path), "it is left from looking whether the store can be written", "Delete it", broken=False)
    return Fault(str(path), "it is no run file, and nothing reads it", _LOOK, broken=False)


def check_results(results: Path) -> tuple[dict[Path, ResultsFile], list[Fault]]:
    faults: list[Fault] = []
    results_by_path: dict[Path, ResultsFile] = {}
    folders = sorted({path.parent for path in results.glob("*/*.json")})
    if not folders:
        return results_by_path, faults
    path = results / "benchmarks.json"
    known = _read(load_benchmarks, path, "asv shows nothing at all without it", faults) or {}
    for folder in folders:
        path = folder / "machine.json"
        machine = _read(load_machine, path, f"asv shows nothing of {folder.name} without it", faults) or {}
        name = machine.get("machine", folder.name)
        if name != folder.name:
            what = f"it is of machine {name!r:.80}, and its folder is called {folder.name}: asv shows nothing of it"
            remedy = f'Write "machine": "{folder.name}" into it, or delete it and `fp8bench history rebuild`'
            faults.append(Fault(str(path), what, remedy))
        for path in results_files(folder):
            file = _read(load_results, path, "it was a moment ago", faults)
            if file is not None:
                results_by_path[path] = file
                faults += _results_faults(path, file)
    for path in sorted(results.rglob("*")):
        if ".broken-" in path.name:
            faults.append(Fault(str(path), "it was broken, and was set aside", _LOOK, broken=False))
        elif path.name.endswith(PARTIAL):
            faults.append(Fault(str(path), "it is what a writer left that was killed", "Delete it", broken=False))
    faults += _not_listed(results, results_by_path, known)
    return results_by_path, faults


def _read(load: Callable[[Path], T], path: Path, without: str, faults: list[Fault]) -> T | None:
    try:
        return settled_read(load, path)
    except AsvFileAbsent:
        faults.append(Fault(str(path), f"it is not there, and {without}", _REBUILD))
    except AsvFileOfOtherVersion as error:
        faults.append(_fault(path, error, "asv and fp8bench leave it alone"))
    except AsvFileError as error:
        faults.append(_fault(path, error, f"{_REBUILD}, and keeps this one beside it"))
    return None


def _results_faults(path: Path, file: ResultsFile) -> Iterator[Fault]:
    machine = file.params["machine"]
    if machine != path.parent.name:
        what = f"it is of machine {machine!r:.80} and lies in {path.parent.name}, so that asv does not show it"
        yield Fault(str(path), what, "Move it where it belongs")
    if file.troubles:
        remedy = f"{_REBUILD}, where there are runs of it"
        yield Fault(str(path), "; ".join(file.troubles[:_MOST_TROUBLES]), remedy)


def _not_listed(results: Path, files: dict[Path, ResultsFile], known: dict[str, Any]) -> list[Fault]:
    """Returns benchmarks with results and without a definition: `asv run` writes the list anew."""
    names = {name for file in files.values() for name, row in file.rows.items() if numbers(row)}
    missing = sorted(names - set(known))
    if not missing or not known:
        return []
    many = f"{len(missing)} benchmarks with results are" if len(missing) > 1 else "a benchmark with results is"
    what = f"{many} not in it, and asv hides what is not ({', '.join(missing[:3])})"
    remedy = f"{_REBUILD}, as far as there are runs of them"
    return [Fault(str(results / "benchmarks.json"), what, remedy, broken=False)]


def _fault(path: Path, error: StoreError, remedy: str) -> Fault:
    """Makes a fault of an error, which names the file and perhaps a remedy of its own."""
    words = str(error).removeprefix(f"the run file {path} ").removeprefix(f"{path} ")
    what = words.partition(". ")[0].rstrip(".").removeprefix("is broken: ")
    return Fault(str(path), f"it {what}" if what.startswith(_VERBS) else what, remedy)
