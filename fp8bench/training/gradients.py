"""The gradients of a step: how they are kept from one micro-batch to the next, until the weights are updated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

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
