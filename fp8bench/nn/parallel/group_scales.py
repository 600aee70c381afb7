"""Scales of tensors that are divided among ranks.

If a tensor is divided, no rank knows its largest magnitude. With amax=own the part of each rank is scaled by its own
largest magnitude. With amax=group the ranks find the largest magnitude of all parts before every cast, so that codes
are the same as on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from fp8bench.formats.native_codes import compute_current_scale
from fp8bench.formats.recipes import DelayedScaling, Treatment
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.nn.parallel.ways import OUTPUT_DIMENSION, RankWeightCut
from fp8bench.nn.tensor_scales import DelayedScale, ScaleAndInverse, ScaleSource
from fp8bench.protocols import Arithmetic, Role

# A function that takes this rank's largest magnitude, a float32 scalar tensor, and returns the largest magnitude on
# all ranks.
MaxOverRanks = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class GroupCurrentScale:
    """The current scale of a tensor that ranks divide, from the largest magnitude of the whole tensor."""

    _max_over_ranks: MaxOverRanks
    treatment: Treatment
    last_pair: ScaleAndInverse | None = None

    def next(self, x: Tensor, repeat: bool = False, amax: Tensor | None = None) -> ScaleAndInverse:
        # A recomputed block must cast with the same scale again. Returning it here also avoids an exchange.
        if repeat and self.last_pair is not None:
            return self.last_pair
        scaling = self.treatment.scaling
        assert scaling is not None
        amax = self._max_over_ranks(largest_magnitude(x) if amax is None else amax)
        self.last_pair = ScaleAndInverse(*compute_current_scale(amax, self.treatment.fmt, scaling.rounding))
        return self.last_pair


class GroupDelayedScale(DelayedScale):
    """The delayed scale of a tensor that ranks divide. Its history has the largest magnitudes of the whole tensor."""

    is_local = False

    def __init__(self, max_over_ranks: MaxOverRanks, delayed: DelayedScaling, treatment: Treatment) -> None:
        super().__init__(delayed, treatment.fmt)
        self._max_over_ranks = max_over_ranks

    def next(self, x: Tensor, repeat: bool = False, amax: Tensor | None = None) -> ScaleAndInverse:
        if repeat and self.last_pair is not None:
            return self.last_pair
        return super().next(x, repeat, self._max_over_ranks(largest_magnitude(x) if amax is None else amax))


def list_divided_roles(cut: RankWeightCut) -> tuple[Role, ...]:
    """Returns the roles of the two operands of a layer that the cut divides among the ranks: the weight, and the
    gradient or the input. The third operand is the same on all ranks.
    """
    return (Role.WEIGHT, Role.GRADIENT if cut.dim == OUTPUT_DIMENSION else Role.INPUT)


def use_group_scales(arithmetic: Arithmetic, roles: Iterable[Role], max_over_ranks: MaxOverRanks) -> Arithmetic:
    """Returns an arithmetic that casts operands with these roles by scales that all ranks share. Returns `arithmetic`
    unchanged if it has no tensor scales. All ranks must cast in the same order.
    """
    if not (isinstance(arithmetic, RecipeArithmetic) and arithmetic.recipe.has_tensor_scales_only):
        return arithmetic
    delayed = arithmetic.recipe.delayed
    scales: dict[Role, ScaleSource] = dict(arithmetic.scales)
    for role in roles:
        treatment = arithmetic.treatments[role]
        scales[role] = (
            GroupDelayedScale(max_over_ranks, delayed, treatment)
            if delayed
            else GroupCurrentScale(max_over_ranks, treatment)
        )
    return type(arithmetic)(arithmetic.recipe, arithmetic.carrier, arithmetic.name, scales)
