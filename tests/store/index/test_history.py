"""The index says what reading every run says, and knows when a file of figures no longer counts."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8bench.model import Request, Status
from fp8bench.registry import workloads
from fp8bench.store.commit_runs import by_place, read_runs
from fp8bench.store.index import figure_files
from fp8bench.store.index import points_file as points_files
from fp8bench.store.index.figure_files import Fingerprints
from fp8bench.store.index.history import History, keep_figures, open_history, read_and_keep
from fp8bench.store.index.points_file import VERSION, Index, points_file
from fp8bench.store.index.tables import table_of
from fp8bench.store.merge_stores import rebuild
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
    return open_history(store, Reads())


def same(store: Path) -> Trends:
    """Compares both ways of reading: with an index of all commits, of some, and without one."""
    slow = read_trends(store, every)
    for _ in range(2):
        assert trends_of(opened(store), every) == slow
    points_file(store).unlink(missing_ok=True)
    if slow.runs:
        keep_figures(store, next(run_files(store)))
    again = opened(store)
    assert trends_of(again, every) == slow and not again.troubles
    assert opened(store).read == 0
    assert again.names == sorted({trend.name for trend in slow.trends})
    for name in again.names[:3]:
        assert trends_of(again, name.__eq__) == read_trends(store, name.__eq__)
    return slow


def test_many_kinds_of_runs(tmp_path: Path) -> None:
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


RUNS = st.lists(
    st.tuples(
        st.integers(0, 4), st.sampled_from((1.0, 1.5)), st.sampled_from(tuple(Status)), st.booleans(),
        st.sampled_from(("box", "bax")), st.sampled_from(("2.12", "2.13")), st.sampled_from((1, 2, 24)),
    ),
    min_size=1, max_size=8,
)  # fmt: skip


@pytest.mark.slow
@given(RUNS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_runs(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[int, float, Status, bool, str, str, int]]
) -> None:
    store = tmp_path_factory.mktemp("store")
    for hour, (number, time, status, quick, machine, torch, rounds) in enumerate(runs):
        facts = {"asv_machine": machine, "torch": torch, "commit_date": number // 2 if number else None}
        measured = tuple(records(time, status, rounds))
        keep(store, run_at(number, hour, records=measured, facts=facts, request=Request("gemm", quick=quick)))
    same(store)


def test_endings(tmp_path: Path) -> None:
    history(tmp_path, 1.0, 1.1)
    keep(tmp_path, run_at(2, records=tuple(records(status=Status.FAILED))))
    keep(tmp_path, run_at(3, records=tuple(records(status=Status.FAILED))))
    found = opened(tmp_path)
    endings = [trend.ending for trend in found.trends(every)]
    assert [replace(one.trend, figures=()) for one in endings] == [one.trend for one in found.endings(every)]
    assert [one[1:] for one in endings] == [one[1:] for one in found.endings(every)]
    assert {ending.points for ending in endings} == {0, 2, 4}
    assert any(ending.before is not None and ending.last.value is None for ending in endings)


def test_comparable_figures(tmp_path: Path) -> None:
    history(tmp_path, 1.0, 1.1)
    keep(tmp_path, run_at(2, facts={"torch": "2.99"}))
    keep(tmp_path, run_at(3, request=Request("gemm", quick=True)))
    keep(tmp_path, run_at(4, records=tuple(records(status=Status.FAILED))))
    keep(tmp_path, run_at(5, records=tuple(records(1.2))))
    found = opened(tmp_path)
    for line in found.lines.lines:
        figures = found.lines.trend(line).figures
        for one in found.lines.comparable(line):
            assert [figures[place].value for place in one.places] == one.values.tolist()
            assert len({(figures[place].version, figures[place].under) for place in one.places}) == 1
            assert not any(figures[place].hasty for place in one.places)
    places = {tuple(stretch.places.tolist()) for line in found.lines.lines for stretch in found.lines.comparable(line)}
    assert places == {(0, 1, 5), (0, 1, 4, 5), (2,)}


def test_a_new_run_has_one_commit_read(tmp_path: Path) -> None:
    paths = history(tmp_path, 1.0, 1.1, 1.2)
    reads = Reads()
    open_history(tmp_path, reads)
    open_history(tmp_path, reads)
    keep(tmp_path, run_at(1, 9))
    for path in (paths[0], paths[2]):
        content = path.read_bytes()
        status = path.stat()
        path.write_bytes(b"x" * len(content))  # nobody looks
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    found = open_history(tmp_path, reads)
    assert reads == [3, 2] and found.runs == 4


def test_a_run_that_went_on_is_gone_or_is_none_any_more_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert trends_of(opened(tmp_path), every) == read_trends(tmp_path, every)
    paths = history(tmp_path, 1.0, 1.1, 1.2, 1.3)
    assert opened(tmp_path).read == 4
    with paths[0].open("a") as file:  # told by its size
        file.write('{"note":"more"}\n')
    paths[1].write_bytes(paths[1].read_bytes().replace(b"1103000", b"9103000"))  # told by its content
    paths[2].unlink()
    paths[3].write_text("no run\n")  # which it stays until it changes
    for read in (3, 0):
        found = opened(tmp_path)
        assert found.read == read and trends_of(found, every) == read_trends(tmp_path, every)
    assert found.runs == 2 and sum(found.left.values()) == 2  # of one of them a line alone


def test_a_copied_store_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy, or what git has checked out, has other dates and the same content, which is looked at once."""
    history(tmp_path / "a", 1.0, 1.1)
    slow = trends_of(opened(tmp_path / "a"), every)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for path in run_files(tmp_path / "b"):
        os.utime(path, ns=(1, 1))
    found = opened(tmp_path / "b")
    assert found.read == 0 and trends_of(found, every) == slow
    monkeypatch.setattr(figure_files, "digest_of", lambda _: "nobody asks for it again")
    assert trends_of(opened(tmp_path / "b"), every) == slow and opened(tmp_path / "b").read == 0


