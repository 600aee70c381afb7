"""Checks the scales with which ranks cast. nn/parallel/exchanges.py checks FP8 exchanges.

A scale that is twice too large changes results less than correct rounding does. A scale of half the right size
changes almost nothing. So results cannot show a wrong scale. Instead, the largest magnitudes of all cast tensors are
recorded, each scale is computed again from them, and both scales are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fp8bench.formats.native_codes import compute_current_scale
from fp8bench.formats.recipes import DelayedScaling, Treatment
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.nn.linear import Linear
from fp8bench.nn.parallel.exchanges import find_first_rank_fault, gather_rank_answers
from fp8bench.nn.tensor_scales import DelayedScale, ScaleAndInverse, ScaleSource
from fp8bench.protocols import Role

# Maps a layer's name to the roles of the operands whose scales several ranks share.
FindSharedRoles = Callable[[str], Collection[Role]]


@dataclass(eq=False)
class _WatchedScale:
    """Wraps the scales of one operand to check them. For each cast it records the scale and the tensor's largest
    magnitude. `expected_scales` computes the correct scales from the magnitudes.

    If `is_shared` is True, all ranks must have the same scale. Repeated casts are not recorded.
    """

    source: ScaleSource
    treatment: Treatment
    delayed: DelayedScaling | None
    is_shared: bool
    magnitudes: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)

    def next(self, x: Tensor, repeat: bool = False, amax: Tensor | None = None) -> ScaleAndInverse:
        pair = self.source.next(x, repeat, amax)
        if not repeat:
            self.magnitudes.append(largest_magnitude(x))
            self.scales.append(pair.scale.clone())
        return pair

    @property
    def last_pair(self) -> ScaleAndInverse | None:
        return self.source.last_pair

    def expected_scales(self, magnitudes: list[Tensor]) -> Iterator[Tensor]:
        assert self.treatment.scaling is not None
        history = DelayedScale(self.delayed, self.treatment.fmt) if self.delayed else None
        for magnitude in magnitudes:
            if history is not None:
                yield history.next(magnitude, amax=magnitude).scale.clone()
            else:
                yield compute_current_scale(magnitude, self.treatment.fmt, self.treatment.scaling.rounding)[0]


class ScaleWitness:
    """Checks the scales that come from earlier tensors or from several ranks, by computing them again. `sharing_ranks`
    are the ranks that share scales with this rank, by default all ranks.
    """

    def __init__(
        self,
        layers: Mapping[str, Linear],
        shared: FindSharedRoles,
        group: dist.ProcessGroup,
        sharing_ranks: Sequence[int] = (),
    ) -> None:
        self._group = group
        self._sharing_ranks = sharing_ranks or range(group.size())
        self._sources: dict[tuple[str, Role], _WatchedScale] = {}
        for path, layer in layers.items():
            arithmetic = layer.arithmetic
            if not (
                isinstance(arithmetic, RecipeArithmetic)
                and arithmetic.recipe.has_tensor_scales_only
                and arithmetic.scales
            ):
                continue
            scales: dict[Role, ScaleSource] = {}
            for role, source in arithmetic.scales.items():
                treatment = arithmetic.treatments[role]
                delayed = arithmetic.recipe.delayed
                watched_scale = _WatchedScale(source, treatment, delayed, role in shared(path))
                self._sources[path, role] = scales[role] = watched_scale
            layer.arithmetic = type(arithmetic)(arithmetic.recipe, arithmetic.carrier, arithmetic.name, scales)

    def find_fault(self) -> str:
        """Returns the first fault of any rank, or ''. All ranks must call it together."""
        magnitudes = {" ".join(key): list(map(float, source.magnitudes)) for key, source in self._sources.items()}
        return find_first_rank_fault(
            self._find_local_scale_fault(gather_rank_answers(magnitudes, self._group)), self._group
        )

    def _find_local_scale_fault(self, magnitudes_by_rank: list[dict[str, list[float]]]) -> str:
        for (path, role), source in self._sources.items():
            # 1. If ranks share the scale, take for each cast the largest magnitude of these ranks.
            magnitudes = source.magnitudes
            if source.is_shared:
                rank_magnitudes = [magnitudes_by_rank[rank].get(f"{path} {role}", []) for rank in self._sharing_ranks]
                if len(set(map(len, rank_magnitudes))) > 1:
                    return f"does not cast the {role} of {path} as often as the other ranks do"
                max_magnitudes_over_ranks = map(max, zip(*rank_magnitudes, strict=True))
                magnitudes = [
                    x.new_tensor(magnitude) for x, magnitude in zip(magnitudes, max_magnitudes_over_ranks, strict=True)
                ]

            # 2. Compare every scale bit for bit with the scale that follows from the magnitudes.
            measured_and_expected_scales = zip(source.scales, source.expected_scales(magnitudes), strict=True)
            for number, (scale, expected) in enumerate(measured_and_expected_scales, 1):
                if not torch.equal(scale, expected):
                    tensors = "all ranks' shares" if source.is_shared else "its own tensors"
                    return (
                        f"multiplies the {role} of {path} by {float(scale):g} in cast {number}, where the "
                        f"largest magnitudes of {tensors} require {float(expected):g}"
                    )
        return ""
