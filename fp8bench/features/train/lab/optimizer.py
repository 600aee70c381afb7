"""What a step does with its gradients: keeps them from one micro-batch to the next, and updates an arm's weights, in
few kernels and without the host waiting."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.readings import dense
from fp8bench.features.train.lab.update_rules import RULES, factor_of, group_of, kind_of, states_for
from fp8bench.features.train.request import TrainerSettings, clip_of
from fp8bench.formats.grids import E4M3, FP16
from fp8bench.formats.native_codes import codes, current_scale
from fp8bench.formats.recipes import ScaleRounding
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.moments import BETAS, EPSILON, Bucket, Storage, Update, bucketed, in_arithmetic, scaled
from fp8bench.protocols import Operand
from fp8bench.report.panels import together


def seed_of(purpose: str, *numbers: int) -> int:
    """A seed of 32 bits, the most that a CPU generator takes, different for each purpose and numbers."""
    words = "/".join((purpose, *map(str, numbers)))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big")


# As in FP8-LM: a scale is halved where more values than this share saturate, else it doubles over 1000 steps.
MOST_SATURATED = 1e-5
_GROWTH = 2 ** (1 / 1000)


def gradient_of(parameter: Tensor) -> Tensor:
    """Zeros where backward found none, as for an expert without tokens."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class Gradients:
    """Gradients in float32, added up by autograd. They stay until the next step begins."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

    def begin(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return list(map(gradient_of, parameters))

    def filled(self) -> list[Tensor]:
        for parameter in self._parameters:
            parameter.grad = gradient_of(parameter)
        return self.of(self._parameters)

    def given(self) -> None:
        """Take what lies in the parameters' `grad` but comes from no backward."""

    def norms(self) -> list[Tensor]:
        return list(torch._foreach_norm(list(map(dense, self.of(self._parameters)))))

    def end(self) -> None:
        """Called when the weights are updated."""

    def kept(self) -> list[Tensor]:
        return self.of(self._parameters)

    def memory(self) -> list[Tensor]:
        return []


