"""What a trainer trains: an arm's model with its batches and losses, of either kind of maker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.evaluate import Scores
from fp8bench.features.train.lab.step_optimizer import StepOptimizer, make_step_optimizer, seed_of
from fp8bench.features.train.lab.together import Alone
from fp8bench.features.train.values import Arm, SeedTask, Validation
from fp8bench.nn.whole_layers import CachedWeights
from fp8bench.protocols import Arithmetic, Phases, SilentPhases, WatchedArithmetic
from fp8bench.protocols.arithmetic import Watch as WatchCasts
from fp8bench.registry import precisions

SILENT = SilentPhases()
# Replaces the arithmetic of a mode, given both.
WrapArithmetic = Callable[[str, Arithmetic], Arithmetic]


class MadeModel:
    """A model in an arm's precision, with its batches, its losses and what it is scored on. Makers fill in the rest:
    models.py's architectures (BuiltInModel) or a user's function (OwnModel). `tokens` is the number in a step."""

    model: nn.Module
    together: Alone
    scores: Scores
    parameter_count: int
    tokens: int

    def __init__(self, task: SeedTask, arm: Arm, watch: WatchCasts | None, wrap: WrapArithmetic | None) -> None:
        """`watch` is called with every cast."""
        self.task, self.arm, self.watch_casts = task, arm, watch
        self.settings = arm.taken(task.settings)
        self.precision = precisions.get(arm.precision)
        self.arithmetics: dict[str, Arithmetic] = {}
        self._wrap = wrap

    def finish(self) -> None:
        """Find what is trained and cast; called once the model is there."""
        named = self.model.named_parameters()
        self.parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.cached_weights = CachedWeights(self.model)

    def arithmetic(self, mode: str) -> Arithmetic:
        arithmetic = precisions.get(mode).arithmetic(self.task.facts)
        return arithmetic if self._wrap is None else self._wrap(mode, arithmetic)

    def watched(self, arithmetic: Arithmetic) -> Arithmetic:
        return arithmetic if self.watch_casts is None else WatchedArithmetic(arithmetic, self.watch_casts)

    def make_optimizer(self) -> StepOptimizer:
        return make_step_optimizer(self.together.own(self.parameters), self.settings)

    @property
    def has_own_rates(self) -> bool:
        """Whether the optimizer is a user's, whose rates no schedule of ours changes."""
        return False

    def read_batch(self, step: int, number: int) -> Any:
        """This rank's part of a step's micro-batch."""
        raise NotImplementedError

    def seeded(self, step: int, number: int) -> AbstractContextManager[None]:
        """Seeds what a micro-batch draws at random."""
        part = number * self.together.shares + self.together.share
        torch.manual_seed(seed_of("step", self.task.seed, step, part))
        return nullcontext()

    def compute_loss(self, batch: Any, phase: Phases, watched: bool = False) -> Tensor:
        """The loss of a batch. `watched`: hooks on modules have to be called, which a compiled graph does not do."""
        raise NotImplementedError

    def digest_batches(self, step: int) -> tuple[int, int]:
        """Digests of the tokens that this rank reads in a step, and of those that all ranks read in it."""
        raise NotImplementedError

    def repeat_steps(self, count: int) -> None:
        """The last steps are taken again."""

    def validate(self, who: tuple[str, int, int], last: bool) -> Iterator[Validation]:
        """The held-out losses of an arm, a seed and a step; `last` adds what only a finished training gets."""
        raise NotImplementedError
