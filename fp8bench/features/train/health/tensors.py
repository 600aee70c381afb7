"""Health rules about the tensors of layers: their scales, and the values that rounding loses."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict, deque
from dataclasses import field
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar

from fp8bench.features.train.health.jumps import compute_finite_log2, find_jump, usable_scale
from fp8bench.features.train.health.steps import HealthRule, Remedy, newest_values
from fp8bench.features.train.values import LayerReading, StepFigure, StepRow
from fp8bench.protocols import Role

PreviousReadings = deque[LayerReading]

# The range of E8M0, the format of block scales.
_MIN_E8M0, _MAX_E8M0 = 2.0**-127, 2.0**127


class TensorHealthRule(HealthRule[LayerReading]):
    """A rule about tensors whose role is in `roles`. `judge` receives a reading and the `window` readings before it.
    With `judges_casts`, the rule only reads tensors that may be rounded.
    """

    judged_line_types = LayerReading
    roles: ClassVar[tuple[str, ...]] = tuple(Role)
    judges_casts: ClassVar[bool] = False
    window: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self._previous: dict[tuple[str, str], PreviousReadings] = defaultdict(lambda: deque(maxlen=self.window))

    def accepts_line(self, line: Any) -> bool:
        return (
            isinstance(line, LayerReading) and line.role in self.roles and (may_be_cast(line) or not self.judges_casts)
        )

    def read_line(self, line: LayerReading) -> str:
        previous_readings = self._previous[line.layer, line.role]
        text = self.judge(line, previous_readings)
        previous_readings.append(line)
        return text

    @abstractmethod
    def judge(self, reading: LayerReading, previous: PreviousReadings) -> str:
        """Returns the text of an alarm; '' if nothing is wrong. `previous` are earlier readings of the same tensor."""


def may_be_cast(reading: LayerReading) -> bool:
    """Returns whether a tensor may have been rounded. Tensors of zeros look the same with and without a cast."""
    shows_cast_effect = reading.lag is not None or reading.signal_to_noise is not None or reading.scale != 1
    return shows_cast_effect or not reading.amax


class _ScaleJump(TensorHealthRule):
    """Detects a scale that jumps away from the median of earlier readings: up if `jump_sign` is 1, down if it is -1."""

    judges_casts = True
    window = 6
    jump_octaves = 4.0
    gradient_jump_octaves = 8.0
    alarms_at = (
        "a scale is 4 octaves (that of a gradient 8) from the median of 4 to 6 readings before, and 2 from each of them"
    )
    jump_sign: ClassVar[int]

    def judge(self, reading: LayerReading, previous: PreviousReadings) -> str:
        # Even in a healthy training, gradients of rare tokens jump by six octaves.
        octave_limit = self.gradient_jump_octaves if reading.role == Role.GRADIENT else self.jump_octaves
        distance = self.jump_sign * find_jump(usable_scale(reading), list(map(usable_scale, previous)), octave_limit)
        if distance <= 0:
            return ""
        direction = "rose" if self.jump_sign > 0 else "fell"
        return f"the scale of {name_tensor(reading)} {direction} by {distance:.1f} octaves to {reading.scale:.3g}"


class ScaleFall(_ScaleJump):
    """Detects a fall of a scale. Magnitudes usually change by 1 or 2 octaves, gradients of rare tokens by 6."""

    name = "scale-falls"
    jump_sign = -1
    remedies = (Remedy.CLIP_HARDER, Remedy.LOWER_RATE, Remedy.LAYER_IN_BF16)


class ScaleRise(_ScaleJump):
    """Detects a sudden rise of a scale. Values then became much smaller, so an input or gradient is lost."""

    name = "scale-rises"
    jump_sign = 1
    remedies = (Remedy.LOOK_AT_LAYER, Remedy.LOWER_RATE)


class ScaleUnsettled(TensorHealthRule):
    """Detects a scale that swings back and forth. Such a scale is wrong in half of the steps."""

    name = "scale-never-settles"
    judges_casts = True
    window = 9
    swing_octaves = 2.0
    min_turns = 6
    alarms_at = f"the scale turns {min_turns} times in 10 readings, by at least {swing_octaves:g} octaves each way"
    remedies = (Remedy.SHORTER_HISTORY, Remedy.RAISE_MARGIN, Remedy.LAYER_IN_BF16)

    def judge(self, reading: LayerReading, previous: PreviousReadings) -> str:
        scales = compute_finite_log2(map(usable_scale, (*previous, reading)))
        if len(scales) <= self.window or max(scales) - min(scales) < self.swing_octaves:
            return ""
        swings = [new - old for old, new in pairwise(scales)]
        turns = sum(old * new < 0 and min(abs(old), abs(new)) >= self.swing_octaves for old, new in pairwise(swings))
        if turns < self.min_turns:
            return ""
        median_swing_octaves = median(abs(swing) for swing in swings)
        return (
            f"the scale of {name_tensor(reading)} turned {turns} times in {len(scales)} readings, by "
            f"{median_swing_octaves:.1f} octaves each time"
        )


class ScaleAtRangeEnd(TensorHealthRule):
    """Detects a scale at the end of its range. Values that were rounded with such a scale are lost."""

    name = "scale-at-edge"
    judges_casts = True
    alarms_at = "a scale is 0, infinite or NaN, or at an end of E8M0's range, 2^-127 or 2^127"
    remedies = (Remedy.LAYER_IN_BF16, Remedy.LOWER_RATE)

    def judge(self, reading: LayerReading, previous: PreviousReadings) -> str:
        for value in (reading.scale, reading.least_scale, reading.largest_scale):
            if not _MIN_E8M0 < value < _MAX_E8M0:
                return f"a scale of {name_tensor(reading)} is {value:.3g}"
        return ""


class ScaleLag(TensorHealthRule):
    """Detects values beyond the range of their format, because their delayed scale is too large. Growing tensors
    usually exceed the range by hundredths of an octave. With NVFP4, rounding small scales adds up to 0.58 octaves."""

    name = "lag"
    judges_casts = True
    window = 2
    max_lag_octaves = 0.75
    alarms_at = f"values exceed the format's range by more than {max_lag_octaves:g} octaves in 3 readings in a row"
    remedies = (Remedy.SHORTER_HISTORY, Remedy.RAISE_MARGIN)

    def judge(self, reading: LayerReading, previous: PreviousReadings) -> str:
        readings = (*previous, reading)
        if len(readings) <= self.window or not all((old.lag or 0.0) > self.max_lag_octaves for old in readings):
            return ""
        return (
            f"{name_tensor(reading)} exceeds its format by {reading.lag:.1f} octaves, {len(readings)} readings in a row"
            f"{describe_stale_history(reading, previous)}"
        )


class OverflowBurst(TensorHealthRule):
    """Detects a sudden increase of saturated values. Some saturation is normal with block scales that are rounded
    down: 0.6% of normally distributed values, and 3.5% with NVFP4."""

    name = "overflow-burst"
    judges_casts = True
    window = 6
    saturated_share = 0.05
    overflow_rise_factor = 5.0
    alarms_at = (
        f"{saturated_share:.0%} of all elements saturate, and {overflow_rise_factor:g} times the median of the "
        f"{window} readings before"
    )
    remedies = (Remedy.SHORTER_HISTORY, Remedy.RAISE_MARGIN, Remedy.E5M2_GRADIENTS, Remedy.LAYER_IN_BF16)

    def judge(self, reading: LayerReading, previous: PreviousReadings) -> str:
        if reading.saturated < self.saturated_share:
            return ""
        usual_saturated_share = median(layer_reading.saturated for layer_reading in previous) if previous else 0.0
        if reading.saturated < self.overflow_rise_factor * usual_saturated_share:
            return ""
        return (
            f"{reading.saturated:.1%} of {name_tensor(reading)} saturates; {usual_saturated_share:.2%} was usual"
            f"{describe_stale_history(reading, previous)}"
        )


class UnderflowCreep(TensorHealthRule):
    """Detects more underflow than before. The share that underflows usually stays the same within a few percent."""

    name = "underflow-creep"
    judges_casts = True
    window = 8
    added_share = 0.25
    alarms_at = (
        f"in each of the last 3 readings {added_share:.0%} more of all elements underflow than in the median of the "
        f"first {window}"
    )
    remedies = (Remedy.SHORTER_HISTORY, Remedy.E5M2_GRADIENTS, Remedy.DYNAMIC_LOSS_SCALE, Remedy.LAYER_IN_BF16)
    _first_underflow_shares: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def judge(self, reading: LayerReading, previous: PreviousReadings) -> str:
        # The first readings are the baseline, because the usual share depends on the format.
        first_underflow_shares = self._first_underflow_shares.setdefault((reading.layer, reading.role), [])
        if len(first_underflow_shares) < self.window:
            first_underflow_shares.append(reading.underflow)
            return ""
        if reading.underflow < self.added_share:
            return ""
        usual_share = median(first_underflow_shares)
        last_underflow_shares = [layer_reading.underflow for layer_reading in (*list(previous)[-2:], reading)]
        if min(last_underflow_shares) < usual_share + self.added_share:
            return ""
        return (
            f"{reading.underflow:.0%} of {name_tensor(reading)} is rounded to zero; at first it was {usual_share:.0%}"
            f"{describe_stale_history(reading, previous)}"
        )


class WeightsBehind(TensorHealthRule):
    """Detects rounded weights that no longer follow the weights from which they were rounded. Their signal-to-noise
    ratio depends on the format, and normally stays within 0.4 dB in any precision."""

    name = "weights-behind"
    roles = (Role.WEIGHT,)
    judges_casts = True
    window = 20
    drop_db = 2.0
    low_reading_count = 3
    exact_db = 150.0  # a higher ratio means that nothing was rounded, for example if all weights are 1
    alarms_at = (
        f"the last {low_reading_count} of 21 readings of a weight's signal to noise are all "
        f"{drop_db:g} dB below the best of them"
    )
    remedies = (Remedy.LAYER_IN_BF16, Remedy.LOOK_AT_LAYER)

    def judge(self, reading: LayerReading, previous: PreviousReadings) -> str:
        signal_to_noise_ratios = [layer_reading.signal_to_noise for layer_reading in (*previous, reading)]
        snr_values_in_db = [value for value in signal_to_noise_ratios if value is not None and value < self.exact_db]
        if (
            len(snr_values_in_db) <= self.low_reading_count
            or max(snr_values_in_db[-self.low_reading_count :]) > max(snr_values_in_db) - self.drop_db
        ):
            return ""
        return (
            f"{name_tensor(reading)} has a signal to noise of {snr_values_in_db[-1]:.1f} dB after rounding, once "
            f"{max(snr_values_in_db):.1f} dB"
        )


class NotFiniteTensor(TensorHealthRule):
    """Detects the first tensor with NaN or infinity. The problem began there: such values spread to later tensors."""

    name = "tensor-not-finite"
    alarms_at = "a single element is NaN or infinite"
    remedies = (Remedy.LAYER_IN_BF16, Remedy.LOWER_RATE, Remedy.DYNAMIC_LOSS_SCALE)

    def judge(self, reading: LayerReading, previous: PreviousReadings) -> str:
        if not reading.not_finite and math.isfinite(reading.amax):
            return ""
        return f"{reading.not_finite:.2%} of {name_tensor(reading)} is infinite or NaN"


def name_tensor(reading: LayerReading) -> str:
    return f"{reading.layer}'s {reading.role}"


# A delayed scale is stale if it stayed the same in this many readings, while magnitudes changed by this many octaves.
_MIN_STALE_READINGS, _MIN_STALE_OCTAVES = 2, 0.5


def describe_stale_history(reading: LayerReading, previous: PreviousReadings) -> str:
    """Returns a remark on a tensor that moved while its delayed scale stayed the same; '' for any other tensor."""
    readings = [reading]
    for old in reversed(previous):
        if old.scale != reading.scale:
            break
        readings.append(old)
    magnitudes = compute_finite_log2(old.amax for old in readings)
    amax_range_octaves = max(magnitudes, default=0.0) - min(magnitudes, default=0.0)
    if reading.scale == 1 or len(readings) < _MIN_STALE_READINGS or amax_range_octaves < _MIN_STALE_OCTAVES:
        return ""
    return (
        f": its amax history is stale, since the scale stayed at {reading.scale:.3g} for {len(readings)} readings in "
        f"which the largest magnitude moved by {amax_range_octaves:.1f} octaves"
    )


class StepFigureRule(HealthRule[StepFigure]):
    """A rule about one figure. It judges each layer separately, by the last `window` values of the figure."""

    judged_line_types = StepFigure
    window: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self._last_values: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=self.window))

    def read_line(self, line: StepFigure) -> str:
        last = self._last_values[line.layer]
        last.append(line.value)
        return self.judge(line, last)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        """Returns the text of an alarm; '' if nothing is wrong. `last` are the newest values, up to that of `line`."""
        raise NotImplementedError


class KeptScale(StepFigureRule):
    """Detects a jump of a stored scale. Stored scales usually change by 1 or 2 octaves, those of gradients by 6."""

    name = "kept-scale-jumps"
    figures = ("kept_scale",)
    window = 7
    jump_octaves = 4.0
    gradient_jump_octaves = 8.0
    alarms_at = (
        f"a buffer of scales is {jump_octaves:g} octaves (for gradients {gradient_jump_octaves:g}) from the median of "
        "4 to 6 readings before, and 2 from each of them"
    )
    remedies = (Remedy.LOOK_AT_LAYER, Remedy.SHORTER_HISTORY)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        scale_jump_limit_octaves = self.gradient_jump_octaves if "grad" in line.layer else self.jump_octaves
        octave_distance = find_jump(line.value, list(last)[:-1], scale_jump_limit_octaves)
        if not octave_distance:
            return ""
        return f"{line.layer}, which a layer stores, moved by {octave_distance:+.1f} octaves to {line.value:.3g}"


# Pairs of an embedding's spread (see `measure_embedding_spread`) and the median of the latest losses.
EmbeddingSpreads = deque[tuple[float, float]]


class EmbeddingCollapse(HealthRule[Any]):
    """Detects an embedding whose rows become alike. In a token embedding, rows move apart as it learns. In a position
    embedding they may move together, but then the loss does not rise."""

    name = "embedding-collapse"
    judged_line_types = StepRow | StepFigure
    figures = ("embedding_spread",)
    window = 20
    share_of_largest_spread = 0.75
    loss_factor = 1.02
    loss_count = 10
    alarms_at = (
        f"the spread is below {share_of_largest_spread:g} of the largest in the last {window} readings, and the median "
        f"of {loss_count} losses is {loss_factor:g} times the median at that time"
    )
    remedies = (Remedy.LOWER_RATE, Remedy.HIGHER_MASTER, Remedy.LOOK_AT_LAYER)
    _losses: deque[float] = newest_values(loss_count)
    _embedding_spreads: dict[str, EmbeddingSpreads] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=EmbeddingCollapse.window))
    )

    def read_line(self, line: StepRow | StepFigure) -> str:
        if isinstance(line, StepRow):
            self._losses.append(line.loss)
            return ""
        loss = median(self._losses or [math.inf])
        embedding_spreads = self._embedding_spreads[line.layer]
        embedding_spreads.append((line.value, loss))
        largest, loss_then = max(embedding_spreads)
        if not line.value < self.share_of_largest_spread * largest or loss < self.loss_factor * loss_then:
            return ""
        return f"the rows of {line.layer or 'the embedding'} collapse: spread {line.value:.3g}, once {largest:.3g}"


class LayerStandsStill(HealthRule[Any]):
    """Detects a matrix that no longer learns. Updates of most matrices are within a factor of four of the matrices'
    median. Weight decay alone changes a matrix by 1 to 6% of this median. A rarely used layer may have no gradient for
    several steps."""

    name = "layer-stands-still"
    judged_line_types = LayerReading | StepFigure
    figures = ("embedding_spread", "gain", "rate_share", "weight_gradient", "steps_without_gradient", "update_ratio")
    update_share = 0.1
    window = 3
    min_gap_steps = 10
    gap_factor = 3
    min_gap_steps_from_start = 25
    alarms_at = (
        f"{window} updates in a row of a matrix, relative to its norm, are below {update_share:g} times the median of "
        "matrices with a gradient; low rates, by --rates or of its group, lower this limit; 2 updates are enough if "
        f"it no longer changes at all; or the matrix has no gradient in {min_gap_steps} steps in a row and in "
        f"{gap_factor} times as many as ever before, or in the first {min_gap_steps_from_start} steps"
    )
    remedies = (Remedy.LOOK_AT_LAYER, Remedy.E5M2_GRADIENTS, Remedy.LAYER_IN_BF16)
    _update_ratios: dict[str, float] = field(default_factory=dict)
    # All positive and finite update ratios, sorted. Building this list for each matrix would be slow.
    _sorted_update_ratios: list[float] = field(default_factory=list)
    _non_matrices: set[str] = field(default_factory=set)
    _low_counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _rate_share_by_layer: dict[str, float] = field(default_factory=dict)
    _updated_layers: set[str] = field(default_factory=set)
    # By layer: the step and the norm of the last gradient.
    _last_gradients: dict[str, tuple[int, float]] = field(default_factory=dict)
    # By layer: the number of consecutive steps without a gradient, now and in the longest streak.
    _steps_without_gradient: dict[str, tuple[float, float]] = field(default_factory=dict)

    def read_line(self, line: LayerReading | StepFigure) -> str:
        if isinstance(line, LayerReading):
            if line.role == Role.WEIGHT:
                self._update_ratios.setdefault(line.layer, math.nan)
            return ""
        # Only matrices count for the median: the update ratios of embeddings and norms differ.
        if line.name in ("embedding_spread", "gain"):
            self._non_matrices.add(line.layer)
            self._set_update_ratio(line.layer, math.nan)
        if line.name == "rate_share":
            self._rate_share_by_layer[line.layer] = line.value
        if line.name == "weight_gradient":
            self._last_gradients[line.layer] = line.step, line.value
        # A layer counts as a matrix only if its weight has readings.
        if line.layer not in self._update_ratios or line.layer in self._non_matrices or not math.isfinite(line.value):
            return ""
        if line.name == "steps_without_gradient":
            return self._judge_gradient_gap(line)
        return self._judge_update(line) if line.name == "update_ratio" else ""

    def _set_update_ratio(self, layer: str, ratio: float) -> None:
        previous_ratio = self._update_ratios.get(layer, math.nan)
        if 0 < previous_ratio < math.inf:
            del self._sorted_update_ratios[bisect_left(self._sorted_update_ratios, previous_ratio)]
        if 0 < ratio < math.inf:
            insort(self._sorted_update_ratios, ratio)
        self._update_ratios[layer] = ratio

    def _judge_gradient_gap(self, line: StepFigure) -> str:
        gap, longest_gap_steps = self._steps_without_gradient.get(line.layer, (0.0, 0.0))
        longest_gap_steps = max(longest_gap_steps, gap) if line.value < gap else longest_gap_steps
        self._steps_without_gradient[line.layer] = line.value, longest_gap_steps
        required_gap_steps = self.min_gap_steps if line.layer in self._last_gradients else self.min_gap_steps_from_start
        if line.value < required_gap_steps or line.value <= self.gap_factor * longest_gap_steps:
            return ""
        return f"no gradient has reached {line.layer} in {line.value:g} steps in a row"

    def _judge_update(self, line: StepFigure) -> str:
        step, gradient = self._last_gradients.get(line.layer, (line.step, math.nan))
        if self._last_gradients and (step != line.step or math.isnan(gradient)):
            self._set_update_ratio(line.layer, math.nan)
            return ""
        # A layer without a gradient changes by weight decay only, so it does not count for the median of the others.
        self._set_update_ratio(line.layer, line.value if gradient else math.nan)
        usual_ratio = median(self._sorted_update_ratios) if self._sorted_update_ratios else 0.0
        # --rates or a parameter group may intentionally give a layer a low learning rate.
        learning_rate_share = min(1.0, self.arm.min_rate_factor, self._rate_share_by_layer.get(line.layer, 1.0))
        # A rate of 0 from the start is intentional. A layer that stops changing while others change is a mistake.
        has_stopped = line.value == 0 < usual_ratio and line.layer in self._updated_layers
        is_update_too_small = has_stopped or line.value < self.update_share * learning_rate_share * usual_ratio
        self._low_counts[line.layer] = self._low_counts[line.layer] + 1 if is_update_too_small else 0
        if line.value > 0:
            self._updated_layers.add(line.layer)
        if self._low_counts[line.layer] < (self.window if line.value or line.layer not in self._updated_layers else 2):
            return ""
        return (
            f"a step changes {line.layer} by {line.value:.2g} of its norm, and other layers by {usual_ratio:.2g} of "
            "theirs"
        )


class AttentionOverflow(StepFigureRule):
    """Detects scores too large for softmax: weights below e^-88, about fp32's smallest normal number, become zero."""

    name = "attention-score-overflow"
    figures = ("attention_score",)
    max_attention_score = 88.0
    alarms_at = f"an attention score of {max_attention_score:g}"
    remedies = (Remedy.LOWER_RATE, Remedy.LOOK_AT_LAYER, Remedy.LAYER_IN_BF16)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        if not line.value >= self.max_attention_score:  # a NaN causes an alarm of the rule tensor-not-finite
            return ""
        return f"attention scores of {line.layer or 'a layer'} reach {line.value:.4g}"


class BatchNormDrift(StepFigureRule):
    """Detects running statistics that do not follow the batches. With a momentum of 0.1, they forget half of their
    value in 7 steps. The means of different batches differ by hundredths of a deviation."""

    name = "batch-norm-drift"
    figures = ("batch_norm_drift",)
    window = 3
    max_deviations = 1.0
    alarms_at = (
        f"running means are more than {max_deviations:g} standard deviation of the batch away from its mean in "
        f"{window} readings in a row, from the 6th reading on"
    )
    remedies = (Remedy.LOOK_AT_LAYER, Remedy.LOWER_RATE)
    _reading_counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        # Running statistics begin at mean 0 and variance 1, so the first five readings are ignored.
        self._reading_counts[line.layer] += 1
        if (
            self._reading_counts[line.layer] <= 5
            or len(last) < self.window
            or not all(abs(value) > self.max_deviations for value in last)
        ):
            return ""
        distance = "infinitely" if math.isinf(line.value) else f"{line.value:.2g} deviations"
        return f"running statistics of {line.layer} are {distance} from those of its batches, in {len(last)} readings"
