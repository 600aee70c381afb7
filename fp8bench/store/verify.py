"""Whether a store is sound: its files, and whether runs, asv's view, the repository and machines agree."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from fp8bench.model import Fault, Plan, Run
from fp8bench.store.asv.files import ResultsFile
from fp8bench.store.asv.identity import from_facts, resolved
from fp8bench.store.asv.rows import NOT_MEASURED, AsvRow, by_combination, is_measured, numbers
from fp8bench.store.asv.view import filled, nothing_of, results_of
from fp8bench.store.commit_runs import TrackedRun, by_commit, by_place, checked_run, missing_commits
from fp8bench.store.compacted.archive import archived_files, sha256_of
from fp8bench.store.compacted.compact import check_compacted
from fp8bench.store.index.figure_files import check_steps, digest_of, names_of
from fp8bench.store.index.points_file import Index, check_figures, check_index
from fp8bench.store.runs.listing import REMEDY, Listing, listing, refusal
from fp8bench.store.verify_files import Soundness, check_results, check_run, check_surroundings

_MOST_NAMED = 3


@dataclass(frozen=True)
class Verified:
    """The faults of a store, and by kind of file how many of how many are sound."""

    faults: tuple[Fault, ...]
    sound: dict[str, tuple[int, int]]


def verify(store: Path, folder: Path, now: datetime) -> Verified:
    """Reads every file of a store. `folder` may be in the repository whose commits were measured."""
    results = results_of(store)
    files, of_view = check_results(results)
    of_commits: dict[tuple[str, str], list[ResultsFile]] = {}
    for path, file in files.items():
        of_commits.setdefault((path.parent.name, file.commit_hash), []).append(file)
    faults: list[Fault] = []
    lacking: list[Fault] = []
    runs: dict[str, Run] = {}
    counted: list[tuple[Run, int | None]] = []
    unknown: Counter[str] = Counter()
    there = listing(store)
    broken, by_files = 0, by_commit(there.everything)
    index = Index.opened(store)
    changed, old = _changed(index, by_files), 0
    for commit, paths in by_files.items():
        kept: dict[str, TrackedRun] = {}
        soundness: dict[Path, Soundness] = {}
        for path in paths:
            run, soundness[path], of_run = check_run(path, now)
            old += soundness[path] is Soundness.UNKNOWN
            if soundness[path] is Soundness.UNKNOWN and (fault := changed.get(path)):
                soundness[path] = Soundness.DAMAGED
                of_run.append(fault)
            if run is not None:
                of_run += _uncounted(path, there)
                header = replace(run, records=(), plan=Plan(()))
                runs.setdefault(run.id, header)
                if there.counts(path):
                    counted.append((header, samples_of(run)))
                tracked, why = checked_run(run, path)
                unknown.update([why] if "--import" in why else [])
                if tracked is not None and there.counts(path):
                    kept[run.id] = tracked
            broken += any(fault.broken for fault in of_run)
            faults += of_run
        oldest_first = sorted(kept.values(), key=lambda run: run.order)
        for members in by_place(oldest_first):
            lacking += [_judged(fault, soundness) for fault in _lacking(results, members, of_commits)]
        faults += check_figures(index, commit, paths, list(kept.values()))
    across = [*_unchecked(store, unknown, old, len(there.everything)), *check_index(index), *check_steps(store)]
    across += [*_lost_commits(store, runs.values(), folder), *_copies(counted)]
    broken_of_view = {fault.path for fault in of_view if fault.broken}
    listed = {path for path in (*results.glob("*/*.json"), results / "benchmarks.json") if path.is_file()}
    sound = sum(str(path) not in broken_of_view for path in listed)
    count = sum(map(len, by_files.values()))
    of_points, whole = check_compacted(store)
    compacted = {"compacted files": (max(0, whole - sum(point.broken for point in of_points)), whole)} if whole else {}
    return Verified(
        (*faults, *check_surroundings(store), *of_view, *_folded(results, lacking), *across, *of_points),
        {"run files": (count - broken, count), "asv's files": (sound, len(listed)), **compacted},
    )


def _unchecked(store: Path, unknown: Mapping[str, int], old: int, files: int) -> Iterator[Fault]:
    """Yields what could not be checked: figures of suites that are not imported, and files without checksums."""
    for why, count in unknown.items():
        what = f"of {count} run{'s' * (count != 1)}, {why}"
        yield Fault(str(store / "runs"), what, "Their figures were not compared", broken=False)
    if old:
        what = f"{old} of {files} run files have no checksums: an older fp8bench wrote them"
        yield Fault(str(store / "runs"), what, "A digit that changes in one is not seen", broken=False)


def _judged(fault: Fault, soundness: Mapping[Path, Soundness]) -> Fault:
    """Changes the fault of asv's file that differs from runs where the runs may be wrong."""
    if not fault.broken or set(soundness.values()) == {Soundness.WHOLE}:
        return fault
    damaged = [path.name for path, soundness_of in soundness.items() if soundness_of is Soundness.DAMAGED]
    if damaged:
        remedy = f"Put {_listed(damaged)} right first, which is not what was measured; this file may be sound"
        return replace(fault, remedy=remedy, broken=False)
    what = f"{fault.what}, which have no checksums: nobody can tell which of them is wrong"
    return replace(fault, what=what, remedy="Look at copies of both; `fp8bench history rebuild` takes the runs' word")


