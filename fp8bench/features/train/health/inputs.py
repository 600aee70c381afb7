"""Rules that look at the batches alone: whether a loader draws what it drew before."""

from __future__ import annotations

from collections import deque
from dataclasses import field
from statistics import fmean, median, stdev
from typing import Any

from fp8bench.features.train.health.steps import HealthAlarm, HealthRule, Remedy, newest
from fp8bench.features.train.health.tensors import FigureRule
from fp8bench.features.train.values import StepFigure


class DuplicateInputs(FigureRule):
    """Examples of a batch are copies of each other: a sampler, or a join, has repeated them."""

    name = "duplicate-inputs"
    figure = "duplicates"
    keep = 3
    share = 0.5
    looks_at = f"{keep} watched batches in turn, of eight examples of eight values or more"
    alarms_at = f"{share:.0%} of the examples of all of them are equal to another in the batch"
    because = "a loader draws each example once an epoch; what is drawn with replacement repeats few of many"
    remedies = (Remedy.LOOK_AT_DATA,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        if len(last) < self.keep or min(last) < self.share:
            return ""
        return f"{line.value:.0%} of the examples of a batch are copies of others in it"


class DataDrift(HealthRule[StepFigure]):
    """Inputs are not what they were: a source, a preprocessing, or their order is another."""

    name = "data-drift"
    reads = StepFigure
    first = 10
    last = 4
    noise = 6.0
    far = 0.5
    looks_at = f"the means of the last {last} watched batches' inputs, and of the first {first}"
    alarms_at = (
        f"all of the last on one side of the mean of the first, {noise:g} of their standard deviations and {far:g}"
        " of the inputs' own away"
    )
    because = "batches that are drawn from one source have means as far apart as those of the first"
    remedies = (Remedy.LOOK_AT_DATA,)
    _first: list[float] = field(default_factory=list)
    _last: deque[float] = newest(last)
    _deviations: deque[float] = newest(first)

    def see(self, line: StepFigure) -> HealthAlarm | None:
        if line.name == "input_deviation":
            self._deviations.append(line.value)
        if line.name != "input_mean":
            return None
        if len(self._first) < self.first:
            self._first.append(line.value)
            return None
        self._last.append(line.value)
        usual, size = fmean(self._first), median(self._deviations or [0.0])
        moved = [value - usual for value in self._last]
        least = min(map(abs, moved))
        same_side = min(moved) > 0 or max(moved) < 0
        if len(moved) < self.last or not same_side or least <= max(self.noise * stdev(self._first), self.far * size):
            return None
        words = (
            f"the mean of the inputs has moved from {usual:.3g} to {line.value:.3g}, by {least / size:.2g} of their "
            "standard deviations or more"
            if size
            else f"the inputs have moved from {usual:.3g} to {line.value:.3g}"
        )
        return HealthAlarm(words, figures=(("mean", line.value), ("usual", usual), ("deviation", size)))


RULES: tuple[type[HealthRule[Any]], ...] = (DuplicateInputs, DataDrift)
