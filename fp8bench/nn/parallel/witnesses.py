"""Witnesses of the scales that ranks cast with; nn/parallel/exchanges.py has that of exchanges in FP8.

A share's scale that is twice too large changes less than honest rounding does, and one that is half of it next to
nothing. So scales are compared bit for bit with those that follow from the recorded magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fp8bench.formats.native_codes import current_scale
from fp8bench.formats.recipes import Delayed, Treatment
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.nn.linear import Linear
from fp8bench.nn.parallel.exchanges import all_answers, first_mistake
from fp8bench.nn.tensor_scales import DelayedScale, NextScale, ScalePair
from fp8bench.protocols import Role

# The operands of a layer whose scale ranks share.
Shared = Callable[[str], Collection[Role]]


@dataclass(eq=False)
class _WatchedScale:
    """Wraps a source of scales; records its scales and the magnitudes of the tensors, and computes what they should be.

    Ranks have the same scale if it is `shared`. Repeated casts are not recorded.
    """

    source: NextScale
    treatment: Treatment
    delayed: Delayed | None
    shared: bool
    magnitudes: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)

    def next(self, x: Tensor, repeat: bool = False, amax: Tensor | None = None) -> ScalePair:
        pair = self.source.next(x, repeat, amax)
        if not repeat:
            self.magnitudes.append(largest_magnitude(x))
            self.scales.append(pair.scale.clone())
        return pair

    @property
    def last(self) -> ScalePair | None:
        return self.source.last

    def expected_scales(self, magnitudes: list[Tensor]) -> Iterator[Tensor]:
        assert self.treatment.scaling is not None
        history = DelayedScale(self.delayed, self.treatment.fmt) if self.delayed else None
        for magnitude in magnitudes:
            if history is not None:
                yield history.next(magnitude, amax=magnitude).scale.clone()
            else:
                yield current_scale(magnitude, self.treatment.fmt, self.treatment.scaling.rounding)[0]


class ScaleWitness:
    """Checks the scales of a rank's layers, where they depend on more than the tensor.

    `sharing` are the ranks that share scales with this one, by default all.
    """

    def __init__(
        self, layers: Mapping[str, Linear], shared: Shared, group: dist.ProcessGroup, sharing: Sequence[int] = ()
    ) -> None:
        self._group = group
        self._sharing = sharing or range(group.size())
        self._sources: dict[tuple[str, Role], _WatchedScale] = {}
        for path, layer in layers.items():
            arithmetic = layer.arithmetic
            if not (isinstance(arithmetic, RecipeArithmetic) and arithmetic.recipe.per_tensor and arithmetic.scales):
                continue
            scales: dict[Role, NextScale] = {}
            for role, source in arithmetic.scales.items():
                treatment = arithmetic.treatments[role]
                delayed = arithmetic.recipe.delayed
                watched = _WatchedScale(source, treatment, delayed, role in shared(path))
                self._sources[path, role] = scales[role] = watched
            layer.arithmetic = type(arithmetic)(arithmetic.recipe, arithmetic.carrier, arithmetic.name, scales)

    def mistake(self) -> str:
        """Returns the first mistake of any rank, or ''. All ranks must call it together."""
        magnitudes = {" ".join(key): list(map(float, source.magnitudes)) for key, source in self._sources.items()}
        return first_mistake(self._find_mistake(all_answers(magnitudes, self._group)), self._group)

    def _find_mistake(self, of_all_ranks: list[dict[str, list[float]]]) -> str:
        for (path, role), source in self._sources.items():
            # 1. A shared scale follows from the largest magnitude on any rank, cast by cast.
            magnitudes = source.magnitudes
            if source.shared:
                by_rank = [of_all_ranks[rank].get(f"{path} {role}", []) for rank in self._sharing]
                if len(set(map(len, by_rank))) > 1:
                    return f"casts the {role} of {path} as often as no other rank does"
                largest = map(max, zip(*by_rank, strict=True))
                magnitudes = [x.new_tensor(magnitude) for x, magnitude in zip(magnitudes, largest, strict=True)]

            # 2. Every scale must be the expected one, to the bit.
            pairs = zip(source.scales, source.expected_scales(magnitudes), strict=True)
            for number, (scale, expected) in enumerate(pairs, 1):
                if not torch.equal(scale, expected):
                    tensors = "all ranks' shares" if source.shared else "its own tensors"
                    return (
                        f"multiplies the {role} of {path} by {float(scale):g} in cast {number}, where the "
                        f"largest magnitudes of {tensors} ask for {float(expected):g}"
                    )
        return ""
