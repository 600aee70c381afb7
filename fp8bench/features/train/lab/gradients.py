"""The gradients of a step: how they are kept from one micro-batch to the next, until the weights are updated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.readings import Figures
from fp8bench.formats.grids import E4M3
from fp8bench.formats.native_codes import codes, current_scale
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.formats.scalings import ScaleRounding
from fp8bench.protocols import Operand

# As FP8-LM has it: a scale is halved where more values saturate than this share, and grows to twice itself over so
# many steps in which no more do.
MOST_SATURATED = 1e-5
_GROWTH = 2 ** (1 / 1000)


class Gradients:
    """float32, where autograd keeps them and adds them up itself. They lie there until the next step begins."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        for one in parameters:
            one.grad = torch.zeros_like(one)

    def begin(self) -> None:
        """A step begins: there are none."""
        for one in self._parameters:
            one.grad = None

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """float32; zeros where a step has found none, as of an expert that had no token."""
        return [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]

    def filled(self) -> list[Tensor]:
        """Where they lie, with zeros where a step has found none."""
        for one in self._parameters:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        return [one.grad for one in self._parameters if one.grad is not None]

    def norms(self) -> list[Tensor]:
        """Of each; not finite where it is not."""
        return list(torch._foreach_norm(self.of(self._parameters)))

    def end(self) -> None:
        """The weights are updated."""

    def kept(self) -> list[Tensor]:
        """What they are kept in."""
        return self.of(self._parameters)

    def memory(self) -> list[Tensor]:
        """What the next step depends on."""
        return []


class _Sum(Protocol):
    """What is kept of one parameter's gradient."""

    @property
    def operand(self) -> Operand: ...

    def add(self, fresh: Tensor, first: bool) -> None: ...

    def restored(self) -> Tensor: ...

    def end(self) -> None: ...


class LowGradients(Gradients):
    """In low precision: of each parameter what backward has found is added and rounded as soon as it is there, so that
    never more than one of them is float32."""

    def __init__(self, parameters: Sequence[nn.Parameter], micro_batches: int, fp8: bool) -> None:
        self._parameters = parameters
        self._sums: dict[Tensor, _Sum] = {}
        for one in parameters:
            self._sums[one] = AutomaticScale(one.detach(), micro_batches) if fp8 else _BFloat16(one.detach())
        self._begun: set[Tensor] = set()
        for one in parameters:
            one.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._begun.clear()

    def _take(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._sums[parameter].add(parameter.grad, parameter not in self._begun)
        self._begun.add(parameter)
        parameter.grad = None

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [self._sums[one].restored() if one in self._begun else torch.zeros_like(one) for one in parameters]

    def norms(self) -> list[Tensor]:
        return [self.of([one])[0].norm() for one in self._parameters]

    def end(self) -> None:
        for one in self._sums.values():
            one.end()

    def kept(self) -> list[Tensor]:
        return [part for one in self._sums.values() for part in one.operand.tensors]

    def memory(self) -> list[Tensor]:
        return [one.share for one in self._sums.values() if isinstance(one, AutomaticScale)]


class _BFloat16:
    def __init__(self, like: Tensor) -> None:
        self.operand = Operand(torch.zeros_like(like, dtype=torch.bfloat16))

    def add(self, fresh: Tensor, first: bool) -> None:
        self.operand = Operand((fresh if first else fresh + self.operand.data).to(torch.bfloat16))

    def restored(self) -> Tensor:
        return self.operand.data.to(torch.float32)

    def end(self) -> None:
        """Nothing is learnt from a step."""


class AutomaticScale:
    """E4M3 codes under one scale, which all micro-batches of a step share, as do all devices in FP8-LM.

    It takes the largest magnitude that the first micro-batch lets expect of all of them to the share `share` of the
    format's own. The share is halved after a step in which too many values were larger, and grows back to 1. Gradients
    that are not finite are restored as NaN.
    """

    def __init__(self, like: Tensor, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._codes, self._inverse = codes(like * 0, E4M3), like.new_ones(())
        self._scale, self._saturated = like.new_ones(()), torch.zeros((), dtype=torch.int64, device=like.device)
        self.share = like.new_ones(())

    @property
    def operand(self) -> Operand:
        return Operand(self._codes, self._inverse)

    def add(self, fresh: Tensor, first: bool) -> None:
        total = fresh if first else fresh + self.restored()
        amax = largest_magnitude(total)
        if first:
            scale, _ = current_scale(amax * self._micro_batches, E4M3, ScaleRounding.EXACT)
            self._scale, self._saturated = scale * self.share, torch.zeros_like(self._saturated)
        self._saturated = self._saturated + torch.count_nonzero(total.abs() > E4M3.largest / self._scale)
        self._codes = codes(total, E4M3, self._scale)
        self._inverse = torch.where(amax.isfinite(), self._scale.reciprocal(), torch.nan)

    def restored(self) -> Tensor:
        return self._codes.to(torch.float32) * self._inverse

    def end(self) -> None:
        too_many = self._saturated > MOST_SATURATED * self._codes.numel() * self._micro_batches
        after = torch.where(too_many, self.share / 2, (self.share * _GROWTH).clamp(max=1.0))
        self.share = torch.where(self._inverse.isfinite(), after, self.share)


def joint(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all tensors together, from those of each."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


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
