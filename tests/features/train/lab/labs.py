"""Labs of small trainings in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import Arm, SeedTask, StepRow, StreamLine, TokenSpan, TrainingTokens
from fp8bench.model.raw import Settings
from fp8bench.plan.corpus import Corpus
from tests.facts import CPU

# Model size in this folder's tests, in addition to the standard ones: a step takes milliseconds.
TINY = "tiny"
TINY_TIED = "tiny-tied"
SMALL = TrainerSettings(model=TINY)


def text_of(corpus: Corpus) -> TrainingTokens:
    """A text that is also its held-out part, as these tests do not depend on learning."""
    span = TokenSpan(corpus.path, 0, corpus.num_tokens)
    return TrainingTokens(span, span, 256, "bytes", corpus.identity)


def task_of(corpus: Corpus, *arms: Arm | str, seed: int = 0, steps: int = 20, **settings: Any) -> SeedTask:
    """One seed; a string is an arm in that precision."""
    made = tuple(Arm(arm, arm) if isinstance(arm, str) else arm for arm in arms)
    return SeedTask(seed, made, replace(SMALL, **settings), steps, 10, text_of(corpus), CPU)


def lab_of(task: SeedTask) -> Lab:
    lab = Lab(Settings())
    lab.begin(task)
    return lab


def rows(lines: Sequence[StreamLine]) -> list[StepRow]:
    """The rows of steps, without their times."""
    return [replace(line, seconds=0.0) for line in lines if isinstance(line, StepRow)]


def hooks_of(model: nn.Module) -> int:
    on_modules = (len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    own = ((own._backward_hooks or (), own._post_accumulate_grad_hooks or ()) for own in model.parameters())
    return sum(on_modules) + sum(len(before) + len(after) for before, after in own)


def restarted(lab: Lab, task: SeedTask, folder: Path) -> Lab:
    assert lab.save(str(folder / "kept")) == ()
    other = lab_of(task)
    other.restore(str(folder / "kept"))
    return other
