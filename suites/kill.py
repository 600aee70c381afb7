"""Kills runs at random moments, and checks that the store loses nothing: `python -m suites.kill --kills 1000`.

The parent of a run, its worker, or both are killed by SIGKILL. Then the store is checked, and the run is resumed and
killed again, until a start without a kill finishes it. After each kill the store must open, the file must begin with
its previous content, and no process may be left. Resuming may measure only what is missing.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fp8bench.model import Record, Run, Status
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import find_incomplete_groups, load_run
from suites.trials import FP8BENCH, conditions, environment, options, write_document

SUITE = """
import time

from fp8bench.suites import Axis, Work, Workload, whole_number, workloads


@workloads.register("nap")
class Nap(Workload):
    name = "nap"
    summary = "steps that sleep: they cost a busy machine nothing"

    def axes(self, facts):
        return (Axis("place", "a number", tuple(str(place) for place in range(24)), whole_number(low=0)),)

    def work(self, params):
        return Work(1.0)

    def prepare(self, setup):
        # A group is stored before the next one is prepared, so the store must hold all logged groups except the last.
        with open("prepared.log", "a") as log:
            log.write(f"{setup.case.param('place')}\\n")

    def step(self, state, phase):
        with phase.gemm:
            time.sleep(0.005)
"""
VICTIMS = ("parent", "worker", "both")
# Most of a start is the import of torch, so half of the kills happen while records are written.
_LONGEST_START = 4.0
_MEASURING = 1.5
_PATIENCE = 300.0
_MOST_KILLS = 24  # kills of one run


@dataclass
class Tally:
    """Counts of kills, and of their consequences."""

    kills: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    too_late: int = 0
    runs: int = 0
    resumptions: int = 0
    torn_lines: int = 0
    failed_cases: int = 0
    broken: list[str] = field(default_factory=list)


class Promise(AssertionError):
    """The store has lost or changed something, which breaks its promise."""


def promise(holds: bool, words: str) -> None:
    if not holds:
        raise Promise(words)


def start(suite: Path, store: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    """Starts or resumes a run in a new process."""
    command, pipe = [*FP8BENCH, "suite", *words, "--store", str(store)], subprocess.PIPE
    return subprocess.Popen(command, cwd=suite.parent, stdout=pipe, stderr=pipe, text=True, env=environment())


def _stat(pid: int | str) -> list[str]:
    """Returns the state and the parent of a process and further fields; an empty list if the process has ended or is
    a zombie.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return fields if fields[0] != "Z" else []


def children(parent: int) -> list[int]:
    """Returns the ids of the child processes of a process."""
    pids = [path.name for path in Path("/proc").glob("[0-9]*")]
    return [int(pid) for pid in pids if str(parent) in _stat(pid)[1:2]]


