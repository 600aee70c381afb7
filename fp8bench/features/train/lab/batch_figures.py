"""Figures of the batches of a loop: inputs compared with the last 100 batches, targets, and labels.

A step only computes fingerprints, on their device. They are read and compared in watched steps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8bench.features.train.lab.loop_figures import data_figures, fingerprint_of, tensors_in
from fp8bench.features.train.lab.readings import Figures

# Inputs are compared with this number of batches before them.
_BATCHES = 100
# With more classes, a batch has too few labels of each to compare frequencies.
_MOST_CLASSES = 1000
_LEAST_EXAMPLES = 8
# Watched batches whose labels are counted before others are compared with them.
_LEAST_COUNTED = 3
# A loss may be scaled and averaged in at most this many operations after it is computed.
_CHAIN = 8


class _Fingerprints(NamedTuple):
    """One batch's: of all inputs, and of the condition, an input with one number per example such as a diffusion's
    time. `usual` are the sizes of all inputs, which a length or a setting equals; None if the condition is one."""

    inputs: Tensor
    condition: Tensor
    first: Tensor
    usual: frozenset[int] | None


class BatchMemory:
    """Compares the first micro-batch of each step with those before it."""

    def __init__(self) -> None:
        self._steps, self._examples = 0, 0
        self._unread: list[_Fingerprints] = []
        # The last step that had each batch of the last 100.
        self._last_steps: dict[float, int] = {}
        # Steps in a row with the batch before, and with one of the last 100, of which the furthest; batches that were
        # new; steps in a row with the condition before.
        self._again = self._cycled = self._period = self._new = self._same_condition = 0
        self._condition, self._condition_changed = math.nan, False
        # Fingerprints of the last watched batch's inputs and targets.
        self._inputs = self._targets = torch.tensor(math.nan)
        self._same_inputs, self._same_targets = torch.zeros((), dtype=torch.bool), torch.zeros(())
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
        self._unread.append(_Fingerprints(fingerprint, *_find_condition(inputs, fingerprint)))
        if len(self._unread) > _BATCHES:
            self._compare()

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
        self._compare()
        counts = {
            "inputs_again": self._again,
            "inputs_cycled": self._cycled,
            "inputs_period": self._period,
            "inputs_new": self._new,
            "condition_again": self._same_condition,
            "examples": self._examples,
        }
        figures = self._watched | {name: float(count) for name, count in counts.items()}
        return {(name, ""): value for name, value in figures.items()}

    def _compare(self) -> None:
        """Reads the fingerprints since the last watched step, and compares each with those before it."""
        if not self._unread:
            return
        numbers = torch.stack([number for batch in self._unread for number in batch[:3]]).view(-1, 3).tolist()
        for batch, (inputs, condition, first) in zip(self._unread, numbers, strict=True):
            age = self._steps - self._last_steps.get(inputs, -_BATCHES - 1)
            is_known = age <= _BATCHES
            self._again = self._again + 1 if age == 1 else 0
            self._cycled, self._period = (self._cycled + 1, max(self._period, age)) if is_known else (0, 0)
            self._new += not is_known
            self._last_steps[inputs] = self._steps
            self._steps += 1
            if not math.isnan(condition):
                is_setting = batch.usual is None or first in batch.usual
                self._compare_condition(condition, age == 1, is_setting)
        self._last_steps = {key: step for key, step in self._last_steps.items() if self._steps - step <= _BATCHES}
        self._unread = []

    def _compare_condition(self, condition: float, is_same_batch: bool, is_setting: bool) -> None:
        """Counts the steps in which a condition stayed while the rest changed."""
        is_same = condition == self._condition
        self._condition_changed |= not is_same and not math.isnan(self._condition)
        # Lengths, masks and single settings may be the same from the first step on.
        counts = is_same and not is_same_batch and (self._condition_changed or not is_setting)
        self._same_condition, self._condition = self._same_condition + 1 if counts else 0, condition

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


def _find_condition(inputs: Any, fingerprint: Tensor) -> tuple[Tensor, Tensor, frozenset[int] | None]:
    """Returns the fingerprint of the last tensor with one number per example and its first number, both NaN if there is
    none, and the sizes that lengths and settings equal."""
    first, *following = (tensor.detach() for tensor in tensors_in(inputs) if tensor.numel())
    sizes = {1, *first.shape[:1]}
    conditions = [tensor for tensor in following if tensor.numel() in sizes and tensor.dtype != torch.bool]
    if not conditions:
        nothing = torch.full_like(fingerprint, math.nan)
        return nothing, nothing, None
    condition = conditions[-1].flatten().to(fingerprint)
    number = (condition * torch.arange(1, len(condition) + 1, device=condition.device).sqrt()).sum()
    shapes = (tensor.shape for tensor in (first, *following))
    usual = None if len(condition) == 1 else frozenset({0, 1}.union(*shapes))
    return number, condition[0], usual


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
