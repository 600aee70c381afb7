"""What loads make of code that did not change, and whether a gate ever clears what did: `python -m suites.load FOLDER`.

Runs of the same code are measured beside 0 to 10 busy processes, and each is compared with each: no figure may be
called worse. Gates over the pairs that look worst measure again, beside loads. Slow-downs are made of the samples of
stored runs, and planted in a step whose length a file says: none may be cleared. It takes about 50 minutes on two busy
cores. What FOLDER/rows.jsonl has is not done again; the counts are in FOLDER/outcomes.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from fp8bench.analysis.compare.compare import compare
from fp8bench.analysis.compare.sides import Side, side_of
from fp8bench.analysis.findings import findings
from fp8bench.features.gate.judging import GateOutcome, JudgedFigure, SecondLook, first_look, key_of, second_look
from fp8bench.model import Direction, Run, Timing
from fp8bench.store.runs.listing import find_run
from fp8bench.store.runs.run_file import load_run

LOADS, LOW = (0, 2, 4, 8, 10), (0, 2, 4)
RUNS, GATES, MADE, PLANTED = 3, 20, 200, 2
SLOWER = (1.05, 1.10)
SUITE = (
    "gemm,norm_act", "--dtypes", "fp32,bf16",
    "--set", "shape=128", "--set", "operation=layer_norm", "--set", "tokens=64",
)  # fmt: skip
_LOOKS = {"full": ("--rounds", "24"), "quick": ("--quick",)}
_LOOP = """
from pathlib import Path
from fp8bench.suites import Work, Workload, workloads


@workloads.register("paced")
class Paced(Workload):
    name, summary = "paced", "as long as a file says"

    def axes(self, facts):
        return ()

    def work(self, params):
        return Work()

    def prepare(self, setup):
        pace = float(Path(__file__).with_name("pace").read_text()) if setup.case.precision == "bf16" else 1.0
        return round(40_000 * pace)

    def step(self, state, phase):
        with phase.gemm:
            sum(range(state))
"""
# It ends with whoever started it.
_BUSY = "import os\nown = os.getppid()\nwhile os.getppid() == own: sum(range(100_000))"
Row = dict[str, Any]


class Trial:
    """A folder with a store, and a row for all that was done in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, folder / "store"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "rows.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.rows: list[Row] = [json.loads(line) for line in lines]

    def add(self, row: Row) -> Row:
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        return row

    def of(self, what: str) -> list[Row]:
        return [row for row in self.rows if row["what"] == what]

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fp8bench", *words, "--store", str(self.store)]
        found = {**os.environ, "GITHUB_STEP_SUMMARY": "", "GIT_CEILING_DIRECTORIES": str(self.folder.parent)}
        return subprocess.run(command, cwd=self.folder, env=found, capture_output=True, text=True, check=False)

    def measure(self, look: str, *suite: str) -> str:
        """The id of a new run."""
        done = self.command("suite", *suite, *_LOOKS[look], "--no-energy", "--no-report")
        if done.returncode:
            raise RuntimeError(f"a run ended with {done.returncode}: {done.stderr}")
        return re.findall(r"stored in .*-(\w+)\.jsonl", done.stdout)[-1]

    def gate(self, before: str, after: str) -> Row:
        done = self.command("gate", before, after)
        counts = re.search(r"\d+ figures?: .*", done.stdout)
        return {"code": done.returncode, "said": counts[0] if counts else done.stdout + done.stderr}

    @cache  # noqa: B019 - as long as this process
    def run(self, name: str) -> Run:
        return load_run(find_run(name, self.store))

    @cache  # noqa: B019
    def side(self, name: str) -> Side:
        return _side(self.run(name))


def _side(run: Run) -> Side:
    return side_of(run.id, [(run, findings(run))])


@contextmanager
def load(count: int) -> Iterator[None]:
    """So many busy processes beside what is done here."""
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        time.sleep(3 if count else 0)
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def measure(trial: Trial) -> None:
    """The same code at each load in turn."""
    there = {(row["look"], row["load"], row["number"]) for row in trial.of("run")}
    for number in range(RUNS):
        for look in _LOOKS:
            for count in LOADS if look == "full" else LOW:
                if (look, count, number) not in there:
                    with load(count):
                        name = trial.measure(look, *SUITE)
                    average = round(os.getloadavg()[0], 1)
                    trial.add(
                        {"what": "run", "look": look, "load": count, "number": number, "id": name, "average": average}
                    )


def pairs(trial: Trial, look: str) -> Row:
    """Of all pairs of runs, those with a figure that is worse either way."""
    loads = _loads(trial, look)
    worse = [
        [f"{loads[old]} and {loads[new]}", one.case, one.metric, round(one.ratio.point, 3) if one.ratio else None]
        for old, new in permutations(loads, 2)
        for one in compare(trial.side(old), trial.side(new)).comparisons
        if one.direction is Direction.WORSE
    ]
    return {"pairs": len(list(combinations(loads, 2))), "worse": worse}


def _loads(trial: Trial, look: str) -> dict[str, int]:
    return {row["id"]: row["load"] for row in trial.of("run") if row["look"] == look}


def gates(trial: Trial) -> None:
    """The pairs that look worst, each measured again beside a load of its own."""
    loads = _loads(trial, "full")
    ranked = sorted(permutations(loads, 2), key=lambda pair: -_worst(trial, *pair))
    for number, (old, new) in enumerate(ranked[:GATES]):
        if not any(row["pair"] == [old, new] for row in trial.of("gate")):
            beside = (loads[new], *LOADS)[number % (1 + len(LOADS))]
            with load(beside):
                done = trial.gate(old, new)
            trial.add({"what": "gate", "pair": [old, new], "loads": [loads[old], loads[new]], "again": beside, **done})


