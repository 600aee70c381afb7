"""Health rules over the tensors of layers: their scales, and what rounding loses."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import field
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar

from fp8bench.features.train.health.steps import HealthRule, Remedy, newest
from fp8bench.features.train.values import LayerReading, StepFigure, StepRow
from fp8bench.protocols import Role

Before = deque[LayerReading]

# The range of E8M0 scales of blocks.
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-127, 2.0**127


class TensorRule(HealthRule[LayerReading]):
    """A rule over the readings of each tensor: `judge` receives a reading and the `keep` previous ones."""

    reads = LayerReading
    keep: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self._before: dict[tuple[str, str], deque[LayerReading]] = defaultdict(lambda: deque(maxlen=self.keep))

    def see(self, line: LayerReading) -> str:
        previous = self._before[line.layer, line.role]
        words = self.judge(line, previous)
        previous.append(line)
        return words

    @abstractmethod
    def judge(self, reading: LayerReading, previous: Before) -> str:
        """Returns the sentence of an alarm, or ''."""


def octaves(scale: float) -> float | None:
    """Returns log2 of a scale; None if it is not positive and finite."""
    return math.log2(scale) if 0 < scale < math.inf else None


def known_octaves(magnitudes: Iterable[float]) -> list[float]:
    return [math.log2(magnitude) for magnitude in magnitudes if 0 < magnitude < math.inf]


def scale_of(reading: LayerReading) -> float | None:
    """Returns the scale in octaves; None without one, or for a tensor of zeros, whose scale of 1 is meaningless."""
    return octaves(reading.scale) if reading.amax else None


class _Jump(TensorRule):
    """A scale departs from the median of earlier ones, in the direction of `sign`."""

    keep = 6
    fewest = 4
    far = 4.0
    gradients = 8.0
    alarms_at = "4 octaves from the median of 6 readings, of gradients 8, and 2 beyond all of them; from the 4th on"
    sign: ClassVar[int]

    def judge(self, reading: LayerReading, previous: Before) -> str:
        # Compare scales in octaves, the unit of formats and powers of two.
        now = scale_of(reading)
        scales = [value for value in map(scale_of, previous) if value is not None]
        if now is None or len(scales) < self.fewest:
            return ""
        moved = self.sign * (now - median(scales))
        # Gradients of rare tokens jump by six octaves even in a healthy training.
        limit = self.gradients if reading.role == Role.GRADIENT else self.far
        if moved < limit or min(self.sign * (now - old) for old in scales) < 2:
            return ""
        direction = "rose" if self.sign > 0 else "fell"
        return f"the scale of {of(reading)} {direction} by {moved:.1f} octaves to {reading.scale:.3g}"


class ScaleFall(_Jump):
    """Magnitudes move by an octave or two between readings, of gradients of few and rare tokens by six."""

    name = "scale-falls"
    sign = -1
    remedies = (Remedy.CLIP_HARDER, Remedy.LOWER_RATE, Remedy.LAYER_IN_BF16)


class ScaleRise(_Jump):
    """As for a scale that falls: a tensor sixteen times as small has lost its input or its gradient."""

    name = "scale-rises"
    sign = 1
    remedies = (Remedy.LOOK_AT_LAYER, Remedy.LOWER_RATE)


class ScaleUnsettled(TensorRule):
    """A scale may follow its tensor; one that swings as far as it goes is wrong in half of the steps."""

    name = "scale-never-settles"
    keep = 9
    swing = 2.0
    turns = 6
    alarms_at = f"{turns} turns of at least {swing:g} octaves each way in 10 readings"
    remedies = (Remedy.SHORTER_HISTORY, Remedy.RAISE_MARGIN, Remedy.LAYER_IN_BF16)

    def judge(self, reading: LayerReading, previous: Before) -> str:
        scales = map(scale_of, (*previous, reading))
        sound = [scale for scale in scales if scale is not None]
        if len(sound) <= self.keep:
            return ""
        moves = [new - old for old, new in pairwise(sound)]
        turns = sum(old * move < 0 and min(abs(old), abs(move)) >= self.swing for old, move in pairwise(moves))
        if turns < self.turns:
            return ""
        swing = median(abs(move) for move in moves)
        return (
            f"the scale of {of(reading)} turned {turns} times in {len(sound)} readings, by {swing:.1f} octaves a time"
        )


class ScaleAtEdge(TensorRule):
    """Nothing comes back through such a scale; a tensor of zeros has a scale of 1."""

    name = "scale-at-edge"
    alarms_at = "0, infinite, no number, or 2^-127 or 2^127, where the exponents of E8M0 end"
    remedies = (Remedy.LAYER_IN_BF16, Remedy.LOWER_RATE)

    def judge(self, reading: LayerReading, previous: Before) -> str:
        for value in (reading.scale, reading.least_scale, reading.largest_scale):
            if not _LEAST_SCALE < value < _LARGEST_SCALE:
                return f"a scale of {of(reading)} is {value:.3g}"
        return ""


class Lag(TensorRule):
    """Delayed scales are late by hundredths where a tensor grows; the least of NVFP4 are rounded by 0.58."""

    name = "lag"
    keep = 2
    far = 0.75
    alarms_at = f"above {far:g} octaves in 3 readings in a row"
    remedies = (Remedy.SHORTER_HISTORY, Remedy.RAISE_MARGIN)

    def judge(self, reading: LayerReading, previous: Before) -> str:
        lags = [layer_reading.lag for layer_reading in (*previous, reading) if layer_reading.lag is not None]
        if len(lags) <= self.keep or min(lags) <= self.far:
            return ""
        words = f"{of(reading)} is {lags[-1]:.1f} octaves beyond its format, {len(lags)} readings in a row"
        return words + stale_history(reading, previous)


class OverflowBurst(TensorRule):
    """Block scales that are rounded down cut off 0.6% of normal values, those of NVFP4 3.5%, always."""

    name = "overflow-burst"
    keep = 6
    share = 0.05
    times = 5.0
    alarms_at = f"{share:.0%} of all elements, and {times:g} times the median of the {keep} readings before"
    remedies = (Remedy.SHORTER_HISTORY, Remedy.RAISE_MARGIN, Remedy.E5M2_GRADIENTS, Remedy.LAYER_IN_BF16)

    def judge(self, reading: LayerReading, previous: Before) -> str:
        usual = median(layer_reading.saturated for layer_reading in previous) if previous else 0.0
        if reading.saturated < self.share or reading.saturated < self.times * usual:
            return ""
        words = f"{reading.saturated:.1%} of {of(reading)} is beyond its format; {usual:.2%} was usual"
        return words + stale_history(reading, previous)


class UnderflowCreep(TensorRule):
    """How much of a tensor underflows is a matter of its format, and the same within a few percent all along."""

    name = "underflow-creep"
    keep = 8
    rise = 0.25
    alarms_at = f"the last 3 readings all {rise:.0%} of all elements above the median of the first {keep}"
    remedies = (Remedy.SHORTER_HISTORY, Remedy.E5M2_GRADIENTS, Remedy.DYNAMIC_LOSS_SCALE, Remedy.LAYER_IN_BF16)
    _first: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def judge(self, reading: LayerReading, previous: Before) -> str:
        # The first readings are the baseline: how much underflows at all depends on the format.
        first = self._first.setdefault((reading.layer, reading.role), [])
        if len(first) < self.keep:
            first.append(reading.underflow)
            return ""
        usual = median(first)
        last = [layer_reading.underflow for layer_reading in (*list(previous)[-2:], reading)]
        if min(last) < usual + self.rise:
            return ""
        words = f"{reading.underflow:.0%} of {of(reading)} is rounded to zero; at first it was {usual:.0%}"
        return words + stale_history(reading, previous)


class WeightsBehind(TensorRule):
    """How well a format rounds weights is a matter of the format: within 0.4 dB all along, in any precision."""

    name = "weights-behind"
    keep = 20
    far = 2.0
    wanted = 3
    exact = 150.0  # dB from which on nothing was rounded: weights that begin as ones are on every grid
    alarms_at = f"the last {wanted} of 21 readings of a weight's signal to noise all {far:g} dB below the best"
    remedies = (Remedy.LAYER_IN_BF16, Remedy.LOOK_AT_LAYER)

    def judge(self, reading: LayerReading, previous: Before) -> str:
        if reading.role != Role.WEIGHT:
            return ""
        ratios = [layer_reading.signal_to_noise for layer_reading in (*previous, reading)]
        noise = [value for value in ratios if value is not None and value < self.exact]
        if len(noise) <= self.wanted or max(noise[-self.wanted :]) > max(noise) - self.far:
            return ""
        return f"{of(reading)} is multiplied at {noise[-1]:.1f} dB of itself, once {max(noise):.1f} dB"


class NotFiniteTensor(TensorRule):
    """They spread to every element of every tensor behind; the first layer that has some is where to look."""

    name = "tensor-not-finite"
    alarms_at = "a single element"
    remedies = (Remedy.LAYER_IN_BF16, Remedy.LOWER_RATE, Remedy.DYNAMIC_LOSS_SCALE)

    def judge(self, reading: LayerReading, previous: Before) -> str:
        if not reading.not_finite and math.isfinite(reading.amax):
            return ""
        return f"{reading.not_finite:.2%} of {of(reading)} is infinite or no number"


def of(reading: LayerReading) -> str:
    return f"{reading.layer}'s {reading.role}"


# A history counts as stale from this number of readings with one scale on, if magnitudes moved by this many octaves.
_STALE_READINGS, _STALE_OCTAVES = 2, 0.5


def stale_history(reading: LayerReading, previous: Before) -> str:
    """Returns the end of a sentence about a tensor whose scale has stayed while its magnitude moved, or ''."""
    same = [reading]
    for old in reversed(previous):
        if old.scale != reading.scale:
            break
        same.append(old)
    magnitudes = known_octaves(old.amax for old in same)
    moved = max(magnitudes, default=0.0) - min(magnitudes, default=0.0)
    if reading.scale == 1 or len(same) < _STALE_READINGS or moved < _STALE_OCTAVES:
        return ""
    return (
        f": its amax history is stale, since the scale stayed at {reading.scale:.3g} for {len(same)} readings in which "
        f"the largest magnitude moved by {moved:.1f} octaves"
    )


class FigureRule(HealthRule[StepFigure]):
    """A rule over one figure, separately for each layer; the last `keep` values are kept."""

    reads = StepFigure
    keep: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self._last: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=self.keep))

    def see(self, line: StepFigure) -> str:
        last = self._last[line.layer]
        last.append(line.value)
        return self.judge(line, last)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        """Returns the sentence of an alarm, or ''; `last` ends with the newest figure."""
        raise NotImplementedError


class KeptScale(FigureRule):
    """Scales that layers keep follow their tensors, by an octave or two between readings, those of gradients by six."""

    name = "kept-scale-jumps"
    figures = ("kept_scale",)
    keep = 7
    fewest = 4
    far = 4.0
    gradients = 8.0
    alarms_at = (
        f"{far:g} octaves from the median of {fewest} to 6 readings of a buffer, of gradients {gradients:g}, and 2 "
        "beyond all of them"
    )
    remedies = (Remedy.LOOK_AT_LAYER, Remedy.SHORTER_HISTORY)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        now, earlier = octaves(line.value), known_octaves(list(last)[:-1])
        if now is None or len(earlier) < self.fewest:
            return ""
        moved = now - median(earlier)
        limit = self.gradients if "grad" in line.layer else self.far
        if abs(moved) < limit or min(abs(now - old) for old in earlier) < 2:
            return ""
        return f"{line.layer}, which a layer keeps, moved by {moved:+.1f} octaves to {line.value:.3g}"


# Spreads of a table, each with the loss at the time.
Spreads = deque[tuple[float, float]]


class EmbeddingCollapse(HealthRule[Any]):
    """A table of tokens spreads as it learns; one of positions may shrink, while the loss falls or stays."""

    name = "embedding-collapse"
    reads = StepRow | StepFigure
    figures = ("embedding_spread",)
    keep = 20
    share = 0.75
    worse = 1.02
    losses = 10
    alarms_at = (
        f"below {share:g} of the largest spread in the last {keep} readings, at a median of {losses} losses {worse:g} "
        "times that of then"
    )
    remedies = (Remedy.LOWER_RATE, Remedy.HIGHER_MASTER, Remedy.LOOK_AT_LAYER)
    _losses: deque[float] = newest(losses)
    _spreads: dict[str, Spreads] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=EmbeddingCollapse.keep))
    )

    def see(self, line: StepRow | StepFigure) -> str:
        if isinstance(line, StepRow):
            self._losses.append(line.loss)
            return ""
        loss = median(self._losses or [math.inf])
        spreads = self._spreads[line.layer]
        spreads.append((line.value, loss))
        largest, loss_then = max(spreads)
        if not line.value < self.share * largest or loss < self.worse * loss_then:
            return ""
        return f"the rows of {line.layer or 'the embedding'} spread {line.value:.3g}, once {largest:.3g}: they collapse"


class LayerStill(HealthRule[Any]):
    """Matrices learn at rates within a factor of four of their median; weight decay alone moves one by 1 to 6%. A part
    that is used now and then has no gradient in a few steps in turn."""

    name = "layer-stands-still"
    reads = LayerReading | StepFigure
    figures = ("embedding_spread", "gain", "rate_share", "weight_gradient", "steps_without_gradient", "update_ratio")
    share = 0.1
    keep = 3
    steps = 10
    times = 3
    never = 25
    alarms_at = (
        f"{keep} updates of a matrix, relative to itself, below {share:g} of the median of all that have a gradient "
        "but embeddings, times the least factor of --rates, or its group's share of the highest rate; 2, where it no "
        f"longer moves at all; {steps} steps in turn without a gradient, and {times} times those before; {never} from "
        "the start"
    )
    remedies = (Remedy.LOOK_AT_LAYER, Remedy.E5M2_GRADIENTS, Remedy.LAYER_IN_BF16)
    _moved: dict[str, float] = field(default_factory=dict)
    _no_matrices: set[str] = field(default_factory=set)
    _low: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _shares: dict[str, float] = field(default_factory=dict)
    _has_moved: set[str] = field(default_factory=set)
    # The last step and norm of each gradient, and the gap without one: now, and the longest before.
    _gradients: dict[str, tuple[int, float]] = field(default_factory=dict)
    _gaps: dict[str, tuple[float, float]] = field(default_factory=dict)

    def see(self, line: LayerReading | StepFigure) -> str:
        if isinstance(line, LayerReading):
            if line.role == Role.WEIGHT:
                self._moved.setdefault(line.layer, math.nan)
            return ""
        # Tables and norms learn at different rates, and are left out of the median.
        if line.name in ("embedding_spread", "gain"):
            self._no_matrices.add(line.layer)
            self._moved.pop(line.layer, None)
        if line.name == "rate_share":
            self._shares[line.layer] = line.value
        if line.name == "weight_gradient":
            self._gradients[line.layer] = line.step, line.value
        # Only a layer with a weight reading counts as a matrix.
        if line.layer not in self._moved or line.layer in self._no_matrices or not math.isfinite(line.value):
            return ""
        if line.name == "steps_without_gradient":
            return self._judge_gap(line)
        return self._judge_update(line) if line.name == "update_ratio" else ""

    def _judge_gap(self, line: StepFigure) -> str:
        gap, longest = self._gaps.get(line.layer, (0.0, 0.0))
        longest = max(longest, gap) if line.value < gap else longest
        self._gaps[line.layer] = line.value, longest
        fewest = self.steps if line.layer in self._gradients else self.never
        if line.value < fewest or line.value <= self.times * longest:
            return ""
        return f"no gradient has reached {line.layer} in {line.value:g} steps in turn"

    def _judge_update(self, line: StepFigure) -> str:
        step, gradient = self._gradients.get(line.layer, (line.step, math.nan))
        if self._gradients and (step != line.step or math.isnan(gradient)):
            self._moved[line.layer] = math.nan
            return ""
        # A layer that only decays does not show how fast the others learn.
        self._moved[line.layer] = line.value if gradient else math.nan
        moving = [value for value in self._moved.values() if 0 < value < math.inf]
        usual = median(moving) if moving else 0.0
        # A layer may be slow intentionally, by --rates or its group.
        slowest = min(1.0, self.arm.slowest, self._shares.get(line.layer, 1.0))
        # A rate of 0 from the start freezes a group; one that becomes 0 while others learn is a mistake.
        stopped = line.value == 0 < usual and line.layer in self._has_moved
        low = stopped or line.value < self.share * slowest * usual
        self._low[line.layer] = self._low[line.layer] + 1 if low else 0
        if line.value > 0:
            self._has_moved.add(line.layer)
        if self._low[line.layer] < (self.keep if line.value or line.layer not in self._has_moved else 2):
            return ""
        return f"a step changes {line.layer} by {line.value:.2g} of itself, and the other layers by {usual:.2g}"


class AttentionOverflow(FigureRule):
    """E^-88 is the least normal number of fp32: next to such a score no other key counts."""

    name = "attention-score-overflow"
    figures = ("attention_score",)
    largest = 88.0
    alarms_at = f"a score of {largest:g}"
    remedies = (Remedy.LOWER_RATE, Remedy.LOOK_AT_LAYER, Remedy.LAYER_IN_BF16)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        if not line.value >= self.largest:  # NaN is covered by the rule for tensors that are not finite
            return ""
        return f"attention scores of {line.layer or 'a layer'} reach {line.value:.4g}"


class BatchNormDrift(FigureRule):
    """A momentum of 0.1 forgets half of what was in 7 steps; between batches means differ by hundredths."""

    name = "batch-norm-drift"
    figures = ("batch_norm_drift",)
    keep = 3
    far = 1.0
    alarms_at = f"{keep} readings above 1 standard deviation of the batch, from the 6th on: they begin anywhere"
    remedies = (Remedy.LOOK_AT_LAYER, Remedy.LOWER_RATE)
    _seen: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        # Running statistics begin at 0 and 1, far from any batch.
        self._seen[line.layer] += 1
        if self._seen[line.layer] <= 5 or len(last) < self.keep or not all(abs(value) > self.far for value in last):
            return ""
        distance = "infinitely" if math.isinf(line.value) else f"{line.value:.2g} deviations"
        return f"running statistics of {line.layer} are {distance} from those of its batches, in {len(last)} readings"
