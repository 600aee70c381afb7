"""Scales of tensors that come from earlier casts (delayed) or from data (static). The host reads none of them, unless
it asks for a scale as a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8bench.formats.blocks import float_factor
from fp8bench.formats.grids import FORMATS, Format
from fp8bench.formats.matrix_codes import DelayedCodes
from fp8bench.formats.native_codes import current_scale, delayed_codes, delayed_scale
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
    """A source of a tensor's scales other than its present values."""

    def next(self, x: Tensor, repeat: bool = False, amax: Tensor | None = None) -> ScalePair:
        """Returns the scale for a cast of `x`, whose largest magnitude may be known; `repeat` repeats the scale of the
        last."""

    @property
    def last(self) -> ScalePair | None:
        """The scale of the last cast."""


class DelayedScale:
    """The delayed scale of one role's tensor in one layer, and its history.

    As in Transformer Engine, a cast takes the current scale and then enters its own largest magnitude. The first scale
    is 1. A history of zeros does not change the scale; neither does a cast with infinities or NaN, which enters 0.
    `scale` is that of the next cast, `history` a ring of largest magnitudes, filled from its front; both are float32 on
    the device, None before the first cast.
    """

    # Whether a tensor's magnitude is this rank's own, so that it can be found while casting.
    alone: ClassVar[bool] = True

    def __init__(self, delayed: Delayed, fmt: Format) -> None:
        self._delayed = delayed
        self._fmt = fmt
        self._casts: Tensor | None = None
        self.scale: Tensor | None = None
        self.history: Tensor | None = None
        self.last: ScalePair | None = None

    def next(self, x: Tensor, repeat: bool = False, amax: Tensor | None = None) -> ScalePair:
        """A recomputed block casts with `repeat`: it gets the scale that it had, and is not entered twice."""
        if repeat and self.last is not None:
            return self.last
        amax = largest_magnitude(x) if amax is None else amax
        self.last = ScalePair(*delayed_scale(amax, *self._state(x.device), self._fmt, self._delayed))
        return self.last

    def cast(self, x: Tensor, repeat: bool, both: bool) -> DelayedCodes | None:
        """Casts `x` and does what `next` does, in one pass; None where the scale is not this tensor's alone, or is that
        of the last cast."""
        if not self.alone or (repeat and self.last is not None):
            return None
        cast = delayed_codes(x, *self._state(x.device), self._fmt, self._delayed, both)
        self.last = ScalePair(cast.scale, cast.inverse)
        return cast

    def _state(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if self.scale is None or self.history is None or self._casts is None:
            self.scale = torch.ones((), dtype=torch.float32, device=device)
            self.history = torch.zeros(self._delayed.history, dtype=torch.float32, device=device)
            self._casts = torch.zeros((), dtype=torch.int32, device=device)
        return self.history, self._casts, self.scale

    def memory(self) -> dict[str, Tensor]:
        if self.scale is None or self.history is None or self._casts is None:
            return {}
        return {"scale": self.scale, "history": self.history, "casts": self._casts}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        self.scale, self.history, self._casts = map(memory.get, ("scale", "history", "casts"))


def backward_is_running() -> bool:
    """Whether this thread runs autograd's backward; False while a graph is compiled, which traces backward apart."""
    return not torch.compiler.is_compiling() and bool(torch._C._current_graph_task_id() != -1)


def largest_magnitudes(tensors: list[Tensor]) -> Sequence[Tensor]:
    """The largest magnitude of each tensor, in one call on a GPU."""
    if not tensors or tensors[0].device.type == "cpu":
        return [largest_magnitude(tensor) for tensor in tensors]  # _foreach_norm takes 37 times as long there
    return torch._foreach_norm(tensors, math.inf, dtype=torch.float32)


def kept_scales(book: ScaleBook, layer: str, treatments: Mapping[Role, Treatment]) -> dict[Role, StaticScale]:
    scales = {}
    for role, treatment in treatments.items():
        assert treatment.scaling is not None
        amax = None if book.known is None else book.known.get((layer, role.value))
        scales[role] = StaticScale(book, treatment.fmt, treatment.scaling.rounding, amax)
        book.keep(layer, role.value, scales[role].state)
    return scales


class StaticScale:
    """The static scale of one role's tensor in one layer; a book decides when it is renewed.

    While the book is watching, a cast takes the current scale and enters its largest magnitude; the first cast after
    that makes the scale of the largest one entered. Magnitudes that are 0 or not finite do not count. A scale that is
    known and never renewed changes no state here, so that a graph can be compiled around it.
    """

    def __init__(self, book: ScaleBook, fmt: Format, rounding: ScaleRounding, found_amax: float | None = None) -> None:
        """`found_amax` is the largest magnitude if it was found before; its scale is made on torch's default device."""
        self._book = book
        self._fmt = fmt
        self._rounding = rounding
        self._amax: Tensor | None = None
        self._scale: ScalePair | None = None
        self._renewals: Tensor | None = None
        self._entered: Tensor | None = None
        self._used: ScalePair | None = None
        if found_amax is not None:
            self._settle(torch.full((), found_amax, dtype=torch.float32))

    def next(self, x: Tensor, repeat: bool = False, amax: Tensor | None = None) -> ScalePair:
        # A recomputed block gets the scale that it had, so that both casts give the same codes.
        if repeat and self._used is not None:
            return self._used
        # While data is watched the scale is each tensor's own, and the largest magnitude is noted.
        if self._book.watching:
            amax = largest_magnitude(x) if amax is None else amax
            counted = torch.where(amax.isfinite(), amax, 0.0)
            self._entered = counted if self._entered is None else torch.maximum(self._entered, counted)
            self._used = ScalePair(*current_scale(amax, self._fmt, self._rounding))
            return self._used
        # Use the current scale, or that of the entered magnitude, or, for a new tensor, the scale of its values.
        if self._entered is not None:
            self._settle(self._entered)
        elif self._scale is None:
            self._settle(largest_magnitude(x) if amax is None else amax)
        assert self._scale is not None
        bound = self._book.rule.bound
        if bound is not None:
            self._bound(x, self._scale.scale, bound)
        # A bound may renew the scale at any cast; a recomputed block needs the scale that was used.
        if bound is not None or self._used is not None:
            self._used = None if bound is None else self._scale
        return self._scale

    @property
    def last(self) -> ScalePair | None:
        return self._used or self._scale

    def memory(self) -> dict[str, Tensor]:
        """Returns what a renewed scale carries from cast to cast; one that is never renewed is known."""
        named = {"amax": self._amax, "renewals": self._renewals, "entered": self._entered}
        return {name: tensor for name, tensor in named.items() if tensor is not None and self._is_renewed}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        if self._is_renewed:
            self._amax, self._renewals, self._entered = map(memory.get, ("amax", "renewals", "entered"))
            self._scale = None if self._amax is None else _invert(self._factor(self._amax))
            self._used = None

    @property
    def _is_renewed(self) -> bool:
        return bool(self._book.rule.refresh) or self._book.rule.bound is not None

    def state(self) -> ScaleState | None:
        if self._entered is not None:
            self._settle(self._entered)
        if self._amax is None or self._scale is None or self._renewals is None:
            return None
        return ScaleState(float(self._amax), float(self._scale.scale), int(self._renewals))

    def _settle(self, amax: Tensor) -> None:
        """Makes the scale of that largest magnitude; the first time does not count as a renewal."""
        self._entered = None
        if self._scale is None:
            self._amax, self._scale = amax, _invert(self._factor(amax))
            self._renewals = torch.zeros((), dtype=torch.int64, device=amax.device)
        else:
            self._renew(amax, torch.ones_like(amax, dtype=torch.bool))

    def _bound(self, x: Tensor, scale: Tensor, bound: float) -> None:
        """Renews the scale from the tensor if the current one would cut off more than a share of `bound`."""
        # A GPU must not wait for an answer: it always counts and makes both scales, and selects one on the device.
        waits = x.device.type == "cpu"
        # Tensor by tensor, as in float_factor: a number over a tensor is a product with its reciprocal on a GPU.
        limit = torch.full_like(scale, self._fmt.largest) / scale
        amax = largest_magnitude(x)
        if waits and amax <= limit:
            return
        beyond = torch.count_nonzero(x.detach().to(torch.float32).abs() > limit)
        too_many = beyond > bound * x.numel()
        if not waits or too_many:
            self._renew(amax, too_many)

    def _renew(self, amax: Tensor, due: Tensor) -> None:
        assert self._amax is not None and self._scale is not None and self._renewals is not None
        renew = due & amax.isfinite() & (amax > 0)
        self._amax = torch.where(renew, amax, self._amax)
        self._scale = _invert(torch.where(renew, self._factor(amax), self._scale.scale))
        self._renewals = self._renewals + renew

    def _factor(self, amax: Tensor) -> Tensor:
        return float_factor(amax, self._fmt, self._rounding)


def _invert(scale: Tensor) -> ScalePair:
    return ScalePair(scale, scale.reciprocal())


@dataclass(frozen=True)
class RecipeView:
    """One tensor's element format and factors, None where unknown, and the course of a delayed scale."""

    fmt: Format | None = None
    factors: Factors | None = None
    course: ScaleCourse | None = None


def view_of(precision: Precision, role: Role, x: Tensor, earlier: Sequence[Tensor] = ()) -> RecipeView:
    """The view of `x` after earlier steps' tensors, newest first. A precision without a recipe is just a format."""
    recipe = getattr(precision, "recipe", None)
    # Formats without a recipe have no scale whose course could be shown.
    if not isinstance(recipe, Recipe):
        return RecipeView(FORMATS.get(precision.name))
    treatment = dict(zip((Role.INPUT, Role.WEIGHT, Role.GRADIENT), recipe.treatments, strict=True))[role]
    if recipe.delayed is None:
        return RecipeView(treatment.fmt, factors_of(x, treatment.fmt, treatment.scaling))
    steps = [*reversed(earlier), x]
    memory = DelayedScale(recipe.delayed, treatment.fmt)
    scales = [memory.next(step) for step in steps]
    # The first step's scale comes from nothing, so it is not part of the course.
    places = slice(1, None) if earlier else slice(None)
    amaxes = [float(step.abs().max()) for step in steps[places]]
    course = scale_course([float(pair.scale) for pair in scales[places]], amaxes, treatment.fmt)
    return RecipeView(treatment.fmt, factors_of(x, treatment.fmt, treatment.scaling, scales[-1].scale), course)
