"""Health rules about the batches that a loop gives to its model, and about the model's mode and replicas."""

from __future__ import annotations

from collections import deque
from statistics import median

from fp8bench.features.train.health.steps import Remedy
from fp8bench.features.train.health.tensors import StepFigureRule
from fp8bench.features.train.values import StepFigure


class SameCondition(StepFigureRule):
    """Detects a condition (an input with one number per example) that stays the same although the other inputs change.
    Times or classes are usually drawn for every example. Lengths and settings are constant from the first step on, and
    do not count.
    """

    name = "same-conditioning"
    figures = ("condition_again",)
    constant_steps = 7
    alarms_at = (
        f"an input with one number per example is the same in {constant_steps} steps in a row while other inputs change"
    )
    remedies = (Remedy.LOOK_AT_DATA,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        if line.value < self.constant_steps:
            return ""
        return f"an input with one number per example, such as a time, was the same in {line.value:g} steps in a row"


class SameTargets(StepFigureRule):
    """Detects targets that stay the same although the inputs change. Targets such as a diffusion model's noise are
    drawn for every batch. Constant targets, as those of a GAN's discriminator, do not count.
    """

    name = "same-targets"
    figures = ("targets_again",)
    repeated_watched_steps = 2
    alarms_at = (
        f"targets equal those of the previous watched step, with other inputs, in {repeated_watched_steps} watched "
        "steps in a row"
    )
    remedies = (Remedy.LOOK_AT_DATA,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        if line.value < self.repeated_watched_steps:
            return ""
        return f"targets (such as noise) were the same in {line.value + 1:g} watched steps, and the inputs were not"


class LabelShift(StepFigureRule):
    """Detects batches whose labels have other frequencies than those of earlier batches. Batches from one source differ
    only by chance, and sampling by class makes them differ even less.
    """

    name = "label-shift"
    figures = ("label_shift",)
    window = 30
    new_batches = 2
    min_distance = 2.0
    distance_growth_factor = 1.6
    sorted_distance = 3.1
    sorted_readings = 5
    alarms_at = (
        f"in {new_batches} watched batches in a row, label frequencies are {min_distance:g} times as far from earlier "
        f"ones as by chance, and {distance_growth_factor:g} times as far as in any of 4 to {window} batches before; or "
        f"in {sorted_readings} batches in a row, they are {sorted_distance:g} times as far as by chance"
    )
    remedies = (Remedy.LOOK_AT_DATA,)

    def judge(self, line: StepFigure, last_distances: deque[float]) -> str:
        values = list(last_distances)
        earlier_distances, new_distances = values[: -self.new_batches], values[-self.new_batches :]
        have_labels_shifted = len(earlier_distances) >= 4 and min(new_distances) > max(
            self.min_distance, self.distance_growth_factor * max(earlier_distances)
        )
        is_label_order_sorted = (
            len(values) >= self.sorted_readings and min(values[-self.sorted_readings :]) > self.sorted_distance
        )
        if not have_labels_shifted and not is_label_order_sorted:
            return ""
        return (
            f"labels are {line.value:.1f} times as far from their usual frequencies as chance explains "
            f"(usual: {median(values):.1f}): is the data sorted, or mislabelled?"
        )


class PartSwitchedToEval(StepFigureRule):
    """Detects a part of the model that was switched to eval mode. Batch norms or frozen layers may be in eval mode
    from the first step on, but nothing should change their mode later.
    """

    name = "part-in-eval"
    figures = ("parts_in_eval",)
    alarms_at = (
        "a dropout or batch norm is in eval mode while the model is in train mode, and was not in the first step"
    )
    remedies = (Remedy.LOOK_AT_LOOP,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        count_words = f" and {line.value - 1:g} more dropouts or batch norms are" if line.value > 1 else " is"
        return f"{line.layer}{count_words} in eval mode, and the model is in train mode"


class ReplicasApart(StepFigureRule):
    """Detects replicas whose weights have become different. Replicas that receive the same gradients stay equal to
    the bit. Ranks that hold different parts of a model are not replicas: they never had equal weights.
    """

    name = "replicas-apart"
    figures = ("replicas_apart",)
    alarms_at = "weights of another rank, once equal to this rank's, differ from them"
    remedies = (Remedy.LOOK_AT_LOOP,)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        ranks = f"{line.layer} and {line.value - 1:g} more" if line.value > 1 else line.layer
        return f"the weights of {ranks} are no longer equal to this rank's: are gradients averaged over ranks?"
