"""Whether health rules find illnesses and leave healthy trainings alone: `python -m suites.health`.

Real trainings of a small model on a CPU, in parts that are kept in a folder and not repeated: `--part well` (four
precisions, three architectures, five seeds, each with a warm-up and a change of text), `--part nvfp4` (the same in that
precision), `--part small` (all five, with a quarter of the tokens in a batch), `--part setting` (other seeds, by which
thresholds were set), `--part ill` (every illness in two seeds). All kept trainings are then judged by the present
rules, and `--report DIR` writes the confusion matrix.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from fp8bench.features.train.beginnings import prepare_text
from fp8bench.features.train.health.health import RULES, Health
from fp8bench.features.train.lab.evaluate import TokenWindows
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.request import TrainerSettings
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
from suites.trials import conditions, say, seconds

SLICE, STRIDE = 10, 10
# Healthy trainings have a model so small that 50,000 steps are feasible, ill ones nano.
TINY = "tiny"
_TINY = GPTConfig(256, 64, 1, 2, 2, 256, batch=4, sequence=64)
BATCH, SEQUENCE = 4, 64
PRECISIONS = ("fp8", "fp8-delayed:history=16", "mxfp8")
# Precisions of healthy trainings next to the reference, and sequences in a batch.
SORTS = {"well": (PRECISIONS, BATCH), "nvfp4": (("nvfp4",), BATCH), "small": ((*PRECISIONS, "nvfp4"), 1)}
ARCHITECTURES = ("gpt", "mlp", "cnn")
STEPS, CHANGE = 700, 400
# Thresholds were set on the first ten.
SETTING, JUDGING = range(10), range(10, 15)
REFERENCE = Arm("bf16", "bf16", ArmRole.REFERENCE)
KINDS = (StepRow, LayerReading, StepFigure)


@dataclass(frozen=True)
class Study:
    """One training: the arms of one seed, healthy or with an illness in the last arm."""

    name: str
    arch: str
    seed: int
    steps: int
    arms: tuple[Arm, ...]
    illness: Illness | None = None
    batch: int = BATCH

    @property
    def file(self) -> str:
        return f"{self.name}.jsonl.gz"

    def settings(self) -> TrainerSettings:
        own = self.illness.settings if self.illness else {}
        model = "nano" if self.illness else TINY
        chosen = {"batch": self.batch, "sequence": SEQUENCE, **own}
        return TrainerSettings(arch=self.arch, model=model, **chosen)


def well(seeds: range, sort: str = "well") -> list[Study]:
    """Precisions; the text changes on the way."""
    precisions, batch = SORTS[sort]
    arms = (REFERENCE, *(Arm(mode.partition(":")[0], mode) for mode in precisions))
    return [
        Study(f"{sort}-{arch}-{seed}", arch, seed, STEPS, arms, batch=batch) for seed in seeds for arch in ARCHITECTURES
    ]


def ill(seeds: range) -> list[Study]:
    """Every illness, with the reference where a rule compares."""
    return [
        Study(
            f"ill-{number}-{seed}", illness.arch, seed, illness.steps,
            (*((REFERENCE,) if illness.beside else ()), Arm("ill", illness.precision)), illness,
        )
        for number, illness in enumerate(ILLNESSES)
        for seed in seeds
    ]  # fmt: skip


def train(study: Study, text: TrainingText) -> Iterator[StreamLine]:
    """The lines of a study, in slices, with arms in random order."""
    SIZES.setdefault(TINY, _TINY)
    torch.set_num_threads(1)
    lab = Lab(Settings())
    task = SeedTask(study.seed, study.arms, study.settings(), study.steps, STRIDE, text, lab.probe()[0])
    lab.begin(task)
    trainers: dict[str, Any] = lab._trainers
    patient = Patient(trainers["ill"]) if study.illness else None
    order = random.Random(study.seed)
    for start in range(0, study.steps, SLICE):
        if start == CHANGE and study.illness is None:  # from the sources of a program to prose
            assert text.other is not None
            prose = TokenWindows(text.other, SEQUENCE, "cpu", next(iter(trainers.values()))._windows(0)._vocabulary)
            for trainer in trainers.values():
                trainer._windows = lambda step, prose=prose: prose
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


def keep(study: Study, folder: Path) -> None:
    """Train a study and keep its lines, unless they are complete already."""
    path = folder / study.file
    if path.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    text = prepare_text(None, "bytes", folder, SEQUENCE)
    partial = path.with_suffix(f".{os.getpid()}")
    with gzip.open(partial, "wt", compresslevel=5) as file:
        for line in train(study, text):
            if isinstance(line, KINDS):
                file.write(json.dumps([KINDS.index(type(line)), *astuple(line)]) + "\n")
    partial.rename(path)


def kept(study: Study, folder: Path) -> list[StreamLine]:
    """The lines of a study as far as it was trained."""
    path = folder / study.file
    lines: list[StreamLine] = []
    partial = sorted(folder.glob(f"{path.stem}.*"), key=lambda file: file.stat().st_size)
    for whole in [path] if path.exists() else partial[-1:]:
        with gzip.open(whole, "rt") as file, contextlib.suppress(EOFError):
            for text in file:
                if text.endswith("]\n"):
                    kind, *values = json.loads(text)
                    lines.append(KINDS[kind](*values))
    return lines


# Two seeds of the later sorts are enough to set thresholds.
PARTS: dict[str, list[Study]] = {
    "setting": [*well(SETTING), *well(SETTING[:2], "small"), *well(SETTING[:2], "nvfp4")],
    **{sort: well(JUDGING, sort) for sort in SORTS},
    "ill": ill(SETTING[:2]),
}


@dataclass(frozen=True)
class WellRow:
    """All steps of some healthy trainings, and their alarms. A training that was cut off counts as far as it came;
    `whole` counts the others."""

    part: str
    trainings: int
    whole: int
    steps: int
    alarms: dict[str, int]
    told: list[str]

    @property
    def at_most(self) -> float:
        """The upper 95% bound of alarms in 10,000 steps."""
        return 1e4 * upper_bound(sum(self.alarms.values()), self.steps) if self.steps else math.nan


@dataclass(frozen=True)
class IllRow:
    """One illness: in how many seeds its rule alarmed, after how many steps, and which other rules did. `early` counts
    false alarms before the onset."""

    illness: str
    rule: str
    precision: str
    seeds: int
    found: int
    delays: list[int]
    alarms: dict[str, int]
    early: int


def upper_bound(events: int, trials: int, level: float = 0.95) -> float:
    """Clopper and Pearson's: the rate at which so few events are seen in 1 - `level` of all cases."""
    low, high = 0.0, 1.0
    for _ in range(100):
        rate = (low + high) / 2
        shares = (
            math.exp(math.log(math.comb(trials, seen)) + seen * math.log(rate) + (trials - seen) * math.log1p(-rate))
            for seen in range(events + 1)
        )
        low, high = (rate, high) if math.fsum(shares) > 1 - level else (low, rate)
    return high


