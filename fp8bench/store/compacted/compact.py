"""Compacting: the figures of each commit's runs, written into a Parquet file for each machine and month.

The runs stay the truth. Commits are read month by month, and a month counts as soon as its files were written and read
back, so that a kill loses no earlier month.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import LOCK, is_locked, keeping, locked
from fp8bench.model import Fault
from fp8bench.store.commit_runs import TrackedRun, commit_points
from fp8bench.store.compacted.archive import Archived, archive, is_whole
from fp8bench.store.compacted.manifest import (
    ARCHIVE,
    MAKE_ROOM,
    Archive,
    CompactedPlace,
    LineKey,
    Manifest,
    Partition,
    UnreadableIndex,
    digest_of_sources,
    load_manifest,
    parquet_of,
    points_of,
    save_manifest,
    without_runs,
)
from fp8bench.store.compacted.parquet import RowBatch, Spool, batch_of, leftovers, need_duckdb
from fp8bench.store.index.figure_files import CommitFigures, Fingerprints, Stamp, figures_of_runs, read_stamped
from fp8bench.store.index.history import Fit, by_commit, fit, spread
from fp8bench.store.index.points_file import Index, Kept, points_file
from fp8bench.store.index.tables import FigureTable, read_layout, table_of
from fp8bench.store.runs.listing import all_files, index_of, stamps_of
from fp8bench.store.runs.run_file import safe_folder

_AT_ONCE = 40  # commits that are read before their rows go to the disk
_MOST_LAYOUTS = 100  # whose lines are remembered
_LOCK_SECONDS = 5.0
_AGAIN = "`fp8bench store compact` makes it again; until then the runs are read"


@dataclass
class Compaction:
    """What was done: runs and rows compacted, files written and left as they were, commits read; `busy` commits had
    runs that changed meanwhile, `mended` files were not as they had been written."""

    runs: int = 0
    rows: int = 0
    written: list[str] = field(default_factory=list)
    kept: int = 0
    read: int = 0
    busy: int = 0
    mended: list[str] = field(default_factory=list)
    archived: Archived = field(default_factory=Archived)


# The table of a place, the samples of each of its rows, and the ids of its runs.
Sampled = tuple[FigureTable, list[list[float]], list[str]]
# Reads the runs of one commit, as read_commit does.
Reader = Callable[[Path, Fingerprints, Sequence[Path]], CommitFigures[Sampled] | None]


def compact(store: Path, observe: Callable[[int, int], None], reader: Reader | None = None) -> Compaction:
    """Updates what was compacted from the runs; `observe` is told how many commits of how many were read.

    A benchmark may give a `reader`, to do without runs. Raises StoreError where another compaction is at work or there
    is no room, and UsageError without DuckDB.
    """
    need_duckdb()
    with locked(store / ARCHIVE, _LOCK_SECONDS):
        return _Compacting(store, observe, reader or read_commit).done()


class _Compacting:
    def __init__(self, store: Path, observe: Callable[[int, int], None], reader: Reader) -> None:
        self.store, self.observe, self.reader = store, observe, reader
        self.known = Fingerprints()
        self.result = Compaction()
        self.before = stamps_of(store)
        self.manifest = _begun(store)
        if self.manifest.files and not self.manifest.files.keys() & self.before.keys():
            raise StoreError(
                f"{store} has none of the runs any more that were compacted, and what was compacted stays as it is. "
                "`fp8bench store restore` writes them again."
            )
        self.index = Index.opened(store)
        if self.index.newer:
            raise StoreError(f"{points_file(store)} is a newer fp8bench's. Upgrade fp8bench, or delete it.")
        self.files = by_commit(self.index, self.before)[1]
        self.lines: dict[bytes, list[int]] = {}
        self.next = max(self.manifest.places, default=-1) + 1  # no number is given twice while its rows may be there

    def done(self) -> Compaction:
        bad = self._bad()
        gone = self.manifest.units.keys() - self.files.keys()
        gone |= {place.commit for place in self.manifest.places.values() if place.partition in bad}
        touched = self.manifest.drop(gone)
        restamped = {commit: self._still_counts(commit) for commit in self.files}
        changed = [commit for commit, sources in restamped.items() if sources is None]
        # All at once, because the index may have other places of a changed commit already.
        touched = (touched | self.manifest.drop(set(changed))) - bad
        for name in bad:
            del self.manifest.partitions[name]
        self._keep([
            (commit, self.index.figures(commit)._replace(sources=tuple(sources)))
            for commit, sources in restamped.items() if sources
        ])  # fmt: skip
        with Spool.opened(self.store) as spool:
            # By the months in which their first runs began, by the names of the files.
            for _, some in groupby(changed, key=lambda commit: self.files[commit][0].rpartition("/")[2][:6]):
                touched |= self._take(spool, list(some), len(changed))
                self._write(spool, touched)
                touched = set()
                self._save()
            self._write(spool, touched)
        archive(self.store, self.manifest, self.result.archived, self._save)
        self._finish()
        return self.result

    def _bad(self) -> set[str]:
        written = self.manifest.partitions.items()
        bad = {name for name, partition in written if _fault_of(parquet_of(self.store, name), partition)}
        self.result.mended = sorted(bad)
        return bad

    def _still_counts(self, commit: str) -> list[Stamp] | None:
        """Returns None for a commit that must be read, else its stamps, which are new where only dates have changed."""
        digest, _ = self.manifest.units.get(commit, ("", 0))
        if digest != digest_of_sources(self.index.sources(commit)):
            return None
        stale, restamped = fit(self.index, commit, self.files[commit], self.before, self.known)
        return None if stale is Fit.STALE else restamped

    def _keep(self, figures: Sequence[Kept]) -> None:
        why = self.index.keep(figures) if figures else ""
        if why:
            raise StoreError(f"{points_file(self.store)} cannot be written ({why}). {MAKE_ROOM}")

    def _take(self, spool: Spool, commits: Sequence[str], count: int) -> set[str]:
        """Reads commits and spools their rows; returns the partitions of these."""
        touched = set()
        for begin in range(0, len(commits), _AT_ONCE):
            some = commits[begin : begin + _AT_ONCE]
            self.observe(self.result.read + self.result.busy, count)
            jobs = [[self.store / name for name in self.files[commit]] for commit in some]
            batches: list[RowBatch] = []
            kept: list[Kept] = []
            for commit, read in zip(some, spread(partial(self.reader, self.store, self.known), jobs), strict=True):
                if read is None:
                    self.result.busy += 1
                    continue
                first, self.next = self.next, self.next + len(read.places)
                for rank, (table, samples, runs) in enumerate(read.places):
                    batches.append(batch_of(first + rank, self._lines(table.layout), table.rows, samples))
                    self.manifest.places[first + rank] = CompactedPlace(commit, rank, _partition(table), runs)
                    touched.add(_partition(table))
                if fit(self.index, commit, self.files[commit], self.before, self.known)[0] is not Fit.CURRENT:
                    kept.append((commit, CommitFigures(*read[:-1], tuple(table for table, _, _ in read.places))))
                self.manifest.units[commit] = digest_of_sources(read.sources), read.runs
                self.result.read += 1
            self._keep(kept)
            spool.add(batches)
        return touched

    def _lines(self, layout: bytes) -> list[int]:
        """Returns the lines of a layout's rows. Neighbouring commits have the same layouts."""
        if layout not in self.lines:
            series, cells = read_layout(layout)
            plain = [(metric.name, metric.workload, metric.metric, metric.unit) for metric in series]
            if len(self.lines) == _MOST_LAYOUTS:
                self.lines.clear()
            self.lines[layout] = [self.manifest.lines.number(list(key)) for key in keys_of(plain, cells)]
        return self.lines[layout]

    def _write(self, spool: Spool, touched: set[str]) -> None:
        """Writes partitions anew, from what is spooled and what still counts of the old files."""
        members: dict[str, list[int]] = {name: [] for name in touched}
        for number, place in self.manifest.places.items():
            if place.partition in members:
                members[place.partition].append(number)
        for name, places in sorted(members.items()):
            path = parquet_of(self.store, name)
            if not places:
                self.manifest.partitions.pop(name, None)
                path.unlink(missing_ok=True)
                continue
            old = self.manifest.partitions.get(name)
            if old is not None:
                spool.keep(path, places)
            known = [(number, self.manifest.places[number]) for number in places]
            said = [(number, self.index.figures(at.commit).places[at.rank].said, at.runs) for number, at in known]
            self.manifest.partitions[name] = spool.write(path, self.manifest.lines.values, said)
            self.result.written.append(name)
        spool.forget()

    def _finish(self) -> None:
        whole = not self.result.busy and stamps_of(self.store) == self.before
        self.manifest.files = self.before if whole else {}
        self._save()
        there = self.manifest.partitions
        self.result.written = [name for name in dict.fromkeys(self.result.written) if name in there]
        self.result.kept = len(there) - len(self.result.written)
        self.result.runs = sum(runs for _, runs in self.manifest.units.values())
        self.result.rows = sum(partition.rows for partition in self.manifest.partitions.values())

    def _save(self) -> None:
        with keeping(index_of(self.store), MAKE_ROOM):
            save_manifest(self.store, self.manifest)


