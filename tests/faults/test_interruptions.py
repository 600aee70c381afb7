"""Interrupted, killed, disk full, or concurrent: the store keeps finished cases, with a message."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import find_incomplete_groups, load_run
from suites import kill
from suites.trials import ROOT
from tests.counts import counts, sampled
from tests.forked_workers import started as forking
from tests.forked_workers import workers

LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv = ["fp8bench", *sys.argv[2:]]
runpy.run_module("fp8bench", run_name="__main__")
"""
# A group is not measured while a file of its name exists.
HELD = kill.SUITE.replace(
    "    def prepare(self, setup):\n",
    """    def prepare(self, setup):
        import os
        while os.path.exists(f"hold {setup.case.param('place')}"):
            time.sleep(0.01)
""",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nap_suite.py").write_text(HELD)
    return tmp_path


def started(
    folder: Path, *words: str, limit: int | None = None, stdout: int | IO[str] = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Starts a command; `limit` is the largest file size in bytes that it may write."""
    pipes = {"cwd": folder, "stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    environment = {"COLUMNS": ""}  # each message on stderr is one line
    if limit is None:
        return forking(words, env=environment, **pipes)
    command = [sys.executable, "-c", LIMITED, str(limit), *words]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, **pipes)


def nap(*places: int) -> tuple[str, ...]:
    axis = ",".join(str(place) for place in places)
    return (
        "suite",
        "./nap_suite.py",
        "--no-report",
        "--rounds",
        "4",
        "--dtypes",
        "fp32,bf16",
        "--set",
        f"place={axis}",
    )


@contextmanager
def endless(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A run of 12 groups that cannot finish within the body, however late the interrupt comes."""
    (folder / "hold 11").touch()
    with started(folder, *nap(*range(12)), *words) as process:
        try:
            yield process
        finally:
            (folder / "hold 11").unlink()


def wait_for(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def num_lines(folder: Path, store: str = ".fp8bench") -> int:
    return sum(path.read_bytes().count(b"\n") for path in run_files(folder / store))


@pytest.mark.slow
def test_an_interrupt_prints_what_there_is_and_how_to_go_on(folder: Path) -> None:
    with endless(folder) as process:
        wait_for(lambda: num_lines(folder) >= 5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "nap (2 settings) on " in out and "place 0" in out and "Stopped early" in out
    told = re.search(r"To do the rest: fp8bench (suite --resume \w+)\n", err)
    assert told and "Traceback" not in err
    assert len([line for line in err.splitlines() if " groups after " not in line]) == 2
    with started(folder, *told[1].split(), "--no-report") as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0
    (path,) = run_files(folder / ".fp8bench")
    run = load_run(path)
    assert run.finished and not find_incomplete_groups(run) and len(run.records) == 24 and len(run.resumptions) == 1
    with started(folder, *told[1].split()) as process:
        _, err = process.communicate(timeout=240)
    assert process.returncode == 0 and err == f"fp8bench: run {run.id} is finished; nothing was missing\n"


@pytest.mark.slow
def test_a_full_disk_loses_nothing_that_was_finished(folder: Path) -> None:
    with started(folder, *nap(*range(12)), limit=30_000) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 2 and "Traceback" not in err
    assert "cannot be written" in err and "make room" in err
    (path,) = run_files(folder / ".fp8bench")
    run = load_run(path)
    kept, shown = len(run.records), len(re.findall(r"^  place \d+ ", out, re.MULTILINE))
    assert 0 < kept < 24 and shown >= kept // 2
    with started(folder, "suite", "--resume", run.id) as process:
        process.communicate(timeout=240)
    whole = load_run(path)
    assert process.returncode == 0 and whole.finished and len(whole.records) == 24


@pytest.mark.slow
def test_two_runs_in_one_store_know_of_each_other(folder: Path) -> None:
    def files() -> list[Path]:
        return list(run_files(folder / ".fp8bench"))

    for place in (1, 2, 4, 5):
        (folder / f"hold {place}").touch()
    with started(folder, *nap(0, 1, 2)) as first, started(folder, *nap(3, 4, 5)) as second:
        wait_for(lambda: len(files()) == 2)
        for place in (1, 4):
            (folder / f"hold {place}").unlink()
        wait_for(lambda: all(b"was measured at the same time" in path.read_bytes() for path in files()))
        for place in (2, 5):
            (folder / f"hold {place}").unlink()
        outs = [process.communicate(timeout=240)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0]
    runs = [load_run(path) for path in files()]
    assert [len(run.records) for run in runs] == [6, 6]
    assert all(run.finished and not run.troubles for run in runs)
    for run, other in (runs, runs[::-1]):
        assert [note for note in run.notes if Path(other.path).stem in note and "load" in note], run.notes
    assert all("was measured at the same time" in " ".join(out.split()) for out in outs)


@pytest.mark.slow
@pytest.mark.parametrize("number", sampled([signal.SIGHUP], [signal.SIGTERM, signal.SIGHUP]), ids=lambda one: one.name)
def test_a_termination_signal_is_an_interrupt(folder: Path, number: signal.Signals) -> None:
    with endless(folder, "--store", "else where") as process:
        wait_for(lambda: num_lines(folder, "else where") >= 3)
        process.send_signal(number)
        out, err = process.communicate(timeout=240)
    assert process.returncode == 130 and out.startswith("Stopped early: ") and "\nnap " in out
    assert re.search(r"To do the rest: fp8bench suite --resume \w+ --store 'else where'\n", err)


@pytest.mark.slow
def test_a_second_interrupt_still_prints_how_to_continue(folder: Path) -> None:
    with endless(folder) as process:
        wait_for(lambda: num_lines(folder) >= 5)
        for _ in range(5):
            process.send_signal(signal.SIGINT)
            time.sleep(0.03)
        _, err = process.communicate(timeout=240)
    # CPython kills itself with the signal if an interrupt ever passed through exec(), caught or not (for example while
    # creating a dataclass). A shell reports both as 130.
    assert process.returncode in (130, -signal.SIGINT)
    assert "To do the rest: fp8bench suite --resume" in err and "Traceback" not in err
    (path,) = run_files(folder / ".fp8bench")
    assert '{"end":"interrupted","digest":' in path.read_text().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("ignored", sampled([False], [False, True]))
def test_a_closed_terminal_interrupts_the_run(folder: Path, ignored: bool) -> None:
    master, terminal = pty.openpty()

    def begin() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    command = [sys.executable, "-m", "fp8bench", *nap(*range(12))]
    if not ignored:
        (folder / "hold 11").touch()
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=begin,  # noqa: PLW1509 - this process has no threads that hold locks
    ) as process:
        try:
            os.close(terminal)
            _drained(master, lambda: num_lines(folder) >= 5)
            os.close(master)
            process.wait(240)
        finally:
            (folder / "hold 11").unlink(missing_ok=True)
    (path,) = run_files(folder / ".fp8bench")
    run = load_run(path)
    assert run.finished is ignored and not run.troubles and len(run.records) >= 4
    with started(folder, "suite", "--resume", "last", "--no-report") as again:
        _, err = again.communicate(timeout=240)
    assert again.returncode == 0 and "Traceback" not in err and load_run(path).finished


def _drained(master: int, condition: Callable[[], bool]) -> None:
    """Reads from a terminal until a condition holds, so that its program does not block."""
    while not condition():
        if select.select([master], [], [], 0.05)[0]:
            os.read(master, 4096)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_unwritable_stdout_costs_no_run(folder: Path) -> None:
    with Path("/dev/full").open("w") as full, started(folder, *nap(1), stdout=full) as process:
        _, err = process.communicate(timeout=240)
    told = "fp8bench: stdout cannot be written (No space left on device). "
    assert process.returncode == 2 and err.startswith(told)
    (path,) = run_files(folder / ".fp8bench")
    assert str(path.relative_to(folder)) in err and load_run(path).finished
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread, started(folder, "suite", "--resume", "last", stdout=unread) as process:
        _, err = process.communicate(timeout=240)
    assert process.returncode == 0 and "nothing was missing" in err and "Error" not in err
    for closed in (
        "show last >&-",
        "list >&-",
        "list >/dev/full",
        "show last >/dev/full 2>&-",
        "show last --json 2>&-",
    ):
        command = f"{sys.executable} -m fp8bench {closed}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": ""}  # each message on stderr is one line
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == (2 if "full" in closed else 0) and "Traceback" not in done.stderr, closed


def start_of_a_run(suite: Path, store: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    """Starts a run as suites/kill.py does."""
    line, pipe = ["suite", *words, "--store", str(store)], subprocess.PIPE
    return forking(line, cwd=suite.parent, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the worker by /proc")
@counts(1, 30, 1000)
def test_a_kill_at_any_moment_loses_nothing_that_was_finished(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills parent, worker or both; suites/kill.py lists the checks of the store.

    Most of the thousand kills hit started workers, a few forked ones.
    """
    if count < 1000:
        monkeypatch.setattr(kill, "start", start_of_a_run)
        monkeypatch.setattr(kill, "children", workers)
    tally = kill.trials(count, seed=30)
    assert tally.broken == [] and sum(tally.kills.values()) == count
    assert count < 30 or (set(tally.kills) == set(kill.VICTIMS) and tally.resumptions > 3)