def alarms_of(study: Study, lines: Sequence[StreamLine]) -> list[TrainingEvent]:
    """The alarms of a training whose lines come in slices."""
    health = Health(study.arms, study.settings())
    return [event for start in range(0, len(lines), 50) for event in health.see(lines[start : start + 50])]


def judge_well(part: str, folder: Path) -> WellRow | None:
    steps, trainings, whole, told, alarms = 0, 0, 0, [], Counter[str]()
    for study in PARTS[part]:
        lines = kept(study, folder)
        rows = [line for line in lines if isinstance(line, StepRow)]
        steps += len(rows)
        trainings += len({row.arm for row in rows})
        whole += sum(row.step == study.steps - 1 for row in rows)
        events = alarms_of(study, lines)
        alarms.update(event.rule for event in events)
        told += [f"{study.name}, {event.arm}, step {event.step}: {event.rule}: {event.words}" for event in events]
    return WellRow(part, trainings, whole, steps, dict(alarms), told) if steps else None


def together(rows: Sequence[WellRow]) -> WellRow:
    alarms = sum((Counter(row.alarms) for row in rows), Counter[str]())
    trainings, whole, steps = (sum(getattr(row, name) for row in rows) for name in ("trainings", "whole", "steps"))
    return WellRow("judged together", trainings, whole, steps, dict(alarms), [])