class LowGradients(Gradients):
    """Gradients in low precision: each is added and rounded as it arrives, so that only one at a time is float32."""

    def __init__(self, parameters: Sequence[nn.Parameter], micro_batches: int, fp8: bool) -> None:
        self._parameters = parameters
        self._sums: dict[Tensor, _BFloat16 | AutomaticScale] = {}
        self._begun: set[Tensor] = set()
        for parameter in parameters:
            values = parameter.detach()
            self._sums[parameter] = AutomaticScale(values, micro_batches) if fp8 else _BFloat16(values)
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._begun.clear()

    def _take(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._sums[parameter].add(parameter.grad, parameter not in self._begun)
        self._begun.add(parameter)
        parameter.grad = None

    def given(self) -> None:
        for parameter in self._parameters:
            self._take(parameter)

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [
            self._sums[parameter].restored() if parameter in self._begun else torch.zeros_like(parameter)
            for parameter in parameters
        ]

    def norms(self) -> list[Tensor]:
        return [self.of([parameter])[0].norm() for parameter in self._parameters]

    def end(self) -> None:
        for total in self._sums.values():
            total.end()

    def kept(self) -> list[Tensor]:
        return [part for total in self._sums.values() for part in total.operand.tensors]

    def memory(self) -> list[Tensor]:
        return [scale.share for scale in self._sums.values() if isinstance(scale, AutomaticScale)]


class _BFloat16:
    def __init__(self, like: Tensor) -> None:
        self.operand = Operand(torch.zeros_like(like, dtype=torch.bfloat16))

    def add(self, gradient: Tensor, first: bool) -> None:
        self.operand = Operand((gradient if first else gradient + self.operand.data).to(torch.bfloat16))

    def restored(self) -> Tensor:
        return self.operand.data.to(torch.float32)

    def end(self) -> None:
        """There is no scale to adapt."""


class AutomaticScale:
    """E4M3 codes under one scale for all micro-batches of a step, as all devices share one in FP8-LM. It takes the
    magnitude expected by the first micro-batch to `share` of the format's largest. The share is halved after a step in
    which too many values were larger, and grows back to 1. Gradients that are not finite are restored as NaN."""

    def __init__(self, like: Tensor, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._codes, self._inverse = codes(like * 0, E4M3), like.new_ones(())
        self._scale, self._saturated = like.new_ones(()), torch.zeros((), dtype=torch.int64, device=like.device)
        self.share = like.new_ones(())

    @property
    def operand(self) -> Operand:
        return Operand(self._codes, self._inverse)

    def add(self, gradient: Tensor, first: bool) -> None:
        total = gradient if first else gradient + self.restored()
        amax = largest_magnitude(total)
        if first:
            scale, _ = current_scale(amax * self._micro_batches, E4M3, ScaleRounding.EXACT)
            self._scale, self._saturated = scale * self.share, torch.zeros_like(self._saturated)
        self._saturated = self._saturated + torch.count_nonzero(total.abs() > E4M3.largest / self._scale)
        self._codes = codes(total, E4M3, self._scale)
        self._inverse = torch.where(amax.isfinite(), self._scale.reciprocal(), torch.nan)

    def restored(self) -> Tensor:
        return self._codes.to(torch.float32) * self._inverse

    def end(self) -> None:
        too_many = self._saturated > MOST_SATURATED * self._codes.numel() * self._micro_batches
        after = torch.where(too_many, self.share / 2, (self.share * _GROWTH).clamp(max=1.0))
        self.share = torch.where(self._inverse.isfinite(), after, self.share)


def joint(norms: Sequence[Tensor]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


def clippings_of(
    norms: list[Tensor], norm: Tensor, scale: float, most: float, groups: Sequence[str]
) -> tuple[list[Tensor], Tensor]:
    """What each gradient is divided by, and by how much all shrink. `groups` names the group of each parameter."""
    each = together(zip(groups, norms, strict=True))
    if not most or len(each) == 1:
        clipping = (norm / most).clamp(min=1.0) if most else torch.ones_like(norm)
        return [clipping] * len(norms), clipping
    parts = {group: joint(some) / scale for group, some in each.items()}
    by = {group: (part / most).clamp(min=1.0) for group, part in parts.items()}
    after = joint([parts[group] / by[group] for group in parts])
    return [by[group] for group in groups], (norm / after).clamp(min=1.0)


class Weights:
    """Float32 weights, which are the parameters themselves."""

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Parameter] = ()) -> None:
        """`layers` are the parameters that products in low precision read."""
        self._parameters, self._layers = parameters, layers

    @contextmanager
    def present(self) -> Iterator[None]:
        """Gives the parameters their values for the body."""
        yield

    def draws(self, seed: int) -> None:
        """Seed the random rounding, if there is any."""

    def raised(self) -> None:
        """Give the parameters the values that an update begins from."""

    def round(self, parameters: Sequence[Tensor]) -> None:
        """Round parameters that a step has changed, and keep them."""

    def kept(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._parameters]


class HalfWeights(Weights):
    """fp16 weights under one scale a tensor, as in FP8-LM; between steps the float32 parameters have no memory."""

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Parameter] = ()) -> None:
        super().__init__(parameters, layers)
        self._storage = self._stored()
        self._masters: dict[Tensor, Operand] = {}
        self._sizes = {parameter: parameter.untyped_storage().nbytes() for parameter in parameters}
        self.round(parameters)
        self._release()

    def _stored(self) -> Storage:
        """Scales are powers of two, so that rounding a rounded weight again, as in a skipped step, changes nothing."""
        return scaled(FP16, ScaleRounding.POWER_OF_TWO)

    @contextmanager
    def present(self) -> Iterator[None]:
        for parameter in self._parameters:
            parameter.untyped_storage().resize_(self._sizes[parameter])
            parameter.detach().copy_(self._storage.restore(self._masters[parameter]))
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        for parameter in self._parameters:
            parameter.untyped_storage().resize_(0)

    def round(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            self._masters[parameter] = self._storage.keep(parameter.detach())
            parameter.detach().copy_(self._storage.restore(self._masters[parameter]))

    def kept(self) -> list[Tensor]:
        return [part for parameter in self._parameters for part in self._masters[parameter].tensors]


class EightBitWeights(HalfWeights):
    """fp16 weights, from which updates begin, and E4M3 copies that passes see, as in MS-AMP's O3."""

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Parameter]) -> None:
        self._eight, self._codes = scaled(E4M3, ScaleRounding.POWER_OF_TWO), dict[Tensor, Operand]()
        super().__init__(parameters, layers)

    @contextmanager
    def present(self) -> Iterator[None]:
        with super().present():
            for parameter in self._layers:
                parameter.detach().copy_(self._eight.restore(self._codes[parameter]))
            yield

    def raised(self) -> None:
        for parameter in self._layers:
            parameter.detach().copy_(self._storage.restore(self._masters[parameter]))

    def round(self, parameters: Sequence[Tensor]) -> None:
        super().round(parameters)
        layers = set(map(id, self._layers))
        for parameter in parameters:
            if id(parameter) in layers:
                self._codes[parameter] = self._eight.keep(parameter.detach())

    def kept(self) -> list[Tensor]:
        return [*super().kept(), *(part for layer in self._layers for part in self._codes[layer].tensors)]


