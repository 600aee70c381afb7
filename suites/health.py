"""Whether health rules find what is ill, and leave alone what is well: `python -m suites.health`.

Real trainings of a small model on a CPU, in parts that are kept in a folder and not done again: `--part well` (four
precisions, three architectures, five seeds, a warm-up and a change of text in each), `--part nvfp4` (the same in that
precision), `--part small` (in all five, batches of a quarter as many tokens), `--part setting` (other seeds, which
thresholds were set by), `--part ill` (every illness in two seeds). Then all that is kept is judged by the rules as they
are, and `--report DIR` writes the confusion matrix.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fp8bench.features.train.health.health import RULES, Health
from fp8bench.features.train.values import Line, StepRow, TrainingEvent
from suites.health_streams import JUDGING, SETTING, SORTS, Study, ill, is_whole, keep, kept, well
from suites.illnesses import ILLNESSES

# Of the sorts that came later two seeds are enough to set thresholds by.
PARTS: dict[str, list[Study]] = {
    "setting": [*well(SETTING), *well(SETTING[:2], "small"), *well(SETTING[:2], "nvfp4")],
    **{sort: well(JUDGING, sort) for sort in SORTS},
    "ill": ill(SETTING[:2]),
}
NAMES = [rule.name for rule in RULES]


@dataclass(frozen=True)
class WellRow:
    """All well steps of some trainings, and the alarms in them; `at_most` is the upper 95% bound in 10,000 steps.

    A training that was cut off counts as far as it came; `whole` are those that were not.
    """

    part: str
    trainings: int
    whole: int
    steps: int
    alarms: dict[str, int]
    at_most: float
    told: list[str]


@dataclass(frozen=True)
class IllRow:
    """One illness: in how many of its seeds its rule alarmed, how many steps late, and which other rules did.

    `early` are alarms before the onset, all of them false.
    """

    illness: str
    rule: str
    precision: str
    seeds: int
    found: int
    delays: list[int]
    alarms: dict[str, int]
    early: int
    loss_jumps: list[int | None]


def upper_bound(events: int, trials: int, level: float = 0.95) -> float:
    """Clopper and Pearson's: the rate at which so few events or fewer are seen in 1 - `level` of all cases."""
    low, high = 0.0, 1.0
    for _ in range(100):
        rate = (low + high) / 2
        logs = (
            math.lgamma(trials + 1) - math.lgamma(seen + 1) - math.lgamma(trials - seen + 1)
            + seen * math.log(rate) + (trials - seen) * math.log1p(-rate)
            for seen in range(events + 1)
        )  # fmt: skip
        if math.fsum(map(math.exp, logs)) > 1 - level:
            low = rate
        else:
            high = rate
    return high


def alarms_of(study: Study, lines: Sequence[Line]) -> list[TrainingEvent]:
    """The alarms of a training, its lines given in slices as they came."""
    health = Health(study.arms, study.settings())
    found: list[TrainingEvent] = []
    for start in range(0, len(lines), 50):
        found += health.see(lines[start : start + 50])
    return found


def rule_of(event: TrainingEvent) -> str:
    """Whose alarm it is."""
    return str(dict(event.values)["rule"])


def judge_well(part: str, folder: Path) -> WellRow | None:
    """Of the trainings of a part that are there."""
    steps, trainings, whole, told, alarms = 0, 0, 0, [], Counter[str]()
    for study in PARTS[part]:
        if not (lines := kept(study, folder)):
            continue
        rows = [line for line in lines if isinstance(line, StepRow)]
        steps += len(rows)
        trainings += len({row.arm for row in rows})
        whole += sum(row.step == study.steps - 1 for row in rows)
        events = alarms_of(study, lines)
        alarms.update(map(rule_of, events))
        told += [f"{study.name}, {one.arm}, step {one.step}: {rule_of(one)}: {one.words}" for one in events]
    bound = 1e4 * upper_bound(len(told), steps) if steps else math.nan
    return WellRow(part, trainings, whole, steps, dict(alarms), bound, told) if steps else None


def together(rows: Sequence[WellRow]) -> WellRow:
    """All trainings that judge, in one row."""
    alarms = sum((Counter(one.alarms) for one in rows), Counter[str]())
    steps = sum(one.steps for one in rows)
    bound = 1e4 * upper_bound(alarms.total(), steps) if steps else math.nan
    counts = sum(one.trainings for one in rows), sum(one.whole for one in rows)
    return WellRow("judged together", *counts, steps, dict(alarms), bound, [])


