"""What was compacted says what the runs say, bit for bit, or is not believed."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8bench.errors import StoreError, UsageError
from fp8bench.files import locked
from fp8bench.model import Measurement, Request, Status
from fp8bench.store.compacted import compact as compacting
from fp8bench.store.compacted import manifest as manifests
from fp8bench.store.compacted import parquet
from fp8bench.store.compacted.compact import Compaction, check_compacted, compact
from fp8bench.store.compacted.manifest import load_manifest, points_of
from fp8bench.store.index import figure_files
from fp8bench.store.index import history as index
from fp8bench.store.index.history import History, open_history
from fp8bench.store.index.points_file import points_file
from fp8bench.store.runs.listing import index_of
from fp8bench.store.verify import verify
from tests.counts import for_each, sampled
from tests.histories import history, keep, read_trends, records, run_at, trends_of


def every(_: str) -> bool:
    return True


def compacted(store: Path) -> Compaction:
    return compact(store, lambda done, commits: None)


def opened(store: Path) -> History:
    return open_history(store, lambda done, runs: None)


def told(found: History) -> Any:
    lines = found.lines
    same = [
        (
            line.trend,
            lines.trend(line),
            [(part.places.tolist(), part.values.tobytes()) for part in lines.comparable(line)],
        )
        for line in lines.lines
    ]
    one = [found.trends(name.__eq__) for name in found.names[:2]]
    return trends_of(found, every), found.names, found.endings(every), same, one


def words(value: Any) -> str:
    """Returns a value as text, in which NaN equals NaN, and a member of an enum its word."""
    return re.sub(r"<\w+\.\w+: ('[^']*')>", r"\1", repr(value))


def no_figures(store: Path) -> None:
    """Lets nothing but the runs and what was compacted be read."""
    shutil.rmtree(store / "figures", ignore_errors=True)


def same(store: Path) -> Compaction:
    slow = words(told(opened(store)))
    done = compacted(store)
    no_figures(store)
    fast = opened(store)
    assert fast.read == 0 and not fast.troubles and words(told(fast)) == slow
    assert words(fast.trends(every)) == words(read_trends(store, every).trends)
    again = compacted(store)
    assert not again.written and not again.read and (again.runs, again.rows) == (done.runs, done.rows)
    return done


def many_kinds(store: Path) -> None:
    """Runs of many kinds, of several months and machines, and files that are none."""
    history(store, 1.0, 1.1, 1.2)
    keep(store, run_at(1, 7, records=tuple(records(1.3)), request=Request("gemm", quick=True)))
    keep(store, run_at(2, 800, records=tuple(records(1.4))))
    keep(store, run_at(2, 1600, records=tuple(records(1.5)), facts={"torch": "2.99 \u00e4\u2028 \ud800"}))
    lead, other = records(status=Status.FAILED)
    keep(store, run_at(3, 10, records=(lead, replace(other, reason="\u4e2d\udfff, 'a' \"b\"\n\0"))))
    keep(store, run_at(4, 11, records=tuple(records(status=Status.SKIPPED)), facts={"commit_date": None}))
    keep(store, run_at(5, 12, facts={"dirty": True}))
    keep(store, run_at(6, 13, facts={"commit": None}))
    keep(store, run_at(7, 14, facts={"asv_machine": "another's one", "asv_gpu": "H200", "commit_date": 10**30}))
    keep(store, run_at(8, 801))
    keep(store, run_at(7, 15, facts={"asv_python": "/other/python"}))
    strange = [Measurement("product_error", "", (value,)) for value in (math.nan, math.inf, -0.0)]
    for number, one in enumerate(strange, 11):
        keep(store, run_at(number, 20 + number, records=tuple(replace(r, measurements=(one,)) for r in records())))
    path = keep(store, run_at(9, 17))
    shutil.copy(path, path.with_name(f"copy of {path.name}"))
    path = keep(store, run_at(10, 18))
    path.write_bytes(path.read_bytes()[:-300])
    (path.parent / "20260105T120000.000Z-0000000f-ffff.jsonl").write_text("no run\n")
    (path.parent / "nothing.jsonl").write_text("")


def test_many_kinds_of_runs(tmp_path: Path) -> None:
    many_kinds(tmp_path)
    done = same(tmp_path)
    files = sorted(path.relative_to(points_of(tmp_path)).as_posix() for path in points_of(tmp_path).rglob("*.parquet"))
    assert files == [f"{name}/points.parquet" for name in sorted(done.written)] and len(files) == 3
    assert files[0].startswith("machine=another-s-one/month=2026-01")
    query = "SELECT * FROM read_parquet(?, hive_partitioning = true)"
    rows = duckdb.execute(query, [f"{points_of(tmp_path)}/**/*.parquet"]).df()
    figures = [figure for trend in opened(tmp_path).trends(every) for figure in trend.measured]
    values = sorted(figure.value for figure in figures if math.isfinite(figure.value or 0.0))
    assert len(rows) == done.rows and sorted(filter(math.isfinite, rows.value)) == values
    assert set(rows.machine_name) == {"box", "another's one"} and set(rows.status) == {one.value for one in Status}
    known = rows[rows.status == "ok"].dropna(subset="value")
    finite = known[[bool(np.isfinite(sample).all()) for sample in known.samples]]
    assert len(finite) and all(np.median(one.samples) == pytest.approx(one.value) for one in finite.itertuples())
    assert all(len(one.samples) == one.sample_count for one in rows.itertuples())
    assert {len(ids) for ids in rows.run_ids} == {1, 2, 3}
    assert check_compacted(tmp_path) == ([], 3 + len(done.archived.written))


def test_runs_that_were_measured(tmp_path: Path) -> None:
    """Few rows, with more texts than rows, which DuckDB may join in another order."""
    shutil.copytree(Path(__file__).resolve().parents[2] / "golden" / "stores" / "stored" / "runs", tmp_path / "runs")
    assert same(tmp_path).rows == 84


RUNS = st.lists(
    st.tuples(
        st.integers(0, 4), st.sampled_from((1.0, 1.5)), st.sampled_from(tuple(Status)), st.booleans(),
        st.sampled_from(("box", "bax")), st.sampled_from(("2.12", "2.13")), st.sampled_from((1, 2, 24)),
        st.sampled_from((1, 700)), st.sampled_from(("", "torn", "gone", "copy", "foreign")),
    ),
    min_size=1, max_size=8,
)  # fmt: skip


def any_runs(store: Path, runs: list[tuple[int, float, Status, bool, str, str, int, int, str]]) -> None:
    """Any runs in any order, compacted before and after the last ones and damages came."""
    paths = []
    for hour, (number, factor, status, quick, machine, torch, rounds, stride, _) in enumerate(runs):
        facts = {"asv_machine": machine, "torch": torch, "commit_date": number // 2 if number else None}
        measured = tuple(records(factor, status, rounds))
        run = run_at(number, hour * stride, records=measured, facts=facts, request=Request("gemm", quick=quick))
        paths.append(keep(store, replace(run, id=f"{hour:08x}")))
        if hour == len(runs) // 2:
            same(store)
            compacted_then = words(opened(store).trends(every))
    for path, (*_, damage) in zip(paths, runs, strict=True):
        match damage:
            case "torn":
                path.write_bytes(path.read_bytes()[:-200])
            case "gone":
                path.unlink()
            case "copy":
                shutil.copy(path, path.with_name(f"x{path.name}"))
            case "foreign":
                path.with_name(f"y{path.name}").write_text('{"schema": 99}\n')
    if not any(path.is_file() for path in (store / "runs").rglob("*")):  # then what was compacted is all that is known
        assert words(opened(store).trends(every)) == compacted_then
    else:
        assert words(opened(store).trends(every)) == words(read_trends(store, every).trends)
    if any((store / name).is_file() for name in load_manifest(store).files):
        same(store)
    else:
        with pytest.raises(StoreError, match="what was compacted stays as it is"):
            compacted(store)


GONE = [
    (4, 1.0, Status.OK, True, "box", "2.12", 1, 1, "torn"),
    (0, 1.0, Status.SKIPPED, False, "box", "2.12", 1, 700, "torn"),
    (0, 1.0, Status.SKIPPED, False, "box", "2.12", 1, 1, "gone"),
    (0, 1.0, Status.OK, False, "bax", "2.12", 1, 1, "gone"),
    (1, 1.0, Status.SKIPPED, False, "bax", "2.13", 1, 1, "gone"),
    (2, 1.5, Status.SKIPPED, False, "box", "2.12", 24, 700, ""),
]
IN_TWO_MONTHS = [
    (0, 1.0, Status.OK, False, "box", "2.12", 1, 1, "gone"),
    (0, 1.0, Status.SKIPPED, False, "box", "2.12", 1, 700, ""),
    (1, 1.0, Status.OK, False, "box", "2.12", 1, 1, "torn"),
    (0, 1.0, Status.OK, False, "box", "2.12", 1, 700, ""),
]


@pytest.mark.slow
@for_each("runs", [GONE, IN_TWO_MONTHS])
def test_commits_that_lost_runs_after_the_history_was_read(runs: Any, tmp_path: Path) -> None:
    """The index knows fewer places of them than the files do, and months are written one after the other."""
    any_runs(tmp_path, runs)


@pytest.mark.nightly
@given(RUNS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_runs(tmp_path_factory: pytest.TempPathFactory, runs: Any) -> None:
    any_runs(tmp_path_factory.mktemp("store"), runs)


def test_portions_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many_kinds(tmp_path)
    whole = words(opened(tmp_path).endings(every))
    compacted(tmp_path)
    monkeypatch.setattr(index, "_MOST_ROWS", 20)
    monkeypatch.setattr(parquet, "CHUNK_ROWS", 20)
    assert words(opened(tmp_path).endings(every)) == whole
    compacted(tmp_path)


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    history(tmp_path, 1.0, 1.1)
    last = keep(tmp_path, run_at(2, 800))
    first = compacted(tmp_path)
    assert len(first.written) == 2 and first.read == 3
    keep(tmp_path, run_at(1, 9))
    no_figures(tmp_path)
    found = opened(tmp_path)
    assert found.read == 2 and trends_of(found, every) == read_trends(tmp_path, every)
    again = compacted(tmp_path)
    assert again.written == ["machine=box/month=2026-01"] and again.read == 1 and again.kept == 1
    no_figures(tmp_path)
    assert opened(tmp_path).read == 0 and trends_of(opened(tmp_path), every) == read_trends(tmp_path, every)
    shutil.copytree(tmp_path, copy := tmp_path.with_name("copy"), copy_function=shutil.copyfile)  # with other dates
    done = compacted(copy)
    assert not done.read and not done.written and opened(copy).read == 0
    last.unlink()  # sources are asked, and not only what was compacted
    assert trends_of(opened(tmp_path), every) == read_trends(tmp_path, every)
    compacted(tmp_path)
    assert len(list(points_of(tmp_path).rglob("*.parquet"))) == 1 and same(tmp_path).runs == 3


def test_grids_that_are_not_known_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history(tmp_path, 1.0)
    keep(tmp_path, run_at(1, facts={"asv_python": "/other/python"}))
    compacted(tmp_path)
    no_figures(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("fp8bench.store.index.figure_files.fingerprint", lambda _: "")
        assert opened(tmp_path).read == 2 and not compacted(tmp_path).read  # whoever imports it will want it
    no_figures(tmp_path)
    assert opened(tmp_path).read == 0


def flipped(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def older(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"fp8bench_id", b"fp8bench_no"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "half of it": half,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "of somebody else": older,
}


@pytest.mark.nightly
@for_each("file", ["points.parquet", "index.json", "points.figures"])
def test_a_file_that_is_not_what_was_written(tmp_path: Path, file: str) -> None:
    history(tmp_path, 1.0, 1.1)
    slow = words(told(opened(tmp_path)))
    compacted(tmp_path)
    (path,) = points_of(tmp_path).rglob(file)
    for name, damage in DAMAGES.items():
        if file != "points.parquet" and name == "of somebody else":
            continue
        damage(path)
        named = [fault.path for fault in verify(tmp_path, tmp_path, datetime.now(UTC)).faults if fault.broken]
        assert named == [str(path)] * (file == "points.parquet" or name != "gone")
        done = compacted(tmp_path)
        assert done.read == 2 * (file != "points.figures" or name != "longer")
        assert bool(done.mended) is (file == "points.parquet")
        assert words(told(opened(tmp_path))) == slow and not opened(tmp_path).troubles


@pytest.mark.slow
def test_a_flipped_bit_is_never_a_wrong_number(tmp_path: Path) -> None:
    history(tmp_path, 1.0, 1.1, 1.3)
    slow = words(told(opened(tmp_path)))
    compacted(tmp_path)
    figures = points_file(tmp_path)
    whole = figures.read_bytes()
    for number in range(30):
        flipped(figures, number / 29)
        assert words(told(opened(tmp_path))) == slow
        figures.write_bytes(whole)
    (path,) = points_of(tmp_path).rglob("points.parquet")
    flipped(path, 0.3)
    (fault,) = check_compacted(tmp_path)[0]
    assert fault.path == str(path) and fault.broken
    assert compacted(tmp_path).mended == ["machine=box/month=2026-01"] and opened(tmp_path).read == 0


@pytest.mark.parametrize(
    ("name", "step"), [*sampled([], [("VERSION", -1), ("SCHEMA", -1), ("SCHEMA", 1)]), ("VERSION", 1)]
)
def test_another_version_of_it(tmp_path: Path, name: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    history(tmp_path, 1.0)
    slow = words(told(opened(tmp_path)))
    with monkeypatch.context() as patch:
        patch.setattr(manifests, name, getattr(manifests, name) + step)
        compacted(tmp_path)
    before = index_of(tmp_path).read_bytes()
    found = opened(tmp_path)
    assert words(told(found)) == slow and not found.troubles
    if step > 0:
        with pytest.raises(StoreError, match="Upgrade"):
            compacted(tmp_path)
        assert index_of(tmp_path).read_bytes() == before
    else:
        assert compacted(tmp_path).written


def test_a_run_that_comes_or_goes_on_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = history(tmp_path, 1.0, 1.1)
    read = figure_files.read_runs

    def meanwhile(some: Any, **how: Any) -> Any:
        told = read(some, **how)
        if paths[0] in some:
            with paths[0].open("a") as file:
                file.write('{"note":"more"}\n')
            keep(tmp_path, run_at(5))
        return told

    with monkeypatch.context() as patch:
        patch.setattr(figure_files, "read_runs", meanwhile)
        assert compacted(tmp_path).busy == 1
    no_figures(tmp_path)
    found = opened(tmp_path)
    assert found.read == 2 and trends_of(found, every) == read_trends(tmp_path, every)
    assert compacted(tmp_path).read == 2


def test_without_duckdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history(tmp_path, 1.0)
    slow = words(told(opened(tmp_path)))
    compacted(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    monkeypatch.setitem(__import__("sys").modules, "duckdb", None)
    found = opened(tmp_path)
    assert words(told(found)) == slow and len(found.troubles) == 1 and "restore" in found.troubles[0]
    with pytest.raises(UsageError, match="pip install 'fp8bench"):
        compacted(tmp_path)


def test_what_killed_ones_left_is_swept_and_two_at_once_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history(tmp_path, 1.0)
    compacted(tmp_path)
    monkeypatch.setattr(compacting, "_LOCK_SECONDS", 0.1)
    with locked(tmp_path / "archive"), pytest.raises(StoreError, match="another process"):
        compacted(tmp_path)
    (points_of(tmp_path) / ".spool-1" / "spill").mkdir(parents=True)
    (points_of(tmp_path) / "machine=box" / "month=2026-01" / ".x.partial").touch()
    os.utime(tmp_path / "runs")
    compacted(tmp_path)
    assert sorted(path.name for path in points_of(tmp_path).rglob("*") if path.is_file()) == [
        ".lock", "index.json", "points.figures", "points.parquet",
    ]  # fmt: skip
    assert load_manifest(tmp_path).files
