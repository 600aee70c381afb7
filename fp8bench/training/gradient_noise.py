"""How noisy gradients are, from those of a step's micro-batches: signal over noise, and the batch where they meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.training.readings import Figures


class GradientNoise:
    """Sums over the gradients that arrive at some parameters, a micro-batch after the other, and of those together.

    A step of one micro-batch says nothing, and neither do gradients that are taken away as soon as they are there.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._counts = dict.fromkeys(parameters, 0)
        self._squares: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}

    def attach(self, stack: ExitStack) -> None:
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                arriving: Any = parameter.register_hook(self._arriving(name))  # type: ignore[no-untyped-call]
                added: Any = parameter.register_post_accumulate_grad_hook(self._added(name))  # type: ignore[no-untyped-call]
                stack.callback(arriving.remove)
                stack.callback(added.remove)

    def _arriving(self, name: str) -> Callable[[Tensor], None]:
        def see(gradient: Tensor) -> None:
            self._counts[name] += 1
            before = self._parameters[name].grad
            if self._counts[name] == 1 or before is None:
                return
            first = _square(before) if self._counts[name] == 2 else self._squares[name]
            self._squares[name] = first + _square(gradient)

        return see

    def _added(self, name: str) -> Callable[[Tensor], None]:
        def see(parameter: Tensor) -> None:
            if self._counts[name] > 1 and parameter.grad is not None:
                self._totals[name] = _square(parameter.grad)

        return see

    def figures(self) -> dict[str, Figures]:
        """By parameter, those with two micro-batches or more."""
        return {
            name: {"count": self._counts[name], "squares": squares, "total": self._totals[name]}
            for name, squares in self._squares.items()
        }


def _square(gradient: Tensor) -> Tensor:
    squared: Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).to(torch.float64).square()
    return squared


@dataclass(frozen=True)
class Noise:
    """Of n gradients of equally many examples: the variance of one around their mean, and the square of the true mean,
    both without bias. Of many parameters they add up."""

    variance: float
    signal: float

    @property
    def ratio(self) -> float:
        """The norm of the mean over the deviation of one; 0 where noise leaves nothing of the signal."""
        if self.variance <= 0:
            return math.inf if self.signal > 0 else 0.0
        return math.sqrt(max(self.signal, 0.0) / self.variance)

    @property
    def scale(self) -> float:
        """So many gradients averaged are half noise; infinite where there is no signal."""
        return max(self.variance, 0.0) / self.signal if self.signal > 0 else math.inf


def noise_of(count: float, squares: float, total: float) -> Noise:
    """From the sum of the gradients' squares and the square of their sum."""
    variance = (squares - total / count) / (count - 1)
    return Noise(variance, total / count**2 - variance / count)


def told(found: Mapping[str, Mapping[str, float]], examples: int) -> Iterator[tuple[str, str, float]]:
    """Names, layers and values of the figures; of all parameters together the layer is ''."""
    every = {name: noise_of(one["count"], one["squares"], one["total"]) for name, one in found.items()}
    if not every:
        return
    for name, one in every.items():
        yield "gradient_snr", name, one.ratio
    joint = Noise(sum(one.variance for one in every.values()), sum(one.signal for one in every.values()))
    yield "gradient_snr", "", joint.ratio
    yield "noise_scale", "", examples * joint.scale
