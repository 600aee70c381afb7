"""Kill runs at random moments, and see whether the store keeps its promise.

`python -m suites.kill --kills 1000 --json PATH`: a run is started, its parent, its worker or both are killed (SIGKILL)
at a random moment, the store is examined, the run is resumed, killed again, and so on until a start that nobody kills
has finished it; then the next run begins. After every kill: the store opens, what lay in the file lies in it still,
and no process is left. After every resumption: only what was missing was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
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

from fp8bench import __version__
from fp8bench.model import Run, Status
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run, missing_groups

ROOT = Path(__file__).resolve().parents[1]

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
        # Every group is in the store before the next one is prepared: this log is what the store is held against.
        with open("prepared.log", "a") as log:
            log.write(f"{setup.case.param('place')}\\n")

    def step(self, state, phase):
        with phase.gemm:
            time.sleep(0.005)
"""
VICTIMS = ("parent", "worker", "both")
# Most of a start is torch's import; half of the kills aim at the time when records are written.
_LONGEST_START = 4.0
_MEASURING = 1.5
_PATIENCE = 300.0


@dataclass
class Tally:
    """What the kills have come to."""

    kills: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    too_late: int = 0
    runs: int = 0
    resumptions: int = 0
    torn_lines: int = 0
    failed_cases: int = 0
    broken: list[str] = field(default_factory=list)


class Promise(AssertionError):
    """What the store promises was not kept."""


def promise(holds: bool, words: str) -> None:
    if not holds:
        raise Promise(words)


