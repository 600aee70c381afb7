"""Trains one arm of a seed: its state from step to step, its reaction to steps that were not finite, validations and
checkpoints. The step itself is in features/train/step.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.features.train.lab.checkpoint import frozen_in
from fp8bench.features.train.lab.made import SILENT, BuiltInModel, MadeModel, WrapArithmetic
from fp8bench.features.train.lab.own_model import OwnModel
from fp8bench.features.train.lab.rates import RateSchedule, group_of, loss_scale_of
from fp8bench.features.train.lab.together import digest_of
from fp8bench.features.train.lab.watched_step import FaultyTensor, ModelWatch, not_finite_words
from fp8bench.features.train.request import change_of, clip_of
from fp8bench.features.train.values import (
    NOT_FINITE,
    Arm,
    ArmState,
    SeedTask,
    State,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
)
from fp8bench.model import MemoryRole
from fp8bench.protocols import Operand, Phases, Role
from fp8bench.protocols.arithmetic import Watch as WatchCasts
from fp8bench.registry import precisions

# An arm stops after this many steps in a row that were not finite.
_MOST_SKIPPED = 20


class CastState(NamedTuple):
    """State that a step passes to the next, without weights and moments: scales of casts, statistics of the model."""

    arithmetics: dict[str, dict[str, Tensor]]
    statistics: dict[str, Tensor]


class Trainer:
    """Trains an arm of one seed; `step` is the next step, counted from 0."""

    def __init__(
        self, task: SeedTask, arm: Arm, watch: WatchCasts | None = None, wrap: WrapArithmetic | None = None
    ) -> None:
        """`watch` is called with every cast."""
        self.arm, self.task = arm, task
        self.precision = precisions.get(arm.precision)
        self.settings = settings = arm.merge_settings(task.settings)
        self.step, self.stopped, self._skipped = 0, False, 0
        self.made: MadeModel = (OwnModel if task.settings.make else BuiltInModel)(task, arm, watch, wrap)
        self.model, self.together, self.arithmetics = self.made.model, self.made.together, self.made.arithmetics
        self.optimizer = self.made.make_optimizer()
        self.parameters = self.made.parameters
        self.most_norm, clip_group = clip_of(settings.clip)
        self.clip_groups = [group_of(name, parameter.ndim, clip_group) for name, parameter in self.parameters.items()]
        self._schedule = RateSchedule(settings, task.steps)
        self._lowered = 1.0  # share of all rates, which --on-nan lower-rate halves
        self.loss_scale = loss_scale_of(settings, self.precision.loss_scale)
        self.watch = ModelWatch(self.model, arm.name, task.seed, settings.compile == "no")

    @property
    def tokens(self) -> int:
        return self.made.tokens

    def state(self) -> ArmState:
        count, sizes = self.made.parameter_count, []
        for name, tensors in self._stored_tensors().items():
            sizes.append((name, sum(tensor.nbytes for tensor in tensors) / count))
        return ArmState(self.arm.name, count, self.tokens, tuple(sizes))

    def _stored_tensors(self) -> dict[str, list[Tensor]]:
        """Returns all tensors that stay in memory between two steps, by kind; those of casts appear with the first
        cast."""
        further = {
            "casts": [*self._cast_tensors()],
            "statistics": [*self.model.buffers()],
            "frozen": frozen_in(self.model),
        }
        return self.optimizer.stored_tensors() | {name: tensors for name, tensors in further.items() if tensors}

    def memory_roles(self) -> dict[MemoryRole, object]:
        tensors_of = self.optimizer.stored_tensors()
        moments = [tensors for name, tensors in tensors_of.items() if name not in ("weights", "gradients")]
        weights = [*tensors_of["weights"], *frozen_in(self.model)]
        return {
            MemoryRole.WEIGHTS: weights,
            MemoryRole.GRADIENTS: tensors_of["gradients"],
            MemoryRole.OPTIMIZER: moments,
        }

    @property
    def are_scales_due(self) -> bool:
        """Whether the next step renews scales from data. Stored ones last until the first renewal."""
        every = self.settings.refresh_scales
        return bool(every and self.step % every == 0 and (self.step or not self.settings.scales))

    @property
    def change(self) -> tuple[str, int] | None:
        """The precision that the arm changes to, and its first step in it; None if it does not change."""
        word, share = change_of(self.settings.then)
        return (word, max(1, round(share * self.task.steps))) if word else None

    def rate_share(self) -> float:
        """Returns the share of the optimizer's rates in the next step. A user's schedule has changed those already."""
        return self._lowered * (1.0 if self.made.has_own_rates else self._schedule.share(self.step))

    def end_step(
        self, row: StepRow, casts: CastState, find: Callable[[], FaultyTensor | None]
    ) -> Iterator[TrainingEvent]:
        """Adapts the loss scale. After a step that was not finite, finds its first faulty tensor with `find`, and does
        as --on-nan asks."""
        self.loss_scale.see(not row.skipped)
        if row.skipped or not math.isfinite(row.parameter_norm):
            yield from self._handle_not_finite(row, casts, find)
        self._skipped = self._skipped + 1 if row.skipped else 0
        self.step += 1

    def weights_digest(self) -> tuple[int, tuple[str, ...]]:
        """Returns a digest of the weights that all ranks share, and errors in what this rank received."""
        with self.present(SILENT):
            return digest_of(self.together.common(self.parameters)), self.together.faults()

    def scales_digest(self) -> int:
        """Returns a digest of the scales that come from earlier casts."""
        return digest_of(tensor for tensor in self._cast_tensors() if tensor.dtype == torch.float32)

    def _cast_tensors(self) -> Iterator[Tensor]:
        """Yields the state of casts, which appears with the first cast."""
        for arithmetic in self.arithmetics.values():
            yield from arithmetic.memory().values()

    def repeat(self, last: int) -> None:
        """Lets an arm that is done repeat its last steps, from its current weights."""
        # Energy windows need steps after the last one.
        if self.step == self.task.steps:
            first = max(0, self.step - last)
            self.made.repeat_steps(self.step - first)
            self.step = first

    @contextmanager
    def present(self, phase: Phases) -> Iterator[None]:
        """Gives the model's parameters their values during the body."""
        watch = self.made.watch_casts
        with self.optimizer.weights.present(), self.together.present(phase):
            if watch is not None:  # the role of weights that exist for one step would otherwise be unknown
                for parameter in self.parameters.values():
                    watch(Operand(parameter), parameter, Role.WEIGHT, None)
            yield

    def _handle_not_finite(
        self, row: StepRow, casts: CastState, find: Callable[[], FaultyTensor | None]
    ) -> Iterator[TrainingEvent]:
        """Halves the loss scale, or finds the first faulty tensor and does as --on-nan asks."""
        # A dynamic loss scale that was halved explains the overflow.
        if row.skipped and math.isfinite(row.loss) and self.loss_scale.scale < row.loss_scale:
            self.recall_casts(CastState({}, casts.statistics))
            yield self.event("scale-halved", f"gradients overflowed under a loss scale of {row.loss_scale:g}")
            return
        place = find()
        layer, tensor, values = (place.layer, place.tensor, place.values) if place is not None else ("", "", ())
        words = not_finite_words(place, row.loss, row.gradient_norm)
        values = (*values, ("loss_scale", row.loss_scale))
        yield TrainingEvent(row.arm, row.seed, row.step, NOT_FINITE, words, layer, tensor, values)
        reason = self._stop_reason(row)
        if reason:
            self.stopped = True
            yield self.event("stopped", f"the arm is stopped: {reason}")
        elif self.settings.on_nan == "lower-rate":
            self._lowered /= 2
            yield self.event("rate-lowered", f"the learning rate is {self._lowered:g} of its setting from here on")

    def _stop_reason(self, row: StepRow) -> str:
        """Returns why the arm stops after a step that was not finite; '' if it continues."""
        if not math.isfinite(row.parameter_norm):
            return "its weights are not finite; resume from the last checkpoint"
        if self._skipped + 1 == _MOST_SKIPPED:
            return f"{_MOST_SKIPPED} steps in a row were not finite"
        return "as --on-nan stop says" if self.settings.on_nan == "stop" else ""

    def event(self, kind: str, words: str) -> TrainingEvent:
        return TrainingEvent(self.arm.name, self.task.seed, self.step, kind, words)

    def remember_casts(self) -> CastState:
        arithmetics = {name: _copy(arithmetic.memory()) for name, arithmetic in self.arithmetics.items()}
        return CastState(arithmetics, _copy(dict(self.model.named_buffers())))

    def recall_casts(self, casts: CastState) -> None:
        """Takes over these tensors: the caller must not use them any more."""
        for name, memory in casts.arithmetics.items():
            self.arithmetics[name].recall({key: tensor.to(self.task.facts.key) for key, tensor in memory.items()})
        for name, buffer in self.model.named_buffers():
            buffer.copy_(casts.statistics[name])

    def validate(self, last: bool = False) -> tuple[StreamLine, ...]:
        """Validates; `last` adds what only a finished training gets. The state of casts is restored, so that later
        steps do not change."""
        place, casts = (self.arm.name, self.task.seed, self.step), self.remember_casts()
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        self.made.renew_scales(False)
        try:
            last = last or self.step == self.task.steps
            with self.present(SILENT), torch.no_grad(), self.made.cached_weights.cast(SILENT):
                looks = tuple(self.made.validate(place, last))
                scores = tuple(self.made.scores.of(self.model)) if last else ()
            for look in looks:
                if look.of == "held-out":
                    self._schedule.see_held_out(look.loss)
            return *looks, *(StepFigure(*place, name, value) for name, value in scores)
        finally:
            for module, mode in modes:
                module.training = mode
            # Validation casts, too: without restoring, delayed scales would depend on the times of validation.
            self.recall_casts(casts)

    def memory(self) -> State:
        return {
            "step": self.step,
            "precision": self.arm.precision,
            "stopped": self.stopped,
            "loss_scale": [self.loss_scale.scale, self.loss_scale.good_steps],
            "optimizer": self.optimizer.memory(),
            "schedule": self._schedule.memory(),
            "skipped": self._skipped,
            "lowered": self._lowered,
            "casts": self.remember_casts()._asdict(),
            "watched": dict(self.watch.scales),
        }

    def recall(self, memory: State) -> None:
        self.step, self.stopped = int(memory["step"]), bool(memory["stopped"])
        # The memory of casts belongs to their precision, as does the loss scale; older checkpoints have one precision.
        same = memory.get("precision", self.arm.precision) == self.arm.precision
        if not same:
            memory = {**memory, "casts": {**memory["casts"], "arithmetics": {}}, "watched": {}}
        else:
            self.loss_scale.scale, self.loss_scale.good_steps = memory["loss_scale"]
        self._skipped, self._lowered = memory["skipped"], memory.get("lowered", 1.0)
        self._schedule.recall(memory["schedule"])
        self.optimizer.recall(memory["optimizer"])
        self.recall_casts(CastState(**memory["casts"]))
        self.watch.scales = dict(memory["watched"])


def change_precision(trainer: Trainer) -> Trainer:
    """Returns a trainer of the arm in its later precision, with the same weights, moments and step; the same trainer if
    it does not change now."""
    if trainer.change is None or trainer.step < trainer.change[1]:
        return trainer
    changed = Trainer(trainer.task, trainer.arm.changed(trainer.change[0]))
    changed.recall(trainer.memory())
    return changed


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
