"""Scales of tensors of which each rank has a share: one of each share's own, or one of the whole tensor.

A tensor that is cut has no largest magnitude that one rank knows. `own` scales each share by its own, `group` asks all
ranks for the largest of all shares before every cast, so that codes are those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from fp8bench.formats.native_codes import current_scale
from fp8bench.formats.recipes import Delayed, Treatment
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.parallel.cuts import OUTPUTS, Cut
from fp8bench.nn.recipe_arithmetic import RecipeArithmetic
from fp8bench.nn.tensor_scales import DelayedScale, NextScale, ScalePair
from fp8bench.protocols import Arithmetic, Role

# A largest magnitude, float32 without dimensions, to that of all ranks.
Largest = Callable[[Tensor], Tensor]


class CurrentOfGroup:
    """The scale of a tensor's largest magnitude over all ranks."""

    def __init__(self, largest: Largest, treatment: Treatment) -> None:
        self._largest, self._treatment = largest, treatment
        self.last: ScalePair | None = None

    def next(self, x: Tensor, again: bool = False, amax: Tensor | None = None) -> ScalePair:
        """A block that is computed again is cast by the scale that it had."""
        if again and self.last is not None:
            return self.last
        scaling = self._treatment.scaling
        assert scaling is not None
        amax = self._largest(largest_magnitude(x) if amax is None else amax)
        self.last = ScalePair(*current_scale(amax, self._treatment.fmt, scaling.rounding))
        return self.last


class DelayedOfGroup(DelayedScale):
    """A delayed scale whose history is that of the whole tensor."""

    def __init__(self, largest: Largest, delayed: Delayed, treatment: Treatment) -> None:
        super().__init__(delayed, treatment.fmt)
        self._largest = largest

    def next(self, x: Tensor, again: bool = False, amax: Tensor | None = None) -> ScalePair:
        if again and self.last is not None:
            return self.last
        return super().next(x, again, self._largest(largest_magnitude(x) if amax is None else amax))


def cut_roles(cut: Cut) -> tuple[Role, ...]:
    """What each rank has a share of. The rest of a product's operands is the same on all of them."""
    return (Role.WEIGHT, Role.GRADIENT if cut.dim == OUTPUTS else Role.INPUT)


def scaled_together(arithmetic: Arithmetic, roles: Iterable[Role], largest: Largest) -> Arithmetic:
    """The same for a layer, with scales by the largest magnitudes of all ranks for these roles; itself where no tensor
    has one scale. Ranks have to cast alike, and at the same time."""
    if not (isinstance(arithmetic, RecipeArithmetic) and arithmetic.recipe.per_tensor):
        return arithmetic
    delayed = arithmetic.recipe.delayed
    scales: dict[Role, NextScale] = dict(arithmetic.scales)
    for role in roles:
        treatment = arithmetic.treatments[role]
        scales[role] = DelayedOfGroup(largest, delayed, treatment) if delayed else CurrentOfGroup(largest, treatment)
    return type(arithmetic)(arithmetic.recipe, arithmetic.carrier, arithmetic.name, scales)
