"""Labs of small trainings in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import Arm, SeedTask, StepRow, StreamLine, TokenSpan, TrainingText
from fp8bench.model.raw import Settings
from fp8bench.plan.corpus import Corpus
from tests.facts import CPU

# The size that the tests of this folder have beside the others: some milliseconds a step.
TINY = "tiny"
SMALL = TrainerSettings(model=TINY)


def text_of(corpus: Corpus) -> TrainingText:
    """A text that is its own held-out part: what is tested here is not what was learnt."""
    span = TokenSpan(corpus.path, 0, corpus.num_tokens)
    return TrainingText(span, span, None, 256, "bytes", corpus.identity)


def task_of(corpus: Corpus, *arms: Arm | str, seed: int = 0, steps: int = 20, **settings: Any) -> SeedTask:
    """All arms of one seed; a word is an arm in that precision."""
    made = tuple(Arm(one, one) if isinstance(one, str) else one for one in arms)
    return SeedTask(seed, made, replace(SMALL, **settings), steps, 10, text_of(corpus), CPU)


def lab_of(task: SeedTask) -> Lab:
    lab = Lab(Settings())
    lab.begin(task)
    return lab


def rows(lines: Sequence[StreamLine]) -> list[StepRow]:
    """Those of the steps, without the time that they took."""
    return [replace(one, seconds=0.0) for one in lines if isinstance(one, StepRow)]


def hooks_of(model: nn.Module) -> int:
    """How many hooks anybody has put on a model or its parameters."""
    own = sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())
    return own + sum(
        len(one._backward_hooks or ()) + len(one._post_accumulate_grad_hooks or ()) for one in model.parameters()
    )


def restarted(lab: Lab, task: SeedTask, folder: Path) -> Lab:
    """A lab that has begun anew, and goes on from what another one keeps."""
    assert lab.save(str(folder / "kept")) == ()
    other = lab_of(task)
    other.restore(str(folder / "kept"))
    return other