def wait_until_gone(pids: Sequence[int], seconds: float) -> list[int]:
    end = time.monotonic() + seconds
    while (running := [pid for pid in pids if _stat(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    return running


def content(store: Path) -> bytes:
    path = next(run_files(store), None)
    return path.read_bytes() if path else b""


def wait_for_the_moment(process: subprocess.Popen[str], store: Path, chance: random.Random) -> str:
    """Sleeps until a random moment of the start, or of the time when records are written. Returns which of the two."""
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0.0, _LONGEST_START))
        return "any"
    size, end = len(content(store)), time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end and len(content(store)) <= size:
        time.sleep(0.005)
    time.sleep(chance.uniform(0.0, _MEASURING))
    return "while writing"


def kill(process: subprocess.Popen[str], store: Path, chance: random.Random, tally: Tally) -> None:
    """Kills the parent, the worker or both. A kill counts as too late if the process had ended."""
    victim = chance.choice(VICTIMS)
    moment = wait_for_the_moment(process, store, chance)
    workers = children(process.pid)
    if process.poll() is None and (workers or victim == "parent"):
        tally.kills[victim] += 1
        tally.moments[moment] += 1
    else:
        tally.too_late += 1
    if victim != "worker":
        process.kill()
    for worker in workers if victim != "parent" else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    survivors = wait_until_gone(workers, 30.0) if victim != "worker" else []
    promise(not survivors, f"workers {survivors} outlived their parent")


def records_by_group(run: Run | None) -> dict[int, list[Record]]:
    """Returns the records of complete groups, by the value of their axis `place`."""
    groups: dict[int, list[Record]] = {}
    if run is None:
        return groups
    for record in run.records:
        groups.setdefault(int(record.case.param("place")), []).append(record)
    for group in find_incomplete_groups(run):
        groups.pop(int(group.cases[0].case.param("place")), None)
    return groups


def check_store(store: Path, old_content: bytes, old_run: Run | None, tally: Tally) -> Run | None:
    """Checks the store after a process that began with `old_run` has ended.

    The store must open, and the file must still begin with `old_content`. Finished groups must be stored, and none
    may be measured twice.
    """
    path, log = next(run_files(store), None), store.parent / "prepared.log"
    prepared = list(dict.fromkeys(map(int, log.read_text().split()))) if log.exists() else []
    if path is None:
        promise(not old_content and not prepared, "the run file is gone")
        return None
    promise(path.read_bytes().startswith(old_content), "what was written was changed")
    run = load_run(path)
    old_groups, groups = records_by_group(old_run), records_by_group(run)
    lost = set(prepared[:-1]) - groups.keys()
    promise(not lost, f"groups {sorted(lost)} were finished and are not there")
    repeated = old_groups.keys() & prepared
    promise(not repeated, f"groups {sorted(repeated)} were there and were measured again")
    promise(groups | old_groups == groups, "a record that was there differs")
    tally.torn_lines += len(run.troubles)
    promise(len(run.troubles) <= len(run.resumptions) + 1, f"more broken lines than kills: {run.troubles}")
    return run


def kill_and_resume(folder: Path, chance: random.Random, tally: Tally, kills: int) -> None:
    """Runs, kills and resumes one run until it finishes, with at most `kills` kills."""
    suite, store = folder / "nap_suite.py", folder / "store"
    suite.write_text(SUITE)
    tally.runs += 1
    run: Run | None = None
    words = ["nap", "--import", "./nap_suite.py", "--rounds", "4", "--dtypes", "fp32,bf16"]
    while True:
        tally.resumptions += run is not None
        old_content = content(store)
        (folder / "prepared.log").unlink(missing_ok=True)
        with start(suite, store, ["--resume", "last"] if run else words) as process:
            if kills > 0:
                kill(process, store, chance, tally)
                kills -= 1
            out, err = process.communicate(timeout=_PATIENCE)
            code = process.returncode
        promise("Traceback" not in err, f"a traceback: {err[-500:]}")
        run = check_store(store, old_content, run, tally)
        if code == -signal.SIGKILL:
            continue
        # The parent was not killed: the run has finished, or explained why it did not.
        promise(code in (0, 3), f"exit {code}: {err[-500:]}")
        if run is None or not run.finished:
            promise(code == 3 and "worker crashed" in err, f"unfinished without a reason: {err[-500:]}")
            continue
        promise("nap" in out, "no table")
        promise(len(run.records) == run.plan.num_cases, "cases lack records")
        tally.failed_cases += sum(record.status is Status.FAILED for record in run.records)
        return


def trials(kills: int, seed: int, store: Callable[[Tally], object] = str) -> Tally:
    """Kills processes `kills` times, over several runs. Keeps the store if a promise was broken.

    `store` is called with the tally after every run, so that an interrupted trial is not lost.
    """
    chance, tally = random.Random(seed), Tally()
    while (missing := kills - tally.kills.total()) > 0:
        folder = Path(tempfile.mkdtemp(prefix="fp8bench-kill-"))
        try:
            kill_and_resume(folder, chance, tally, min(missing, chance.randint(1, _MOST_KILLS)))
        except Promise as broken:
            tally.broken.append(f"{broken} ({folder.name})")
        else:
            shutil.rmtree(folder)
        store(tally)
    return tally


def main() -> int:
    asked = options(
        __doc__,
        kills=(30, "kills that hit a running process"),
        seed=(0, "seed of moments and victims"),
        json=(Path, "also write the tally to this file"),
    )
    begun = time.monotonic()

    def report(tally: Tally, prints: bool = False) -> None:
        command = f"python -m suites.kill --kills {tally.kills.total()} --seed {asked.seed}"
        seconds = round(time.monotonic() - begun, 1)
        write_document({"command": command, **vars(tally), "seconds": seconds, **conditions()}, asked.json, prints)

    tally = trials(asked.kills, asked.seed, report)
    report(tally, prints=True)
    return int(bool(tally.broken))


if __name__ == "__main__":
    sys.exit(main())
