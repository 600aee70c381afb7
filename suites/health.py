"""Whether health rules find what is ill, and leave alone what is well: `python -m suites.health`.

Real trainings of a small model on a CPU, in parts that are kept in a folder and not done again: `--part well` (four
precisions, three architectures, five seeds, a warm-up and a change of text in each), `--part nvfp4` (the same in that
precision), `--part small` (in all five, batches of a quarter as many tokens), `--part setting` (other seeds, which
thresholds were set by), `--part ill` (every illness in two seeds). Then all that is kept is judged by the rules as they
are, and `--report DIR` writes the confusion matrix. A training's lines are a file.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fp8bench.features.train.health.health import RULES, Health
from fp8bench.features.train.lab.evaluate import TokenWindows
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.texts import prepare_text
from fp8bench.features.train.values import (
    Arm,
    ArmRole,
    LayerReading,
    SeedTask,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
    TrainingText,
)
from fp8bench.model.raw import Settings
from fp8bench.nn.sizes import SIZES, GPTConfig
from suites.illnesses import ILLNESSES, Illness, Patient

SLICE, STRIDE = 10, 10
# Well trainings are of a model so small that 50,000 steps can be done, ill ones of nano.
TINY = "tiny"
_TINY = GPTConfig(256, 64, 1, 2, 2, 256, batch=4, sequence=64)
BATCH, SEQUENCE = 4, 64
PRECISIONS = ("fp8", "fp8-delayed:history=16", "mxfp8")
# What well trainings are of: precisions beside the reference, and sequences in a batch.
SORTS = {"well": (PRECISIONS, BATCH), "nvfp4": (("nvfp4",), BATCH), "small": ((*PRECISIONS, "nvfp4"), 1)}
ARCHITECTURES = ("gpt", "mlp", "cnn")
STEPS, CHANGE = 700, 400
# Thresholds were set on the first ten.
SETTING, JUDGING = range(10), range(10, 15)
REFERENCE = Arm("bf16", "bf16", ArmRole.REFERENCE)
OTHER = Arm("bf16, other seed", "bf16", ArmRole.OTHER_SEED)
KINDS = (StepRow, LayerReading, StepFigure)


@dataclass(frozen=True)
class Study:
    """One training: arms beside each other under one seed, well or with an illness in its last arm."""

    name: str
    arch: str
    seed: int
    steps: int
    arms: tuple[Arm, ...]
    illness: Illness | None = None
    batch: int = BATCH

    def settings(self) -> TrainerSettings:
        own = self.illness.settings if self.illness else {}
        model = "nano" if self.illness else TINY
        chosen = {"batch": self.batch, "sequence": SEQUENCE, **own}
        return TrainerSettings(arch=self.arch, model=model, **chosen)


def well(seeds: range, sort: str = "well") -> list[Study]:
    """Precisions beside each other, and the reference under another seed; the text changes on the way."""
    precisions, batch = SORTS[sort]
    arms = (REFERENCE, *(Arm(one.partition(":")[0], one) for one in precisions), OTHER)
    return [
        Study(f"{sort}-{arch}-{seed}", arch, seed, STEPS, arms, batch=batch) for seed in seeds for arch in ARCHITECTURES
    ]


def ill(seeds: range) -> list[Study]:
    """Every illness, beside the reference where a rule compares."""
    return [
        Study(
            f"ill-{number}-{seed}", illness.arch, seed, illness.steps,
            (*((REFERENCE, OTHER) if illness.beside else ()), Arm("ill", illness.precision)), illness,
        )
        for number, illness in enumerate(ILLNESSES)
        for seed in seeds
    ]  # fmt: skip


def train(study: Study, text: TrainingText) -> Iterator[StreamLine]:
    """The lines of a study, slice by slice, all arms in random order."""
    SIZES.setdefault(TINY, _TINY)
    torch.set_num_threads(1)
    lab = Lab(Settings())
    task = SeedTask(study.seed, study.arms, study.settings(), study.steps, STRIDE, text, lab.probe()[0])
    lab.begin(task)
    trainers: dict[str, Any] = lab._trainers
    patient = Patient(trainers["ill"]) if study.illness else None
    order = random.Random(study.seed)
    for start in range(0, study.steps, SLICE):
        if start == CHANGE and study.illness is None:
            for trainer in trainers.values():
                _change_text(trainer, text)
        for arm in order.sample(list(trainers), len(trainers)):
            if patient is None or arm != "ill" or study.illness is None:
                yield from lab.advance(arm, SLICE)
                continue
            for step in range(start, start + SLICE):
                if step >= study.illness.onset:
                    with torch.no_grad():
                        study.illness.plant(patient)
                    patient.steps += 1
                yield from lab.advance(arm, 1)


def _change_text(trainer: Any, text: TrainingText) -> None:
    """From the sources of a program to prose."""
    assert text.other is not None
    trainer._windows = TokenWindows(text.other, SEQUENCE, "cpu", trainer._windows._vocabulary)


def keep(study: Study, folder: Path) -> None:
    """Train a study and keep its lines, unless all of them are there."""
    path = _path(study, folder)
    if path.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    text = prepare_text(None, None, "bytes", folder, SEQUENCE)
    partial = path.with_suffix(f".{os.getpid()}")
    with gzip.open(partial, "wt", compresslevel=5) as file:
        for line in train(study, text):
            if isinstance(line, KINDS):
                file.write(json.dumps([KINDS.index(type(line)), *astuple(line)]) + "\n")
    partial.rename(path)


def kept(study: Study, folder: Path) -> list[StreamLine]:
    """The lines of a study as far as it was trained: a training that was cut off has been well, or ill, until then."""
    path = _path(study, folder)
    partial = sorted(folder.glob(f"{path.stem}.*"), key=lambda one: one.stat().st_size)
    for found in [path] if path.exists() else partial[-1:]:
        return list(_lines(found))
    return []


def is_whole(study: Study, folder: Path) -> bool:
    """Whether it was trained to its end."""
    return _path(study, folder).exists()


def _path(study: Study, folder: Path) -> Path:
    return folder / f"{study.name}.jsonl.gz"


def _lines(path: Path) -> Iterator[StreamLine]:
    with gzip.open(path, "rt") as file, contextlib.suppress(EOFError):
        for text in file:
            if text.endswith("]\n"):
                kind, *values = json.loads(text)
                yield KINDS[kind](*values)


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


def alarms_of(study: Study, lines: Sequence[StreamLine]) -> list[TrainingEvent]:
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


def _loss_jump(lines: Sequence[StreamLine], onset: int) -> int | None:
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
