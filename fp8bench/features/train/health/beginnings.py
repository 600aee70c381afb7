"""Health rules that compare a training with its beginning, since what grows slowly is like itself in the last steps."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import field
from statistics import median
from typing import Any

from fp8bench.features.train.health.steps import HealthRule, Remedy
from fp8bench.features.train.health.tensors import Before, FigureRule, TensorRule, of
from fp8bench.features.train.values import LayerReading, StepFigure, StepRow
from fp8bench.protocols import Role

# A magnitude by step, in octaves.
Course = list[tuple[int, float]]


class SlowGrowth(TensorRule):
    """A weight that learns grows ever more slowly; one that grows by the same factor each step is driven from outside.
    Inputs of a part that begins to be used may double in forty steps."""

    name = "slow-growth"
    keep = 20
    weights = 5
    weight_octaves = 1.3
    inputs = 9
    input_octaves = 2.0
    slowing = 0.75
    straight = 0.2
    earlier = 4
    alarms_at = (
        f"the largest magnitude of a weight moved by {weight_octaves:g} octave in {weights} readings, of an input by "
        f"{input_octaves:g} in {inputs}, beyond all of {earlier} to {keep} before: in a line up to {straight:g} of "
        f"that, and in the second half at {slowing:g} of the speed of the first or more"
    )
    remedies = (Remedy.LOOK_AT_LAYER, Remedy.LOWER_RATE, Remedy.LOOK_AT_DATA)

    def judge(self, reading: LayerReading, previous: Before) -> str:
        is_weight = reading.role == Role.WEIGHT
        count, octaves = (self.weights, self.weight_octaves) if is_weight else (self.inputs, self.input_octaves)
        if reading.role == Role.GRADIENT or len(previous) < self.earlier + count - 1:
            return ""
        readings = (*previous, reading)
        course = [(old.step, math.log2(old.amax)) for old in readings if 0 < old.amax < math.inf]
        moved = self.find_change(course[:-count], course[-count:]) if len(course) == len(readings) else 0.0
        if abs(moved) < octaves:
            return ""
        return f"the largest magnitude of {of(reading)} moved by {moved:+.1f} octaves since step {course[-count][0]}"

    def find_change(self, earlier: Course, last: Course) -> float:
        """Returns by how much the last values moved, if in a line and beyond all earlier; else 0."""
        (start, first), (middle, between), (end, final) = last[0], last[len(last) // 2], last[-1]
        moved = final - first
        beyond = min((final - value) * math.copysign(1, moved) for _, value in earlier)
        speeds = (between - first) / (middle - start), (final - between) / (end - middle)
        if (
            beyond < abs(moved) / 2
            or min(speed * moved for speed in speeds) <= 0
            or speeds[1] / speeds[0] < self.slowing
        ):
            return 0.0
        off = max(abs(first + moved * (step - start) / (end - start) - value) for step, value in last)
        return moved if off <= self.straight * abs(moved) else 0.0


class EmbeddingRow(FigureRule):
    """Rows of frequent tokens grow as a model learns, by a third in a thousand steps."""

    name = "embedding-row"
    figures = ("largest_row",)
    keep = 20
    times = 2.0
    alarms_at = f"the norm of the largest row over that of the median row {times:g} times the least of {keep} readings"
    remedies = (Remedy.LOOK_AT_LAYER, Remedy.LOWER_RATE)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        if not line.value > self.times * min(last):
            return ""
        return f"a row of {line.layer} is {line.value:.3g} times as large as the median row, once {min(last):.3g} times"


class GradientVanished(HealthRule[Any]):
    """Each matrix has about the same share of the gradient's norm all along; a part that is seldom used has none at
    times."""

    name = "gradient-vanished"
    reads = StepRow | StepFigure
    figures = ("weight_gradient",)
    keep = 20
    fewest = 5
    octaves = 5.0
    below = 2.0
    readings = 2
    times = 3
    alarms_at = (
        f"a matrix's share of the gradient's norm {octaves:g} octaves below the median of {fewest} to {keep} readings, "
        f"{below:g} below all, in {readings} readings in turn, and {times} times as many more as ever before"
    )
    remedies = (Remedy.E5M2_GRADIENTS, Remedy.DYNAMIC_LOSS_SCALE, Remedy.LAYER_IN_BF16, Remedy.LOOK_AT_LAYER)
    _norm: float = math.nan
    _shares: dict[str, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=GradientVanished.keep))
    )
    # How many readings in a row are low: now, and at most before.
    _runs: dict[str, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))

    def see(self, line: StepRow | StepFigure) -> str:
        if isinstance(line, StepRow):
            self._norm = line.gradient_norm
            return ""
        if not 0 < self._norm < math.inf:
            return ""
        shares, (run, longest) = self._shares[line.layer], self._runs[line.layer]
        share = math.log2(line.value / self._norm) if line.value else -math.inf
        usual, least = (median(shares), min(shares)) if len(shares) >= self.fewest else (-math.inf, -math.inf)
        if line.value and share >= min(usual - self.octaves, least - self.below):
            shares.append(share)
            self._runs[line.layer] = 0, max(run, longest)
            return ""
        self._runs[line.layer] = run + 1, longest
        if len(shares) < self.fewest or run + 1 < self.readings + self.times * longest:
            return ""
        lost = f"has lost {usual - share:.1f} octaves of its share of the whole" if line.value else "is zero everywhere"
        return f"the gradient of {line.layer}'s weight {lost}, {run + 1} readings in a row"
