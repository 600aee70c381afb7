"""The store of another machine taken in, and what is made of runs made again.

Runs that are new are copied, longer ones appended, and nothing is ever rewritten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import append, is_locked, keeping, locked, write_whole
from fp8bench.model import Series
from fp8bench.store.acks import merge_acks
from fp8bench.store.asv.view import Taken, define, merge_folders, results_of, write_place
from fp8bench.store.ceilings import merge_ceilings
from fp8bench.store.commit_runs import by_place, commit_of, files_by_commit, read_runs, series_of_runs
from fp8bench.store.index.figure_files import Fingerprints
from fp8bench.store.index.history import read_and_keep
from fp8bench.store.index.points_file import Index
from fp8bench.store.runs.listing import Listing, id_of, is_beginning, listing, machine_folder, run_files
from fp8bench.store.runs.run_file import load_run, lock_run


@dataclass
class Merged(Taken):
    """What was taken of another store: runs that were `copied`, or appended to ours; how many were the `same`, and how
    many acknowledgements and ceilings are new. `files` are asv's."""

    copied: list[Path] = field(default_factory=list)
    extended: list[Path] = field(default_factory=list)
    same: int = 0
    acks: int = 0
    ceilings: int = 0


def find_store(folder: Path, ours: Path) -> Path:
    """The store that a folder is, or that lies in it. Raises StoreError where there is none, or it is our own."""
    try:
        places = (folder, folder / ours.name, folder / ".fp8bench")
        there = next((place for place in places if (place / "runs").is_dir()), None)
        if there is None:
            what = "has neither runs nor .fp8bench/runs in it" if folder.is_dir() else "is no directory"
            raise StoreError(f"{folder} is no store: it {what}. Give another machine's .fp8bench, or what it lies in.")
        own, other = ours.resolve(), there.resolve()
    except OSError as error:
        raise StoreError(f"{folder} cannot be read ({error.strerror}).") from None
    if other == own or own in other.parents:
        raise StoreError(f"{folder} is this store, or lies in it. Give the store of another machine.")
    return there


def merge_runs(ours: Path, theirs: Path) -> Merged:
    """Take in the runs of another store, which is only read."""
    merged = Merged()
    here, there = listing(ours), listing(theirs)
    known = {id_of(path): path for path in (*here.refused, *here.files)}
    merged.failed += [f"{note}." for note in there.notes(there.refused)]
    merged.failed += take_each(there, partial(_take, known, ours, merged))
    return merged


def take_each(there: Listing, take_one: Callable[[Path], None]) -> Iterator[str]:
    """Have the runs of another store taken, oldest first; a sentence on each that was not."""
    for path in reversed(there.files):
        try:
            take_one(path)
        except StoreError as error:
            yield str(error)
        except OSError as error:
            yield f"{path} was not taken ({error.strerror})."


def _take(known: Mapping[str, Path], ours: Path, merged: Merged, path: Path) -> None:
    """One run of theirs; `known` are our files by their ids."""
    content = _whole(path, merged)
    load_run(path)  # what is no run file raises
    target = known.get(id_of(path)) or ours / "runs" / machine_folder(path) / path.name
    came = take(path, content, target)
    if came is Came.SAME:
        merged.same += 1
    else:
        (merged.copied if came is Came.NEW else merged.extended).append(target)


class Came(Enum):
    """What a run file of another store was here: one that was not there, the same, or longer than ours."""

    NEW = "new"
    SAME = "same"
    LONGER = "longer"


def take(path: Path, content: bytes, target: Path) -> Came:
    """Take a run file of another store in, as `target`; `content` is what is taken of it, whole or a beginning.

    Under one id the longer file counts where the one is the beginning of the other. Raises StoreError for any other.
    """
    with keeping(target, "Make room, and try again."):
        if not target.exists():
            write_whole(target, content)
            return Came.NEW
        if id_of(target) != id_of(path):
            raise StoreError(f"{path} was not taken: {target} is another run. Rename one of them.")
        if is_beginning(content, target.read_bytes()):
            return Came.SAME
        if content.startswith(target.read_bytes()):
            with target.open("ab") as file:  # a kill leaves a beginning of theirs, which is taken again
                lock_run(file, target)
                own = target.read_bytes()
                if content.startswith(own):
                    append(file, content[len(own) :])
                    return Came.LONGER
    raise StoreError(
        f"run {id_of(path)} has other bytes in {path} than in {target}, which stays as it is: each was resumed alone, "
        "or one was changed. Keep the file that is right, and move the other away."
    )


def _whole(path: Path, merged: Merged) -> bytes:
    """What is in a file of theirs; its whole lines where it is still being written."""
    if not is_locked(path):
        return path.read_bytes()
    merged.notes.append(f"run {path.stem} is still being measured there: merge again when it has ended")
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


@dataclass
class Rebuilt:
    """What was made: files, how many series are in them, of how many runs; how many runs are in none, and why.

    `aside` are files that were broken, under their new names; `failed` are sentences on files that could not be made.
    """

    files: list[Path] = field(default_factory=list)
    series: int = 0
    runs: int = 0
    left: Counter[str] = field(default_factory=Counter)
    aside: list[Path] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def rebuild(store: Path, commits: Collection[str] | None = None) -> Rebuilt:
    """Write the files of all commits, or of those given by the beginning that run files' names have.

    It goes in the order of the commits' first runs, because the first one decides under which name a machine's results
    lie. What asv alone measured stays.
    """
    made, known = Rebuilt(left=listing(store).left if commits is None else Counter()), Fingerprints()
    series: dict[str, Series] = {}
    index = Index.opened(store)
    for commit, paths in files_by_commit(store).items():
        if commits is not None and commit not in commits:
            continue
        # Read under the lock, too: a writer that knew fewer runs must not come after one that knew more.
        with locked(store / "asv"):
            read = read_and_keep(index, commit, paths, known)
            for tracked in by_place(read.runs):
                try:
                    made.files.append(write_place(results_of(store), tracked, made.aside))
                except (StoreError, OSError) as error:
                    made.failed.append(str(error))
        made.left.update(read.left)
        made.runs += len(read.runs)
        series |= {run.name: run for run in series_of_runs(read.runs)}
    with locked(store / "asv"):
        define(results_of(store), _newest(store, series.values()), made.aside)
    made.files, made.failed = list(dict.fromkeys(made.files)), list(dict.fromkeys(made.failed))
    made.series = len(series)
    return made


def _newest(store: Path, series: Iterable[Series]) -> list[Series]:
    """The series as the newest run that has each defines it: an old commit's text is not what asv should go by."""
    wanted = {own.workload for own in series}
    newest: dict[str, Series] = {}
    for path in run_files(store):
        seen = {own.workload for own in newest.values()}
        if wanted <= seen:
            break
        tracked = read_runs([path]).runs
        newest |= {run.name: run for run in series_of_runs(tracked) if run.workload in wanted - seen}
    return list(newest.values())


def join(store: Path, other: Path) -> tuple[Merged, Rebuilt]:
    """Take in `other`, which is only read, and make the view of its runs."""
    with locked(store / "asv"):
        merged = merge_runs(store, other)
        merge_folders(results_of(store), results_of(other), merged)
        try:
            merged.acks = merge_acks(store, other)
            merged.ceilings = merge_ceilings(store, other)
        except (StoreError, OSError) as error:
            merged.failed.append(str(error))
    return merged, rebuild(store, {commit_of(path) for path in (*merged.copied, *merged.extended)})