def judge_ill(folder: Path) -> list[IllRow]:
    """A row for every illness with a complete training."""
    rows = []
    for illness in ILLNESSES:
        studies = [study for study in PARTS["ill"] if study.illness is illness and (folder / study.file).exists()]
        delays, others, early = [], Counter[str](), 0
        for study in studies:
            events = alarms_of(study, kept(study, folder))
            after = [event for event in events if event.arm == "ill" and event.step >= illness.onset]
            early += len(events) - len(after)
            delays += [event.step - illness.onset for event in after if event.rule == illness.rule][:1]
            others.update({event.rule for event in after})
        if studies:
            words, rule = illness.words, illness.rule
            rows.append(IllRow(words, rule, illness.precision, len(studies), len(delays), delays, dict(others), early))
    return rows


def page(wells: Sequence[WellRow], ills: Sequence[IllRow]) -> str:
    """The confusion matrix as Markdown: illnesses, and which rules alarmed in how many seeds."""
    trained = [
        (row.part, row.trainings, row.whole, f"{row.steps:,}", sum(row.alarms.values()), f"{row.at_most:.2f}")
        for row in wells
    ]
    planted = [
        (
            row.illness, row.precision, row.rule, f"{row.found} of {row.seeds}", ", ".join(map(str, row.delays)) or "-",
            ", ".join(f"{rule} {count}" for rule, count in sorted(row.alarms.items()) if rule != row.rule) or "-",
            row.early,
        )
        for row in ills
    ]  # fmt: skip
    lines = _table("trained|trainings|to the end|steps|false alarms|in 10,000 steps, at most (95%)", trained)
    lines += [f"- {told}" for row in wells for told in row.told]
    lines += ["", *_table("illness|precision|its rule|found|late by, steps|other rules|false before it", planted)]
    return "\n".join(lines) + "\n"


def _table(heads: str, rows: Sequence[Sequence[object]]) -> list[str]:
    every = [heads.split("|"), ["---"] * (heads.count("|") + 1), *rows]
    return [f"| {' | '.join(map(str, cells))} |" for cells in every]


def cost(folder: Path) -> float:
    """The processor time of the rules for a line, in seconds, over the first healthy training that is there."""
    for study in PARTS["well"]:
        if lines := kept(study, folder):
            return seconds(lambda: alarms_of(study, lines)) / len(lines)  # noqa: B023 - called at once
    return math.nan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=Path, required=True, help="folder in which trainings are kept")
    parser.add_argument("--part", action="append", choices=PARTS, default=[], help="train it, where it is not kept")
    parser.add_argument("--report", type=Path, help="write confusion.json and confusion.md there")
    arguments = parser.parse_args()
    for part in arguments.part:
        for study in PARTS[part]:
            keep(study, arguments.streams)
            say(study.name)
    judged = [row for part in SORTS if (row := judge_well(part, arguments.streams)) is not None]
    setting, joint = judge_well("setting", arguments.streams), together(judged)
    wells, ills = [*judged, joint, *([setting] if setting is not None else [])], judge_ill(arguments.streams)
    text = page(wells, ills)
    say(text)
    if arguments.report:
        arguments.report.mkdir(parents=True, exist_ok=True)
        well = [{**asdict(row), "at_most": row.at_most} for row in wells]
        result = {**conditions(), "rules": [rule.name for rule in RULES], "well": well}
        result |= {"ill": [asdict(row) for row in ills], "seconds_a_line": cost(arguments.streams)}
        (arguments.report / "confusion.json").write_text(json.dumps(result, indent=1) + "\n")
        (arguments.report / "confusion.md").write_text(text)
    missed = [row.illness for row in ills if row.found < row.seeds]
    return 0 if not missed and joint.at_most <= 1 else 1  # nothing judged is no number, and not fine


if __name__ == "__main__":
    sys.exit(main())
