"""The base class of health rules, and the rules about figures of complete steps: losses, norms, updates.

A rule reads the output lines of one arm and seed in order, and may raise an alarm at each line.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from statistics import correlation, fmean, median
from types import UnionType
from typing import Any, ClassVar, Generic, TypeVar, dataclass_transform

from fp8bench.features.train.values import LayerReading, StepFigure, StepRow

# A loss below this share of the first loss has converged: nothing is left to learn.
LEARNED_SHARE = 1e-4
L = TypeVar("L", StepRow, LayerReading, StepFigure)


@dataclass(frozen=True)
class WatchedArm:
    """The arm that a rule watches, and the reference that it is compared with. `min_rate_factor` is the smallest factor
    of --rates.
    """

    name: str
    reference: str = ""
    min_rate_factor: float = 1.0


# All rules, in the order in which their classes are defined.
RULES: list[type[HealthRule[Any]]] = []


def newest_values(length: int) -> Any:
    """Returns a dataclass field that stores the newest `length` values."""
    return field(init=False, default_factory=lambda: deque(maxlen=length))


@dataclass_transform(eq_default=False, field_specifiers=(field,))
@dataclass(eq=False)
class HealthRule(ABC, Generic[L]):
    """One kind of problem in a training. A subclass with a `name` is applied to every training, and documented.
    `judged_line_types` has the types of lines that a rule reads. If `figures` is not empty, the rule reads only these
    figures. `alarms_at` describes the limit, and the docstring gives the reasons for the limit. With `compares_arms`,
    the rule also reads the rows of the arm that its arm is compared with. The rule does not alarm while the rule named
    by `suppressed_by` alarms.
    """

    name: ClassVar[str]
    judged_line_types: ClassVar[type[StepRow] | type[LayerReading] | type[StepFigure] | UnionType] = StepRow
    figures: ClassVar[tuple[str, ...]] = ()
    alarms_at: ClassVar[str]
    remedies: ClassVar[tuple[Remedy, ...]]
    compares_arms: ClassVar[bool] = False
    suppressed_by: ClassVar[str] = ""
    arm: WatchedArm

    def __init_subclass__(cls) -> None:
        dataclass(eq=False)(cls)
        if "name" in vars(cls):
            RULES.append(cls)

    def accepts_line(self, line: Any) -> bool:
        is_unread_figure = isinstance(line, StepFigure) and self.figures and line.name not in self.figures
        return isinstance(line, self.judged_line_types) and not is_unread_figure

    @property
    def last_alarm_remedies(self) -> tuple[Remedy, ...]:
        """Returns the remedies for the last alarm."""
        return self.remedies

    @classmethod
    def rationale(cls) -> str:
        return " ".join((cls.__doc__ or "").split())

    @abstractmethod
    def read_line(self, line: L) -> str:
        """Reads the next line. Returns the text of an alarm while something is wrong, and '' otherwise."""


class Remedy(StrEnum):
    """A recommended change of a single setting."""

    RAISE_MARGIN = "raise the margin of delayed scales by an octave"
    SHORTER_HISTORY = "shorter history or interval of delayed scales"
    E5M2_GRADIENTS = "E5M2 for gradients"
    LAYER_IN_BF16 = "this layer in bf16"
    DYNAMIC_LOSS_SCALE = "a dynamic loss scale"
    CLIP_HARDER = "clip gradients harder"
    LOWER_RATE = "a lower learning rate"
    HIGHER_MASTER = "master weights, gradients and optimizer states in fp32"
    SAME_SETTINGS = "compare at the reference's rate, clipping, loss scale, tokens per step and batches"
    LOOK_AT_DATA = "look at the batches of these steps"
    LOOK_AT_LOOP = "look at the loop: zero_grad, loss scale and sums, schedule, what the optimizer was given"
    LOOK_AT_LAYER = "look at how this layer is made: its gain, its momentum, whether anything reaches it"


class GradientSpike(HealthRule[StepRow]):
    """Detects a single gradient norm far above the usual one. Norms 5 to 15 times as large are normal if batches have
    few tokens. Rare text raises the norm, but not the loss. In a model that has memorised its data, a spike costs
    almost nothing.
    """

    name = "gradient-norm-spike"
    # If the loss rises as well, the alarm of `loss-back-up` is enough.
    suppressed_by = "loss-back-up"
    window = 50
    norm_multiples_window = 500
    min_steps = 20
    norm_factor = 16.0
    norm_factor_with_loss = 8.0
    loss_factor = 2.5
    min_lost_progress_share = 0.1
    alarms_at = (
        f"the gradient norm is {norm_factor:g} times its median over {min_steps} to {window} steps, and this multiple "
        f"is above the square of the largest one in {norm_multiples_window} steps; or it is {norm_factor_with_loss:g} "
        f"times the median, and the loss exceeds its median {loss_factor:g} times as far as in any of these steps, and "
        f"by {min_lost_progress_share:.0%} of what was learned"
    )
    remedies = (Remedy.CLIP_HARDER, Remedy.LOWER_RATE, Remedy.LOOK_AT_DATA)
    _gradient_norms: deque[float] = newest_values(window)
    _losses: deque[float] = newest_values(window)
    _gradient_norm_multiples: deque[float] = newest_values(norm_multiples_window)
    _first_loss: float = math.nan

    def read_line(self, line: StepRow) -> str:
        norm, loss, norms, losses = line.gradient_norm, line.loss, self._gradient_norms, self._losses
        if not math.isfinite(norm + loss):
            return ""
        alarm_text = self._judge_gradient_norm(norm, loss) if len(norms) >= self.min_steps else ""
        self._first_loss = loss if math.isnan(self._first_loss) else self._first_loss
        norms.append(norm)
        losses.append(loss)
        return alarm_text

    def _judge_gradient_norm(self, norm: float, loss: float) -> str:
        # A spike would raise a mean, and so hide the next spike. It does not raise a median.
        usual_gradient_norm = median(self._gradient_norms)
        norm_multiple = norm / max(usual_gradient_norm, 1e-300)
        if norm_multiple > self.norm_factor_with_loss:
            # A training whose norm once was a large multiple of the median gets a higher limit.
            largest_norm_multiple = max(
                max(self._gradient_norms) / max(usual_gradient_norm, 1e-300),
                *self._gradient_norm_multiples,
                math.sqrt(self.norm_factor),
            )
            usual_loss = median(self._losses)
            is_loss_high = loss - usual_loss > max(
                self.loss_factor * (max(self._losses) - usual_loss),
                self.min_lost_progress_share * (self._first_loss - usual_loss),
            )
            if math.sqrt(norm_multiple) > largest_norm_multiple or is_loss_high:
                return f"the gradient norm is {norm:.3g}, {norm_multiple:.3g} times its median, at a loss of {loss:.4g}"
        self._gradient_norm_multiples.append(norm_multiple)
        return ""


class UpdateBurst(HealthRule[StepRow]):
    """Detects an update far above the usual size. In a linear warm-up the rate is at most twice its recent median, and
    Adam limits the effect of a single batch. A model that has memorised its data makes tiny updates. Its bursts
    cause no alarm, because they are smaller than the first updates of the training.
    """

    name = "update-norm-burst"
    suppressed_by = "loss-back-up"
    window = 20
    first_step_count = 10
    update_ratio_factor = 4.0
    alarms_at = (
        f"the update is {update_ratio_factor:g} times the median of the last {window} steps, and above the median of "
        f"the first {first_step_count}"
    )
    remedies = (Remedy.LOWER_RATE, Remedy.CLIP_HARDER)
    _update_ratios: deque[float] = newest_values(window)
    _first_ratio_median: float = 0.0

    def read_line(self, line: StepRow) -> str:
        ratio, ratios = line.update_ratio, self._update_ratios
        if line.skipped or not math.isfinite(ratio):
            return ""
        # The newest ratio is added after `usual_ratio` is computed, so that it is not compared with itself.
        usual_ratio = median(ratios) if len(ratios) >= self.first_step_count else math.inf
        ratios.append(ratio)
        if len(ratios) == self.first_step_count:
            self._first_ratio_median = median(ratios)
        if ratio <= max(self.update_ratio_factor * usual_ratio, self._first_ratio_median):
            return ""
        return (
            f"the update is {ratio:.3g} times the weights, and usually {usual_ratio:.3g} times: the loss may jump next"
        )


class LossPlateau(HealthRule[Any]):
    """Detects a loss that no longer falls. A loss falls by about the same amount whenever the number of steps
    doubles, so the last half of a training should never be flat.
    """

    name = "plateau"
    judged_line_types = StepRow | StepFigure
    figures = ("entropy",)
    min_entropy_distance_share = 0.03
    min_steps = 100
    check_step_interval = 10
    check_interval_share = 0.005
    loss_mean_count = 4
    flat_loss_range_share = 0.01
    max_mean_loss_error = 0.0075
    min_gradient_norm_share = 0.9
    alarms_at = (
        f"the last half of all steps (at least {min_steps}) has {loss_mean_count} consecutive mean losses within "
        f"{flat_loss_range_share:.1%}, each with an error of at most {max_mean_loss_error:.2%}; the median gradient "
        f"norm is at least {min_gradient_norm_share:g} times that of the steps before, the rate at least half of its "
        f"peak, and the entropy of predictions, if known, {min_entropy_distance_share:.0%} away from the loss. Checked "
        f"every {check_step_interval} steps, and from step 2,000 on once per {check_interval_share:.1%} of all steps"
    )
    remedies = (Remedy.HIGHER_MASTER, Remedy.DYNAMIC_LOSS_SCALE, Remedy.LOOK_AT_LAYER)
    _losses: list[float] = field(default_factory=list)
    _gradient_norms: list[float] = field(default_factory=list)
    _learning_rates: list[float] = field(default_factory=list)
    _prediction_entropies: deque[float] = newest_values(10)
    _next_check_loss_count: int = 0

    def read_line(self, line: StepRow | StepFigure) -> str:
        if isinstance(line, StepFigure):
            self._prediction_entropies.append(line.value)
            return ""
        if not (math.isfinite(line.loss) and math.isfinite(line.gradient_norm)):
            return ""
        self._losses.append(line.loss)
        self._gradient_norms.append(line.gradient_norm)
        self._learning_rates.append(line.rate)
        # The last half of all steps, rounded so that it can be divided into equal parts.
        length = len(self._losses) // 2 // self.loss_mean_count * self.loss_mean_count
        if (
            length < self.min_steps
            or len(self._losses) % self.check_step_interval
            or len(self._losses) < self._next_check_loss_count
        ):
            return ""
        # A check reads half of all losses, so it takes longer and longer. Check less and less often.
        self._next_check_loss_count = round(len(self._losses) * (1 + self.check_interval_share))
        # At a low learning rate a flat loss is normal.
        if min(self._learning_rates[-length], line.rate) < max(self._learning_rates) / 2:
            return ""
        # The noise of a loss can hide a slow fall. Four consecutive means distinguish a slow fall from a flat loss.
        steps_per_loss_mean = length // self.loss_mean_count
        losses = self._losses[-length:]
        part_mean_losses = [
            fmean(losses[start : start + steps_per_loss_mean]) for start in range(0, length, steps_per_loss_mean)
        ]
        mean_loss = abs(fmean(part_mean_losses) or 1.0)
        relative_loss_range = (max(part_mean_losses) - min(part_mean_losses)) / mean_loss
        error = measure_noise(losses) / math.sqrt(steps_per_loss_mean) / mean_loss
        norm, previous_norm = (
            median(self._gradient_norms[-length:]),
            median(self._gradient_norms[-2 * length : -length]),
        )
        has_nothing_to_learn = abs(part_mean_losses[-1]) < LEARNED_SHARE * abs(self._losses[0])
        has_loss_or_gradient_moved = (
            relative_loss_range > self.flat_loss_range_share or norm < self.min_gradient_norm_share * previous_norm
        )
        if has_nothing_to_learn or has_loss_or_gradient_moved or error > self.max_mean_loss_error:
            return ""
        # If the entropy of predictions equals the loss, nothing more can be learned from this text.
        if (
            self._prediction_entropies
            and abs(fmean(self._prediction_entropies) - part_mean_losses[-1])
            < self.min_entropy_distance_share * mean_loss
        ):
            return ""
        return (
            f"the loss has stayed at {fmean(part_mean_losses):.4g} for {length} steps, the gradient norm at {norm:.3g}"
        )


class NotFiniteStep(HealthRule[StepRow]):
    """Detects steps with NaN or infinity. Some of them are normal with a dynamic loss scale: it skips steps while it
    falls from 2^32 to a usable scale, and again when it tries a larger one.
    """

    name = "not-finite"
    allowed_skipped_steps = 20
    alarms_at = (
        "a loss, weight or gradient is not finite; gradients of steps that a loss scale skips only after "
        f"{allowed_skipped_steps} in a row"
    )
    remedies = (Remedy.DYNAMIC_LOSS_SCALE, Remedy.LOWER_RATE, Remedy.LAYER_IN_BF16)
    _skipped_steps: int = 0

    def read_line(self, line: StepRow) -> str:
        self._skipped_steps = self._skipped_steps + 1 if line.skipped else 0
        figures = {name: getattr(line, name) for name in ("loss", "gradient_norm", "parameter_norm")}
        not_finite_names = [name for name, value in figures.items() if not math.isfinite(value)]
        # A dynamic loss scale is found by trying: it overflows now and then.
        is_gradient_overflow = line.skipped and line.loss_scale > 1 and not_finite_names == ["gradient_norm"]
        if not not_finite_names or (is_gradient_overflow and self._skipped_steps < self.allowed_skipped_steps):
            return ""
        first_not_finite_name = not_finite_names[0]
        text = f"the {first_not_finite_name.replace('_', ' ')} is {figures[first_not_finite_name]}"
        if is_gradient_overflow:
            text += f" in {self._skipped_steps} steps in a row, at a loss scale of {line.loss_scale:g}"
        return text


class GradientScale(HealthRule[StepRow]):
    """Detects gradients that are suddenly multiplied by a factor. A change of the model would also change the loss. If
    only the gradients change, the cause is a loss scale, a sum instead of a mean, or the number of micro-batches.
    """

    name = "gradient-scale"
    suppressed_by = "loss-back-up"
    new_steps = 3
    window = 20
    jump_octaves = 1.9
    min_norm_gap_octaves = 1.0
    noise_factor = 5.0
    alarms_at = (
        f"the median gradient norms of the last {new_steps} steps and of the {window} before differ by "
        f"{jump_octaves:g} octaves and {noise_factor:g} times the noise, and each of the {new_steps} norms is at least "
        f"1 octave beyond all of the {window}; the loss stayed, or changed by the same factor, within half an octave"
    )
    remedies = (Remedy.LOOK_AT_LOOP, Remedy.DYNAMIC_LOSS_SCALE)
    _norm_and_loss_logs: deque[tuple[float, float]] = newest_values(window + new_steps)

    def read_line(self, line: StepRow) -> str:
        if not (0 < line.gradient_norm < math.inf and 0 < line.loss < math.inf):
            return ""
        self._norm_and_loss_logs.append((math.log2(line.gradient_norm), math.log2(line.loss)))
        norms, losses = zip(*self._norm_and_loss_logs, strict=True)
        earlier_norms, last_norms = norms[: -self.new_steps], norms[-self.new_steps :]
        if len(earlier_norms) < self.window:
            return ""
        norm_change, loss_change = (
            median(logs[-self.new_steps :]) - median(logs[: -self.new_steps]) for logs in (norms, losses)
        )
        # The new norms must all be above, or all below, the earlier ones: a slow drift is not a jump.
        norm_gap_octaves = (
            min(last_norms) - max(earlier_norms) if norm_change > 0 else min(earlier_norms) - max(last_norms)
        )
        if (
            abs(norm_change) < max(self.jump_octaves, self.noise_factor * measure_noise(earlier_norms))
            or norm_gap_octaves < self.min_norm_gap_octaves
        ):
            return ""
        # A mistake in the loop changes the loss by the same factor, as a sum instead of a mean does, or not at all, as
        # a loss scale does.
        if min(abs(loss_change), abs(loss_change - norm_change)) > 0.5:
            return ""
        loss_words = ", and the loss has changed as much" if abs(loss_change) > 0.5 else ""
        return (
            f"the gradient norm is {2**norm_change:.3g} times that of the {self.window} steps before{loss_words}: a "
            "loss scale, a sum, or micro-batches?"
        )


class LossGap(HealthRule[StepRow]):
    """Detects an arm whose loss is worse than the reference's. If both arms have the same batches and dropout, chance
    has little effect. Other differences between the arms are ruled out before the arithmetic is blamed. Batches count
    as the same if the losses of both arms rise and fall together.
    """

    name = "loss-gap"
    compares_arms = True
    window = 50
    margin = 0.02
    max_difference = 0.01
    max_clipping = 0.1
    min_correlation = 0.5
    alarms_at = (
        f"the loss is {margin:.0%} behind the reference's over {window} steps. Other causes are checked first: a "
        f"rate, loss scale or number of tokens that differs by {max_difference:.0%}, a share of clipping by "
        f"{max_clipping:.0%}, or batches with a correlation of losses below {min_correlation:g}"
    )
    remedies = (Remedy.LAYER_IN_BF16, Remedy.RAISE_MARGIN, Remedy.LOWER_RATE)
    _rows_by_step: dict[int, dict[str, StepRow]] = field(default_factory=dict)
    _step_row_pairs: deque[tuple[StepRow, StepRow]] = newest_values(window)
    _difference_from_reference: str = ""

    @property
    def last_alarm_remedies(self) -> tuple[Remedy, ...]:
        return (Remedy.SAME_SETTINGS,) if self._difference_from_reference else self.remedies

    def read_line(self, line: StepRow) -> str:
        arm, reference = self.arm.name, self.arm.reference
        if not reference:
            return ""
        # Arms run in turns, so that the rows of one step do not arrive together.
        rows = self._rows_by_step.setdefault(line.step, {})
        rows[line.arm] = line
        if len(rows) < 2:
            return ""
        del self._rows_by_step[line.step]
        reference_step_row = rows[reference]
        if not (reference_step_row.loss and all(math.isfinite(row.loss) for row in rows.values())):
            return ""
        self._step_row_pairs.append((reference_step_row, rows[arm]))
        if len(self._step_row_pairs) < self.window:
            return ""
        mean_loss_gap = fmean(
            (row.loss - reference_step_row.loss) / abs(reference_step_row.loss)
            for reference_step_row, row in self._step_row_pairs
        )
        if mean_loss_gap <= self.margin:
            return ""
        self._difference_from_reference = self.find_setting_difference(self._step_row_pairs)
        same_settings = (
            "rate, loss scale, tokens, clipping and batches equal the reference's, so that the arithmetic is suspected"
        )
        cause = self._difference_from_reference or same_settings
        return f"the loss is {mean_loss_gap:.1%} behind that of {reference} over {self.window} steps: {cause}"

    @classmethod
    def find_setting_difference(cls, pairs: Sequence[tuple[StepRow, StepRow]]) -> str:
        """Returns how an arm differs from the reference besides its arithmetic, as text; '' if it does not. `pairs` has
        the rows of both in the same steps: (reference's row, arm's row).
        """
        for name, title in (("rate", "rate"), ("loss_scale", "loss scale"), ("tokens", "number of tokens per step")):
            figure_ratios = [getattr(row, name) / getattr(base, name) for base, row in pairs if getattr(base, name)]
            if figure_ratios and abs(median(figure_ratios) - 1) > cls.max_difference:
                return f"its {title} is {median(figure_ratios):.3g} times as large"
        added_clipping = fmean(row.clipped - base.clipped for base, row in pairs)
        if abs(added_clipping) > cls.max_clipping:
            return (
                f"clipping takes {abs(added_clipping):.0%} {'more' if added_clipping > 0 else 'less'} of its gradients"
            )
        losses, base_losses = ([pair[place].loss for pair in pairs] for place in (1, 0))
        # Compare the differences between consecutive losses, because the general fall of the loss is the same in both
        # arms.
        loss_changes, base_loss_changes = (
            [after - before for before, after in pairwise(values)] for values in (losses, base_losses)
        )
        if (
            len(set(loss_changes)) < 2
            or len(set(base_loss_changes)) < 2
            or correlation(loss_changes, base_loss_changes) >= cls.min_correlation
        ):
            return ""
        return "its batches or their order differ: the losses do not rise and fall together"


def measure_noise(values: Sequence[float]) -> float:
    """Returns the standard deviation of the noise around a slow trend, from differences between consecutive values."""
    # 1.4826 converts a median of absolute deviations to a standard deviation. A difference of two values has sqrt(2)
    # times the noise of one.
    return 1.4826 * median(abs(following - value) for value, following in pairwise(values)) / math.sqrt(2)
