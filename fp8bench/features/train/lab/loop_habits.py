"""What somebody's own loop does with gradients and its optimizer between two steps, as far as it can be seen for
nothing: no tensor is read; and what backward begins with, of a module whose loss is made outside of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8bench.features.train.lab.loop_figures import data_figures, sign_of_inputs
from fp8bench.features.train.values import GRADIENTS_LEFT, MOMENTS_GONE, OTHERS_TRAIN

# Parameters, their gradients, and how often those had been changed.
Left = list[tuple[Tensor, Tensor, int]]


class LoopHabits:
    """Of a module and its optimizer; `noticed` says once what has come to be so."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._own = {id(parameter) for parameter in module.parameters()}
        self._left: Left = []
        self._cleared = self._began = False
        self._states, self._age = 0, 0.0
        self._inputs: Tensor | None = None
        self._again: Tensor | float = 0.0
        self.examples = 0
        self._data: dict[str, Any] = {}
        self._noticed: list[str] = []
        self._so: set[str] = set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        handle = register_optimizer_step_post_hook(self._somebody_stepped)
        try:
            yield
        finally:
            handle.remove()

    def given(self, inputs: Any, watched: bool = False) -> None:
        self._data = data_figures(inputs) if watched else {}
        sign, self.examples = sign_of_inputs(inputs)
        if sign is not None:
            same = sign == self._inputs if self._inputs is not None else torch.zeros_like(sign)
            self._inputs, self._again = sign, (self._again + 1) * same

    def figures(self, parameters: Mapping[str, nn.Parameter]) -> dict[tuple[str, str], Tensor | float]:
        """By name and layer: how often in turn the same inputs were given, and shares of the highest rate."""
        highest = self.rate()
        shares = {id(one): rate / highest for rate, group in self._groups() for one in group["params"] if highest > 0}
        slower = {
            ("rate_share", name.removesuffix(".weight")): share
            for name, parameter in parameters.items() if (share := shares.get(id(parameter), 1.0)) < 1
        }  # fmt: skip
        data = {(name, ""): value for name, value in self._data.items()}
        return slower | data | {("inputs_again", ""): self._again, ("examples", ""): float(self.examples)}

    def backward_begins(self) -> bool:
        """Whether gradients begin anew: those that nobody has touched since the last update, or since the backward
        before, were not cleared."""
        still = (parameter.grad is grad and grad._version == version for parameter, grad, version in self._left)
        anew = not self._left or not all(still)
        self._began = True
        self._cleared |= anew
        return anew

    def backward_ended(self) -> None:
        self._left = self._gradients()

    def update_begins(self) -> None:
        self._set(GRADIENTS_LEFT, self._began and not self._cleared)
        states, age = self._moments()
        self._set(MOMENTS_GONE, states < self._states or age < self._age)

    def rate(self) -> float:
        """The highest of all groups; NaN of an optimizer that finds its own."""
        return max((rate for rate, _ in self._groups()), default=math.nan)

    def updated(self) -> None:
        self._left, self._cleared, self._began = self._gradients(), False, False
        self._states, self._age = self._moments()

    def noticed(self) -> list[str]:
        noticed, self._noticed = self._noticed, []
        return noticed

    def _set(self, word: str, now: bool) -> None:
        if now and word not in self._so:
            self._noticed.append(word)
        (self._so.add if now else self._so.discard)(word)

    def _somebody_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        others = (id(one) not in self._own for group in optimizer.param_groups for one in group["params"])
        if optimizer is not self._optimizer and any(others):
            self._set(OTHERS_TRAIN, True)

    def _groups(self) -> Iterator[tuple[float, dict[str, Any]]]:
        return ((float(group["lr"]), group) for group in self._optimizer.param_groups if group.get("lr") is not None)

    def _gradients(self) -> Left:
        every = ((one, one.grad) for group in self._optimizer.param_groups for one in group["params"])
        return [(parameter, gradient, gradient._version) for parameter, gradient in every if gradient is not None]

    def _moments(self) -> tuple[int, float]:
        """Of how many parameters the optimizer knows something, and how old that is if it says so."""
        state = self._optimizer.state
        age = next(iter(state.values())).get("step", 0) if state else 0
        waits = isinstance(age, Tensor) and age.device.type != "cpu"
        return len(state), 0.0 if waits else float(age)


class BackwardListener(ABC):
    """Hears of every backward while it listens; of those inside another one, as of checkpoints, it hears nothing."""

    @abstractmethod
    def backward_begins(self, root: Tensor | None) -> None:
        """The number that it begins with, with its graph; None where it is no single number."""

    @abstractmethod
    def backward_ended(self, root: Tensor | None) -> None:
        """The number it began with, None where it was no single number."""


_listeners: list[BackwardListener] = []
_running: list[bool] = []
_plain = torch.autograd.backward


@contextmanager
def listening(listener: BackwardListener) -> Iterator[None]:
    """Every way into backward passes by `torch.autograd.backward`, which is wrapped while anybody listens."""
    _listeners.append(listener)
    torch.autograd.backward = _heard  # type: ignore[assignment]
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners and torch.autograd.backward is _heard:
            torch.autograd.backward = _plain


def _heard(tensors: Tensor | Sequence[Tensor], *args: Any, **named: Any) -> None:
    if _running:
        return _plain(tensors, *args, **named)
    listeners, root = tuple(_listeners), _number(tensors)
    for listener in listeners:
        listener.backward_begins(root)
    _running.append(True)
    try:
        _plain(tensors, *args, **named)
    finally:
        _running.pop()
    for listener in listeners:
        listener.backward_ended(None if root is None else root.detach().reshape(()))
    return None


def _number(tensors: Tensor | Sequence[Tensor]) -> Tensor | None:
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    alone = found[0] if len(found) == 1 else None
    return alone if alone is not None and alone.numel() == 1 else None
