"""Scales from data: a tensor's scale comes from the largest magnitudes of steps before. The host reads none of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fp8bench.formats.grids import Format
from fp8bench.formats.recipes import Treatment
from fp8bench.formats.scales import float_factor
from fp8bench.formats.scalings import ScaleRounding
from fp8bench.nn.delayed import largest_magnitude
from fp8bench.protocols import Role, ScaleBook, Standing


def kept_scales(book: ScaleBook, layer: str, treatments: Mapping[Role, Treatment]) -> dict[Role, StaticScale]:
    """Scales for a layer by role, entered into the book."""
    found = {}
    for role, one in treatments.items():
        assert one.scaling is not None
        known = None if book.known is None else book.known.get((layer, role.value))
        found[role] = StaticScale(book, one.fmt, one.scaling.rounding, known)
        book.keep(layer, role.value, found[role])
    return found


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
        self._scale: Tensor | None = None
        self._renewals: Tensor | None = None
        self._entered: Tensor | None = None
        self._used: Tensor | None = None
        if known is not None:
            self._settle(torch.full((), known, dtype=torch.float32))

    def next(self, x: Tensor, again: bool = False) -> Tensor:
        """The scale for a cast of `x`, a float32 tensor without dimensions on its device.

        `again`: the cast before is done once more, and gets the scale that it had.
        """
        if again and self._used is not None:
            return self._used
        if self._book.watching:
            self._used = self._enter(x)
            return self._used
        scale = self._standing(x)
        if self._book.rule.bound is not None:
            self._used = scale = self._bounded(x, scale, self._book.rule.bound)
        elif self._used is not None:
            self._used = None
        return scale

    def standing(self) -> Standing | None:
        """As it is now; waits for the device."""
        if self._entered is not None:
            self._settle(self._entered)
        if self._amax is None or self._scale is None or self._renewals is None:
            return None
        return Standing(float(self._amax), float(self._scale), int(self._renewals))

    def _enter(self, x: Tensor) -> Tensor:
        amax = largest_magnitude(x)
        counted = torch.where(amax.isfinite(), amax, 0.0)
        self._entered = counted if self._entered is None else torch.maximum(self._entered, counted)
        return self._factor(amax)

    def _standing(self, x: Tensor) -> Tensor:
        """The scale that stands, once what was entered counts; of a tensor that nobody has seen its own."""
        if self._entered is not None:
            self._settle(self._entered)
        elif self._scale is None:
            self._settle(largest_magnitude(x))
        assert self._scale is not None
        return self._scale

    def _settle(self, amax: Tensor) -> None:
        """Scale by that largest magnitude from now on: the first time found, later renewed."""
        self._entered = None
        if self._scale is None:
            self._amax, self._scale = amax, self._factor(amax)
            self._renewals = torch.zeros((), dtype=torch.int64, device=amax.device)
        else:
            self._renew(amax, torch.ones_like(amax, dtype=torch.bool))

    def _bounded(self, x: Tensor, scale: Tensor, bound: float) -> Tensor:
        """The scale that stands, or the current one from now on where too many values would be cut off."""
        # On a GPU no answer is waited for: all is counted, both scales are found, and one is taken there.
        waits = x.device.type == "cpu"
        # Divided as float_factor divides: elsewhere than on a processor torch takes a reciprocal.
        limit, amax = torch.full_like(scale, self._fmt.largest) / scale, largest_magnitude(x)
        if waits and amax <= limit:
            return scale
        beyond = torch.count_nonzero(x.detach().to(torch.float32).abs() > limit)
        too_many = beyond > bound * x.numel()
        if waits and not too_many:
            return scale
        self._renew(amax, too_many)
        assert self._scale is not None
        return self._scale

    def _renew(self, amax: Tensor, wanted: Tensor) -> None:
        assert self._amax is not None and self._scale is not None and self._renewals is not None
        renew = wanted & amax.isfinite() & (amax > 0)
        self._amax = torch.where(renew, amax, self._amax)
        self._scale = torch.where(renew, self._factor(amax), self._scale)
        self._renewals = self._renewals + renew

    def _factor(self, amax: Tensor) -> Tensor:
        return float_factor(amax, self._fmt, self._rounding)
