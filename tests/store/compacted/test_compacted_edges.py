"""A compaction that cannot end: disks without room or for reading alone, kills; and clocks that say any month."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import ItemsView
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.errors import StoreError
from fp8bench.store.compacted.archive import restore
from fp8bench.store.compacted.manifest import load_manifest, points_of
from fp8bench.store.index.points_file import points_file
from fp8bench.store.runs.listing import all_files, index_of
from tests.commands import Say, unfolded
from tests.histories import history, keep, read_trends, run_at, tree, trends_of
from tests.store.compacted.test_compacted import compacted, every, no_figures, opened, same, told, words

PROCESS = """
import resource, sys
from pathlib import Path
from fp8bench.errors import StoreError
from fp8bench.store.compacted.compact import compact
print("begins", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    compact(Path(sys.argv[1]), lambda done, commits: None)
except StoreError as error:
    sys.exit(str(error))
"""
RESTORES = "`fp8bench store restore` writes the runs"


def begun(store: Path, most: int = 1 << 40) -> subprocess.Popen[str]:
    """Starts a compaction in a process of its own, whose files may have so many bytes."""
    line = [sys.executable, "-c", PROCESS, str(store), str(most)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begins\n"
    return process


def left_behind(store: Path) -> list[str]:
    """Returns all files but the index, the lock, and the Parquet files in the index."""
    known = (
        {f"{name}/points.parquet" for name in load_manifest(store).partitions} if index_of(store).exists() else set()
    )
    known |= {"index.json", ".lock", "points.figures"}
    paths = (path.relative_to(points_of(store)).as_posix() for path in points_of(store).rglob("*") if path.is_file())
    return sorted(set(paths) - known)


def runs_of(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in all_files(store)}


def restored(store: Path, copy: Path) -> ItemsView[str, bytes]:
    """Returns the runs that can be restored, whatever a kill has left."""
    for name in ("points", "archive"):
        if (store / name).exists():
            shutil.copytree(store / name, copy / name)
    if index_of(copy).exists():
        restore(copy)
    return runs_of(copy).items()


def six_months(store: Path) -> str:
    for number in range(6):
        keep(store, run_at(number, 700 * number))
    return words(told(opened(store)))


def raises(number: int) -> Any:
    def planted(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return planted


def test_no_room_after_the_second_month(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = six_months(tmp_path)
    no_figures(tmp_path)
    sync, synced = os.fsync, []

    def full(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append(path)
        if path.parent.name == "month=2026-03":
            raises(errno.ENOSPC)()
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=r"No space left.*Make room"):
            compacted(tmp_path)
    assert synced and not left_behind(tmp_path)
    assert len(load_manifest(tmp_path).partitions) == 2
    found = opened(tmp_path)
    assert not found.read and words(told(found)) == slow
    assert same(tmp_path).read == 4


@pytest.mark.slow
def test_files_that_may_not_grow(tmp_path: Path) -> None:
    slow = six_months(tmp_path)
    ends = []
    for most in (0, 5_000, 20_000, 300_000, 600_000, 1 << 30):
        process = begun(tmp_path, most)
        said = process.communicate()[1]
        ends.append(process.returncode)
        assert process.returncode == 0 or "cannot be" in said.splitlines()[0], said
        no_figures(tmp_path)
        assert not left_behind(tmp_path) and words(told(opened(tmp_path))) == slow
    assert ends[0] == 1 and ends[-1] == 0
    same(tmp_path)


def test_a_store_that_is_for_reading_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history(tmp_path / "a", 1.0, 1.1)
    slow = words(told(opened(tmp_path / "a")))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    compacted(tmp_path / "b")
    no_figures(tmp_path / "b")
    before = tree(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", raises(errno.EROFS))
        with pytest.raises(StoreError, match="Read-only file system"):
            compacted(tmp_path / "a")
        found = opened(tmp_path / "b")
        assert words(told(found)) == slow and found.read == 0 and not found.troubles
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "count", [pytest.param(5, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.nightly)]
)
def test_killed_at_any_moment(tmp_path: Path, count: int) -> None:
    """Everything readable is right, and the next compaction completes it."""
    slow = six_months(tmp_path)
    process, start = begun(tmp_path), time.monotonic()
    assert process.communicate()[1] == ""
    whole, killed, moments = time.monotonic() - start, 0, random.Random(0)
    for number in itertools.count():
        if number >= count and killed:
            break
        if number % 3 == 0:
            shutil.rmtree(points_of(tmp_path), ignore_errors=True)
        process = begun(tmp_path)
        time.sleep(moments.uniform(0, whole) if number else 0)
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        process.communicate()
        no_figures(tmp_path)
        assert words(told(opened(tmp_path))) == slow
        assert restored(tmp_path, tmp_path / f"of {number}") <= runs_of(tmp_path).items()
    same(tmp_path)
    assert not left_behind(tmp_path)
    assert restored(tmp_path, tmp_path / "whole") == runs_of(tmp_path).items()
    assert [path.name for path in (tmp_path / "archive").rglob(".*")] in ([], [".lock"])


def test_clocks_that_say_any_month(tmp_path: Path) -> None:
    history(tmp_path, 1.0)
    starts = ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "1969-12-31T23:00:00+00:00",
              "2026-02-01T00:30:00+01:00")  # fmt: skip
    for number, started in enumerate(starts, 1):
        keep(tmp_path, replace(run_at(number), started=started))
    done = same(tmp_path)
    months = ("1969-12", "2026-01", "unknown")
    assert sorted(done.written) == [f"machine=box/month={month}" for month in months] and not done.kept
    assert len(list(points_of(tmp_path).rglob("*.parquet"))) == 3


def test_a_clock_that_was_set_back(tmp_path: Path) -> None:
    """A run of the same commit that began in an earlier month takes the commit's row with it; no file stays empty."""
    keep(tmp_path, run_at(0, 0))
    keep(tmp_path, run_at(1, 800))
    assert same(tmp_path).written == ["machine=box/month=2026-01", "machine=box/month=2026-02"]
    keep(tmp_path, run_at(1, 10))
    done = same(tmp_path)
    assert done.written == ["machine=box/month=2026-01"] and not done.kept and not left_behind(tmp_path)
    assert done.rows == 2 * 28 and trends_of(opened(tmp_path), every) == read_trends(tmp_path, every)


def test_runs_that_were_taken_away(tmp_path: Path) -> None:
    slow = six_months(tmp_path)
    compacted(tmp_path)
    no_figures(tmp_path)
    shutil.move(tmp_path / "runs", tmp_path / "away")
    for _ in range(2):
        found = opened(tmp_path)
        assert words(told(found)) == slow and found.read == 0
        assert found.troubles == (f"{tmp_path} has no runs: figures are those that were compacted. {RESTORES}",)
        with pytest.raises(StoreError, match="stays as it is"):
            compacted(tmp_path)
        (tmp_path / "runs").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:  # of suites that are not known here, or others by now
        patch.setattr("fp8bench.store.index.figure_files.fingerprint", lambda _: "")
        assert words(told(opened(tmp_path))) == slow
    path = points_file(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StoreError, match=r"lacks 6 of 6 commits.*store restore"):
        opened(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    shutil.move(tmp_path / "away", tmp_path / "runs")
    same(tmp_path)


def test_figures_of_suites_that_are_not_known_are_left_out_aloud(tmp_path: Path, fp8bench: Say) -> None:
    run = run_at(0)
    known = run.records[0]
    keep(tmp_path, replace(run, records=(known, replace(known, case=replace(known.case, workload="nosuch")))))
    code, out, _ = fp8bench("store", "compact", "--store", str(tmp_path))
    assert code == 0 and "figures left out: the suite nosuch is not known here; --import its module" in unfolded(out)


def test_a_night_after_all_compacted_runs_were_taken_away(tmp_path: Path, fp8bench: Say) -> None:
    """Each command says what lacks, not the first alone, and the only copy of the runs stays."""
    history(tmp_path, 1.0, 1.1)
    compacted(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    for line in ("history list --runs", "gate --history"):
        assert "runs in compacted files alone" in unfolded(fp8bench(*line.split(), "--store", str(tmp_path))[1])
    keep(tmp_path, run_at(1, 9.5))
    for _ in range(2):
        (trouble,) = opened(tmp_path).troubles
        assert trouble.startswith("2 run files that were compacted are not in")
    with pytest.raises(StoreError, match="stays as it is"):
        compacted(tmp_path)
    assert restore(tmp_path).written == 2 and compacted(tmp_path).runs == 3


def test_a_copy_of_two_moments(tmp_path: Path) -> None:
    """Copied elsewhere, as to a bucket and back, the files of one compaction are a store; those of two are an error."""
    history(tmp_path / "a", 1.0)
    for number, copy in enumerate(("old", "new")):
        keep(tmp_path / "a", run_at(2 + number, 800 + number))
        compacted(tmp_path / "a")
        shutil.copytree(points_of(tmp_path / "a"), points_of(tmp_path / copy))
    no_figures(tmp_path / "a")
    slow = words(told(opened(tmp_path / "a")))
    assert words(told(opened(tmp_path / "new"))) == slow != words(told(opened(tmp_path / "old")))
    mixed = tmp_path / "mixed"
    shutil.copytree(points_of(tmp_path / "old"), points_of(mixed))
    shutil.copyfile(index_of(tmp_path / "new"), index_of(mixed))
    with pytest.raises(StoreError, match=r"lacks 1 of 3 commits that were compacted.*Copy it again"):
        opened(mixed)
    points_file(tmp_path / "new").unlink()
    with pytest.raises(StoreError, match="lacks 3 of 3"):
        opened(tmp_path / "new")