def test_a_suite_that_changes_its_grid_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history(tmp_path, 1.0, 1.1)
    assert opened(tmp_path).read == 2
    gemm = type(workloads.get("gemm"))
    grid = gemm.history
    assert grid is not None
    monkeypatch.setattr(gemm, "history", type(grid)(**{**vars(grid), "dtypes": ("fp32",)}))
    from fp8bench.store import points

    for one in (points._check, points._series, points._metrics, points._cells):
        one.cache_clear()
    found = opened(tmp_path)
    names = {trend.cell[0] for trend in found.trends(every)}
    for one in (points._check, points._series, points._metrics, points._cells):
        one.cache_clear()
    assert found.read == 2 and names == {"fp32"}


def test_a_suite_that_is_not_imported_leaves_what_was_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever imports it finds it again; a run that is new is written down as far as it is known here."""
    history(tmp_path, 1.0, 1.1)
    assert opened(tmp_path).read == 2
    with monkeypatch.context() as patch:
        patch.setattr(figure_files, "fingerprint", lambda _: "")
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


def damaged(content: bytes) -> Iterator[bytes]:
    """Ways in which a file is no longer what was written."""
    yield b""
    yield content[: len(content) // 2]
    yield content[:-1]
    yield content.replace(b"[1,1]", b"[2,1]", 1)
    yield content[:40] + bytes([content[40] ^ 1]) + content[41:]
    yield b"SQLite format 3\0" + content
    yield b"fp8bench figures one two\n" + content
    yield content[:39] + b"zzzzzzzz" + content[47:]
    yield b"fp8bench figures ff 00000000\n"
    yield content[:39] + b"00000000" + content[47:]
    yield os.urandom(len(content))


@for_each("way", range(11))
def test_a_torn_file_is_made_anew_and_that_is_said_once(tmp_path: Path, way: int) -> None:
    history(tmp_path, 1.0, 1.1)
    slow = trends_of(opened(tmp_path), every)
    path = points_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(next(itertools.islice(damaged(whole), way, None)))
    first, second = opened(tmp_path), opened(tmp_path)
    assert trends_of(first, every) == trends_of(second, every) == slow
    assert first.read == 2 and len(first.troubles) == 1 and path.name in first.troubles[0]
    assert second.read == 0 and not second.troubles and path.read_bytes() == whole


def test_what_was_cut_off_costs_what_came_last(tmp_path: Path) -> None:
    paths = history(tmp_path, 1.0, 1.1)
    for path in paths:
        keep_figures(tmp_path, path)
    slow = trends_of(opened(tmp_path), every)
    path = points_file(tmp_path)
    path.write_bytes(path.read_bytes() + b"x")
    assert opened(tmp_path).read == 0 and trends_of(opened(tmp_path), every) == slow
    path.write_bytes(path.read_bytes()[:-9])
    assert opened(tmp_path).read == 1 and opened(tmp_path).read == 0 and trends_of(opened(tmp_path), every) == slow


def test_a_file_of_many_frames_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points_files, "_MOST_FRAMES", 3)
    paths = history(tmp_path, *(1.0 + 0.1 * number for number in range(7)))
    sizes = []
    for path in (*paths, *paths):
        keep(tmp_path, run_at(int(path.stem.split("-")[1], 16), 50 + len(sizes)))
        keep_figures(tmp_path, path)
        sizes.append(points_file(tmp_path).stat().st_size)
        assert Index.opened(tmp_path)._frames <= 4
    assert sizes[-1] < 2 * sizes[6] and opened(tmp_path).read == 0
    assert trends_of(opened(tmp_path), every) == read_trends(tmp_path, every)


def test_a_newer_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history(tmp_path, 1.0)
    path = points_file(tmp_path)
    monkeypatch.setattr(points_files, "VERSION", VERSION + 1)
    slow = trends_of(opened(tmp_path), every)
    newer = path.read_bytes()
    monkeypatch.undo()
    found = opened(tmp_path)
    assert trends_of(found, every) == slow and path.read_bytes() == newer
    assert len(found.troubles) == 1 and "newer" in found.troubles[0]
    monkeypatch.setattr(points_files, "VERSION", VERSION + 2)
    again = opened(tmp_path)
    assert trends_of(again, every) == slow and not again.troubles and path.read_bytes() != newer


def test_a_store_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history(tmp_path, 1.0, 1.1)
    (tmp_path / "points").write_text("a file where the folder should be")
    found = opened(tmp_path)
    assert trends_of(found, every) == read_trends(tmp_path, every) and not found.troubles
    monkeypatch.setattr("fp8bench.store.index.history._WORTH_KEEPING", 1)
    (trouble,) = opened(tmp_path).troubles
    assert "2 runs" in trouble and "points" in trouble
    assert (tmp_path / "points").is_file()


def test_keeping_after_a_run(tmp_path: Path) -> None:
    _, last = history(tmp_path, 1.0, 1.1)
    keep_figures(tmp_path, last)
    keep_figures(tmp_path / "nowhere", last)
    keep_figures(tmp_path, Path())
    assert list(Index.opened(tmp_path).units) == [commit(1)[:8]]
    assert opened(tmp_path).read == 1


def test_rebuilding_makes_them_anew(tmp_path: Path) -> None:
    history(tmp_path, 1.0, 1.1)
    slow = trends_of(opened(tmp_path), every)
    index = Index.opened(tmp_path)
    known = index.figures(commit(0)[:8])
    index.keep([(commit(0)[:8], known._replace(runs=7))])
    assert opened(tmp_path).runs == 8 and not read_and_keep(index, commit(0)[:8], [], Fingerprints()).runs
    rebuild(tmp_path)
    assert Index.opened(tmp_path).figures(commit(0)[:8]).runs == 1
    again = opened(tmp_path)
    assert again.read == 0 and trends_of(again, every) == slow


def test_a_commit_that_is_a_path_leads_nowhere(tmp_path: Path) -> None:
    (path,) = history(tmp_path / "deep" / "store", 1.0)
    content = path.read_text().replace(commit(0), "../../x")
    path.unlink()
    path.with_name("renamed.jsonl").write_text(content)
    store = tmp_path / "deep" / "store"
    for read in (1, 0):
        found = opened(store)
        assert found.read == read and trends_of(found, every) == read_trends(store, every)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"] and len(list((store / "points").iterdir())) == 2


def test_what_killed_writers_left_is_swept(tmp_path: Path) -> None:
    history(tmp_path, 1.0)
    folder = tmp_path / "points"
    folder.mkdir()
    old, young, foreign = (folder / name for name in (".a.figures-1.partial", ".b.figures-2.partial", "notes.txt"))
    for path in (old, young, foreign):
        path.write_text("")
    os.utime(old, (1, 1))
    os.utime(foreign, (1, 1))
    opened(tmp_path)
    assert not old.exists() and young.exists() and foreign.exists()


def test_a_change_of_what_is_told_raises_the_version(tmp_path: Path) -> None:
    """If this fails, the same run comes to other figures, or they are written down otherwise.

    Then VERSION in fp8bench/store/index/points_file.py must go up, or what was kept before would be shown as if it
    were new. Raise it, and put the new pair here.
    """
    write_store(tmp_path, 1, 1)
    (path,) = run_files(tmp_path)
    path.write_text(as_older(path).read_text().replace('"status":"ok"', '"status":"failed"', 1))
    with forgotten(tmp_path):
        import_user_modules((str(write_module(tmp_path, 2)),))
        (table,) = map(table_of, by_place(read_runs([path]).runs))
    parts = [json.dumps(table.said, sort_keys=True).encode(), table.layout, table.rows.tobytes()]
    assert (VERSION, hashlib.blake2b(b"".join(parts)).hexdigest()[:16]) == (12, "343971f768e72bd2")
