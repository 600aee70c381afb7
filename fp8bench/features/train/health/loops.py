"""Health rules that need only one training, no reference. Most detect mistakes in a loop or its batches."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import field
from statistics import fmean, median, stdev
from typing import Any

from fp8bench.features.train.health.jumps import find_jump
from fp8bench.features.train.health.steps import LEARNED_SHARE, HealthRule, Remedy, measure_noise, newest_values
from fp8bench.features.train.health.tensors import PreviousReadings, StepFigureRule, TensorHealthRule, name_tensor
from fp8bench.features.train.values import GRADIENTS_LEFT, MOMENTS_GONE, OTHERS_TRAIN, LayerReading, StepFigure, StepRow
from fp8bench.protocols import Role

# How many of the newest losses and learning rates the rules about losses read.
_LOSS_WINDOW_STEPS = 60
_RATE_WINDOW = 30


class LossRule(HealthRule[Any]):
    """A rule about losses. It never alarms if a second optimizer updates parameters outside the module, as in a GAN."""

    judged_line_types = StepRow | StepFigure
    figures = (OTHERS_TRAIN, "classes")
    _losses: deque[float] = newest_values(_LOSS_WINDOW_STEPS)
    _newest_learning_rates: deque[float] = newest_values(_RATE_WINDOW)
    _is_only_optimizer: bool = True
    _guessing_loss: float = math.inf

    def read_line(self, line: StepRow | StepFigure) -> str:
        # The loss of guessing is the logarithm of the number of classes.
        if isinstance(line, StepFigure):
            self._is_only_optimizer &= line.name != OTHERS_TRAIN
            if line.name == "classes" and line.value > 1:
                self._guessing_loss = math.log(line.value)
            return ""
        if line.skipped or not math.isfinite(line.loss):
            return ""
        self._losses.append(line.loss)
        self._newest_learning_rates.append(line.rate)
        return self.judge([*self._losses]) if self._is_only_optimizer else ""

    def judge(self, losses: list[float]) -> str:
        """Returns the text of an alarm about the newest loss, the last of `losses`, or '' if nothing is wrong."""
        raise NotImplementedError


class LossRisesAgain(LossRule):
    """Detects a loss that rises again. One hard batch may raise it, but not five in a row. A change to a different kind
    of text usually undoes less than half of the progress. Text that has nothing in common with the earlier text does
    cause an alarm: its losses look like those of wrong labels.
    """

    name = "loss-back-up"
    high_loss_count = 5
    start_loss_count = 3
    lost_share = 0.5
    noise_factor = 6.0
    excess_over_first_losses = 0.25
    learning_rate_rise_factor = 1.5
    lost_share_after_rate_rise = 0.2
    noise_factor_after_rate_rise = 4.0
    alarms_at = (
        f"{high_loss_count} losses in a row exceed the lowest mean of ten by {lost_share:.0%} of what was learned and "
        f"by {noise_factor:g} times the noise ({lost_share_after_rate_rise:.0%} and {noise_factor_after_rate_rise:g} "
        f"times if the rate rose {learning_rate_rise_factor:g} times in {_RATE_WINDOW} steps); or the first "
        f"{start_loss_count} losses by {excess_over_first_losses:.0%}"
    )
    remedies = (Remedy.LOWER_RATE, Remedy.CLIP_HARDER, Remedy.LOOK_AT_DATA)
    _first_losses: list[float] = field(default_factory=list)
    _lowest_mean: float = math.inf

    def judge(self, losses: list[float]) -> str:
        # Store the first losses, because a collapsed training returns to their level.
        if len(self._first_losses) < self.start_loss_count:
            self._first_losses.append(losses[-1])
        earlier_losses, last_losses = losses[: -self.high_loss_count], losses[-self.high_loss_count :]
        # Use a mean of ten steps, because a single easy batch would give too low a value.
        if len(earlier_losses) >= 10:
            self._lowest_mean = min(self._lowest_mean, fmean(earlier_losses[-10:]))
        if len(earlier_losses) < self.start_loss_count:
            return ""
        lowest_loss, first_loss = min(last_losses), median(self._first_losses)
        if lowest_loss > max(self._first_losses) + self.excess_over_first_losses * abs(first_loss):
            return (
                f"the loss rose from {self._first_losses[0]:.4g} in the first watched step to {lowest_loss:.4g} or "
                f"more in the last {self.high_loss_count}: is the learning rate too high, or did the data change?"
            )
        # Compare the rise of the loss with its earlier fall: losing half of it is a collapse under any loss function.
        loss_decrease = first_loss - self._lowest_mean
        noise = measure_noise(earlier_losses) if len(earlier_losses) > 10 else math.inf
        rate = self._newest_learning_rates[-1]
        rate_rise_text = (
            f": the learning rate rose to {rate:.3g}"
            if rate > self.learning_rate_rise_factor * self._newest_learning_rates[0]
            else ""
        )
        lost_share, noise_factor = (
            (self.lost_share_after_rate_rise, self.noise_factor_after_rate_rise)
            if rate_rise_text
            else (self.lost_share, self.noise_factor)
        )
        if loss_decrease <= 0 or lowest_loss - self._lowest_mean < max(
            lost_share * loss_decrease, noise_factor * noise
        ):
            return ""
        return (
            f"the loss has risen again from {self._lowest_mean:.4g}, and has stayed above {lowest_loss:.4g} for "
            f"{self.high_loss_count} steps{rate_rise_text}"
        )


class LossAboveGuessing(LossRule):
    """Detects a loss above that of random guessing. A model that learns gets below the loss of guessing within some
    steps, or falls towards it.
    """

    name = "loss-above-guessing"
    # If the loss rises as well, the alarm of `loss-back-up` is enough.
    suppressed_by = "loss-back-up"
    loss_count = 8
    guessing_factor = 1.25
    falling_factor = 0.9
    alarms_at = (
        f"{loss_count} losses in a row are {guessing_factor:g} times the logarithm of the number of classes, and "
        f"their median is less than a tenth below that of the {loss_count} before"
    )
    remedies = (Remedy.LOWER_RATE, Remedy.LOOK_AT_LOOP, Remedy.LOOK_AT_DATA)

    def judge(self, losses: list[float]) -> str:
        earlier_losses, last_losses = losses[-2 * self.loss_count : -self.loss_count], losses[-self.loss_count :]
        if len(earlier_losses) < self.loss_count or min(last_losses) < self.guessing_factor * self._guessing_loss:
            return ""
        if median(last_losses) < self.falling_factor * median(earlier_losses):
            return ""
        return (
            f"the loss is {losses[-1]:.4g}, {losses[-1] / self._guessing_loss:.3g} times that of guessing: is the "
            "learning rate too high, or the loss a sum?"
        )


class LossLeaked(LossRule):
    """Detects a sudden drop of the loss, as if the answers had leaked into the inputs. Losses usually fall by a few
    percent per step. Losses of batches with a single example vary more, so they are not judged.
    """

    name = "loss-leaked"
    low_loss_count = 3
    max_loss_share = 0.1
    noise_factor = 5.0
    alarms_at = (
        f"{low_loss_count} losses in a row are below {max_loss_share:g} of the smallest of 20 before, and "
        f"{noise_factor:g} times their noise below it"
    )
    remedies = (Remedy.LOOK_AT_DATA,)

    def judge(self, losses: list[float]) -> str:
        earlier_losses, last_losses = (
            losses[-20 - self.low_loss_count : -self.low_loss_count],
            losses[-self.low_loss_count :],
        )
        if (
            len(earlier_losses) < 20
            or min(earlier_losses) <= 0
            or not 0 < max(last_losses) < self.max_loss_share * min(earlier_losses)
        ):
            return ""
        # Compare logarithms: leaked answers divide the loss by a factor, and noise is proportional to the loss.
        noise = measure_noise([math.log2(value) for value in earlier_losses])
        if math.log2(min(earlier_losses) / max(last_losses)) < self.noise_factor * noise:
            return ""
        return (
            f"the loss fell at once from {median(earlier_losses):.4g} to {median(last_losses):.4g}: are answers among "
            "the inputs?"
        )


class NoUpdate(HealthRule[Any]):
    """Detects steps that leave the weights unchanged. A few such steps are normal, because schedules begin and end with
    a step at a rate of 0. If a float32 weight changes at all, it changes by at least 6e-8 of its value.
    """

    name = "no-update"
    judged_line_types = StepRow | StepFigure
    # Watched steps have a digest of all weights. It reveals whether any weight changed.
    figures = ("weights_before",)
    still_step_count = 5
    equal_reading_count = 3
    alarms_at = (
        f"in {still_step_count} steps in a row the rate is 0 or no weight has a gradient; in 2 steps the update is "
        f"below 1e-8 of the weights; in {equal_reading_count} watched steps the weights are equal to the bit"
    )
    remedies = (Remedy.LOOK_AT_LOOP, Remedy.HIGHER_MASTER)
    _counts_by_symptom: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _weight_digest: float = math.nan
    _first_loss: float = 0.0
    _has_learned: bool = False

    def read_line(self, line: StepRow | StepFigure) -> str:
        if isinstance(line, StepFigure):
            is_equal, self._weight_digest = line.value == self._weight_digest and not self._has_learned, line.value
            return self._alarm_if_lasting("the weights are the same to the bit", is_equal, self.equal_reading_count - 1)
        if line.skipped or not math.isfinite(line.loss):
            return ""
        self._first_loss = self._first_loss or line.loss
        # If the loss is near zero, no update is needed.
        self._has_learned = abs(line.loss) <= LEARNED_SHARE * abs(self._first_loss)
        if self._has_learned:
            return ""
        has_no_gradient = line.gradient_norm == 0
        alarm_text = self._alarm_if_lasting("the rate is 0", line.rate == 0, self.still_step_count)
        alarm_text = (
            self._alarm_if_lasting("no gradient arrives at any weight", has_no_gradient, self.still_step_count)
            or alarm_text
        )
        if math.isfinite(line.update_ratio):
            is_update_small = line.update_ratio < 1e-8 and line.rate != 0 and not has_no_gradient
            alarm_text = (
                self._alarm_if_lasting("updates are less than 1e-8 of the weights", is_update_small, 2) or alarm_text
            )
        return alarm_text

    def _alarm_if_lasting(self, symptom: str, is_still: bool, limit: int) -> str:
        self._counts_by_symptom[symptom] = self._counts_by_symptom[symptom] + 1 if is_still else 0
        return f"steps change nothing: {symptom}" if self._counts_by_symptom[symptom] >= limit else ""


class SameInputs(HealthRule[StepFigure]):
    """Detects a loader that repeats the same batches. An epoch usually has more than four batches, and a loop that
    trains on all data in each step usually has over a hundred examples. A new epoch also repeats batches, but only
    after all batches of the previous epoch. With shuffling, some of them were last read a whole epoch ago.
    """

    name = "same-inputs"
    judged_line_types = StepFigure
    figures = ("inputs_again", "inputs_cycled", "inputs_period", "inputs_new", "examples")
    repeated_steps = 7
    min_example_count = 128
    max_cycle_length = 4
    cycled_step_count = 8
    alarms_at = (
        f"the same inputs in 8 steps in a row, if other inputs came before or there are fewer than {min_example_count} "
        f"examples; {cycled_step_count} steps in a row that repeat batches of the last 100, none of which is older "
        f"than a quarter of the number of new batches; or at most {max_cycle_length} batches that are repeated from "
        f"the start, with fewer than {2 * min_example_count} examples in all"
    )
    remedies = (Remedy.LOOK_AT_DATA,)
    _last_figure_values: dict[str, float] = field(default_factory=dict)

    def read_line(self, line: StepFigure) -> str:
        self._last_figure_values[line.name] = line.value
        # 'examples' is the last of these figures in a step, so all others of this step have been read.
        if line.name != "examples" or "inputs_again" not in self._last_figure_values:
            return ""
        repeated_step_count = self._last_figure_values["inputs_again"]
        if repeated_step_count >= self.repeated_steps and (
            repeated_step_count < line.step or line.value < self.min_example_count
        ):
            # Full-batch training repeats its inputs intentionally.
            return f"the model was given the same inputs in {repeated_step_count + 1:g} steps in a row"
        steps_cycled, period, new_batch_count = (
            self._last_figure_values.get(name, 0.0) for name in ("inputs_cycled", "inputs_period", "inputs_new")
        )
        if steps_cycled < self.cycled_step_count or period < 2:
            return ""
        repeats_from_start = (
            period == new_batch_count <= self.max_cycle_length and line.value * period < 2 * self.min_example_count
        )
        if not repeats_from_start and self.max_cycle_length * period > new_batch_count:
            return ""
        return (
            f"the last {steps_cycled:g} batches repeat earlier ones, at most {period:g} steps old, after "
            f"{new_batch_count:g} new batches"
        )


class AmaxJump(TensorHealthRule):
    """Detects a jump of the largest magnitude of a tensor without scales. In any precision, it usually changes by 1 or
    2 octaves (factors of 2) between readings.
    """

    name = "amax-jump"
    roles = (Role.INPUT, Role.WEIGHT)
    window = 6
    jump_octaves = 3.5
    alarms_at = (
        f"without scales, the largest magnitude is {jump_octaves:g} octaves from the median of 4 to "
        f"{window} readings before, and 2 from each of them"
    )
    remedies = (Remedy.LOOK_AT_DATA, Remedy.LOWER_RATE, Remedy.LOOK_AT_LAYER)

    def judge(self, reading: LayerReading, previous: PreviousReadings) -> str:
        octave_distance = find_jump(reading.amax, [old.amax for old in previous], self.jump_octaves)
        if not octave_distance or (octave_distance < 0 and reading.role == Role.WEIGHT):
            return ""
        if any(layer_reading.scale != 1 for layer_reading in (reading, *previous)):
            return ""
        direction = "rose" if octave_distance > 0 else "fell"
        return (
            f"the largest magnitude of {name_tensor(reading)} {direction} by {octave_distance:+.1f} octaves to "
            f"{reading.amax:.3g}"
        )


class DeadUnits(TensorHealthRule):
    """Detects inputs of a layer that are mostly zeros. Usually, activation functions make half of their outputs zero,
    and dropout up to three quarters. Bags of words are an exception, because they consist mostly of zeros from the
    start.
    """

    name = "dead-units"
    roles = (Role.INPUT,)
    window = 6
    min_zero_share = 0.97
    added_share = 0.2
    constant_share = 0.999
    alarms_at = (
        f"{min_zero_share:.0%} of a layer's inputs are zeros, {added_share:.0%} more than the median of {window} "
        f"readings; or {constant_share:.1%} twice in a row"
    )
    remedies = (Remedy.LOWER_RATE, Remedy.LOOK_AT_LAYER, Remedy.LOOK_AT_DATA)
    _first_layer: str = ""

    def judge(self, reading: LayerReading, previous: PreviousReadings) -> str:
        self._first_layer = self._first_layer or reading.layer
        if not previous or reading.zeros < self.min_zero_share:
            return ""
        usual_zero_share = median(layer_reading.zeros for layer_reading in previous)
        has_zero_share_risen = reading.zeros >= usual_zero_share + self.added_share
        # The data of the first layer may be sparse. Later layers read outputs of layers.
        is_always_zero = (
            reading.layer != self._first_layer and min(reading.zeros, previous[-1].zeros) >= self.constant_share
        )
        if not has_zero_share_risen and not is_always_zero:
            return ""
        usual_share_text = f"; {usual_zero_share:.0%} was usual" if has_zero_share_risen else ""
        return f"{reading.zeros:.1%} of {name_tensor(reading)} are zeros{usual_share_text}"


class NormGain(StepFigureRule):
    """Detects gains of a norm layer that grow or shrink by a large factor. Gains begin at 1 or 0, and change by about
    the learning rate per step.
    """

    name = "norm-gain"
    figures = ("gain",)
    window = 20
    gain_change_factor = 3.0
    min_gain = 0.5
    alarms_at = (
        f"the root mean square of gains is more than {gain_change_factor:g} times its minimum in {window} readings "
        f"(taken as at least {min_gain:g}), or less than 1/{gain_change_factor:g} of its maximum (if that is at least "
        f"{min_gain:g})"
    )
    remedies = (Remedy.LOWER_RATE, Remedy.LOOK_AT_LAYER)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        lowest_gain, highest_gain = min(last), max(last)
        # A gain near 0 easily grows by a large factor, so compare the gain with `min_gain` at least.
        has_gain_grown = line.value > self.gain_change_factor * max(lowest_gain, self.min_gain)
        has_gain_shrunk = highest_gain >= self.min_gain and line.value * self.gain_change_factor < highest_gain
        if not has_gain_grown and not has_gain_shrunk:
            return ""
        opposite_extreme_gain = lowest_gain if has_gain_grown else highest_gain
        return (
            f"the gain of {line.layer or 'the model'} is {line.value:.3g}, and was {opposite_extreme_gain:.3g} earlier"
        )


class LargeLogits(StepFigureRule):
    """Detects logits so far apart that their softmax underflows: e^-88 is the smallest normal number of fp32. In a
    model that memorises its data, the range of logits grows slowly to 20 or 40, which is no problem.
    """

    name = "large-logits"
    figures = ("logit_range",)
    window = 7
    max_logit_range = 88.0
    jump_logit_range = 30.0
    logit_jump_factor = 4.0
    alarms_at = (
        f"logits span {max_logit_range:g}; or {jump_logit_range:g}, if that is {logit_jump_factor:g} times the median "
        f"of the last {window} readings"
    )
    remedies = (Remedy.LOWER_RATE, Remedy.LOOK_AT_LAYER)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        usual_range = median(last)
        if not (
            line.value >= self.max_logit_range
            or (line.value >= self.jump_logit_range and line.value > self.logit_jump_factor * usual_range)
        ):
            return ""
        earlier_logit_ranges = list(last)[:-1]
        usual_range_text = f"; {median(earlier_logit_ranges):.3g} was usual" if earlier_logit_ranges else ""
        return f"the logits of an example span {line.value:.4g}{usual_range_text}"


class UnclearedGradients(StepFigureRule):
    """Detects gradients that the loop did not clear. No threshold is needed, because the rule sees whether each
    gradient tensor was changed.
    """

    name = "gradients-left"
    figures = (GRADIENTS_LEFT,)
    alarms_at = "no gradient is changed between an update and the next backward, nor between the backwards of a step"
    remedies = (Remedy.LOOK_AT_LOOP,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        return "gradients of the previous step were not cleared, so they add up: zero_grad is missing"


class MomentsGone(StepFigureRule):
    """Detects an optimizer that has lost its state. Normally the state only gains parameters and steps."""

    name = "moments-gone"
    figures = (MOMENTS_GONE,)
    alarms_at = "the optimizer's state has fewer parameters than before, or counts fewer steps"
    remedies = (Remedy.LOOK_AT_LOOP,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        return "the optimizer has lost its moments: does the checkpoint have its state, and is that loaded?"


class DuplicateInputs(StepFigureRule):
    """Detects batches that contain the same example several times. Usually a loader reads each example once per epoch.
    Drawing with replacement repeats only few examples of a large dataset.
    """

    name = "duplicate-inputs"
    figures = ("duplicates",)
    window = 3
    duplicate_share = 0.5
    alarms_at = (
        f"in {window} batches {duplicate_share:.0%} of the examples equal another example; only for eight or more "
        "examples of eight or more values"
    )
    remedies = (Remedy.LOOK_AT_DATA,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        if len(last) < self.window or min(last) < self.duplicate_share:
            return ""
        return f"{line.value:.0%} of the examples of a batch are copies of other examples in it"


class DataDrift(HealthRule[StepFigure]):
    """Detects inputs whose mean or deviation moves away from that of the first batches. Batches from one source differ
    from the first batches only as much as these differ from each other.
    """

    name = "data-drift"
    judged_line_types = StepFigure
    figures = (OTHERS_TRAIN, "input_mean", "input_deviation")
    first_batch_count = 10
    new_batches = 4
    noise_factor = 6.0
    deviation_share = 0.5
    alarms_at = (
        f"in {new_batches} watched batches in a row, the mean or the deviation of the inputs is on the same side of "
        f"its average over the first {first_batch_count}, at a distance of {noise_factor:g} standard deviations of "
        f"these {first_batch_count} values and of {deviation_share:g} of the inputs' deviation"
    )
    remedies = (Remedy.LOOK_AT_DATA,)
    _is_only_optimizer: bool = True
    _first_figure_values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _newest_figure_values: dict[str, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=DataDrift.new_batches))
    )

    def read_line(self, line: StepFigure) -> str:
        # Inputs that another model generates change as that model learns.
        self._is_only_optimizer &= line.name != OTHERS_TRAIN
        if not self._is_only_optimizer:
            return ""
        first_values, newest_input_values = self._first_figure_values[line.name], self._newest_figure_values[line.name]
        if len(first_values) < self.first_batch_count:
            first_values.append(line.value)
            return ""
        newest_input_values.append(line.value)
        usual_value, first_deviation = (
            fmean(first_values),
            median(self._first_figure_values["input_deviation"] or [0.0]),
        )
        distances = [value - usual_value for value in newest_input_values]
        min_distance = min(map(abs, distances))
        # Without drift, the newest batches scatter around the average of the first batches. After a drift, all of them
        # are on the same side of it.
        is_one_sided = min(distances) > 0 or max(distances) < 0
        if (
            len(distances) < self.new_batches
            or not is_one_sided
            or min_distance <= max(self.noise_factor * stdev(first_values), self.deviation_share * first_deviation)
        ):
            return ""
        return (
            f"the {line.name.removeprefix('input_')} of the inputs has moved from {usual_value:.3g} to "
            f"{line.value:.3g}; their deviation was {first_deviation:.3g} at first"
        )
