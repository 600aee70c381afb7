"""What looks at how ranks cast: scales by the tensors that are cast.

A share's scale that is twice too large changes less than honest rounding does, and one that is half of it next to
nothing. So scales are held against the magnitudes that they come from, bit for bit; so is what is sent in FP8 against
the same program in one process (`WireWitness` of nn/parallel/exchanges.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fp8bench.formats.native_codes import current_scale
from fp8bench.formats.recipes import Delayed, Treatment
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.linear import Linear
from fp8bench.nn.parallel.exchanges import first_of_all, said_by_all
from fp8bench.nn.recipe_arithmetic import RecipeArithmetic
from fp8bench.nn.tensor_scales import DelayedScale, NextScale, ScalePair
from fp8bench.protocols import Role

# Of which operands of a layer ranks share one scale.
Shared = Callable[[str], Collection[Role]]


class Witness(Protocol):
    """Looks on while a rank takes steps."""

    def mistake(self) -> str:
        """The first that any rank has made, the same on all ranks, which ask together; '' where there is none."""


class _Cast(NamedTuple):
    """The largest magnitude of what a rank cast, and what it multiplied it by."""

    amax: Tensor
    scale: Tensor


class _SeenScale:
    """A scale's source that tells what it gave for which tensor. What is cast again is not another cast."""

    def __init__(self, source: NextScale) -> None:
        self._source = source
        self.casts: list[_Cast] = []

    def next(self, x: Tensor, again: bool = False, amax: Tensor | None = None) -> ScalePair:
        found = self._source.next(x, again, amax)
        if not again:
            self.casts.append(_Cast(largest_magnitude(x), found.scale.clone()))
        return found

    @property
    def last(self) -> ScalePair | None:
        return self._source.last


class _Source(NamedTuple):
    """Of one operand of a layer: its scale's source, what it should be, and whether ranks share it."""

    seen: _SeenScale
    treatment: Treatment
    delayed: Delayed | None
    shared: bool

    def expected(self, magnitudes: list[Tensor]) -> Iterator[Tensor]:
        """The scale of each cast, of tensors with these largest magnitudes."""
        assert self.treatment.scaling is not None
        history = DelayedScale(self.delayed, self.treatment.fmt) if self.delayed else None
        for one in magnitudes:
            if history is not None:
                yield history.next(one, amax=one).scale.clone()
            else:
                yield current_scale(one, self.treatment.fmt, self.treatment.scaling.rounding)[0]


class ScaleWitness:
    """Sees from now on what a rank's layers cast by, where that comes from more than the tensor."""

    def __init__(
        self, layers: Mapping[str, Linear], shared: Shared, group: dist.ProcessGroup, sharing: Sequence[int] = ()
    ) -> None:
        """`sharing` are the ranks that share scales with this one, where these are not all."""
        self._group, self._sharing = group, sharing or range(group.size())
        self._sources: dict[tuple[str, Role], _Source] = {}
        for path, layer in layers.items():
            own = layer.arithmetic
            if not (isinstance(own, RecipeArithmetic) and own.recipe.per_tensor and own.scales):
                continue
            for role, source in own.scales.items():
                treatment, seen = own.treatments[role], _SeenScale(source)
                self._sources[path, role] = _Source(seen, treatment, own.recipe.delayed, role in shared(path))
            scales = {role: self._sources[path, role].seen for role in own.scales}
            layer.arithmetic = type(own)(own.recipe, own.carrier, own.name, scales)

    def mistake(self) -> str:
        own = {" ".join(key): [float(one.amax) for one in source.seen.casts] for key, source in self._sources.items()}
        return first_of_all(self._mistake(said_by_all(own, self._group)), self._group)

    def _mistake(self, everybody: list[dict[str, list[float]]]) -> str:
        for key, source in self._sources.items():
            casts = source.seen.casts
            magnitudes = [one.amax for one in casts]
            if source.shared:
                of_ranks = [everybody[rank].get(" ".join(key), []) for rank in self._sharing]
                if len({len(one) for one in of_ranks}) > 1:
                    return f"casts the {key[1]} of {key[0]} as often as no other rank does"
                largest = map(max, zip(*of_ranks, strict=True))
                magnitudes = [x.new_tensor(one) for x, one in zip(magnitudes, largest, strict=True)]
            for number, (cast, scale) in enumerate(zip(casts, source.expected(magnitudes), strict=True), 1):
                if not torch.equal(cast.scale, scale):
                    whose = "all ranks' shares" if source.shared else "its own tensors"
                    return (
                        f"multiplies the {key[1]} of {key[0]} by {float(cast.scale):g} in cast {number}, where the "
                        f"largest magnitudes of {whose} ask for {float(scale):g}"
                    )
        return ""
