"""Health rules that need only the training itself; most detect mistakes in a loop or its batches."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import field
from statistics import fmean, median, stdev
from typing import Any

from fp8bench.features.train.health.steps import LEARNED, HealthRule, Remedy, newest, noise_of_values
from fp8bench.features.train.health.tensors import Before, FigureRule, TensorRule, known_octaves, octaves, of
from fp8bench.features.train.values import GRADIENTS_LEFT, MOMENTS_GONE, OTHERS_TRAIN, LayerReading, StepFigure, StepRow
from fp8bench.protocols import Role

# No rule over losses looks back further.
_LOSSES = 60
_RATES = 30


class LossRule(HealthRule[Any]):
    """A rule over losses; silent if another optimizer trains against the module."""

    reads = StepRow | StepFigure
    figures = (OTHERS_TRAIN, "classes")
    _losses: deque[float] = newest(_LOSSES)
    _rates: deque[float] = newest(_RATES)
    _alone: bool = True
    _guessing: float = math.inf

    def see(self, line: StepRow | StepFigure) -> str:
        # With the number of classes, the loss of guessing is known: its logarithm.
        if isinstance(line, StepFigure):
            self._alone &= line.name != OTHERS_TRAIN
            if line.name == "classes" and line.value > 1:
                self._guessing = math.log(line.value)
            return ""
        if line.skipped or not math.isfinite(line.loss):
            return ""
        self._losses.append(line.loss)
        self._rates.append(line.rate)
        return self.judge([*self._losses]) if self._alone else ""

    def judge(self, losses: list[float]) -> str:
        """Returns the sentence of an alarm about the newest (last) loss, or ''."""
        raise NotImplementedError


class LossBackUp(LossRule):
    """A batch may be hard, five in turn are not; another kind of text costs less than half of what was learned,
    unless it has nothing in common, which losses alone cannot distinguish from wrong labels."""

    name = "loss-back-up"
    stays = 5
    first = 3
    lost = 0.5
    noise = 6.0
    above = 0.25
    risen = 1.5
    lost_by_rate = 0.2
    noise_by_rate = 4.0
    alarms_at = (
        f"{stays} losses above the lowest mean of ten by {lost:.0%} of what was learned and {noise:g} times the noise, "
        f"by {lost_by_rate:.0%} and {noise_by_rate:g} times if the rate rose {risen:g} times in {_RATES} steps; or "
        f"{above:.0%} above the first {first}"
    )
    remedies = (Remedy.LOWER_RATE, Remedy.CLIP_HARDER, Remedy.LOOK_AT_DATA)
    _first: list[float] = field(default_factory=list)
    _best: float = math.inf

    def judge(self, losses: list[float]) -> str:
        # The first losses are the level to which a collapse returns.
        if len(self._first) < self.first:
            self._first.append(losses[-1])
        earlier, last = losses[: -self.stays], losses[-self.stays :]
        # Use a mean of ten steps, because a single lucky batch is not a level.
        if len(earlier) >= 10:
            self._best = min(self._best, fmean(earlier[-10:]))
        if len(earlier) < self.first:
            return ""
        low, began = min(last), median(self._first)
        if low > max(self._first) + self.above * abs(began):
            return f"the loss has stayed above {low:.4g} for {self.stays} steps; it began at {began:.4g}"
        # The scale is what was learned: losing half of it is a collapse, whatever the loss function.
        learned = began - self._best
        noise = noise_of_values(earlier) if len(earlier) > 10 else math.inf
        rate = self._rates[-1]
        rose = f": the rate rose to {rate:.3g}" if rate > self.risen * self._rates[0] else ""
        lost, times = (self.lost_by_rate, self.noise_by_rate) if rose else (self.lost, self.noise)
        if learned <= 0 or low - self._best < max(lost * learned, times * noise):
            return ""
        return (
            f"the loss has come back up from {self._best:.4g}, and stayed above {low:.4g} for {self.stays} steps{rose}"
        )


class LossAboveGuessing(LossRule):
    """A model that learns is below it within some steps, or on its way there."""

    name = "loss-above-guessing"
    # One alarm for a loss that has come back up is enough.
    until = "loss-back-up"
    last = 8
    above = 1.25
    falling = 0.9
    alarms_at = f"{last} losses {above:g} times ln of the classes, their median no tenth below that of {last} before"
    remedies = (Remedy.LOOK_AT_LOOP, Remedy.LOWER_RATE, Remedy.LOOK_AT_DATA)

    def judge(self, losses: list[float]) -> str:
        earlier, last = losses[-2 * self.last : -self.last], losses[-self.last :]
        if len(earlier) < self.last or min(last) < self.above * self._guessing:
            return ""
        if median(last) < self.falling * median(earlier):
            return ""
        times = median(last) / self._guessing
        return f"the loss stays at {median(last):.4g}, {times:.3g} times what guessing costs: is it scaled, or a sum?"


class LossLeaked(LossRule):
    """Losses fall by percents a step; those of single examples vary by more, and are left alone."""

    name = "loss-leaked"
    last = 3
    share = 0.1
    noise = 5.0
    alarms_at = f"{last} losses below {share:g} of the least of 20 before, and {noise:g} times their noise below it"
    remedies = (Remedy.LOOK_AT_DATA,)

    def judge(self, losses: list[float]) -> str:
        earlier, last = losses[-20 - self.last : -self.last], losses[-self.last :]
        if len(earlier) < 20 or min(earlier) <= 0 or not 0 < max(last) < self.share * min(earlier):
            return ""
        # Compare in octaves, since a leak divides the loss, and noise is proportional to it.
        noise = noise_of_values([math.log2(value) for value in earlier])
        if math.log2(min(earlier) / max(last)) < self.noise * noise:
            return ""
        return f"the loss fell at once from {median(earlier):.4g} to {median(last):.4g}: are answers among the inputs?"


class NoUpdate(HealthRule[Any]):
    """Schedules begin and end with a step at 0; float32 keeps no change of less than 6e-8."""

    name = "no-update"
    reads = StepRow | StepFigure
    # A watched step has a digest of all weights, which detects any change.
    figures = ("weights_before",)
    rows = 5
    same = 3
    alarms_at = (
        f"in {rows} steps a rate of 0, or a loss without gradients; in 2 an update of less than 1e-8 of the weights; "
        f"in {same} watched ones weights that are the same to the bit"
    )
    remedies = (Remedy.LOOK_AT_LOOP, Remedy.HIGHER_MASTER)
    _counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _weights: float = math.nan
    _first: float = 0.0
    _learned: bool = False

    def see(self, line: StepRow | StepFigure) -> str:
        if isinstance(line, StepFigure):
            same, self._weights = line.value == self._weights and not self._learned, line.value
            return self._count("the weights are the same to the bit", same, self.same - 1)
        if line.skipped or not math.isfinite(line.loss):
            return ""
        self._first = self._first or line.loss
        # A loss near zero needs no update.
        self._learned = abs(line.loss) <= LEARNED * abs(self._first)
        if self._learned:
            return ""
        none = line.gradient_norm == 0
        alarm = self._count("the rate is 0", line.rate == 0, self.rows)
        alarm = self._count("no gradient arrives at any weight", none, self.rows) or alarm
        if math.isfinite(line.update_ratio):
            small = line.update_ratio < 1e-8 and line.rate != 0 and not none
            alarm = self._count("updates are less than 1e-8 of the weights", small, 2) or alarm
        return alarm

    def _count(self, words: str, happened: bool, most: int) -> str:
        self._counts[words] = self._counts[words] + 1 if happened else 0
        return f"steps change nothing: {words}" if self._counts[words] >= most else ""


class SameInputs(HealthRule[StepFigure]):
    """An epoch has more than four batches; a loop that uses all data in each step has over a hundred examples. A loader
    that begins again goes through all batches that were new; shuffled, it goes back as far at some time."""

    name = "same-inputs"
    reads = StepFigure
    figures = ("inputs_again", "inputs_cycled", "inputs_period", "inputs_new", "examples")
    again = 7
    few = 128
    cycle = 4
    steps = 8
    alarms_at = (
        f"the same for 8 steps in turn, after another, or from the first on, of fewer than {few} examples; {steps} "
        f"steps in turn with batches of the last 100, none further back than a quarter of all that were new; or "
        f"{cycle} batches and fewer from the start, of fewer than twice as many examples"
    )
    remedies = (Remedy.LOOK_AT_DATA,)
    _last: dict[str, float] = field(default_factory=dict)

    def see(self, line: StepFigure) -> str:
        self._last[line.name] = line.value
        # The number of examples comes last.
        if line.name != "examples" or "inputs_again" not in self._last:
            return ""
        again = self._last["inputs_again"]
        if again >= self.again and (again < line.step or line.value < self.few):
            # Full-batch training repeats its inputs intentionally.
            return f"the model was given the same inputs in {again + 1:g} steps in turn"
        cycled, period, new = (self._last.get(name, 0.0) for name in ("inputs_cycled", "inputs_period", "inputs_new"))
        if cycled < self.steps or period < 2:
            return ""
        from_start = period == new <= self.cycle and line.value * period < 2 * self.few
        if not from_start and self.cycle * period > new:
            return ""
        return (
            f"the last {cycled:g} batches were given before, {period:g} steps ago at most, after {new:g} that were new"
        )


class AmaxJump(TensorRule):
    """As for scales: by an octave or two between readings, whatever the precision."""

    name = "amax-jump"
    keep = 6
    fewest = 4
    far = 3.5
    alarms_at = f"{far:g} octaves from the median of {fewest} to {keep} readings without scales, 2 beyond all"
    remedies = (Remedy.LOOK_AT_DATA, Remedy.LOWER_RATE, Remedy.LOOK_AT_LAYER)

    def judge(self, reading: LayerReading, previous: Before) -> str:
        if reading.role == Role.GRADIENT or any(layer_reading.scale != 1 for layer_reading in (reading, *previous)):
            return ""
        now = octaves(reading.amax)
        magnitudes = known_octaves(old.amax for old in previous)
        if now is None or len(magnitudes) < self.fewest:
            return ""
        moved = now - median(magnitudes)
        gap = now - max(magnitudes) if moved > 0 else min(magnitudes) - now
        if abs(moved) < self.far or gap < 2 or (moved < 0 and reading.role == Role.WEIGHT):
            return ""
        direction = "rose" if moved > 0 else "fell"
        return f"the largest magnitude of {of(reading)} {direction} by {moved:+.1f} octaves to {reading.amax:.3g}"


class DeadUnits(TensorRule):
    """Units leave half of their inputs, with dropout three quarters; bags of words are always sparse."""

    name = "dead-units"
    keep = 6
    share = 0.97
    rise = 0.2
    always = 0.999
    alarms_at = f"{share:.0%} zeros, {rise:.0%} more than the median of {keep} readings; or {always:.1%} twice in turn"
    remedies = (Remedy.LOWER_RATE, Remedy.LOOK_AT_LAYER, Remedy.LOOK_AT_DATA)
    _first: str = ""

    def judge(self, reading: LayerReading, previous: Before) -> str:
        if reading.role != Role.INPUT:
            return ""
        self._first = self._first or reading.layer
        usual = median(layer_reading.zeros for layer_reading in previous) if previous else math.nan
        risen = bool(previous) and reading.zeros >= max(self.share, usual + self.rise)
        # The first layer may get sparse data; later ones get the output of layers.
        never = reading.layer != self._first and previous and min(reading.zeros, previous[-1].zeros) >= self.always
        if not risen and not never:
            return ""
        return f"{reading.zeros:.1%} of {of(reading)} are zeros{f'; {usual:.0%} was usual' if risen else ''}"


class NormGain(FigureRule):
    """Gains begin at 1 or 0 and move by a rate's worth a step."""

    name = "norm-gain"
    figures = ("gain",)
    keep = 20
    times = 3.0
    least = 0.5
    alarms_at = (
        f"a root mean square above {times:g} times the least in {keep} readings, which counts as {least:g} at least; "
        f"or the largest, of {least:g} at least, above {times:g} times it"
    )
    remedies = (Remedy.LOWER_RATE, Remedy.LOOK_AT_LAYER)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        lowest, highest = min(last), max(last)
        # A gain near 0 doubles easily.
        grew = line.value > self.times * max(lowest, self.least)
        shrank = highest >= self.least and line.value * self.times < highest
        if not grew and not shrank:
            return ""
        earlier = lowest if grew else highest
        return f"the gain of {line.layer or 'the model'} is {line.value:.3g}, and was {earlier:.3g} some readings ago"


