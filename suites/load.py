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
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations, permutations
from pathlib import Path

from fp8bench.analysis.compare.compare import compare
from fp8bench.analysis.compare.sides import Side, side_of
from fp8bench.analysis.findings import findings
from fp8bench.features.gate.judging import GateOutcome, SecondLook, first_look, key_of, second_look
from fp8bench.model import Comparison, Direction, Record, Run
from fp8bench.store.runs.listing import find_run
from fp8bench.store.runs.run_file import load_run
from suites.trials import FP8BENCH, Row, Rows, load, ran, say

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


class Trial(Rows):
    """A folder with a store, and a row for all that was done in it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder, self.store = folder, folder / "store"

    def command(self, *words: str, ends: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        alone = {"GITHUB_STEP_SUMMARY": "", "GIT_CEILING_DIRECTORIES": str(self.folder.parent)}
        return ran([*FP8BENCH, *words, "--store", str(self.store)], self.folder, ends, alone)

    def measure(self, look: str, *suite: str) -> str:
        """The id of a new run."""
        done = self.command("suite", *suite, *_LOOKS[look], "--no-energy", "--no-report")
        return re.findall(r"stored in .*-(\w+)\.jsonl", done.stdout)[-1]

    def gate(self, before: str, after: str) -> Row:
        done = self.command("gate", before, after, ends=(0, 1, 3, 4))
        counts = re.search(r"\d+ figures?: .*", done.stdout)
        return {"code": done.returncode, "said": counts[0] if counts else done.stdout + done.stderr}

    def loads(self, look: str) -> dict[str, int]:
        """Beside what each run was measured, by its id."""
        return {row["id"]: row["load"] for row in self.of(what="run", look=look)}

    @cache  # noqa: B019 - as long as this process
    def run(self, name: str) -> Run:
        return load_run(find_run(name, self.store))

    @cache  # noqa: B019
    def side(self, name: str, case: str = "", slower: float = 1.0) -> Side:
        """What a run says; with one case slower than it was."""
        run = self.run(name)
        records = (_longer(record, slower) if record.case.id == case else record for record in run.records)
        run = replace(run, records=tuple(records))
        return side_of(name, [(run, findings(run))])

    def compared(self, old: str, new: str) -> tuple[Comparison, ...]:
        return compare(self.side(old), self.side(new)).comparisons


def _longer(record: Record, slower: float) -> Record:
    if record.timing is None:
        return record
    slots = tuple(
        replace(
            slot, calls_ns=tuple(tuple(round(cell * slower) for cell in call) for call in slot.calls_ns),
            wall_seconds=slot.wall_seconds * slower, cpu_seconds=slot.cpu_seconds * slower,
            thread_seconds=slot.thread_seconds and slot.thread_seconds * slower,
        )
        for slot in record.timing.slots
    )  # fmt: skip
    return replace(record, timing=replace(record.timing, slots=slots))


def _average() -> float:
    return round(os.getloadavg()[0], 1)


def measure(trial: Trial) -> None:
    """The same code at each load in turn."""
    for number in range(RUNS):
        for look in _LOOKS:
            for count in LOADS if look == "full" else LOW:
                place = {"what": "run", "look": look, "load": count, "number": number}
                if not trial.of(**place):
                    with load(count):
                        name = trial.measure(look, *SUITE)
                    trial.add(**place, id=name, average=_average())


def planted(trial: Trial) -> None:
    """A loop that takes longer, measured and gated; what measures again finds it as long."""
    suite, pace = trial.folder / "paced.py", trial.folder / "pace"
    suite.write_text(_LOOP)
    for look in _LOOKS:
        for slower in SLOWER:
            while len(trial.of(what="planted", look=look, slower=slower)) < PLANTED:
                names = []
                for factor in (1.0, slower):
                    pace.write_text(str(factor))
                    names.append(trial.measure(look, "./paced.py", "--dtypes", "fp32,bf16"))
                done = trial.gate(*names)
                trial.add(what="planted", look=look, slower=slower, average=_average(), **done)


def gates(trial: Trial) -> None:
    """The pairs that look worst, each measured again beside a load of its own."""
    loads = trial.loads("full")
    ranked = sorted(permutations(loads, 2), key=lambda pair: -_worst(trial, *pair))
    for number, (old, new) in enumerate(ranked[:GATES]):
        if not trial.of(what="gate", pair=[old, new]):
            beside = (loads[new], *LOADS)[number % (1 + len(LOADS))]
            with load(beside):
                done = trial.gate(old, new)
            trial.add(what="gate", pair=[old, new], loads=[loads[old], loads[new]], again=beside, **done)


def _worst(trial: Trial, old: str, new: str) -> float:
    """How far off what is suspected is, all together."""
    return sum(
        math.log(judged.comparison.ratio.point)
        for judged in first_look(trial.compared(old, new))
        if judged.outcome is GateOutcome.TO_CONFIRM and judged.comparison.ratio
    )


def pairs(trial: Trial, look: str) -> Row:
    """Of all pairs of runs, those with a figure that is worse either way."""
    loads = trial.loads(look)
    worse = [
        [f"{loads[old]} and {loads[new]}", one.case, one.metric, round(one.ratio.point, 3) if one.ratio else None]
        for old, new in permutations(loads, 2)
        for one in trial.compared(old, new)
        if one.direction is Direction.WORSE
    ]
    return {"pairs": len(list(combinations(loads, 2))), "worse": worse}


def made(trial: Trial, look: str, slower: float, equal: bool) -> Counter[str]:
    """What becomes of a case that was slowed down in stored runs, and in the run that measures it again.

    Of runs beside any loads, or of three beside the same of at most one a core.
    """
    draw, first, full = random.Random(f"{look} {slower} {equal}"), trial.loads(look), trial.loads("full")
    low = [name for name, count in first.items() if count <= 2]
    outcomes: Counter[str] = Counter()
    while outcomes.total() < MADE:
        old, new = draw.sample(low if equal else list(first), 2)
        again = draw.choice([name for name in full if name not in (old, new)])
        if equal and not first[old] == first[new] == full[again]:
            continue
        case = draw.choice([record.case.id for record in trial.run(new).records if record.case.precision == "bf16"])
        before, after, second = trial.side(old), trial.side(new, case, slower), trial.side(again, case, slower)
        looked = {key_of(one): one for one in compare(before, second, beside=after).comparisons if one.case == case}
        judged = second_look(first_look(compare(before, after).comparisons), SecondLook(looked, "again"))
        own = {one.comparison.metric: one for one in judged if one.comparison.case == case}
        outcomes[own["relative_time" if "relative_time" in own else "time"].outcome.value] += 1
    return outcomes


def outcomes(trial: Trial) -> Row:
    """The counts, from rows and stored runs."""
    return {
        "runs": [{key: row[key] for key in ("look", "load", "average")} for row in trial.of(what="run")],
        "compared": {look: pairs(trial, look) for look in _LOOKS},
        "gates": [{key: row[key] for key in ("loads", "again", "code", "said")} for row in trial.of(what="gate")],
        "made": {
            f"{look}, {100 * (slower - 1):.0f}%, {'equal low loads' if equal else 'any loads'}":
                made(trial, look, slower, equal)
            for look in _LOOKS for slower in SLOWER for equal in (False, True)
        },
        "planted": [{key: value for key, value in row.items() if key != "what"} for row in trial.of(what="planted")],
    }  # fmt: skip


def main() -> int:
    """1 where more than one pair or gate alarms, or anything that is there was cleared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="outside any repository, as a gate would duel with its commits")
    parser.add_argument("--judge", action="store_true", help="measure nothing more")
    asked = parser.parse_args()
    trial = Trial(asked.folder.resolve())
    if not asked.judge:
        for part in (measure, planted, gates):
            part(trial)
    result = outcomes(trial)
    (trial.folder / "outcomes.json").write_text(json.dumps(result, indent=1) + "\n")
    alarmed = len({one[0] for one in result["compared"]["full"]["worse"]})
    alarmed += sum(row["code"] == 1 for row in result["gates"])
    cleared = sum(counts["cleared"] for counts in result["made"].values())
    cleared += sum("cleared" in row["said"] for row in result["planted"])
    say(f"{alarmed} alarms of 105 pairs and {len(result['gates'])} gates; {cleared} cleared")
    for words, counts in result["made"].items():
        say(f"  {words:34} {dict(counts)}")
    return 1 if alarmed > 1 or cleared else 0


if __name__ == "__main__":
    sys.exit(main())
