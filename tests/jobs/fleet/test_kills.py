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

from fp8bench.store.fleet_plans import is_whole
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.read import load_run
from tests.commands import Say

_CELLS = "gemm --quick --no-energy --rounds 2 --dtypes fp32 --no-isolation --set shape="
_WAYS = {"crew": ("work", "--workers", "2"), "submitit": ("submit", "--on", "local", "--workers", "2", "--wait")}
_GONE_SECONDS = 60


def processes(words: Path) -> dict[int, str]:
    """Those with this path on their command line, and what they are."""
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
    """Whom a kill strikes: everybody, the command alone, one worker, or the process of one cell."""
    cells = [number for number, command in at_work.items() if "--cell" in command and " suite " in command]
    workers = [number for number, command in at_work.items() if " fleet work " in command and number != first]
    choices = {"all": [*at_work], "command": [first], "worker": workers[:1], "cell": cells[:1]}
    name = moments.choice([name for name, numbers in choices.items() if numbers])
    return name, choices[name]


def whole_runs(store: Path) -> dict[str, tuple[str, bytes]]:
    """Cell and bytes of each, by file."""
    return {str(path): (run.cell, path.read_bytes()) for path in run_files(store) if is_whole(run := load_run(path))}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kills", "cells", "longest"),
    [pytest.param(3, 3, 6.0, marks=pytest.mark.slow), pytest.param(30, 24, 20.0, marks=pytest.mark.nightly)],
)
@pytest.mark.timeout(7200)
def test_killed_at_any_moment(
    kills: int, cells: int, longest: float, store: Path, fp8bench: Say, tmp_path: Path
) -> None:
    """And then to the end: a whole run of every cell, one alone, and those that were whole before are untouched.

    What is left of a worker ends itself, but for submitit's: these go on by themselves, as they should, and are killed.
    """
    shapes = ",".join(str(16 * number) for number in range(1, cells + 1))
    plan, store = tmp_path / "plan.json", store.resolve()
    code, _, err = fp8bench("suite", *f"{_CELLS}{shapes}".split(), "--dry-run", "--write-plan", str(plan))
    assert code == 0, err
    moments = random.Random(kills)
    struck: Counter[str] = Counter()
    kept: dict[str, tuple[str, bytes]] = {}
    for number in range(kills + 1):
        way = [*_WAYS][number % len(_WAYS)]
        verb, *options = _WAYS[way]
        words = [sys.executable, "-m", "fp8bench", "fleet", verb, str(plan), "--store", str(store), "--retry", *options]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as command:
            if number < kills:
                time.sleep(moments.uniform(0.5, longest))
                name, numbers = victims(processes(tmp_path), command.pid, moments)
                killed(numbers)
                struck[f"{way}: {name}"] += 1
                if name in ("worker", "cell"):
                    time.sleep(moments.uniform(0, 3))
                    killed([command.pid])
            out = command.communicate()[0]
        if number < kills:
            if way == "submitit":
                killed([*processes(tmp_path)])
            end = time.monotonic() + _GONE_SECONDS
            while left := processes(tmp_path):
                assert time.monotonic() < end, (struck, left)
                time.sleep(0.2)
            now = whole_runs(store)
            assert kept.items() <= now.items(), "a whole run was touched"
            kept = now
    print(f"{kills} kills {dict(struck)}; {len(kept)} of {cells} cells were whole by then; all runs: "
          f"{len(run_files(store))}")  # fmt: skip
    assert command.returncode == 0 and f"{cells} done." in out, out
    now = whole_runs(store)
    assert kept.items() <= now.items()
    assert sorted(cell for cell, _ in now.values()) == sorted({cell for cell, _ in now.values()})
    assert len(now) == cells
