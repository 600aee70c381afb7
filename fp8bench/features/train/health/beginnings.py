"""Health rules that compare a training with its beginning, because the last few steps do not show slow growth."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import field
from statistics import median
from typing import Any

from fp8bench.features.train.health.jumps import compute_finite_log2
from fp8bench.features.train.health.steps import HealthRule, Remedy
from fp8bench.features.train.health.tensors import PreviousReadings, StepFigureRule, TensorHealthRule, name_tensor
from fp8bench.features.train.values import LayerReading, StepFigure, StepRow
from fp8bench.protocols import Role

# A magnitude over time: pairs of a step and the log2 of the magnitude.
OctaveCourse = list[tuple[int, float]]


class SlowGrowth(TensorHealthRule):
    """Detects magnitudes that grow slowly but steadily. The growth of a weight slows down as a model learns, so
    growth by a constant factor has a different cause. Inputs have a higher limit than weights, because the inputs of a
    healthy layer may double within forty steps when the model begins to use it.
    """

    name = "slow-growth"
    roles = (Role.INPUT, Role.WEIGHT)
    window = 20
    weight_readings = 5
    weight_octaves = 1.3
    input_reading_count = 9
    input_change_octaves = 2.0
    min_speed_ratio = 0.75
    line_tolerance = 0.2
    min_earlier_readings = 4
    alarms_at = (
        f"the largest magnitude of a weight changes by {weight_octaves:g} octaves in {weight_readings} readings, "
        f"that of an input by {input_change_octaves:g} in {input_reading_count}, to a value beyond "
        f"{min_earlier_readings} to {window} earlier readings; these readings deviate from a line by at most "
        f"{line_tolerance:g} of the change, and the change in their second half is at least {min_speed_ratio:g} times "
        "as fast as in the first half"
    )
    remedies = (Remedy.LOOK_AT_LAYER, Remedy.LOWER_RATE, Remedy.LOOK_AT_DATA)

    def judge(self, reading: LayerReading, previous: PreviousReadings) -> str:
        is_weight = reading.role == Role.WEIGHT
        reading_count, octaves = (
            (self.weight_readings, self.weight_octaves)
            if is_weight
            else (self.input_reading_count, self.input_change_octaves)
        )
        if len(previous) < self.min_earlier_readings + reading_count - 1:
            return ""
        # 1. Compare the two ends first: only a large change needs the logarithms of all readings.
        endpoint_amax_octaves = compute_finite_log2([previous[1 - reading_count].amax, reading.amax])
        if len(endpoint_amax_octaves) < 2 or abs(endpoint_amax_octaves[1] - endpoint_amax_octaves[0]) < octaves:
            return ""
        # 2. Check the whole course. It has no logarithm where a magnitude is 0 or not finite.
        readings = (*previous, reading)
        steps_and_log2_amaxes = [(old.step, math.log2(old.amax)) for old in readings if 0 < old.amax < math.inf]
        if len(steps_and_log2_amaxes) < len(readings):
            return ""
        change = self.find_octave_change(steps_and_log2_amaxes[:-reading_count], steps_and_log2_amaxes[-reading_count:])
        if not change:
            return ""
        return (
            f"the largest magnitude of {name_tensor(reading)} changed by {change:+.1f} octaves since step "
            f"{steps_and_log2_amaxes[-reading_count][0]}"
        )

    def find_octave_change(self, earlier_values: OctaveCourse, last_values: OctaveCourse) -> float:
        """Returns the change over `last_values` in octaves if they are on a straight line, and the newest is clearly
        above or below all earlier values. Otherwise returns 0.
        """
        (start, start_value), (middle, middle_value), (end, end_value) = (
            last_values[0],
            last_values[len(last_values) // 2],
            last_values[-1],
        )
        change = end_value - start_value
        # 1. The newest value has to be above or below all earlier values by half of the change.
        octave_distance = min((end_value - value) * math.copysign(1, change) for _, value in earlier_values)
        # 2. Both halves have to change in the same direction. Healthy growth slows down, so the second half must not.
        growth_rates_of_halves = (
            (middle_value - start_value) / (middle - start),
            (end_value - middle_value) / (end - middle),
        )
        if (
            octave_distance < abs(change) / 2
            or min(speed * change for speed in growth_rates_of_halves) <= 0
            or growth_rates_of_halves[1] / growth_rates_of_halves[0] < self.min_speed_ratio
        ):
            return 0.0
        # 3. A jump may pass these checks, but is not close to a straight line.
        deviation = max(
            abs(start_value + change * (step - start) / (end - start) - value) for step, value in last_values
        )
        return change if deviation <= self.line_tolerance * abs(change) else 0.0


class EmbeddingRow(StepFigureRule):
    """Detects a row of an embedding that becomes much larger than the others. The rows of frequent tokens grow as a
    model learns, by about a third in a thousand steps.
    """

    name = "embedding-row"
    figures = ("largest_row",)
    window = 20
    growth_factor = 2.0
    alarms_at = (
        f"the norm of the largest row, relative to that of the median row, is {growth_factor:g} times its minimum in "
        f"{window} readings"
    )
    remedies = (Remedy.LOWER_RATE, Remedy.LOOK_AT_LAYER)

    def judge(self, line: StepFigure, last_values: deque[float]) -> str:
        if not line.value > self.growth_factor * min(last_values):
            return ""
        return (
            f"the largest row of {line.layer} is {line.value:.3g} times as large as the median row, "
            f"and once was {min(last_values):.3g} times"
        )


class GradientVanished(HealthRule[Any]):
    """Detects a matrix whose gradient nearly vanishes. A matrix usually has about the same share of the gradient norm
    during the whole training. A layer that is seldom used sometimes has no gradient.
    """

    name = "gradient-vanished"
    judged_line_types = StepRow | StepFigure
    figures = ("weight_gradient",)
    window = 20
    min_readings = 5
    octaves_below_median = 5.0
    octaves_below_minimum = 2.0
    low_reading_count = 2
    longest_run_factor = 3
    alarms_at = (
        f"a matrix's share of the gradient norm is {octaves_below_median:g} octaves below the median of {min_readings} "
        f"to {window} readings and {octaves_below_minimum:g} below their minimum; this lasts for {low_reading_count} "
        f"readings plus {longest_run_factor} times the longest such run before"
    )
    remedies = (Remedy.E5M2_GRADIENTS, Remedy.DYNAMIC_LOSS_SCALE, Remedy.LAYER_IN_BF16, Remedy.LOOK_AT_LAYER)
    _gradient_norm: float = math.nan
    _norm_shares_by_layer: dict[str, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=GradientVanished.window))
    )
    # For each matrix: how many readings in a row had a low share of the gradient norm, now and in the longest such run.
    _low_share_run_lengths: dict[str, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))

    def read_line(self, line: StepRow | StepFigure) -> str:
        # 1. Store the norm of all gradients, for the shares of matrices.
        if isinstance(line, StepRow):
            self._gradient_norm = line.gradient_norm
            return ""
        if not 0 < self._gradient_norm < math.inf:
            return ""
        shares, (run_length, longest_run) = (
            self._norm_shares_by_layer[line.layer],
            self._low_share_run_lengths[line.layer],
        )
        # 2. Compare the share with its usual and its smallest value. Until these are known, only a zero is low.
        log_gradient_norm_share = math.log2(line.value / self._gradient_norm) if line.value else -math.inf
        usual_share, min_share = (
            (median(shares), min(shares)) if len(shares) >= self.min_readings else (-math.inf, -math.inf)
        )
        if line.value and log_gradient_norm_share >= min(
            usual_share - self.octaves_below_median, min_share - self.octaves_below_minimum
        ):
            shares.append(log_gradient_norm_share)
            self._low_share_run_lengths[line.layer] = 0, max(run_length, longest_run)
            return ""
        # 3. A layer that is seldom used has such runs, so alarm only if this run is much longer than all before.
        self._low_share_run_lengths[line.layer] = run_length + 1, longest_run
        if (
            len(shares) < self.min_readings
            or run_length + 1 < self.low_reading_count + self.longest_run_factor * longest_run
        ):
            return ""
        description = (
            f"has lost {usual_share - log_gradient_norm_share:.1f} octaves of its share of the gradient norm"
            if line.value
            else "is zero everywhere"
        )
        return f"the gradient of {line.layer}'s weight {description}, {run_length + 1} readings in a row"
