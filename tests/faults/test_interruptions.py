"""Interrupted, killed, out of room, or not alone: the store keeps what was finished, and the person is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8bench.history.runs import load_run, missing_groups, run_files
from suites import kill

KILLS = 30
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv = ["fp8bench", *sys.argv[2:]]
runpy.run_module("fp8bench", run_name="__main__")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a suite of steps that sleep."""
    (tmp_path / "nap_suite.py").write_text(kill.SUITE)
    return tmp_path


def started(folder: Path, *words: str, limit: int | None = None) -> subprocess.Popen[str]:
    """A command in a process of its own; with a limit, no file it writes may grow beyond so many bytes."""
    command = [sys.executable, "-m", "fp8bench"]
    if limit is not None:
        command = [sys.executable, "-c", LIMITED, str(limit)]
    environment = {**os.environ, "PYTHONPATH": str(kill.ROOT)}
    return subprocess.Popen(
        [*command, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def nap(*places: int) -> tuple[str, ...]:
    axis = ",".join(str(place) for place in places)
    return ("suite", "./nap_suite.py", "--rounds", "4", "--dtypes", "fp32,bf16", "--set", f"place={axis}")


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def num_lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in run_files(folder / ".fp8bench"))


def test_an_interrupt_prints_what_there_is_and_how_to_go_on(folder: Path) -> None:
    """Pressed while groups are being measured; the command that is named does the rest."""
    with started(folder, *nap(*range(40))) as process:
        wait_for(lambda: num_lines(folder) >= 5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "nap on cpu" in out and "place=0" in out and "stopped early" in out
    told = re.search(r"To do the rest: fp8bench (suite --resume \w+)\n", err)
    assert told and "Traceback" not in err and err.count("\n") == 1
    with started(folder, *told[1].split()) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    (path,) = run_files(folder / ".fp8bench")
    run = load_run(path)
    assert run.finished and not missing_groups(run) and len(run.records) == 80 and len(run.resumptions) == 1
    with started(folder, *told[1].split()) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == f"fp8bench: run {run.id} is finished; nothing was missing\n"


def test_a_full_disk_loses_nothing_that_was_finished(folder: Path) -> None:
    """The limit is met while records are written: what fits is in the file, the rest at least in the table."""
    with started(folder, *nap(*range(12)), limit=30_000) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 2 and "Traceback" not in err
    assert "cannot be written" in err and "make room" in err
    (path,) = run_files(folder / ".fp8bench")
    run = load_run(path)
    kept, shown = len(run.records), out.count("native")
    assert 0 < kept < 24 and shown >= 2 * (kept // 2)
    with started(folder, "suite", "--resume", run.id) as process:
        process.communicate(timeout=120)
    whole = load_run(path)
    assert process.returncode == 0 and whole.finished and len(whole.records) == 24


def test_two_runs_in_one_store_know_of_each_other(folder: Path) -> None:
    """Each has a file of its own, whole; the figures come with a warning."""
    first = started(folder, *nap(*range(30)))
    wait_for(lambda: num_lines(folder) >= 3)
    second = started(folder, *nap(*range(30)))
    with first, second:
        ends = [process.communicate(timeout=180) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0]
    runs = [load_run(path) for path in run_files(folder / ".fp8bench")]
    assert len(runs) == 2 and all(run.finished and len(run.records) == 60 and not run.troubles for run in runs)
    for run, other in (runs, runs[::-1]):
        assert [note for note in run.notes if Path(other.path).stem in note and "load" in note], run.notes
    assert all("was measured at the same time" in " ".join(out.split()) for out, _ in ends)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the worker by /proc")
def test_a_kill_at_any_moment_loses_nothing_that_was_finished() -> None:
    """Parent, worker or both, thirty times; suites/kill.py says what is held against the store."""
    tally = kill.trials(KILLS, seed=30)
    assert tally.broken == [] and sum(tally.kills.values()) == KILLS
    assert set(tally.kills) == set(kill.VICTIMS) and tally.resumptions > 3
