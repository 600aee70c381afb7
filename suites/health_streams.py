"""Trainings whose lines health rules are judged by: well ones, and ill ones. Kept as files, a training each."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from fp8bench.features.train.lab.evaluate import Windows
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.texts import prepare_text
from fp8bench.features.train.values import Arm, ArmRole, LayerReading, Line, SeedTask, StepFigure, StepRow, TrainingText
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


def train(study: Study, text: TrainingText) -> Iterator[Line]:
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
    trainer._windows = Windows(text.other, SEQUENCE, "cpu", trainer._windows._vocabulary)


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


def kept(study: Study, folder: Path) -> list[Line]:
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


def _lines(path: Path) -> Iterator[Line]:
    with gzip.open(path, "rt") as file, contextlib.suppress(EOFError):
        for text in file:
            if text.endswith("]\n"):
                kind, *values = json.loads(text)
                yield KINDS[kind](*values)