def judge_ill(folder: Path) -> list[IllRow]:
    """A row for every illness of which a training is there to its end."""
    rows = []
    for illness in ILLNESSES:
        whole = [one for one in PARTS["ill"] if one.illness is illness and is_whole(one, folder)]
        studies = [(one, kept(one, folder)) for one in whole]
        delays, others, early, jumps = [], Counter[str](), 0, []
        for study, lines in studies:
            events = alarms_of(study, lines)
            early += sum(one.arm != "ill" or one.step < illness.onset for one in events)
            after = [one for one in events if one.arm == "ill" and one.step >= illness.onset]
            delays += [one.step - illness.onset for one in after if rule_of(one) == illness.rule][:1]
            others.update({rule_of(one) for one in after})
            jumps.append(_loss_jump(lines, illness.onset))
        if studies:
            rows.append(
                IllRow(
                    illness.words, illness.rule, illness.precision, len(studies), len(delays), delays, dict(others),
                    early, jumps,
                )
            )  # fmt: skip
    return rows


def _loss_jump(lines: Sequence[Line], onset: int) -> int | None:
    """How many steps after the onset the loss of the ill arm is a fifth above its median of 20 steps."""
    losses = {line.step: line.loss for line in lines if isinstance(line, StepRow) and line.arm == "ill"}
    for step in range(onset, max(losses, default=0) + 1):
        before = [losses[one] for one in range(step - 20, step) if one in losses]
        if step in losses and before and losses[step] > 1.2 * median(before):
            return step - onset
    return None


def page(wells: Sequence[WellRow], ills: Sequence[IllRow]) -> str:
    """The confusion matrix as Markdown: illnesses down, and which rules alarmed in how many seeds."""
    rows = [
        "| trained | trainings | to the end | steps | false alarms | in 10,000 steps, at most (95%) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in wells:
        counts = (one.part, one.trainings, one.whole, f"{one.steps:,}", sum(one.alarms.values()), f"{one.at_most:.2f}")
        rows.append(f"| {' | '.join(map(str, counts))} |")
    rows += [f"- {told}" for one in wells for told in one.told]
    rows += ["", "| illness | precision | its rule | found | late by, steps | other rules | false before it |"]
    rows += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for row in ills:
        others = ", ".join(f"{name} {count}" for name, count in sorted(row.alarms.items()) if name != row.rule)
        cells = (
            row.illness, row.precision, row.rule, f"{row.found} of {row.seeds}", ", ".join(map(str, row.delays)) or "-",
            others or "-", str(row.early),
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def cost(folder: Path) -> float:
    """The processor time that a line takes the rules, in seconds, over the first well training that is there."""
    study, lines = next(((one, lines) for one in PARTS["well"] if (lines := kept(one, folder))), (None, []))
    if study is None:
        return math.nan
    started = time.process_time()
    alarms_of(study, lines)
    return (time.process_time() - started) / len(lines)


def main() -> int:
    """Train what is asked for, judge what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=Path, required=True, help="folder in which trainings are kept")
    parser.add_argument("--part", action="append", choices=PARTS, default=[], help="train it, where it is not kept")
    parser.add_argument("--report", type=Path, help="write confusion.json and confusion.md there")
    arguments = parser.parse_args()
    for part in arguments.part:
        for study in PARTS[part]:
            keep(study, arguments.streams)
            sys.stdout.write(f"{study.name}\n")
            sys.stdout.flush()
    judged = [row for part in SORTS if (row := judge_well(part, arguments.streams)) is not None]
    setting = judge_well("setting", arguments.streams)
    all_judged = together(judged)
    wells = [*judged, all_judged, *([setting] if setting is not None else [])]
    ills = judge_ill(arguments.streams)
    text = page(wells, ills)
    sys.stdout.write(text)
    if arguments.report:
        arguments.report.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {"torch": torch.__version__, "rules": NAMES, "well": [asdict(one) for one in wells]}
        found |= {"ill": [asdict(one) for one in ills], "seconds_a_line": cost(arguments.streams)}
        (arguments.report / "confusion.json").write_text(json.dumps(found, indent=1) + "\n")
        (arguments.report / "confusion.md").write_text(text)
    missed = [one.illness for one in ills if one.found < one.seeds]
    return 0 if not missed and all_judged.at_most <= 1 else 1  # nothing judged is no number, and not fine


if __name__ == "__main__":
    sys.exit(main())
