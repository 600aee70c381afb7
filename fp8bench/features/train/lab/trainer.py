"""Trains one arm of a seed. This module keeps the arm's state from step to step, reacts to steps with NaN or
infinity, and runs validations and checkpoints. The step itself is in features/train/step.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.features.train.lab.arm_model import UNTIMED_PHASE_MARKERS, ArmModel, BuiltInModel, WrapArithmetic
from fp8bench.features.train.lab.checkpoint import list_frozen_weights
from fp8bench.features.train.lab.own_model import UserArmModel
from fp8bench.features.train.lab.parallelism import digest_tensor_bits
from fp8bench.features.train.lab.rates import RateSchedule, find_clip_group, make_loss_scale
from fp8bench.features.train.lab.watched_step import FaultyTensor, ModelWatch, describe_not_finite
from fp8bench.features.train.request import parse_clip_option, parse_precision_change
from fp8bench.features.train.values import (
    NOT_FINITE_EVENT,
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

# An arm stops after this many steps in a row with NaN or infinity.
_MAX_SKIPPED_STEPS = 20


class CastsAndStatistics(NamedTuple):
    """State that one step passes to the next, besides weights and moments: the scales of casts, and the running
    statistics of the model.
    """

    arithmetics: dict[str, dict[str, Tensor]]
    statistics: dict[str, Tensor]


class Trainer:
    """Trains an arm of one seed. `step` is the number of the next step, counted from 0."""

    def __init__(
        self, task: SeedTask, arm: Arm, watch: WatchCasts | None = None, wrap: WrapArithmetic | None = None
    ) -> None:
        """`watch` is called after each cast of an operand. `wrap` receives the name of a precision and its arithmetic,
        and returns the arithmetic that layers use instead.
        """
        self.arm = arm
        self.task = task
        self.step = 0
        self.stopped = False
        self._steps_skipped = 0
        self.arm_model: ArmModel = (UserArmModel if task.settings.make else BuiltInModel)(task, arm, watch, wrap)
        self.precision = self.arm_model.precision
        self.settings = settings = self.arm_model.settings
        self.model = self.arm_model.model
        self.parallelism = self.arm_model.parallelism
        self.arithmetics = self.arm_model.arithmetics
        self.optimizer = self.arm_model.make_optimizer()
        self.parameters = self.arm_model.parameters
        self.max_norm, clip_group = parse_clip_option(settings.clip)
        self.clip_groups = [
            find_clip_group(name, parameter.ndim, clip_group) for name, parameter in self.parameters.items()
        ]
        self._schedule = RateSchedule(settings, task.steps)
        self._rate_factor = 1.0  # factor of all learning rates, which --on-nan lower-rate halves
        self.loss_scale = make_loss_scale(settings, self.precision.loss_scale)
        self.watch = ModelWatch(self.model, arm.name, task.seed, settings.compile == "no")

    @property
    def tokens(self) -> int:
        return self.arm_model.tokens

    def describe_arm_state(self) -> ArmState:
        parameter_count = self.arm_model.parameter_count
        sizes = []
        for name, tensors in self._list_stored_tensors().items():
            sizes.append((name, sum(tensor.nbytes for tensor in tensors) / parameter_count))
        return ArmState(self.arm.name, parameter_count, self.tokens, tuple(sizes))

    def _list_stored_tensors(self) -> dict[str, list[Tensor]]:
        """Returns all tensors that stay in memory between two steps, by kind. Casts keep tensors, such as scales, only
        after the first cast.
        """
        tensors_by_kind = {
            "casts": [*self._list_cast_tensors()],
            "statistics": [*self.model.buffers()],
            "frozen": list_frozen_weights(self.model),
        }
        return self.optimizer.stored_tensors() | {name: tensors for name, tensors in tensors_by_kind.items() if tensors}

    def memory_roles(self) -> dict[MemoryRole, object]:
        tensors_by_purpose = self.optimizer.stored_tensors()
        optimizer_state_tensors = [
            tensors for name, tensors in tensors_by_purpose.items() if name not in ("weights", "gradients")
        ]
        weights = [*tensors_by_purpose["weights"], *list_frozen_weights(self.model)]
        return {
            MemoryRole.WEIGHTS: weights,
            MemoryRole.GRADIENTS: tensors_by_purpose["gradients"],
            MemoryRole.OPTIMIZER: optimizer_state_tensors,
        }

    @property
    def are_new_scales_due(self) -> bool:
        """Returns whether the next step computes new scales from its data, as it does every --refresh-scales steps. In
        step 0, scales from --scales-from are used instead.
        """
        scale_renewal_steps = self.settings.refresh_scales
        return bool(
            scale_renewal_steps and self.step % scale_renewal_steps == 0 and (self.step or not self.settings.scales)
        )

    @property
    def precision_change(self) -> tuple[str, int] | None:
        """Returns the second precision of the arm and its first step in it; None if the arm has one precision."""
        precision, step_share = parse_precision_change(self.settings.then)
        return (precision, max(1, round(step_share * self.task.steps))) if precision else None

    def rate_share(self) -> float:
        """Returns the factor for the optimizer's learning rates in the next step: 1 for the full rates. A user's
        schedule is not part of this factor, because it changes the rates in the optimizer itself.
        """
        return self._rate_factor * (
            1.0 if self.arm_model.has_user_learning_rates else self._schedule.rate_share(self.step)
        )

    def finish_step(
        self, row: StepRow, casts: CastsAndStatistics, find: Callable[[], FaultyTensor | None]
    ) -> Iterator[TrainingEvent]:
        """Adapts the loss scale. After a step with NaN or infinity, calls `find` to find the first faulty tensor, and
        reacts as set by --on-nan.
        """
        self.loss_scale.adapt_scale(not row.skipped)
        if row.skipped or not math.isfinite(row.parameter_norm):
            yield from self._handle_not_finite(row, casts, find)
        self._steps_skipped = self._steps_skipped + 1 if row.skipped else 0
        self.step += 1

    def digest_shared_weights(self) -> int:
        """Returns a digest of the weights that all ranks share."""
        with self.materialise(UNTIMED_PHASE_MARKERS):
            return digest_tensor_bits(self.parallelism.list_shared_parameters(self.parameters))

    def digest_scales(self) -> int:
        """Returns a digest of the scales that depend on earlier casts."""
        return digest_tensor_bits(tensor for tensor in self._list_cast_tensors() if tensor.dtype == torch.float32)

    def _list_cast_tensors(self) -> Iterator[Tensor]:
        """Yields the tensors that casts keep between steps. They exist from the first cast on."""
        for arithmetic in self.arithmetics.values():
            yield from arithmetic.memory().values()

    def prepare_repeat(self, step_count: int) -> None:
        """Sets the step of a finished arm back by `step_count`, but keeps its weights."""
        # Measurements of energy and time need further steps, but a finished arm has none.
        if self.step == self.task.steps:
            first_step = max(0, self.step - step_count)
            self.arm_model.repeat_steps(self.step - first_step)
            self.step = first_step

    @contextmanager
    def materialise(self, phase: Phases) -> Iterator[None]:
        """Puts the weights into the model's parameters inside the `with` block."""
        cast_watch = self.arm_model.watch_casts
        with self.optimizer.weights.materialise(), self.parallelism.materialise(phase):
            # Report to the watch that these tensors are weights. `memory_roles` does not list tensors that
            # exist for one step only.
            if cast_watch is not None:
                for parameter in self.parameters.values():
                    cast_watch(Operand(parameter), parameter, Role.WEIGHT, None)
            yield

    def _handle_not_finite(
        self, row: StepRow, casts: CastsAndStatistics, find: Callable[[], FaultyTensor | None]
    ) -> Iterator[TrainingEvent]:
        """Handles a step with NaN or infinity. If the loss is finite and the loss scale was just halved, only yields an
        event. Otherwise finds the first faulty tensor, and reacts as set by --on-nan.
        """
        # 1. The loss is finite and the loss scale was just halved: the gradients overflowed because of the scale. Undo
        # the step's changes of running statistics.
        if row.skipped and math.isfinite(row.loss) and self.loss_scale.scale < row.loss_scale:
            self.restore_casts(CastsAndStatistics({}, casts.statistics))
            yield self.event("scale-halved", f"gradients overflowed under a loss scale of {row.loss_scale:g}")
            return
        # 2. Otherwise name the first tensor with NaN or infinity.
        faulty_tensor = find()
        layer, tensor, values = (
            (faulty_tensor.layer, faulty_tensor.tensor, faulty_tensor.values)
            if faulty_tensor is not None
            else ("", "", ())
        )
        words = describe_not_finite(faulty_tensor, row.loss, row.gradient_norm)
        values = (*values, ("loss_scale", row.loss_scale))
        yield TrainingEvent(row.arm, row.seed, row.step, NOT_FINITE_EVENT, words, layer, tensor, values)
        # 3. Stop the arm if further steps are useless, or react as set by --on-nan.
        if not math.isfinite(row.parameter_norm):
            reason = "its weights are not finite; resume from the last checkpoint"
        elif self._steps_skipped + 1 == _MAX_SKIPPED_STEPS:
            reason = f"{_MAX_SKIPPED_STEPS} steps in a row were not finite"
        else:
            reason = "as --on-nan stop says" if self.settings.on_nan == "stop" else ""
        if reason:
            self.stopped = True
            yield self.event("stopped", f"the arm is stopped: {reason}")
        elif self.settings.on_nan == "lower-rate":
            self._rate_factor /= 2
            yield self.event("rate-lowered", f"the learning rate is {self._rate_factor:g} of its setting from here on")

    def event(self, kind: str, words: str) -> TrainingEvent:
        return TrainingEvent(self.arm.name, self.task.seed, self.step, kind, words)

    def copy_casts(self) -> CastsAndStatistics:
        arithmetic_memory_by_name = {
            name: _clone_tensors(arithmetic.memory()) for name, arithmetic in self.arithmetics.items()
        }
        return CastsAndStatistics(arithmetic_memory_by_name, _clone_tensors(dict(self.model.named_buffers())))

    def restore_casts(self, casts: CastsAndStatistics) -> None:
        """Restores the state of casts. The trainer uses the given tensors from now on, so the caller must no longer
        change them.
        """
        for name, tensors in casts.arithmetics.items():
            self.arithmetics[name].recall({key: tensor.to(self.task.facts.key) for key, tensor in tensors.items()})
        for name, buffer in self.model.named_buffers():
            buffer.copy_(casts.statistics[name])

    def validate(self, is_last: bool = False) -> tuple[StreamLine, ...]:
        """Returns the lines of a validation. `is_last` adds what is only measured after the last step, such as scores.
        Afterwards the state of casts is restored, so that later steps do not depend on validations.
        """
        row_key = (self.arm.name, self.task.seed, self.step)
        casts = self.copy_casts()
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        self.arm_model.set_scale_renewal(False)
        try:
            is_last = is_last or self.step == self.task.steps
            with (
                self.materialise(UNTIMED_PHASE_MARKERS),
                torch.no_grad(),
                self.arm_model.cached_weights.cast(UNTIMED_PHASE_MARKERS),
            ):
                losses = tuple(self.arm_model.validate(row_key, is_last))
                scores = tuple(self.arm_model.scores.score_model(self.model)) if is_last else ()
            for loss in losses:
                if loss.of == "held-out":
                    self._schedule.record_held_out(loss.loss)
            return *losses, *(StepFigure(*row_key, name, value) for name, value in scores)
        finally:
            for module, mode in modes:
                module.training = mode
            # The validation has changed the delayed scales of casts. Restore them.
            self.restore_casts(casts)

    def get_state(self) -> State:
        return {
            "step": self.step,
            "precision": self.arm.precision,
            "stopped": self.stopped,
            "loss_scale": [self.loss_scale.scale, self.loss_scale.finite_steps],
            "optimizer": self.optimizer.get_state(),
            "schedule": self._schedule.get_state(),
            "skipped": self._steps_skipped,
            "lowered": self._rate_factor,
            "casts": self.copy_casts()._asdict(),
            "watched": dict(self.watch.scales),
        }

    def set_state(self, state: State) -> None:
        self.step = int(state["step"])
        self.stopped = bool(state["stopped"])
        # The state of casts and the loss scale may be restored only in the precision that they come from.
        if state["precision"] == self.arm.precision:
            self.loss_scale.scale, self.loss_scale.finite_steps = state["loss_scale"]
        else:
            state = {**state, "casts": {**state["casts"], "arithmetics": {}}, "watched": {}}
        self._steps_skipped = state["skipped"]
        self._rate_factor = state["lowered"]
        self._schedule.set_state(state["schedule"])
        self.optimizer.set_state(state["optimizer"])
        self.restore_casts(CastsAndStatistics(**state["casts"]))
        self.watch.scales = dict(state["watched"])


def change_precision(trainer: Trainer) -> Trainer:
    """Returns a trainer of the arm in its second precision, with the same weights, moments and step. Returns `trainer`
    unchanged before the first step in that precision.
    """
    if trainer.precision_change is None or trainer.step < trainer.precision_change[1]:
        return trainer
    changed_trainer = Trainer(trainer.task, trainer.arm.with_precision(trainer.precision_change[0]))
    changed_trainer.set_state(trainer.get_state())
    return changed_trainer


def _clone_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
