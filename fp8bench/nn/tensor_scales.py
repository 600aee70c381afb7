"""Where a tensor's scale comes from, if not from the tensor as it is: earlier casts (delayed), or data (static).

The host reads none of it, unless it asks for a scale as a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fp8bench.formats.blocks import float_factor
from fp8bench.formats.grids import FORMATS, Format
from fp8bench.formats.native_codes import current_scale, delayed_scale
from fp8bench.formats.recipes import Delayed, Recipe, ScaleRounding, Treatment
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.numerics.tensor_error import Factors, ScaleCourse, factors_of, scale_course
from fp8bench.protocols import Precision, Role, ScaleBook
from fp8bench.protocols.arithmetic import ScaleState


class ScalePair(NamedTuple):
    """A tensor's scale and its inverse, float32 tensors without dimensions on its device."""

    scale: Tensor
    inverse: Tensor


class NextScale(Protocol):
    """Where the scale of a tensor comes from, if not from the tensor as it is."""

    def next(self, x: Tensor, again: bool = False, amax: Tensor | None = None) -> ScalePair:
        """The scale for a cast of `x`, whose largest magnitude may be known; `again`: the cast before once more."""

    @property
    def last(self) -> ScalePair | None:
        """What the last cast got."""


class DelayedScale:
    """The scale of one role's tensor in one layer, and the history that it comes from.

    As in Transformer Engine a cast takes the scale that stands, then enters its own largest magnitude. The scale starts
    at 1; a history of zeros leaves it as it is, and so does a cast with infinities or NaN, which enters a 0.
    `scale` is what the next cast will be multiplied by, `history` a ring of largest magnitudes that is filled from its
    front; both are float32 on the device, and None before the first cast.
    """

    def __init__(self, delayed: Delayed, fmt: Format) -> None:
        self._delayed = delayed
        self._fmt = fmt
        self._casts: Tensor | None = None
        self.scale: Tensor | None = None
        self.history: Tensor | None = None
        self._used: ScalePair | None = None

    def next(self, x: Tensor, again: bool = False, amax: Tensor | None = None) -> ScalePair:
        """What is cast `again` (a block computed again in backward) gets the scale it had, and is not entered twice."""
        if again and self._used is not None:
            return self._used
        if self.scale is None or self.history is None or self._casts is None:
            self.scale = torch.ones((), dtype=torch.float32, device=x.device)
            self.history = torch.zeros(self._delayed.history, dtype=torch.float32, device=x.device)
            self._casts = torch.zeros((), dtype=torch.int32, device=x.device)
        amax = largest_magnitude(x) if amax is None else amax
        state = self.history, self._casts, self.scale
        self._used = ScalePair(*delayed_scale(amax, *state, self._fmt, self._delayed))
        return self._used

    def memory(self) -> dict[str, Tensor]:
        """What the scales to come depend on; nothing before the first cast."""
        if self.scale is None or self.history is None or self._casts is None:
            return {}
        return {"scale": self.scale, "history": self.history, "casts": self._casts}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        self.scale, self.history, self._casts = map(memory.get, ("scale", "history", "casts"))

    @property
    def last(self) -> ScalePair | None:
        return self._used


def backward_is_running() -> bool:
    """Whether this thread is in autograd's backward: never while a graph is compiled, which is traced apart."""
    return not torch.compiler.is_compiling() and bool(torch._C._current_graph_task_id() != -1)


def largest_magnitudes(tensors: list[Tensor]) -> Sequence[Tensor]:
    """The same of several, in one call where a call of the device's is dear."""
    if not tensors or tensors[0].device.type == "cpu":
        return [largest_magnitude(tensor) for tensor in tensors]  # norms of many take 37 times as long there
    return torch._foreach_norm(tensors, math.inf, dtype=torch.float32)


def kept_scales(book: ScaleBook, layer: str, treatments: Mapping[Role, Treatment]) -> dict[Role, StaticScale]:
    scales = {}
    for role, treatment in treatments.items():
        assert treatment.scaling is not None
        known = None if book.known is None else book.known.get((layer, role.value))
        scales[role] = StaticScale(book, treatment.fmt, treatment.scaling.rounding, known)
        book.keep(layer, role.value, scales[role].state)
    return scales


