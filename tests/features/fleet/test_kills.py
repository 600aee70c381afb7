"""A fleet whose processes are killed at random moments, all or some: what is whole stays, and nothing is done twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from fp8bench.store.fleet_plans import is_run_complete
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run

_GONE_SECONDS = 300


def processes(words: Path) -> dict[int, str]:
    """Processes with this path on their command line, and their roles."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(words) in command:
            found[int(folder.name)] = command
    return found


def killed(numbers: list[int]) -> None:
    for number in numbers:
        try:
            os.kill(number, signal.SIGKILL)
        except ProcessLookupError:
            continue


def victims(at_work: dict[int, str], first: int, moments: random.Random) -> tuple[str, list[int]]:
    """The processes to kill: all, only the command, one worker, or one cell's process."""
    cells = [number for number, command in at_work.items() if "--cell" in command and " suite " in command]
    workers = [number for number, command in at_work.items() if " fleet work " in command and number != first]
    choices = {"all": [*at_work], "command": [first], "worker": workers[:1], "cell": cells[:1]}
    name = moments.choice([name for name, numbers in choices.items() if numbers])
    return name, choices[name]


def whole_runs(store: Path) -> dict[str, tuple[str, bytes]]:
    """The cell and bytes of each complete run, by file."""
    return {
        str(path): (run.cell, path.read_bytes()) for path in run_files(store) if is_run_complete(run := load_run(path))
    }


def ended(words: list[str], log: Path, tmp_path: Path, longest: float, moments: random.Random) -> tuple[int, str]:
    """How a command ended and what it lost; '' if it finished before the kill."""
    with log.open("wb") as out:
        command = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    name = ""
    if longest:
        time.sleep(moments.uniform(0.5, longest))
        if command.poll() is None:
            name, numbers = victims(processes(tmp_path), command.pid, moments)
            killed(numbers)
            if name in ("worker", "cell"):
                time.sleep(moments.uniform(0, 3))
                killed([command.pid])
    code = command.wait()
    end = time.monotonic() + _GONE_SECONDS
    while left := processes(tmp_path):
        assert time.monotonic() < end, left
        time.sleep(0.2)
    return code, name


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kills", "longest"),
    [pytest.param(3, 6.0, marks=pytest.mark.slow), pytest.param(30, 30.0, marks=pytest.mark.nightly)],
)
@pytest.mark.timeout(7200)
def test_kills_at_any_moment_lose_no_finished_cell(
    kills: int, longest: float, plan: Path, store: Path, tmp_path: Path
) -> None:
    """Afterwards every cell gets one complete run, and runs complete before are untouched.

    Uses as many fleets as the kills need. Remaining workers end by themselves.
    """
    log, moments = tmp_path / "log", random.Random(kills)
    struck: Counter[str] = Counter()
    fleets = 0
    while (rest := kills - struck.total()) > 0:
        folder, kept, code = store.resolve() / str(fleets), dict[str, tuple[str, bytes]](), -1
        while code != 0:
            command = ["fleet", "work", str(plan), "--store", str(folder), "--workers", "2", "--retry"]
            rest = kills - struck.total()
            words = [sys.executable, "-m", "fp8bench", *command]
            code, name = ended(words, log, tmp_path, longest if rest else 0.0, moments)
            struck.update([name] if name else [])
            assert name or code == 0, log.read_text()
            now = whole_runs(folder)
            assert kept.items() <= now.items(), "a whole run was touched"
            kept = now
        assert len(kept) == len({cell for cell, _ in kept.values()}) == 3
        fleets += 1
    print(f"{kills} kills {dict(struck)} in {fleets} fleets of 3 cells")