def _changed(index: Index, by_files: Mapping[str, Sequence[Path]]) -> dict[Path, Fault]:
    """Returns faults of run files that differ from what was indexed or archived, though they are not longer.

    Run files are only appended to, so one of the same size has been damaged.
    """
    faults = {}
    archived = archived_files(index.store)
    for commit, paths in by_files.items():
        known = {source.name: source for source in index.sources(commit)}
        for path, name in zip(paths, names_of(index.store, paths), strict=True):
            with contextlib.suppress(OSError):
                size = path.stat().st_size
                before, kept = known.get(name), archived.get(name)
                if kept is not None and kept.size == size and kept.digest != sha256_of(path):
                    remedy = "Move it away, and `fp8bench store restore` writes back what it was"
                    faults[path] = Fault(str(path), "it is not what was archived of it", remedy)
                elif before is not None and before.size == size and before.digest != digest_of(path):
                    what = "it is not what the index was made of, and nothing was added to it"
                    faults[path] = Fault(str(path), what, "Put it right from a copy")
    return faults


def _uncounted(path: Path, there: Listing) -> Iterator[Fault]:
    if path in there.copies:
        what = f"it is the same run as {there.copies[path]}, or the beginning of it, and counts once"
        yield Fault(str(path), what, "Move it away")
    if path in there.refused:
        yield Fault(str(path), refusal(there.refused[path]), REMEDY)


def _lacking(
    results: Path, tracked: Sequence[TrackedRun], files: Mapping[tuple[str, str], Sequence[ResultsFile]]
) -> list[Fault]:
    """Returns faults where asv's file lacks figures of the runs of one place, which does no harm, or differs."""
    first = tracked[0]
    commit, (machine, python, _) = first.commit, first.identity.home
    here = files.get((machine, commit), ())
    alike = [
        results_file
        for results_file in here
        if results_file.python == python or resolved(results_file.python) == first.identity.interpreter
    ]
    file = alike[0] if alike else nothing_of(commit, first.identity)
    expected = filled(file, tracked).rows
    path = results / machine / first.identity.file_name(commit)
    differing = [name for name, row in expected.items() if not _agrees(file.rows.get(name), row)]
    wrong = [name for name in differing if not _is_behind(file.rows[name], name, tracked)]
    lacking = [name for name, row in expected.items() if name not in wrong and _lacks(file.rows.get(name), row)]
    lacking += [name for name in differing if name not in (*wrong, *lacking)]
    faults = []
    if wrong:
        what = f"it says otherwise than the runs of commit {commit[:8]} of {_listed(wrong)}"
        faults.append(Fault(str(path), what, "`fp8bench history rebuild` makes it right"))
    if lacking:
        what = f"it lacks what the runs of commit {commit[:8]} say of {_listed(lacking)}"
        faults.append(Fault(str(path), what, "`fp8bench history rebuild` puts it there", broken=False))
    return faults


