"""Figures of the batches of a loop: inputs compared with the last 100 batches, targets, and labels.

Batches are compared on their device, so that the host waits for nothing between watched steps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fp8bench.features.train.lab.loop_figures import data_figures, fingerprint_of, tensors_in
from fp8bench.features.train.lab.readings import Figures

# Inputs are compared with so many batches before them.
_BATCHES = 100
# Labels of more classes are too few in a batch to say anything.
_MOST_CLASSES = 1000
_LEAST_EXAMPLES = 8
# Watched batches whose labels are counted before others are compared with them.
_LEAST_COUNTED = 3
# A loss may be scaled and averaged in at most this many operations after it is computed.
_CHAIN = 8


class BatchMemory:
    """Compares the first micro-batch of each step with those before it."""

    def __init__(self) -> None:
        self._steps, self._examples = 0, 0
        self._seen = torch.full((_BATCHES,), math.nan, dtype=torch.float64)
        # Steps in a row with the batch before, and with one of the last 100, of which the furthest; batches that were
        # new; steps in a row with the condition before.
        self._again = self._cycled = self._period = self._new = self._same_condition = torch.zeros(())
        self._condition_changed = torch.zeros((), dtype=torch.bool)
        # Fingerprints of the last batch's condition, and of the last watched batch's inputs and targets.
        self._condition = self._inputs = self._targets = torch.tensor(math.nan)
        self._same_inputs, self._same_targets = self._condition_changed, self._new
        self._counts, self._counted = torch.zeros(_MOST_CLASSES, dtype=torch.float64), 0
        self._watched: Figures = {}
        self._awaits_targets = False

    def take_inputs(self, inputs: Any, watched: bool = False) -> None:
        self._watched, self._awaits_targets = data_figures(inputs) if watched else {}, watched
        fingerprint, self._examples = fingerprint_of(inputs)
        if fingerprint is None:
            return
        if watched:
            self._same_inputs, self._inputs = fingerprint == self._inputs, fingerprint
        self._seen = self._seen.to(fingerprint.device)
        ages = (self._steps - 1 - torch.arange(_BATCHES, device=fingerprint.device)) % _BATCHES + 1
        age = torch.where(self._seen == fingerprint, ages, _BATCHES + 1).amin()
        known = age <= _BATCHES
        self._again, self._cycled, self._new = (
            (self._again + 1) * (age == 1),
            (self._cycled + 1) * known,
            self._new + ~known,
        )
        self._period = torch.maximum(self._period.to(age), age) * known
        self._seen[self._steps % _BATCHES] = fingerprint
        self._steps += 1
        self._compare_condition(inputs, age == 1)

    def add_examples(self, inputs: Any) -> None:
        """Counts the examples of a further micro-batch."""
        first = next(tensors_in(inputs), None)
        self._examples += len(first) if first is not None and first.ndim else 0

    def see_targets(self, root: Tensor) -> None:
        """Compares the targets of a loss with those of the last watched step, and its labels with all before."""
        # Only of the first backward: others are of further micro-batches, or of the same closure.
        target, self._awaits_targets = _target_of(root) if self._awaits_targets else None, False
        if target is None or target.numel() < _LEAST_EXAMPLES:
            return
        if target.is_floating_point():
            fingerprint, _ = fingerprint_of(target)
            assert fingerprint is not None
            # Targets that are all equal, as those of a discriminator, repeat intentionally.
            same = (fingerprint == self._targets) & (target.std() > 0) & ~self._same_inputs
            self._same_targets, self._targets = (self._same_targets + 1) * same, fingerprint
            self._watched["targets_again"] = self._same_targets
        elif target.numel() == self._examples:
            self._see_labels(target.flatten())

    def figures(self) -> dict[tuple[str, str], Tensor | float]:
        figures = self._watched | {
            "inputs_again": self._again,
            "inputs_cycled": self._cycled,
            "inputs_period": self._period,
            "inputs_new": self._new,
            "condition_again": self._same_condition,
            "examples": float(self._examples),
        }
        return {(name, ""): value for name, value in figures.items()}

    def _compare_condition(self, inputs: Any, is_same_batch: Tensor) -> None:
        """Counts the steps in which the last tensor with one number per example, such as a diffusion's time, stayed
        while the rest changed."""
        first, *following = (tensor.detach() for tensor in tensors_in(inputs) if tensor.numel())
        sizes = {1, *first.shape[:1]}
        conditions = [tensor for tensor in following if tensor.numel() in sizes and tensor.dtype != torch.bool]
        if not conditions:
            return
        condition = conditions[-1].flatten().to(torch.float64)
        fingerprint = (condition * torch.arange(1, len(condition) + 1, device=condition.device).sqrt()).sum()
        same = fingerprint == self._condition
        self._condition_changed = self._condition_changed | (~same & ~self._condition.isnan())
        # Lengths, masks and single settings may be the same from the first step on.
        usual = {0, 1, *(size for tensor in (first, *following) for size in tensor.shape)}
        is_setting = len(condition) == 1 or (condition[0] == torch.tensor([*usual]).to(condition)).any()
        counts = same & ~is_same_batch & (self._condition_changed | ~torch.as_tensor(is_setting))
        self._same_condition, self._condition = (self._same_condition + 1) * counts, fingerprint

    def _see_labels(self, labels: Tensor) -> None:
        """Records how far the labels' frequencies are from those of earlier watched batches, as a multiple of what
        chance explains."""
        labels = labels[labels >= 0]
        if len(labels) < _LEAST_EXAMPLES or int(labels.max()) >= _MOST_CLASSES:
            return
        counts = torch.bincount(labels, minlength=_MOST_CLASSES).to(torch.float64)
        shares = counts / len(labels)
        self._counts = self._counts.to(counts)
        if self._counted >= _LEAST_COUNTED:
            usual = self._counts / self._counts.sum()
            chance = (usual * (1 - usual) * (2 / math.pi) / len(labels)).sqrt().sum()
            self._watched["label_shift"] = (shares - usual).abs().sum() / chance.clamp(min=1 / len(labels))
        self._counts = self._counts + counts
        self._counted += 1


def _target_of(root: Tensor) -> Tensor | None:
    """Returns the targets of a cross entropy or mean squared error that a loss comes from."""
    node: Any = root.grad_fn
    for _ in range(_CHAIN):
        if node is None:
            return None
        if node.name().startswith(("NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss")):
            target: Tensor = node._saved_target
            return target.detach()
        nexts = [function for function, _ in node.next_functions if function is not None]
        node = nexts[0] if len(nexts) == 1 else None
    return None