class StochasticWeights(HalfWeights):
    """bf16 weights, rounded up or down at random so that small updates are not lost; a seed for each step."""

    def _stored(self) -> Storage:
        self._drawn = torch.Generator(self._parameters[0].device)
        self._drawn.manual_seed(0)
        return Storage(lambda x: Operand(stochastic_bf16(x, self._drawn)), lambda kept: kept.data.to(torch.float32))

    def draws(self, seed: int) -> None:
        self._drawn.manual_seed(seed)


def stochastic_bf16(x: Tensor, generator: torch.Generator) -> Tensor:
    """Rounds float32 at random: adds sixteen random bits below the last bit that is kept, and cuts them off."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    cut = ((x.contiguous().view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)


_MASTERS = {
    "fp32": Weights, "fp16-scaled": HalfWeights, "fp16-fp8": EightBitWeights, "bf16-stochastic": StochasticWeights,
}  # fmt: skip
# At most so many weights are updated at a time, because they are copied to compute how far they move. What is kept in
# low precision is restored for an update, so that of such weights it is only a small part of the model at a time.
_MOST_ELEMENTS, _LOW_PARTS = 1 << 24, 16


class _Group(NamedTuple):
    """Parameters with one rate, as a factor, and one weight decay. All are clipped as the one at place `first`."""

    bucket: Bucket
    rate: float
    decay: float
    first: int


# The default betas of each optimizer; sgd's first is its momentum.
_BETAS = {"adamw": BETAS, "sgd": (0.9, 0.0), "lion": (0.9, 0.99), "adafactor": (0.0, 0.0)}
_EPSILONS = {"adafactor": 1e-3}


class LoopOptimizer:
    """Updates float32 weights. Norms are those of the last step, in the order of the model's parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: TrainerSettings) -> None:
        self._parameters = list(parameters.values())
        own, kept = self._parameters, settings.gradients
        parts = 1 if settings.parallel == "zero" else settings.micro_batches  # an owner receives their mean, once
        self.gradients = Gradients(own) if kept == "fp32" else LowGradients(own, parts, kept == "fp8")
        self._groups = list(_groups(parameters, settings))
        self._rule = RULES.get(settings.optimizer)
        first, second = settings.betas or _BETAS[settings.optimizer]
        self._betas = first, second
        self._epsilon = _EPSILONS.get(settings.optimizer, EPSILON)
        self._rounds, self._rounded = settings.updates != "fp32", rounded_update(settings.updates)
        layers = [parameter for name, parameter in parameters.items() if kind_of(name, parameter.ndim) == "layer"]
        self.weights = _MASTERS[settings.master](self._parameters, layers)
        self._norms: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def step(self, rate: float, divisors: Sequence[Tensor], skip: Tensor, measured: bool = True) -> None:
        """Update by the gradients over `divisors`, one for each parameter. Where `skip` is 1 nothing changes. How far
        weights move is 0 unless it is `measured`, which takes a copy of them."""
        self.weights.raised()
        for bucket, factor, decay, place in self._groups:
            copied = bucket.parameters if measured or self._rounds else []
            before = [parameter.detach().clone() for parameter in copied]
            bucket.gradients = self.gradients.of(bucket.parameters)
            first, second = bucket.restored()
            how = Update(rate * factor, decay, self._betas, self._epsilon, divisors[place], skip)
            if self._rule is None:
                bucket.update(first, second, how)
            else:
                self._rule(bucket, first, second, how)
            if self._rounds:
                self._rounded(before, bucket.parameters)
            if bucket.plain is None:
                bucket.keep(first, second)
            bucket.gradients = []
            self.weights.round(bucket.parameters)
            with torch.no_grad():
                sizes = torch._foreach_norm(bucket.parameters)
                moved = [torch.zeros_like(size) for size in sizes]
                if before:
                    torch._foreach_sub_(before, bucket.parameters)
                    moved = list(torch._foreach_norm(before))
            self._norms.update(zip(bucket.parameters, zip(moved, sizes, strict=True), strict=True))
        self.gradients.end()

    @property
    def update_norms(self) -> list[Tensor]:
        return [self._norms[parameter][0] for parameter in self._parameters]

    @property
    def weight_norms(self) -> list[Tensor]:
        return [self._norms[parameter][1] for parameter in self._parameters]

    def kept(self) -> dict[str, list[Tensor]]:
        kept = [group.bucket.kept() for group in self._groups]
        moments = {
            name: [tensor for tensors in kept for tensor in tensors[order]]
            for order, name in enumerate(("first moment", "second moment", "steps"))
        }
        return {"weights": self.weights.kept(), "gradients": self.gradients.kept(), **moments}

    def memory(self) -> dict[str, list[Tensor]]:
        """What the next step depends on. Gradients are computed anew, their scales are not."""
        return self.kept() | {"gradients": self.gradients.memory()}

    def recall(self, memory: Mapping[str, Sequence[Tensor]]) -> None:
        for name, tensors in self.memory().items():
            for tensor, kept in zip(tensors, memory[name], strict=True):
                tensor.copy_(kept)