def _begun(store: Path) -> Manifest:
    """Returns what was compacted before; nothing if that cannot be used. Raises StoreError for a newer fp8bench's."""
    try:
        return load_manifest(store)
    except (OSError, UnreadableIndex) as error:
        if isinstance(error, UnreadableIndex) and error.newer:
            words = f"{index_of(store)} does not serve: {error}. Upgrade fp8bench, or delete {points_of(store)}."
            raise StoreError(words) from None
        if isinstance(error, UnreadableIndex) and not all_files(store):
            raise without_runs(store, error) from None
        return Manifest()


def keys_of(series: Sequence[Sequence[str]], cells: Sequence[tuple[int, object]]) -> list[LineKey]:
    return [LineKey(series[rank][0], json.dumps(cell), *series[rank][1:4]) for rank, cell in cells]


def read_commit(store: Path, known: Fingerprints, paths: Sequence[Path]) -> CommitFigures[Sampled] | None:
    """Returns the figures of a commit's runs; None where a run changes meanwhile."""
    read, sources = read_stamped(store, paths)
    return None if sources is None else figures_of_runs(read, sources, known, _sampled)


def _sampled(members: Sequence[TrackedRun]) -> Sampled:
    samples = [list(point.samples) for point in commit_points(members).values()]
    return table_of(members), samples, [member.run.id for member in members]


