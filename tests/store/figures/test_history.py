"""The cache gives the same as reading every run, and is rebuilt if it does not match."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.model import Request, Status
from fp8bench.registry import workloads
from fp8bench.store.commit_runs import group_by_interpreter, read_runs
from fp8bench.store.figures import cache
from fp8bench.store.figures import history as opening
from fp8bench.store.figures.cache import VERSION, delete_cache, get_figure_cache_path, read_cached_values, write_values
from fp8bench.store.figures.history import cache_commit_figures, open_store_history
from fp8bench.store.figures.lines import History
from fp8bench.store.figures.tables import make_table
from fp8bench.store.merge_stores import rebuild_asv_view
from fp8bench.store.runs.listing import run_files
from fp8bench.user_code import import_user_modules
from suites.long_history import write_module, write_store
from tests.counts import for_each
from tests.histories import Trends, commit, history, keep, read_trends, records, run_at, trends_of
from tests.older import as_older
from tests.own_suites import forgotten


def every(_: str) -> bool:
    return True


class Reads(list[int]):
    """How many runs had to be read, each time that any had."""

    def __call__(self, done: int, runs: int) -> None:
        self.extend([runs] * (not done))


def opened(store: Path) -> History:
    return open_store_history(store, Reads())


def same(store: Path) -> Trends:
    """Compares both ways of reading: with a cache of all commits, of some, and without one."""
    slow = read_trends(store, every)
    for _ in range(2):
        assert trends_of(opened(store), every) == slow
    delete_cache(store)
    if slow.runs:
        cache_commit_figures(store, next(run_files(store)))
    again = opened(store)
    assert trends_of(again, every) == slow and not again.troubles
    assert opened(store).read == 0
    assert again.names == sorted({trend.name for trend in slow.trends})
    for name in again.names[:3]:
        assert trends_of(again, name.__eq__) == read_trends(store, name.__eq__)
    return slow


def test_the_cache_gives_the_figures_of_all_kinds_of_runs(tmp_path: Path) -> None:
    history(tmp_path, 1.0, 1.1, 1.2)
    keep(tmp_path, run_at(1, 7, records=tuple(records(1.3)), request=Request("gemm", quick=True)))
    keep(tmp_path, run_at(2, 8, records=tuple(records(1.4))))
    keep(tmp_path, run_at(2, 9, records=tuple(records(1.5)), facts={"torch": "2.99"}))
    keep(tmp_path, run_at(3, 10, records=tuple(records(status=Status.FAILED))))
    keep(tmp_path, run_at(4, 11, records=tuple(records(status=Status.SKIPPED)), facts={"commit_date": None}))
    keep(tmp_path, run_at(5, 12, facts={"dirty": True}))
    keep(tmp_path, run_at(6, 13, facts={"commit": None}))
    keep(tmp_path, run_at(7, 14, facts={"asv_machine": "another", "asv_gpu": "H200"}))
    keep(tmp_path, run_at(7, 15, facts={"asv_python": "/other/python"}))
    keep(tmp_path, run_at(8, 16, request=Request("gemm", seed=3)))
    one, two = records(2.0)
    keep(tmp_path, run_at(9, 17, records=(one,)))
    keep(tmp_path, run_at(9, 18, records=(two,)))
    keep(tmp_path, run_at(10, 19, request=Request("gemm", quick=True)))
    found = same(tmp_path)
    assert len(found.trends) > 6 and found.runs == 13 and sum(found.left.values()) == 3
    figures = [figure for trend in found.trends for figure in trend.figures]
    assert {figure.status for figure in figures} == set(Status) and any(figure.hasty for figure in figures)
    assert any(figure.value is None for figure in figures) and any(figure.runs == 2 for figure in figures)


def test_endings(tmp_path: Path) -> None:
    history(tmp_path, 1.0, 1.1)
    keep(tmp_path, run_at(2, records=tuple(records(status=Status.FAILED))))
    keep(tmp_path, run_at(3, records=tuple(records(status=Status.FAILED))))
    found = opened(tmp_path)
    endings = [trend.ending for trend in found.trends(every)]
    assert [replace(one.trend, figures=()) for one in endings] == [one.trend for one in found.list_trend_endings(every)]
    assert [one[1:] for one in endings] == [one[1:] for one in found.list_trend_endings(every)]
    assert {ending.points for ending in endings} == {0, 2, 4}
    assert any(ending.before is not None and ending.last.value is None for ending in endings)


def test_comparable_figures(tmp_path: Path) -> None:
    history(tmp_path, 1.0, 1.1)
    keep(tmp_path, run_at(2, facts={"torch": "2.99"}))
    keep(tmp_path, run_at(3, request=Request("gemm", quick=True)))
    keep(tmp_path, run_at(4, records=tuple(records(status=Status.FAILED))))
    keep(tmp_path, run_at(5, records=tuple(records(1.2))))
    found = opened(tmp_path)
    for line in found.lines:
        figures = line.make_trend().figures
        for one in line.comparable:
            assert [figures[place].value for place in one.places] == one.values.tolist()
            assert len({(figures[place].version, figures[place].under) for place in one.places}) == 1
            assert not any(figures[place].hasty for place in one.places)
    places = {tuple(stretch.places.tolist()) for line in found.lines for stretch in line.comparable}
    assert places == {(0, 1, 5), (0, 1, 4, 5), (2,)}


def test_a_new_run_has_one_commit_read(tmp_path: Path) -> None:
    paths = history(tmp_path, 1.0, 1.1, 1.2)
    reads = Reads()
    open_store_history(tmp_path, reads)
    open_store_history(tmp_path, reads)
    keep(tmp_path, run_at(1, 9))
    for path in (paths[0], paths[2]):
        content = path.read_bytes()
        status = path.stat()
        path.write_bytes(b"x" * len(content))  # no reader notices
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    found = open_store_history(tmp_path, reads)
    assert reads == [3, 2] and found.runs == 4


def test_changed_run_files_are_read_again(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert trends_of(opened(tmp_path), every) == read_trends(tmp_path, every)
    paths = history(tmp_path, 1.0, 1.1, 1.2, 1.3)
    assert opened(tmp_path).read == 4
    with paths[0].open("a") as file:  # noticed by its size
        file.write('{"note":"more"}\n')
    paths[1].write_bytes(paths[1].read_bytes().replace(b"1103000", b"9103000"))  # noticed by its content
    paths[2].unlink()
    paths[3].write_text("no run\n")  # and it stays so until it changes
    for read in (3, 0):
        found = opened(tmp_path)
        assert found.read == read and trends_of(found, every) == read_trends(tmp_path, every)
    assert found.runs == 2 and sum(found.skipped_run_reasons.values()) == 2  # one of them has only a line


def test_a_suite_that_changes_its_grid_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history(tmp_path, 1.0, 1.1)
    assert opened(tmp_path).read == 2
    gemm = type(workloads.get("gemm"))
    grid = gemm.history
    assert grid is not None
    monkeypatch.setattr(gemm, "history", type(grid)(**{**vars(grid), "dtypes": ("fp32",)}))
    from fp8bench.store import points

    for one in (
        points._check_workload_grid,
        points._make_cached_series,
        points._cached_metrics,
        points._list_cached_cells,
    ):
        one.cache_clear()
    found = opened(tmp_path)
    names = {trend.cell[0] for trend in found.trends(every)}
    for one in (
        points._check_workload_grid,
        points._make_cached_series,
        points._cached_metrics,
        points._list_cached_cells,
    ):
        one.cache_clear()
    assert found.read == 2 and names == {"fp32"}


def test_a_suite_that_is_not_imported_leaves_what_was_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the suite shows it again; a new run is cached with the figures that can be computed now."""
    history(tmp_path, 1.0, 1.1)
    assert opened(tmp_path).read == 2
    with monkeypatch.context() as patch:
        patch.setattr(opening, "fingerprint_grid", lambda _: "")
        assert [opened(tmp_path).read for _ in range(2)] == [2, 2]
        keep(tmp_path, run_at(1, 9))
        assert [opened(tmp_path).read for _ in range(2)] == [3, 1]
    assert [opened(tmp_path).read for _ in range(2)] == [2, 0]


