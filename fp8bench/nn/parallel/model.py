"""One rank's part of a model that several ranks train together, and witnesses of the scales that it casts with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fp8bench.formats.native_codes import current_scale
from fp8bench.formats.recipes import Delayed, Treatment
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.model import MemoryRole
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.nn.gpt import GPT
from fp8bench.nn.linear import Linear
from fp8bench.nn.parallel.exchanges import FP8Wire, WireWitness, all_answers, first_mistake
from fp8bench.nn.tensor_scales import DelayedScale, NextScale, ScalePair
from fp8bench.protocols import Phases, Role


class ParallelModel:
    """A rank's parameters, or its part of them, and how it trains them.

    `weights` are plain tensors that this rank updates in place, `names` their paths in the whole model. `module` has
    the parameters. `sharers` are the ranks that divide a batch, None where each reads all of it; `fp8_wire` sends in
    FP8 where anything does.
    """

    group: ProcessGroup
    module: nn.Module
    sharers: ProcessGroup | None = None
    fp8_wire: FP8Wire | None = None

    def __init__(self, named: Mapping[str, nn.Parameter], loss_scale: float) -> None:
        self.names, self.parameters = list(named), list(named.values())
        self.loss_scale = loss_scale
        self.weights = [local(parameter.detach()) for parameter in self.parameters]

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        """Forward and backward of a whole batch; returns the mean loss of this rank's share."""
        with phase.elementwise:
            loss = self.forward(self.own_share(tokens), self.own_share(targets), phase)
            (loss * self.loss_scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def own_share(self, batch: Tensor) -> Tensor:
        return batch if self.sharers is None else batch.chunk(self.sharers.size())[self.sharers.rank()]

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        loss: Tensor = self.module(tokens, targets, phase)
        return loss

    def gradients(self) -> list[Tensor]:
        gradients = [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        if self.loss_scale != 1.0:
            torch._foreach_div_(gradients, self.loss_scale)
        return gradients

    def updated(self, phase: Phases) -> None:
        """Called after each update, for ranks that hold copies of the weights."""
        return

    def figures(self) -> dict[str, float]:
        return {}

    def forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def full_weights(self) -> dict[str, Tensor]:
        """All weights of the whole model by path, on every rank. All ranks must call it together."""
        return dict(zip(self.names, self.weights, strict=True))

    def whole_loss(self, loss: Tensor) -> Tensor:
        """The mean loss of the whole batch from the result of `loss`. All ranks must call it together."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total / self.group.size()

    def shared_roles(self, layer: str) -> Collection[Role]:
        return ()

    def witnesses(self) -> list[Witness]:
        wires = [self.fp8_wire.watched()] if self.fp8_wire is not None else []
        return [ScaleWitness(self.layers(), self.shared_roles, self.group), *wires]

    def layers(self) -> dict[str, Linear]:
        return {path: linear for path, linear in self.module.named_modules() if isinstance(linear, Linear)}

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {
            MemoryRole.WEIGHTS: self.weights,
            MemoryRole.GRADIENTS: [parameter.grad for parameter in self.parameters],
        }


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def silent_group() -> ProcessGroup:
    """A group of all ranks that sends nothing, to measure what a step takes without communication."""
    # The import registers the backend, which returns what it is given.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    group: ProcessGroup = dist.new_group(list(range(dist.get_world_size())), backend="fake")
    return group


class AloneModel(ParallelModel):
    """One rank that trains the whole model by itself: the reference for all ways."""

    def __init__(self, model: GPT, loss_scale: float) -> None:
        self.module = model
        super().__init__(dict(model.named_parameters()), loss_scale)

    def whole_loss(self, loss: Tensor) -> Tensor:
        return loss

    def witnesses(self) -> list[Witness]:
        return []


# The operands of a layer whose scale ranks share.
Shared = Callable[[str], Collection[Role]]


class _SeenScale:
    """Wraps a source of scales; records its scales and the magnitudes of the tensors, and says what they should be.

    `shared` says that ranks share the scale. Repeated casts are not recorded.
    """

    def __init__(self, source: NextScale, treatment: Treatment, delayed: Delayed | None, shared: bool) -> None:
        self._source, self._treatment, self._delayed, self.shared = source, treatment, delayed, shared
        self.magnitudes: list[Tensor] = []
        self.scales: list[Tensor] = []

    def next(self, x: Tensor, again: bool = False, amax: Tensor | None = None) -> ScalePair:
        pair = self._source.next(x, again, amax)
        if not again:
            self.magnitudes.append(largest_magnitude(x))
            self.scales.append(pair.scale.clone())
        return pair

    @property
    def last(self) -> ScalePair | None:
        return self._source.last

    def expected(self, magnitudes: list[Tensor]) -> Iterator[Tensor]:
        assert self._treatment.scaling is not None
        history = DelayedScale(self._delayed, self._treatment.fmt) if self._delayed else None
        for magnitude in magnitudes:
            if history is not None:
                yield history.next(magnitude, amax=magnitude).scale.clone()
            else:
                yield current_scale(magnitude, self._treatment.fmt, self._treatment.scaling.rounding)[0]


class ScaleWitness:
    """Checks the scales of a rank's layers, where they depend on more than the tensor.

    A share's scale that is twice too large changes less than honest rounding does, and one that is half of it next to
    nothing. So scales are compared bit for bit with those that follow from the recorded magnitudes. `WireWitness`
    (nn/parallel/exchanges.py) does the same for what is sent in FP8.
    """

    def __init__(
        self, layers: Mapping[str, Linear], shared: Shared, group: dist.ProcessGroup, sharing: Sequence[int] = ()
    ) -> None:
        """`sharing` are the ranks that share scales with this one, by default all."""
        self._group, self._sharing = group, sharing or range(group.size())
        self._sources: dict[tuple[str, Role], _SeenScale] = {}
        for path, layer in layers.items():
            own = layer.arithmetic
            if not (isinstance(own, RecipeArithmetic) and own.recipe.per_tensor and own.scales):
                continue
            for role, source in own.scales.items():
                seen = _SeenScale(source, own.treatments[role], own.recipe.delayed, role in shared(path))
                self._sources[path, role] = seen
            scales = {role: self._sources[path, role] for role in own.scales}
            layer.arithmetic = type(own)(own.recipe, own.carrier, own.name, scales)

    def mistake(self) -> str:
        """The first mistake of any rank, '' if there is none. All ranks must call it together."""
        own = {" ".join(key): list(map(float, source.magnitudes)) for key, source in self._sources.items()}
        return first_mistake(self._mistake(all_answers(own, self._group)), self._group)

    def _mistake(self, everybody: list[dict[str, list[float]]]) -> str:
        for key, source in self._sources.items():
            magnitudes = source.magnitudes
            if source.shared:
                of_ranks = [everybody[rank].get(" ".join(key), []) for rank in self._sharing]
                if len({len(rank) for rank in of_ranks}) > 1:
                    return f"casts the {key[1]} of {key[0]} as often as no other rank does"
                largest = map(max, zip(*of_ranks, strict=True))
                magnitudes = [x.new_tensor(magnitude) for x, magnitude in zip(magnitudes, largest, strict=True)]
            pairs = zip(source.scales, source.expected(magnitudes), strict=True)
            for number, (own, scale) in enumerate(pairs, 1):
                if not torch.equal(own, scale):
                    whose = "all ranks' shares" if source.shared else "its own tensors"
                    return (
                        f"multiplies the {key[1]} of {key[0]} by {float(own):g} in cast {number}, where the "
                        f"largest magnitudes of {whose} ask for {float(scale):g}"
                    )
        return ""


Witness = ScaleWitness | WireWitness