def start(suite: Path, store: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    """A run, or its resumption, in a process of its own."""
    command = [sys.executable, "-m", "fp8bench", "suite", *words, "--store", str(store)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=suite.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def children(parent: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        if int(rest.split()[1]) == parent:
            found.append(int(name.split()[0]))
    return found


def gone(pid: int) -> bool:
    """Whether a process has ended; one that waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pids: Sequence[int], seconds: float) -> list[int]:
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if not gone(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def the_file(store: Path) -> Path | None:
    return next(run_files(store), None)


def wait_for_the_moment(process: subprocess.Popen[str], store: Path, chance: random.Random) -> str:
    """Sleep until a random moment: of the whole start, or of the time in which records are written."""
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0.0, _LONGEST_START))
        return "any"
    before = the_file(store)
    size = before.stat().st_size if before else 0
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        now = the_file(store)
        if now is not None and now.stat().st_size > size:
            break
        time.sleep(0.005)
    time.sleep(chance.uniform(0.0, _MEASURING))
    return "while writing"


def strike(process: subprocess.Popen[str], victim: str) -> tuple[bool, list[int]]:
    """Kill; returns whether all who were meant were there to be killed, and the workers, which must end."""
    workers = children(process.pid)
    hit = process.poll() is None
    if victim in ("parent", "both"):
        process.kill()
    if victim in ("worker", "both"):
        hit = hit and bool(workers)
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
    return hit, workers


def prepared(folder: Path) -> list[int]:
    """The places of the groups that were prepared since the last start, in their order."""
    log = folder / "prepared.log"
    return list(dict.fromkeys(int(line) for line in log.read_text().split())) if log.exists() else []


def whole_places(run: Run | None) -> set[int]:
    """The places of the groups that are all there."""
    if run is None:
        return set()
    missing = missing_groups(run)
    return {int(group.cases[0].case.param("place")) for group in run.plan if group not in missing}


def examine(store: Path, before: bytes, kept: Run | None, tally: Tally) -> Run | None:
    """The store after a process that began with `kept` has ended, however it did.

    It opens; what lay in the file lies in it still; every group that was finished is there; none was done twice.
    """
    path = the_file(store)
    begun = prepared(store.parent)
    if path is None:
        promise(not before and not begun, "the run file is gone")
        return None
    promise(path.read_bytes().startswith(before), "what was written was changed")
    run = load_run(path)
    # A group is in the store before the next one is prepared.
    lost = set(begun[:-1]) - whole_places(run)
    promise(not lost, f"groups {sorted(lost)} were finished and are not there")
    again = set(begun) & whole_places(kept)
    promise(not again, f"groups {sorted(again)} were there and were measured again")
    if kept is not None:
        old = {record.case.id: record for record in kept.records if record.case.param("place") in whole_places(kept)}
        new = {record.case.id: record for record in run.records}
        promise(all(new.get(name) == record for name, record in old.items()), "a record that was there differs")
    tally.torn_lines += len(run.troubles)
    promise(len(run.troubles) <= len(run.resumptions) + 1, f"more broken lines than kills: {run.troubles}")
    return run


def check_whole(run: Run, tally: Tally) -> None:
    """A run that came to its end has all its groups and cases."""
    promise(run.finished and not missing_groups(run), "the run is not finished")
    promise(len(run.records) == run.plan.num_cases, "cases lack records")
    tally.failed_cases += sum(record.status is Status.FAILED for record in run.records)


def one_run(folder: Path, chance: random.Random, tally: Tally, kills: int) -> None:
    """One run from its start to its end, killed on the way at most so many times."""
    suite = folder / "nap_suite.py"
    suite.write_text(SUITE)
    store = folder / "store"
    tally.runs += 1
    kept: Run | None = None
    while True:
        words = (
            ["--resume", "last"]
            if kept
            else ["nap", "--import", "./nap_suite.py", "--rounds", "4", "--dtypes", "fp32,bf16"]
        )
        tally.resumptions += kept is not None
        path = the_file(store)
        before = path.read_bytes() if path else b""
        (folder / "prepared.log").unlink(missing_ok=True)
        with start(suite, store, words) as process:
            victim = chance.choice(VICTIMS) if kills > 0 else ""
            if victim:
                kills -= 1
                moment = wait_for_the_moment(process, store, chance)
                hit, workers = strike(process, victim)
                if hit:
                    tally.kills[victim] += 1
                    tally.moments[moment] += 1
                else:
                    tally.too_late += 1
                left = wait_until_gone(workers, 30.0) if victim != "worker" else []
                promise(not left, f"workers {left} outlived their parent")
            out, err = process.communicate(timeout=_PATIENCE)
            code = process.returncode
        promise("Traceback" not in err, f"a traceback: {err[-500:]}")
        run = examine(store, before, kept, tally)
        if code == -signal.SIGKILL:
            kept = run
            continue
        # Nobody killed the parent: the run went on to its end, or said why it could not begin.
        promise(code in (0, 3), f"exit {code}: {err[-500:]}")
        if run is None:
            promise(code == 3 and "worker crashed" in err, f"no run and no reason: {err[-500:]}")
            continue
        if not run.finished:
            promise(code == 3 and "worker crashed" in err, f"unfinished without a reason: {err[-500:]}")
            kept = run
            continue
        promise("nap" in out, "no table")
        check_whole(run, tally)
        return


def trials(kills: int, seed: int, keep: Callable[[Tally], None] | None = None, most_per_run: int = 24) -> Tally:
    """So many kills, over as many runs as that takes. A broken promise is kept in words, and its store too.

    `keep` is handed the tally after every run, so that trials that are interrupted themselves are not lost.
    """
    chance = random.Random(seed)
    tally = Tally()
    while sum(tally.kills.values()) < kills:
        folder = Path(tempfile.mkdtemp(prefix="fp8bench-kill-"))
        wanted = min(kills - sum(tally.kills.values()), chance.randint(1, most_per_run))
        try:
            one_run(folder, chance, tally, wanted)
        except Promise as broken:
            tally.broken.append(f"{broken} ({folder.name})")
        else:
            shutil.rmtree(folder)
        if keep is not None:
            keep(tally)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m suites.kill", description="kill runs at random moments")
    parser.add_argument("--kills", type=int, default=30, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="PATH")
    arguments = parser.parse_args()
    begun = time.monotonic()

    def keep(tally: Tally) -> None:
        if arguments.json:
            arguments.json.write_text(report(tally, arguments.seed, time.monotonic() - begun) + "\n")

    tally = trials(arguments.kills, arguments.seed, keep)
    print(report(tally, arguments.seed, time.monotonic() - begun))
    return 1 if tally.broken else 0


def report(tally: Tally, seed: int, seconds: float) -> str:
    """The tally as JSON, with what it was made under."""
    kills = sum(tally.kills.values())
    result = {
        "command": f"python -m suites.kill --kills {kills} --seed {seed}", "num_kills": kills,
        "kills": dict(tally.kills), "moments": dict(tally.moments), "too_late": tally.too_late, "runs": tally.runs,
        "resumptions": tally.resumptions, "torn_lines_skipped": tally.torn_lines,
        "failed_cases_of_killed_workers": tally.failed_cases, "broken_promises": tally.broken,
        "seconds": round(seconds, 1), "fp8bench": __version__, "commit": commit(), "python": platform.python_version(),
        "system": platform.platform(),
    }  # fmt: skip
    return json.dumps(result, indent=1)


def commit() -> str:
    """What was killed."""
    words = ["git", "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
