"""Scales of tensors that ranks have shares of.

No rank knows the largest magnitude of a tensor that is cut. `own` scales each share by its own magnitude; `group` asks
all ranks for the largest before every cast, so that codes are those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from fp8bench.formats.native_codes import current_scale
from fp8bench.formats.recipes import Delayed, Treatment
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.nn.parallel.ways import OUTPUTS, Cut
from fp8bench.nn.tensor_scales import DelayedScale, NextScale, ScalePair
from fp8bench.protocols import Arithmetic, Role

# Turns one rank's largest magnitude, a float32 scalar tensor, into that of all ranks.
Largest = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class CurrentOfGroup:
    """Scales by a tensor's largest magnitude over all ranks."""

    _largest: Largest
    treatment: Treatment
    last: ScalePair | None = None

    def next(self, x: Tensor, repeat: bool = False, amax: Tensor | None = None) -> ScalePair:
        if repeat and self.last is not None:
            return self.last
        scaling = self.treatment.scaling
        assert scaling is not None
        amax = self._largest(largest_magnitude(x) if amax is None else amax)
        self.last = ScalePair(*current_scale(amax, self.treatment.fmt, scaling.rounding))
        return self.last


class DelayedOfGroup(DelayedScale):
    """A delayed scale with the history of the whole tensor."""

    alone = False

    def __init__(self, largest: Largest, delayed: Delayed, treatment: Treatment) -> None:
        super().__init__(delayed, treatment.fmt)
        self._largest = largest

    def next(self, x: Tensor, repeat: bool = False, amax: Tensor | None = None) -> ScalePair:
        if repeat and self.last is not None:
            return self.last
        return super().next(x, repeat, self._largest(largest_magnitude(x) if amax is None else amax))


def cut_roles(cut: Cut) -> tuple[Role, ...]:
    """The operands of which each rank has a share; the rest of a product is the same on all of them."""
    return (Role.WEIGHT, Role.GRADIENT if cut.dim == OUTPUTS else Role.INPUT)


def scaled_together(arithmetic: Arithmetic, roles: Iterable[Role], largest: Largest) -> Arithmetic:
    """`arithmetic` with scales by the largest magnitudes of all ranks for these roles; itself where no tensor has one
    scale. Ranks have to cast in the same order."""
    if not (isinstance(arithmetic, RecipeArithmetic) and arithmetic.recipe.per_tensor):
        return arithmetic
    delayed = arithmetic.recipe.delayed
    scales: dict[Role, NextScale] = dict(arithmetic.scales)
    for role in roles:
        treatment = arithmetic.treatments[role]
        scales[role] = DelayedOfGroup(largest, delayed, treatment) if delayed else CurrentOfGroup(largest, treatment)
    return type(arithmetic)(arithmetic.recipe, arithmetic.carrier, arithmetic.name, scales)