def _partition(table: FigureTable) -> str:
    """Returns the folder of a place: its machine, and the month in which its oldest run began (UTC)."""
    try:
        month = f"{datetime.fromtimestamp(table.said['began'] / 1000, UTC):%Y-%m}"
    except (ValueError, OverflowError, OSError):  # the first or the last day that there is, of another zone
        month = "unknown"
    return f"machine={safe_folder(str(table.said['machine']['machine']))}/month={month}"


def is_compacting(store: Path) -> bool:
    try:
        return is_locked(store / ARCHIVE / LOCK)
    except OSError:
        return False


def check_compacted(store: Path) -> tuple[list[Fault], int]:
    """Returns what is wrong with what was compacted, and how many files it has. The runs have everything."""
    try:
        written = load_manifest(store).written(store)
    except FileNotFoundError:
        written = {}
    except (OSError, UnreadableIndex) as error:
        why = error.strerror if isinstance(error, OSError) else error
        remedy = _AGAIN if all_files(store) else "Get it from a copy; the fp8bench that wrote it restores its runs"
        return [Fault(str(index_of(store)), f"it does not serve ({why})", remedy)], 0
    faults = []
    for path, partition in written.items():
        why = _fault_of(path, partition)
        faults += [Fault(str(path), why, _AGAIN)] if why else []
    left = [] if is_compacting(store) else leftovers(store)
    packed = (path for path in (store / ARCHIVE).rglob("*") if path.is_file() and path.name != LOCK)
    foreign = sorted({*points_of(store).glob("*/*/points.parquet"), *packed} - written.keys() - set(left))
    what, remedy = "it is of no compaction, and nothing reads it", "Look whether it is of use, and delete it"
    faults += [Fault(str(path), what, remedy, broken=False) for path in foreign]
    what, remedy = "it is what a compaction left that was killed", "The next `fp8bench store compact` removes it"
    faults += [Fault(str(path), what, remedy, broken=False) for path in left]
    return faults, len(written)


def _fault_of(path: Path, file: Partition | Archive) -> str:
    """Returns what is wrong with a compacted file, by its digest: its content was read back when it was written."""
    try:
        if not path.exists():
            return "it is not there"
        return "" if is_whole(path, file) else "it does not hold what was written into it"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
