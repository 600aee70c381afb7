"""Figures of the batches of a user's loop: how often inputs repeat within the last 100 batches, whether targets repeat,
and how frequent each label is. Every step copies a sample of its batch. Samples are compared in the next watched step.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8bench.features.train.lab.loop_figures import (
    compute_fingerprint,
    find_loss_node,
    measure_input_figures,
    sample_tensor_values,
    tensors_in,
)
from fp8bench.features.train.lab.readings import FigureValues

# The inputs of a batch are compared with the inputs of this many earlier batches.
_COMPARED_BATCH_COUNT = 100
# With more than 1000 classes, a batch has too few labels of each class to compare their frequencies.
_MAX_CLASSES = 1000
_MIN_BATCH_EXAMPLES = 8
# Label frequencies are compared once this many watched batches have been counted.
_MIN_WATCHED_BATCHES = 3


class _StoredBatch(NamedTuple):
    """A sample of each input's values, and the shapes of all inputs."""

    samples: list[Tensor]
    shapes: list[torch.Size]


class BatchHistory:
    """Compares the first micro-batch of each step with the batches of earlier steps."""

    def __init__(self) -> None:
        self._steps, self._examples = 0, 0
        self._unread_batches: list[_StoredBatch] = []
        # By fingerprint: the last step that used this batch, for batches of the last 100 steps.
        self._last_steps: dict[float, int] = {}
        # Numbers of consecutive steps: with the batch of the previous step (`_repeated_steps`), with any batch of the
        # last 100 (`_cycled_steps`), and with the same condition (`_same_condition_steps`). `_longest_cycle` is the
        # largest age of a repeated batch, in steps. `_new_batches` counts the batches that were not among the last 100.
        self._repeated_steps = self._cycled_steps = self._longest_cycle = self._new_batches = (
            self._same_condition_steps
        ) = 0
        self._last_condition, self._condition_changed = math.nan, False
        # Fingerprints of the last watched batch's inputs and targets.
        self._last_inputs = self._last_targets = torch.tensor(math.nan)
        self._same_inputs, self._same_targets = torch.zeros((), dtype=torch.bool), torch.zeros(())
        self._label_counts, self._counted_batches = torch.zeros(_MAX_CLASSES, dtype=torch.float64), 0
        self._watched_figures: FigureValues = {}
        self._awaits_targets = False

    def add_inputs(self, inputs: Any, is_watched: bool = False) -> None:
        self._watched_figures, self._awaits_targets = measure_input_figures(inputs) if is_watched else {}, is_watched
        self._examples = 0
        self.add_examples(inputs)
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.numel()]
        if not tensors:
            return
        # A loop may overwrite its batch, so the samples are copies.
        batch = _StoredBatch(
            [sample_tensor_values(tensor).clone() for tensor in tensors], [tensor.shape for tensor in tensors]
        )
        if is_watched:
            fingerprint = compute_fingerprint(batch.samples)
            self._same_inputs, self._last_inputs = fingerprint == self._last_inputs, fingerprint
        self._unread_batches.append(batch)
        if len(self._unread_batches) > _COMPARED_BATCH_COUNT:
            self._compare_batches()

    def add_examples(self, inputs: Any) -> None:
        """Adds the examples of a micro-batch to those of the current step."""
        first_input_tensor = next(tensors_in(inputs), None)
        self._examples += len(first_input_tensor) if first_input_tensor is not None and first_input_tensor.ndim else 0

    def compare_loss_targets(self, loss: Tensor) -> None:
        """Compares the targets of a loss with those of the last watched step. If the targets are labels of classes,
        compares their frequencies with those in all earlier watched steps.
        """
        # Only the first backward of a step is compared. Later ones belong to further micro-batches, or repeat a
        # closure.
        target, self._awaits_targets = _find_loss_target(loss) if self._awaits_targets else None, False
        if target is None or target.numel() < _MIN_BATCH_EXAMPLES:
            return
        if target.is_floating_point():
            fingerprint = compute_fingerprint([sample_tensor_values(target)])
            # Constant targets, as those of a GAN's discriminator, are repeated intentionally.
            repeats_last_targets = (fingerprint == self._last_targets) & (target.std() > 0) & ~self._same_inputs
            self._same_targets, self._last_targets = (self._same_targets + 1) * repeats_last_targets, fingerprint
            self._watched_figures["targets_again"] = self._same_targets
        elif target.numel() == self._examples:
            self._compare_labels(target.flatten())

    def list_figures(self) -> dict[tuple[str, str], Tensor | float]:
        self._compare_batches()
        counts = {
            "inputs_again": self._repeated_steps,
            "inputs_cycled": self._cycled_steps,
            "inputs_period": self._longest_cycle,
            "inputs_new": self._new_batches,
            "condition_again": self._same_condition_steps,
            "examples": self._examples,
        }
        figures = self._watched_figures | {name: float(count) for name, count in counts.items()}
        return {(name, ""): value for name, value in figures.items()}

    def _compare_batches(self) -> None:
        """Compares each batch since the last watched step with earlier batches. Waits for the device once."""
        if not self._unread_batches:
            return
        # 1. Compute all fingerprints, and read them at once.
        device_numbers: list[Tensor] = []
        conditions = list(map(_find_batch_condition, self._unread_batches))
        for batch, condition in zip(self._unread_batches, conditions, strict=True):
            fingerprint = compute_fingerprint(batch.samples)
            device_numbers.append(fingerprint)
            if condition is not None:
                device_numbers += [compute_fingerprint([condition]).to(fingerprint), condition[0].to(fingerprint)]
        numbers = iter(torch.stack(device_numbers).tolist())
        # 2. Compare the fingerprints, in the order of the batches.
        for batch, condition in zip(self._unread_batches, conditions, strict=True):
            age = self._record_batch_fingerprint(next(numbers))
            if condition is not None:
                condition_fingerprint, first_condition_number = next(numbers), next(numbers)
                # An input that looks like a condition may be a length or a setting instead: if it has a single number,
                # or if its first number is 0, 1 or a dimension of an input.
                may_be_length_or_setting = len(condition) == 1 or first_condition_number in {0, 1}.union(*batch.shapes)
                self._count_equal_conditions(condition_fingerprint, age == 1, may_be_length_or_setting)
        self._last_steps = {
            key: step for key, step in self._last_steps.items() if self._steps - step <= _COMPARED_BATCH_COUNT
        }
        self._unread_batches = []

    def _record_batch_fingerprint(self, fingerprint: float) -> int:
        """Counts the next batch. Returns how many steps ago the same batch occurred, if it did."""
        age = self._steps - self._last_steps.get(fingerprint, -_COMPARED_BATCH_COUNT - 1)
        self._repeated_steps = self._repeated_steps + 1 if age == 1 else 0
        if age <= _COMPARED_BATCH_COUNT:
            self._cycled_steps += 1
            self._longest_cycle = max(self._longest_cycle, age)
        else:
            self._new_batches += 1
            self._cycled_steps = self._longest_cycle = 0
        self._last_steps[fingerprint] = self._steps
        self._steps += 1
        return age

    def _count_equal_conditions(self, condition: float, is_same_batch: bool, may_be_setting: bool) -> None:
        """Counts steps in a row with the same condition (see `_find_batch_condition`) but different batches.
        `condition` is its fingerprint. With `may_be_setting`, the condition may be a length or a setting. Then nothing
        is counted until it has changed once.
        """
        if math.isnan(condition):
            return
        is_same_condition = condition == self._last_condition
        self._condition_changed |= not is_same_condition and not math.isnan(self._last_condition)
        # Lengths, masks and settings are often constant from the first step on.
        is_counted = is_same_condition and not is_same_batch and (self._condition_changed or not may_be_setting)
        self._same_condition_steps, self._last_condition = (
            self._same_condition_steps + 1 if is_counted else 0,
            condition,
        )

    def _compare_labels(self, labels: Tensor) -> None:
        """Records how far the frequencies of the labels are from those in earlier watched batches, relative to the
        distance that chance would cause.
        """
        # Negative labels, such as torch's default ignore_index of -100, do not name a class.
        labels = labels[labels >= 0]
        if len(labels) < _MIN_BATCH_EXAMPLES or int(labels.max()) >= _MAX_CLASSES:
            return
        counts = torch.bincount(labels, minlength=_MAX_CLASSES).to(torch.float64)
        label_frequencies = counts / len(labels)
        self._label_counts = self._label_counts.to(counts)
        if self._counted_batches >= _MIN_WATCHED_BATCHES:
            earlier_label_frequencies = self._label_counts / self._label_counts.sum()
            # The expected sum of distances, if each frequency is normally distributed around the earlier one.
            chance_label_distance = (
                (earlier_label_frequencies * (1 - earlier_label_frequencies) * (2 / math.pi) / len(labels)).sqrt().sum()
            )
            self._watched_figures["label_shift"] = (
                label_frequencies - earlier_label_frequencies
            ).abs().sum() / chance_label_distance.clamp(min=1 / len(labels))
        self._label_counts = self._label_counts + counts
        self._counted_batches += 1


def _find_batch_condition(batch: _StoredBatch) -> Tensor | None:
    """Returns a sample of the condition of a batch, such as the time of a diffusion model. It is the last input, except
    the first one, that has a single number or one number per example. Returns None if no input does.
    """
    sizes = {1, *batch.shapes[0][:1]}
    conditions = [
        sample
        for sample, shape in zip(batch.samples[1:], batch.shapes[1:], strict=True)
        if shape.numel() in sizes and sample.dtype != torch.bool
    ]
    return conditions[-1] if conditions else None


def _find_loss_target(loss: Tensor) -> Tensor | None:
    """Returns the targets from which a loss was computed, if it is a cross entropy or a regression loss; otherwise
    None.
    """
    loss_node = find_loss_node(loss, "NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss")
    return None if loss_node is None else loss_node._saved_target.detach()