def _folded(results: Path, faults: Sequence[Fault]) -> list[Fault]:
    """Puts many files that only lack something into one fault, as after the view was deleted."""
    lacking = [fault for fault in faults if not fault.broken]
    if len(lacking) <= _MOST_NAMED:
        return list(faults)
    named = _listed([str(Path(fault.path).relative_to(results)) for fault in lacking])
    what = f"{len(lacking)} files of it lack what the runs of their commits say: {named}"
    whole = Fault(str(results), what, lacking[0].remedy, broken=False)
    return [*(fault for fault in faults if fault.broken), whole]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _agrees(row: AsvRow | None, expected: AsvRow) -> bool:
    """Whether a row has no other number. A failure may be where a number was: `asv run` keeps its last result."""
    wanted = numbers(expected)
    if row is None or not wanted:
        return True
    known = by_combination(row)
    here = {texts: known.get(texts, NOT_MEASURED) for texts in wanted}
    same = all(figures[0] in (None, wanted[texts]) or not is_measured(figures) for texts, figures in here.items())
    return row.version == expected.version and same


def _is_behind(row: AsvRow, name: str, tracked: Sequence[TrackedRun]) -> bool:
    """Whether a row has what the runs came to that had begun when it was written.

    Then only a later `asv run` is missing in it, which was interrupted or left the row out.
    """
    earlier = [run for run in tracked if row.started_at is not None and run.started_at <= row.started_at]
    if not earlier:
        return False
    written_then = filled(nothing_of(earlier[0].commit, earlier[0].identity), earlier).rows.get(name)
    return written_then is not None and bool(numbers(written_then)) and _agrees(row, written_then)


def _lacks(row: AsvRow | None, expected: AsvRow) -> bool:
    """Whether a row lacks numbers: `asv run --bench` writes only some."""
    known = by_combination(row) if row is not None else {}
    return any(not is_measured(known.get(texts, NOT_MEASURED)) for texts in numbers(expected))


def _lost_commits(store: Path, runs: Iterable[Run], folder: Path) -> list[Fault]:
    """Returns faults for commits that the repository has lost, whose runs stay sound."""
    commits = {commit for run in runs if isinstance(commit := run.environment.get("commit"), str)}
    lost = missing_commits(sorted(commits), folder)
    if not lost:
        return []
    if len(lost) == len(commits):
        what = f"none of its {len(lost)} commits is in the repository of this directory"
        return [Fault(str(store / "runs"), what, "Verify from within the one that was measured", broken=False)]
    remedy = "Their runs stay as they are; `asv publish` leaves them out"
    named = ", ".join(sorted(text[:8] for text in lost)[: 2 * _MOST_NAMED])
    more = ", ..." if len(lost) > 2 * _MOST_NAMED else ""
    what = f"{len(lost)} of {len(commits)} commits are not in the repository of this directory ({named}{more})"
    return [Fault(str(store / "runs"), what, remedy, broken=False)]


def samples_of(run: Run) -> int | None:
    """Returns a digest of all times of a run, valid in this process; None where it has none."""
    times = tuple((record.case.id, record.timing.slots) for record in run.records if record.timing is not None)
    return hash(times) if times else None


def _copies(runs: Iterable[tuple[Run, int | None]]) -> Iterator[Fault]:
    """Yields runs of two machines that have the same times to the nanosecond: one is a copy."""
    first: dict[int, tuple[Run, str]] = {}
    for run, digest in runs:
        identity = from_facts(run.environment.facts)
        if identity is not None and digest is not None:
            other, machine = first.setdefault(digest, (run, identity.home.machine))
            if machine != identity.home.machine:
                what = (
                    f"every time in it, to the nanosecond, is that of run {other.id} of machine {machine} "
                    f"({other.path}): one is a copy of the other under another name"
                )
                yield Fault(run.path, what, REMEDY)