class LargeLogits(FigureRule):
    """E^-88 is the least that fp32 holds as a normal number; what is learned by heart reaches 20 to 40, slowly."""

    name = "large-logits"
    figures = ("logit_range",)
    keep = 7
    largest = 88.0
    jump = 30.0
    times = 4.0
    alarms_at = f"a range of {largest:g}; or of {jump:g}, if it is {times:g} times the median of the last {keep}"
    remedies = (Remedy.LOWER_RATE, Remedy.LOOK_AT_LAYER)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        usual = median(last)
        if not (line.value >= self.largest or (line.value >= self.jump and line.value > self.times * usual)):
            return ""
        return f"logits of an example lie {line.value:.4g} apart; {usual:.3g} was usual"


class GradientsLeft(FigureRule):
    """It is seen, and not concluded: the same tensors, unchanged."""

    name = "gradients-left"
    figures = (GRADIENTS_LEFT,)
    alarms_at = "no gradient was touched between an update and the backward after it, nor between those of a step"
    remedies = (Remedy.LOOK_AT_LOOP,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        return "gradients of the step before were not cleared, so they add up: zero_grad is missing"


class MomentsGone(FigureRule):
    """An optimizer's state only grows."""

    name = "moments-gone"
    figures = (MOMENTS_GONE,)
    alarms_at = "its state has fewer parameters than before, or counts fewer steps"
    remedies = (Remedy.LOOK_AT_LOOP,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        return "the optimizer has forgotten its moments: does the checkpoint have its state, and is that loaded?"


class DuplicateInputs(FigureRule):
    """A loader draws each example once an epoch; what is drawn with replacement repeats few of many."""

    name = "duplicate-inputs"
    figures = ("duplicates",)
    keep = 3
    share = 0.5
    alarms_at = f"in {keep} batches {share:.0%} of the examples equal another, of eight or more of as many values"
    remedies = (Remedy.LOOK_AT_DATA,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        if len(last) < self.keep or min(last) < self.share:
            return ""
        return f"{line.value:.0%} of the examples of a batch are copies of others in it"


class DataDrift(HealthRule[StepFigure]):
    """Batches that are drawn from one source have means and deviations as far apart as those of the first."""

    name = "data-drift"
    reads = StepFigure
    figures = (OTHERS_TRAIN, "input_mean", "input_deviation")
    first = 10
    last = 4
    noise = 6.0
    far = 0.5
    alarms_at = (
        f"means or deviations of {last} watched batches' inputs on one side of the mean of the first {first}, "
        f"{noise:g} of their standard deviations and {far:g} of the inputs' own away"
    )
    remedies = (Remedy.LOOK_AT_DATA,)
    _alone: bool = True
    _first: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _last: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=DataDrift.last)))

    def see(self, line: StepFigure) -> str:
        # Inputs that another model makes change as it learns.
        self._alone &= line.name != OTHERS_TRAIN
        if not self._alone:
            return ""
        first, last = self._first[line.name], self._last[line.name]
        if len(first) < self.first:
            first.append(line.value)
            return ""
        last.append(line.value)
        usual, size = fmean(first), median(self._first["input_deviation"] or [0.0])
        moved = [value - usual for value in last]
        least = min(map(abs, moved))
        # Batches of one source are on both sides of its mean.
        same_side = min(moved) > 0 or max(moved) < 0
        if len(moved) < self.last or not same_side or least <= max(self.noise * stdev(first), self.far * size):
            return ""
        name, now = line.name.removeprefix("input_"), line.value
        return f"the {name} of the inputs has moved from {usual:.3g} to {now:.3g}, at a first deviation of {size:.3g}"