class StaticScale:
    """The scale of one role's tensor in one layer, kept by a book that says when it is renewed.

    While the book is watching a cast takes the current scale, and its largest magnitude is entered; from the first
    cast after that on the largest one entered gives the scale. Magnitudes that are 0 or not finite do not count.
    A scale that is known and never renewed changes nothing here, so that a graph may be compiled around it.
    """

    def __init__(self, book: ScaleBook, fmt: Format, rounding: ScaleRounding, known: float | None = None) -> None:
        """`known` is the largest magnitude, if it was found before; its scale lies where tensors are being made."""
        self._book = book
        self._fmt = fmt
        self._rounding = rounding
        self._amax: Tensor | None = None
        self._scale: ScalePair | None = None
        self._renewals: Tensor | None = None
        self._entered: Tensor | None = None
        self._used: ScalePair | None = None
        if known is not None:
            self._settle(torch.full((), known, dtype=torch.float32))

    def next(self, x: Tensor, again: bool = False, amax: Tensor | None = None) -> ScalePair:
        if again and self._used is not None:
            return self._used
        if self._book.watching:
            amax = largest_magnitude(x) if amax is None else amax
            counted = torch.where(amax.isfinite(), amax, 0.0)
            self._entered = counted if self._entered is None else torch.maximum(self._entered, counted)
            self._used = ScalePair(*current_scale(amax, self._fmt, self._rounding))
            return self._used
        # The scale that stands, once what was entered counts; of a tensor that nobody has seen its own.
        if self._entered is not None:
            self._settle(self._entered)
        elif self._scale is None:
            self._settle(largest_magnitude(x) if amax is None else amax)
        assert self._scale is not None
        bound = self._book.rule.bound
        if bound is not None:
            self._bound(x, self._scale.scale, bound)
        if bound is not None or self._used is not None:
            self._used = None if bound is None else self._scale
        return self._scale

    @property
    def last(self) -> ScalePair | None:
        return self._used or self._scale

    def state(self) -> ScaleState | None:
        """As it is now; waits for the device."""
        if self._entered is not None:
            self._settle(self._entered)
        if self._amax is None or self._scale is None or self._renewals is None:
            return None
        return ScaleState(float(self._amax), float(self._scale.scale), int(self._renewals))

    def _settle(self, amax: Tensor) -> None:
        """Scale by that largest magnitude from now on: the first time found, later renewed."""
        self._entered = None
        if self._scale is None:
            self._amax, self._scale = amax, _inverted(self._factor(amax))
            self._renewals = torch.zeros((), dtype=torch.int64, device=amax.device)
        else:
            self._renew(amax, torch.ones_like(amax, dtype=torch.bool))

    def _bound(self, x: Tensor, scale: Tensor, bound: float) -> None:
        """Scale by the current one from now on where the scale that stands would cut off too many values."""
        # On a GPU no answer is waited for: all is counted, both scales are found, and one is taken there.
        waits = x.device.type == "cpu"
        # Divided as float_factor divides: elsewhere than on a processor torch takes a reciprocal.
        limit, amax = torch.full_like(scale, self._fmt.largest) / scale, largest_magnitude(x)
        if waits and amax <= limit:
            return
        beyond = torch.count_nonzero(x.detach().to(torch.float32).abs() > limit)
        too_many = beyond > bound * x.numel()
        if not waits or too_many:
            self._renew(amax, too_many)

    def _renew(self, amax: Tensor, wanted: Tensor) -> None:
        assert self._amax is not None and self._scale is not None and self._renewals is not None
        renew = wanted & amax.isfinite() & (amax > 0)
        self._amax = torch.where(renew, amax, self._amax)
        self._scale = _inverted(torch.where(renew, self._factor(amax), self._scale.scale))
        self._renewals = self._renewals + renew

    def _factor(self, amax: Tensor) -> Tensor:
        return float_factor(amax, self._fmt, self._rounding)


def _inverted(scale: Tensor) -> ScalePair:
    return ScalePair(scale, scale.reciprocal())


@dataclass(frozen=True)
class RecipeView:
    """The elements' format and factors of one tensor, None where nobody knows; the course of a delayed scale."""

    fmt: Format | None = None
    factors: Factors | None = None
    course: ScaleCourse | None = None


def view_of(precision: Precision, role: Role, x: Tensor, before: Sequence[Tensor] = ()) -> RecipeView:
    """Of `x` after the tensors of earlier steps, the nearest first. Precisions without a recipe are their format."""
    recipe = getattr(precision, "recipe", None)
    if not isinstance(recipe, Recipe):
        return RecipeView(FORMATS.get(precision.name))
    treatment = dict(zip((Role.INPUT, Role.WEIGHT, Role.GRADIENT), recipe.treatments, strict=True))[role]
    if recipe.delayed is None:
        return RecipeView(treatment.fmt, factors_of(x, treatment.fmt, treatment.scaling))
    steps, memory = [*reversed(before), x], DelayedScale(recipe.delayed, treatment.fmt)
    scales = [memory.next(step) for step in steps]
    # The first step has none to take its scale from, and is no part of the course.
    told = slice(1, None) if before else slice(None)
    amaxes = [float(step.abs().max()) for step in steps[told]]
    course = scale_course([float(pair.scale) for pair in scales[told]], amaxes, treatment.fmt)
    return RecipeView(treatment.fmt, factors_of(x, treatment.fmt, treatment.scaling, scales[-1].scale), course)