def _worst(trial: Trial, old: str, new: str) -> float:
    """How far off what is suspected is, all together."""
    judged = first_look(compare(trial.side(old), trial.side(new)).comparisons)
    logs = [
        math.log(one.comparison.ratio.point)
        for one in judged
        if one.outcome is GateOutcome.TO_CONFIRM and one.comparison.ratio
    ]
    return sum(logs)


def made(trial: Trial, look: str, slower: float, equal: bool) -> Counter[str]:
    """What becomes of a case that was slowed down in stored runs, and in the run that measures it again.

    Of runs beside any loads, or of three beside the same of at most one a core.
    """
    draw, first, full = random.Random(f"{look} {slower} {equal}"), _loads(trial, look), _loads(trial, "full")
    low = [name for name, count in first.items() if count <= 2]
    found: Counter[str] = Counter()
    while found.total() < MADE:
        old, new = draw.sample(low if equal else list(first), 2)
        again = draw.choice([name for name in full if name not in (old, new)])
        if equal and not first[old] == first[new] == full[again]:
            continue
        case = draw.choice([one.case.id for one in trial.run(new).records if one.case.precision == "bf16"])
        before, after, second = (
            trial.side(old), *(_slowed(trial, name, case, slower) for name in (new, again))
        )  # fmt: skip
        judged = first_look(compare(before, after).comparisons)
        looked = SecondLook(
            {key_of(one): one for one in compare(before, second, beside=after).comparisons if one.case == case}, "again"
        )
        found[_outcome(second_look(judged, looked), case)] += 1
    return found


@cache
def _slowed(trial: Trial, name: str, case: str, slower: float) -> Side:
    run = trial.run(name)
    records = [
        replace(one, timing=_longer(one.timing, slower)) if one.case.id == case and one.timing else one
        for one in run.records
    ]
    return _side(replace(run, records=tuple(records)))


def _longer(timing: Timing, slower: float) -> Timing:
    slots = tuple(
        replace(
            slot, calls_ns=tuple(tuple(round(cell * slower) for cell in call) for call in slot.calls_ns),
            wall_seconds=slot.wall_seconds * slower, cpu_seconds=slot.cpu_seconds * slower,
            thread_seconds=slot.thread_seconds and slot.thread_seconds * slower,
        )
        for slot in timing.slots
    )  # fmt: skip
    return replace(timing, slots=slots)


def _outcome(judged: tuple[JudgedFigure, ...], case: str) -> str:
    """Of the time of a case that is judged."""
    own = {one.comparison.metric: one for one in judged if one.comparison.case == case}
    judges = own["relative_time" if "relative_time" in own else "time"]
    return judges.outcome.value


def planted(trial: Trial) -> None:
    """A loop that takes longer, measured and gated; what measures again finds it as long."""
    suite, pace = trial.folder / "paced.py", trial.folder / "pace"
    suite.write_text(_LOOP)
    there = Counter((row["look"], row["slower"]) for row in trial.of("planted"))
    for look in _LOOKS:
        for slower in SLOWER:
            for _ in range(PLANTED - there[look, slower]):
                names = []
                for factor in (1.0, slower):
                    pace.write_text(str(factor))
                    names.append(trial.measure(look, "./paced.py", "--dtypes", "fp32,bf16"))
                done = trial.gate(*names)
                average = round(os.getloadavg()[0], 1)
                trial.add({"what": "planted", "look": look, "slower": slower, "average": average, **done})


def outcomes(trial: Trial) -> Row:
    """The counts, from rows and stored runs."""
    return {
        "runs": [{key: row[key] for key in ("look", "load", "average")} for row in trial.of("run")],
        "compared": {look: pairs(trial, look) for look in _LOOKS},
        "gates": [{key: row[key] for key in ("loads", "again", "code", "said")} for row in trial.of("gate")],
        "made": {
            f"{look}, {100 * (slower - 1):.0f}%, {'equal low loads' if equal else 'any loads'}":
                made(trial, look, slower, equal)
            for look in _LOOKS for slower in SLOWER for equal in (False, True)
        },
        "planted": [{key: value for key, value in row.items() if key != "what"} for row in trial.of("planted")],
    }  # fmt: skip


def main() -> int:
    """1 where more than one pair or gate alarms, or anything that is there was cleared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="outside any repository, as a gate would duel with its commits")
    parser.add_argument("--judge", action="store_true", help="measure nothing more")
    given = parser.parse_args()
    trial = Trial(given.folder.resolve())
    if not given.judge:
        measure(trial)
        planted(trial)
        gates(trial)
    found = outcomes(trial)
    (trial.folder / "outcomes.json").write_text(json.dumps(found, indent=1) + "\n")
    alarmed = len({one[0] for one in found["compared"]["full"]["worse"]})
    alarmed += sum(row["code"] == 1 for row in found["gates"])
    cleared = sum(counts["cleared"] for counts in found["made"].values())
    cleared += sum("cleared" in row["said"] for row in found["planted"])
    sys.stdout.write(f"{alarmed} alarms of 105 pairs and {len(found['gates'])} gates; {cleared} cleared\n")
    for words, counts in found["made"].items():
        sys.stdout.write(f"  {words:34} {dict(counts)}\n")
    return 1 if alarmed > 1 or cleared else 0


if __name__ == "__main__":
    sys.exit(main())
