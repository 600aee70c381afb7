"""Concurrent and killed writers of one view, and asv, which ignores locks: no file is ever incomplete."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from asv.results import Results

from fp8bench.store.asv.files import load_asv_machine, load_benchmarks, load_results
from fp8bench.store.asv.view import asv_results_folder, update_view
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run
from tests.counts import counts, sampled
from tests.house.sources import ROOT
from tests.kept import COMMIT, ROUNDS, TITLE, grid_run, keep, results_files

FEW_ROUNDS = 3
WRITING = """
import sys
from pathlib import Path
from fp8bench.store.asv.view import update_view
from tests.kept import grid_run, keep
store, who, count, rounds = Path(sys.argv[1]), *map(int, sys.argv[2:])
print("ready", flush=True)
for number in range(count):
    words = update_view(keep(grid_run(rounds=rounds, seconds=60 * who + number), store), store, 600)
    assert words == "history: 2 cases of commit 0a1b2c3d in the history", words
"""
READING = """
import sys, time
from pathlib import Path
from asv import util
from asv.results import Results
results, stop, loads = Path(sys.argv[1]), Path(sys.argv[2]), 0
print("ready", flush=True)
while not (loads and stop.exists()):
    for path in results.glob("*/*.json"):
        if path.name == "machine.json":
            util.load_json(str(path), 1)
        else:
            Results.load(str(path), "box")
            loads += 1
    if (results / "benchmarks.json").exists():
        util.load_json(str(results / "benchmarks.json"), 2)
    time.sleep(0.01)
print(loads)
"""
# Behaves like `asv run`: reads the file, measures for a while, and overwrites the file in place.
ASV = """
import sys
from asv.results import Results
results, name = sys.argv[1:]
file = Results.load(name)
print("has read", flush=True)
for line in sys.stdin:
    file._results["harness.track_start"] = [float(line)]
    file._benchmark_params["harness.track_start"] = []
    file._stats["harness.track_start"] = None
    file.save(results)
    print("has written", flush=True)
