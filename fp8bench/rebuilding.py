"""The whole of asv's view made again from the runs, and with it the files of what commits come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.history.asv_files import locked
from fp8bench.history.runs import run_files
from fp8bench.index.opening import hear_and_keep
from fp8bench.model import Series
from fp8bench.telling import by_place, files_by_commit, hear
from fp8bench.view import LOCK_SECONDS, define, results_of, series_told, write_place


@dataclass(frozen=True)
class Rebuilt:
    """What was made: files, the series in them, of how many runs; how many runs are in none, and why.

    `aside` are files that were broken, under their new names; `failed` are sentences on files that could not be made.
    """

    files: tuple[Path, ...]
    series: int
    runs: int
    left: Counter[str]
    aside: tuple[Path, ...]
    failed: tuple[str, ...]


def rebuild(store: Path, commits: Collection[str] | None = None) -> Rebuilt:
    """Write the files of all commits, or of those given by the beginning that run files' names have.

    It goes in the order of the commits' first runs, because the first one decides under which name a machine's results
    lie. What asv alone measured stays.
    """
    files: dict[Path, None] = {}
    left: Counter[str] = Counter()
    aside: list[Path] = []
    failed: dict[str, None] = {}
    series: dict[str, Series] = {}
    runs = 0
    for commit, paths in files_by_commit(store).items():
        if commits is not None and commit not in commits:
            continue
        # Read under the lock, too: a writer that knew fewer runs must not come after one that knew more.
        with locked(store / "asv", LOCK_SECONDS):
            heard = hear_and_keep(store, commit, paths)
            for told in by_place(heard.told):
                try:
                    files[write_place(results_of(store), told, aside)] = None
                except (StoreError, OSError) as error:
                    failed[str(error)] = None
        left.update(one.why for one in heard.left)
        runs += len(heard.told)
        series |= {one.name: one for one in series_told(heard.told)}
    with locked(store / "asv", LOCK_SECONDS):
        define(results_of(store), _newest(store, series.values()), aside)
    return Rebuilt(tuple(files), len(series), runs, left, tuple(aside), tuple(failed))


def _newest(store: Path, series: Iterable[Series]) -> list[Series]:
    """The series as the newest run that has each defines it: an old commit's text is not what asv should go by."""
    wanted = {one.workload for one in series}
    found: dict[str, Series] = {}
    for path in run_files(store):
        seen = {one.workload for one in found.values()}
        if wanted <= seen:
            break
        told = hear([path]).told
        found |= {one.name: one for one in series_told(told) if one.workload in wanted - seen}
    return list(found.values())
