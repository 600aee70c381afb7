"""Health rules over what a loop gives to its model, and over the mode and the replicas that the model is in."""

from __future__ import annotations

from collections import deque
from statistics import median

from fp8bench.features.train.health.steps import Remedy
from fp8bench.features.train.health.tensors import FigureRule
from fp8bench.features.train.values import StepFigure


class SameCondition(FigureRule):
    """A time or a class is drawn for every example; lengths and settings are the same from the first step on."""

    name = "same-conditioning"
    figures = ("condition_again",)
    steps = 7
    alarms_at = f"one number per example, the same in {steps} steps in turn, in which other inputs changed"
    remedies = (Remedy.LOOK_AT_DATA,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        if line.value < self.steps:
            return ""
        return f"an input with one number per example, such as a time, was the same in {line.value:g} steps in turn"


class SameTargets(FigureRule):
    """Noise is drawn for every batch; constant targets, as of a discriminator, do not count, nor do repeated inputs."""

    name = "same-targets"
    figures = ("targets_again",)
    watched = 2
    alarms_at = f"targets of the watched step before, to other inputs, in {watched} watched steps in turn"
    remedies = (Remedy.LOOK_AT_DATA,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        if line.value < self.watched:
            return ""
        return f"targets (such as noise) were the same in {line.value + 1:g} watched steps, and the inputs were not"


class LabelShift(FigureRule):
    """Batches that are drawn from one source differ as chance has it; sampling by class makes them more alike."""

    name = "label-shift"
    figures = ("label_shift",)
    keep = 30
    last = 2
    least = 2.0
    times = 1.6
    sorted_from = 3.1
    sorted_readings = 5
    alarms_at = (
        f"frequencies of labels {least:g} times as far from all before as by chance, and {times:g} times as far as in "
        f"any of 4 to {keep} batches, in {last} watched batches in turn; or {sorted_from:g} times in {sorted_readings}"
    )
    remedies = (Remedy.LOOK_AT_DATA,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        values = list(last)
        earlier, newest = values[: -self.last], values[-self.last :]
        shifted = len(earlier) >= 4 and min(newest) > max(self.least, self.times * max(earlier))
        always = len(values) >= self.sorted_readings and min(values[-self.sorted_readings :]) > self.sorted_from
        if not shifted and not always:
            return ""
        return (
            f"labels are {line.value:.1f} times as far from their usual frequencies as chance explains "
            f"(usual: {median(values):.1f}): is the data sorted, or mislabelled?"
        )


class PartInEval(FigureRule):
    """Batch norms, or a frozen part, may be in eval mode from the first step on; nothing changes mode afterwards."""

    name = "part-in-eval"
    figures = ("parts_in_eval",)
    alarms_at = "a dropout or batch norm in eval mode, in a model in train mode, that was not in the first step"
    remedies = (Remedy.LOOK_AT_LOOP,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        several = f" and {line.value - 1:g} more dropouts or batch norms are" if line.value > 1 else " is"
        return f"{line.layer}{several} in eval mode, and the model is in train mode"


class ReplicasApart(FigureRule):
    """Replicas that get the same gradients stay equal to the bit; parts of a model never were."""

    name = "replicas-apart"
    figures = ("replicas_apart",)
    alarms_at = "weights of a rank that were those of this rank, and no longer are"
    remedies = (Remedy.LOOK_AT_LOOP,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        ranks = f"{line.layer} and {line.value - 1:g} more" if line.value > 1 else line.layer
        return f"the weights of {ranks} are no longer equal to this rank's: are gradients averaged over ranks?"