"""
KILLING = """
import sys
from pathlib import Path
from tests.faults.test_history_writers import kill_writers
kill_writers(Path(sys.argv[1]), int(sys.argv[2]), seed=int(sys.argv[3]))
"""


@pytest.fixture(autouse=True)
def _nobodys_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def program(text: str, *words: object) -> subprocess.Popen[str]:
    """Starts a Python process that can import the tests' builders."""
    command = [sys.executable, "-c", text, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def repeats(store: Path) -> list[Any]:
    """The samples that asv finds in the only results file, for each combination of gemm's step time."""
    (path,) = results_files(store)
    stats = Results.load(str(path), "box")._stats[f"{TITLE}time"]
    return [one.get("repeat") for one in stats]


def whole(store: Path) -> None:
    results = asv_results_folder(store)
    benchmarks = load_benchmarks(results / "benchmarks.json")
    assert f"{TITLE}time" in benchmarks and load_asv_machine(results / "box" / "machine.json")["machine"] == "box"
    for path in results_files(store):
        assert load_results(path).troubles == ()
        json.loads(path.read_bytes())


def partials(store: Path) -> list[Path]:
    return list(asv_results_folder(store).rglob("*.partial"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("count", "num_writers"), sampled([6], [(6, 3), (20, 8)]))
def test_writers_of_one_commit_lose_no_sample(count: int, num_writers: int, tmp_path: Path) -> None:
    store, stop = tmp_path / "store", tmp_path / "stop"
    reader = program(READING, asv_results_folder(store), stop)
    assert reader.stdout.readline() == "ready\n"
    writers = [program(WRITING, store, who, count, FEW_ROUNDS) for who in range(num_writers)]
    ends = [process.communicate(timeout=1500)[1] for process in writers]
    stop.touch()
    loads, complaints = reader.communicate(timeout=600)
    assert [process.returncode for process in writers] == [0] * num_writers, ends
    assert reader.returncode == 0 and int(loads) > 0, complaints
    runs = [load_run(path) for path in run_files(store)]
    assert len(runs) == num_writers * count and not any(run.troubles for run in runs)
    assert all(run.finished for run in runs)
    assert set(filter(None, repeats(store))) == {num_writers * count * FEW_ROUNDS}
    whole(store)
    assert partials(store) == []


def measured_samples(store: Path) -> int:
    """The samples of one case over all runs, including interrupted ones."""
    total = 0
    for path in run_files(store):
        for record in load_run(path).records[:1]:
            total += record.timing.num_rounds if record.timing is not None else 0
    return total


def write_on(store: Path) -> None:
    """Stores runs and updates the view in a loop until this process is killed."""
    while True:
        update_view(keep(grid_run(rounds=FEW_ROUNDS), store), store)


def kill_writers(store: Path, kills: int, seed: int) -> None:
    """Kills writers at random moments; after each kill the view is complete, and the next update finishes it."""
    chance = random.Random(seed)
    mended = keep(grid_run(), store)
    update_view(mended, store)
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            write_on(store)
        time.sleep(chance.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        whole(store)
        assert "in the history" in update_view(mended, store)
        assert set(filter(None, repeats(store))) == {measured_samples(store)}
    print(json.dumps({"kills": kills, "runs": len(list(run_files(store))), "left": len(partials(store))}))


@pytest.mark.slow
@pytest.mark.timeout(600)
@counts(3, 25)
def test_a_kill_at_any_moment_leaves_whole_files_and_the_next_update_heals(count: int, tmp_path: Path) -> None:
    """Temporary files of killed writers are removed when they are an hour old; younger ones may be in use."""
    store = tmp_path / "store"
    done = program(KILLING, store, count, 1)
    out, err = done.communicate(timeout=500)
    assert done.returncode == 0, err
    left = partials(store)
    assert len(left) == json.loads(out)["left"] <= count
    leftover = asv_results_folder(store) / "box" / ".asv-0123456789abcdef.partial"
    leftover.write_text("{")
    update_view(keep(grid_run(), store), store)
    assert leftover in partials(store)
    for path in partials(store):
        os.utime(path, (time.time() - 4000, time.time() - 4000))
    update_view(keep(grid_run(), store), store)
    assert partials(store) == []


def test_asv_that_saves_in_between_loses_our_rows_until_the_next_update(tmp_path: Path) -> None:
    """It overwrites with what it read before.

    The stored runs still have everything, so the next update restores the rows.
    """
    store = tmp_path / "store"
    first = keep(grid_run(), store)
    update_view(first, store)
    (path,) = results_files(store)
    asv = program(ASV, asv_results_folder(store), path)
    assert asv.stdout.readline() == "has read\n"
    second = keep(grid_run(seconds=1), store)
    update_view(second, store)
    assert set(filter(None, repeats(store))) == {2 * ROUNDS}
    asv.stdin.write("3.5\n")
    asv.stdin.flush()
    assert asv.stdout.readline() == "has written\n"
    assert set(filter(None, repeats(store))) == {ROUNDS}
    assert update_view(second, store) == "history: 2 cases of commit 0a1b2c3d in the history"
    assert set(filter(None, repeats(store))) == {2 * ROUNDS}
    asv.communicate("4.5\n", timeout=240)
    update_view(first, store)
    found = Results.load(str(path), "box")
    assert found._results["harness.track_start"] == [4.5] and set(filter(None, repeats(store))) == {2 * ROUNDS}
    assert found.commit_hash == COMMIT


def test_asv_that_saves_all_the_while_is_never_taken_for_broken(tmp_path: Path) -> None:
    """asv truncates and refills its file; readers wait while it is incomplete."""
    store = tmp_path / "store"
    run = keep(grid_run(), store)
    update_view(run, store)
    (path,) = results_files(store)
    asv = program(ASV, asv_results_folder(store), path)
    asv.stdin.write("".join(f"{number}.5\n" for number in range(300)))
    asv.stdin.flush()
    words = {update_view(run, store) for _ in range(30)}
    asv.communicate(timeout=240)
    assert asv.returncode == 0 and words == {"history: 2 cases of commit 0a1b2c3d in the history"}
    update_view(run, store)
    assert list(asv_results_folder(store).rglob("*.broken-*")) == [] and set(filter(None, repeats(store))) == {ROUNDS}
    whole(store)