def test_two_names_of_one_interpreter(tmp_path: Path) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "python3").write_text("")
    (binaries / "python").symlink_to("python3")
    stores = [tmp_path / "store", tmp_path / "older", tmp_path / "apart"]
    for store, file in zip(stores, ("/venv:/python", None, None), strict=True):
        for hour, name in enumerate(("python", "python3")):
            keep(store, run_at(0, hour, facts={"asv_python": str(binaries / name), "interpreter": file}))
    older = same(stores[1])
    (binaries / "python").unlink()
    assert trends_of(opened(stores[1]), every) == older
    merged, apart = same(stores[0]), same(stores[2])
    assert len(apart.trends) == 2 * len(merged.trends) == 2 * len(older.trends)
    assert merged.trends[0].figures[0].runs == older.trends[0].figures[0].runs == 2


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "another file": lambda content: b"no database at all",
    "noise": lambda content: os.urandom(len(content)),
}


@for_each("damage", DAMAGES)
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: str) -> None:
    history(tmp_path, 1.0, 1.1)
    slow = trends_of(opened(tmp_path), every)
    path = get_figure_cache_path(tmp_path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    first, second = opened(tmp_path), opened(tmp_path)
    assert trends_of(first, every) == trends_of(second, every) == slow
    assert first.read == 2 and second.read == 0


def test_no_digit_of_a_cache_changes_unseen(tmp_path: Path) -> None:
    history(tmp_path, 1.0, 1.1)
    slow = trends_of(opened(tmp_path), every)
    path = get_figure_cache_path(tmp_path)
    whole = path.read_bytes()
    for place in (*range(16, 100, 7), *range(100, len(whole), 193)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert trends_of(opened(tmp_path), every) == slow, place
        assert trends_of(opened(tmp_path), every) == slow and opened(tmp_path).read == 0, place


def test_a_cache_of_another_version_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history(tmp_path, 1.0)
    slow = trends_of(opened(tmp_path), every)
    monkeypatch.setattr(cache, "_FILE_VERSION", cache._FILE_VERSION + 1)
    for read in (1, 0):
        found = opened(tmp_path)
        assert trends_of(found, every) == slow and found.read == read


def test_a_cache_that_cannot_be_written_costs_reading_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history(tmp_path, 1.0, 1.1)
    get_figure_cache_path(tmp_path).mkdir()
    found = opened(tmp_path)
    assert trends_of(found, every) == read_trends(tmp_path, every) and found.read == 2 and not found.troubles
    monkeypatch.setattr(opening, "_MIN_REPORTED_RUNS", 1)
    (trouble,) = opened(tmp_path).troubles
    assert "reads 2 runs again" in trouble and str(get_figure_cache_path(tmp_path)) in trouble


def test_a_cache_that_may_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history(tmp_path, 1.0, 1.1)
    slow = trends_of(opened(tmp_path), every)

    def read_only(path: Path, *arguments: float, **options: None) -> sqlite3.Connection:
        return sqlite3.Connection(f"{path.absolute().as_uri()}?mode=ro", *arguments, uri=True, **options)

    monkeypatch.setattr(sqlite3, "connect", read_only)  # root may write into every folder
    assert trends_of(opened(tmp_path), every) == slow and opened(tmp_path).read == 0
    keep(tmp_path, run_at(2))
    found = opened(tmp_path)
    assert found.read == 1 and trends_of(found, every) == read_trends(tmp_path, every)


def test_a_locked_cache_is_waited_for_and_then_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history(tmp_path, 1.0)
    slow = trends_of(opened(tmp_path), every)
    monkeypatch.setattr(cache, "_LOCK_SECONDS", 0.01)
    with sqlite3.connect(get_figure_cache_path(tmp_path), isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert "locked" in write_values(tmp_path, {("commit", "a"): b"b"})
        found = opened(tmp_path)
        assert found.read == 1 and trends_of(found, every) == slow
        other.execute("ROLLBACK")
    assert opened(tmp_path).read == 0


def test_keeping_after_a_run(tmp_path: Path) -> None:
    _, last = history(tmp_path, 1.0, 1.1)
    cache_commit_figures(tmp_path, last)
    cache_commit_figures(tmp_path / "nowhere", last)
    cache_commit_figures(tmp_path, Path())
    assert list(read_cached_values(tmp_path, "commit")) == [commit(1)[:8]]
    assert opened(tmp_path).read == 1


def test_rebuilding_makes_it_again(tmp_path: Path) -> None:
    history(tmp_path, 1.0, 1.1)
    slow = trends_of(opened(tmp_path), every)
    wrong = read_cached_values(tmp_path, "commit")[commit(1)[:8]]
    write_values(tmp_path, {("commit", commit(0)[:8]): wrong, ("commit", "gone"): b"{}\n"})
    rebuild_asv_view(tmp_path)
    again = opened(tmp_path)
    assert again.read == 0 and trends_of(again, every) == slow and "gone" not in read_cached_values(tmp_path, "commit")


def test_a_commit_that_is_a_path_leads_nowhere(tmp_path: Path) -> None:
    (path,) = history(tmp_path / "deep" / "store", 1.0)
    content = path.read_text().replace(commit(0), "../../x")
    path.unlink()
    path.with_name("renamed.jsonl").write_text(content)
    store = tmp_path / "deep" / "store"
    for read in (1, 0):
        found = opened(store)
        assert found.read == read and trends_of(found, every) == read_trends(store, every)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert {path.name for path in store.iterdir()} == {"runs", get_figure_cache_path(store).name}


def test_a_change_of_what_is_told_raises_the_version(tmp_path: Path) -> None:
    """A failure means that the same run gives other figures or another text.

    Then raise VERSION in fp8bench/store/figures/cache.py, since old caches would be shown otherwise, and put the new
    pair here.
    """
    write_store(tmp_path, 1, 1)
    (path,) = run_files(tmp_path)
    path.write_text(as_older(path).read_text().replace('"status":"ok"', '"status":"failed"', 1))
    with forgotten(tmp_path):
        import_user_modules((str(write_module(tmp_path, 2)),))
        (table,) = map(make_table, group_by_interpreter(read_runs([path]).runs))
    parts = [repr((table.place, table.layout, table.facts)).encode(), table.rows]
    assert (VERSION, hashlib.blake2b(b"".join(parts)).hexdigest()[:16]) == (3, "0c68100ebb43c8a7")