def _groups(parameters: Mapping[str, nn.Parameter], settings: TrainerSettings) -> Iterator[_Group]:
    alike: dict[tuple[float, float, str], list[tuple[int, Tensor]]] = {}
    _, clip_group = clip_of(settings.clip)
    for place, (name, parameter) in enumerate(parameters.items()):
        factor = factor_of(name, parameter.ndim, settings.rates)
        decay = settings.weight_decay if parameter.ndim > 1 else 0.0  # norms and biases do not decay
        clipped = group_of(name, parameter.ndim, clip_group)
        alike.setdefault((factor, decay, clipped), []).append((place, parameter))
    most = _MOST_ELEMENTS
    if (settings.optimizer_states, settings.gradients) != ("fp32", "fp32"):
        most = min(most, sum(parameter.numel() for parameter in parameters.values()) // _LOW_PARTS)
    for (factor, decay, _), placed in alike.items():
        for part in bucketed([tensor.numel() for _, tensor in placed], most):
            tensors = [tensor for _, tensor in placed[part]]
            first, second = states_for(settings.optimizer, tensors)
            storages = _storages(settings.optimizer_states)
            if settings.optimizer in RULES:  # these have no second moments, or few
                storages = storages[0], _storages("fp32")[1]
            yield _Group(Bucket(tensors, [], first, second, storages, 0, True), factor, decay, placed[part][0][0])


def rounded_update(kept: str) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
    """Returns a function that rounds how far weights have moved, and moves them by that instead."""
    storage = {"fp32": None, "bf16": in_arithmetic(PlainArithmetic(torch.bfloat16)), "fp8": scaled(E4M3)}[kept]

    @torch.no_grad()
    def rounded(before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        for old, new in zip(before, after, strict=True) if storage is not None else ():
            assert storage is not None
            update = storage.restore(storage.keep((new - old).to(torch.float32)))
            new.copy_(old + update.to(old.dtype))

    return rounded


def _storages(states: str) -> tuple[Storage, Storage]:
    if states == "fp8lm":
        return scaled(E4M3), scaled(FP16)
    plain = in_arithmetic(PlainArithmetic(torch.float32 if states == "fp32" else torch.bfloat16))
    return plain, plain
