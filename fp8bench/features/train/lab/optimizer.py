"""What a step does with its gradients: how they are kept from one micro-batch to the next, and the optimizer over the
weights of one arm, in few kernels, with nothing that the host has to wait for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.readings import dense
from fp8bench.features.train.lab.update_rules import RULES, factor_of, group_of, kind_of, states_for
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import Arm, ArmRole
from fp8bench.formats.grids import E4M3, FP16
from fp8bench.formats.native_codes import codes, current_scale
from fp8bench.formats.recipes import ScaleRounding
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.moments import BETAS, EPSILON, Bucket, Storage, Update, bucketed, in_arithmetic, scaled
from fp8bench.protocols import Operand


def seed_of(purpose: str, *numbers: int) -> int:
    """32 bits, all that a generator on a processor takes, unlike for any other purpose or numbers."""
    words = "/".join((purpose, *map(str, numbers)))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big")


def own_seed(seed: int, arm: Arm) -> int:
    """The seed of an arm's weights, batches and dropout: its neighbours', but for one that is to have another."""
    return seed_of("other", seed) if arm.role is ArmRole.OTHER_SEED else seed


# As FP8-LM has it: a scale is halved where more values saturate than this share, and grows to twice itself over so
# many steps in which no more do.
MOST_SATURATED = 1e-5
_GROWTH = 2 ** (1 / 1000)


def gradient_of(parameter: Tensor) -> Tensor:
    """Zeros where a step has found none, as of an expert that had no token."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class Gradients:
    """float32, where autograd keeps them and adds them up itself. They lie there until the next step begins."""

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
        """What lies in the parameters' grad was brought there and found by no backward."""

    def norms(self) -> list[Tensor]:
        return list(torch._foreach_norm(list(map(dense, self.of(self._parameters)))))

    def end(self) -> None:
        """The weights are updated."""

    def kept(self) -> list[Tensor]:
        return self.of(self._parameters)

    def memory(self) -> list[Tensor]:
        return []


class LowGradients(Gradients):
    """In low precision: of each parameter what backward has found is added and rounded as soon as it is there, so that
    never more than one of them is float32."""

    def __init__(self, parameters: Sequence[nn.Parameter], micro_batches: int, fp8: bool) -> None:
        self._parameters = parameters
        self._sums: dict[Tensor, _BFloat16 | AutomaticScale] = {}
        self._begun: set[Tensor] = set()
        for parameter in parameters:
            own = parameter.detach()
            self._sums[parameter] = AutomaticScale(own, micro_batches) if fp8 else _BFloat16(own)
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

    def add(self, fresh: Tensor, first: bool) -> None:
        self.operand = Operand((fresh if first else fresh + self.operand.data).to(torch.bfloat16))

    def restored(self) -> Tensor:
        return self.operand.data.to(torch.float32)

    def end(self) -> None:
        """Nothing is learnt from a step."""


class AutomaticScale:
    """E4M3 codes under one scale, which all micro-batches of a step share, as do all devices in FP8-LM.

    It takes the largest magnitude that the first micro-batch lets expect of all of them to the share `share` of the
    format's own. The share is halved after a step in which too many values were larger, and grows back to 1. Gradients
    that are not finite are restored as NaN.
    """

    def __init__(self, like: Tensor, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._codes, self._inverse = codes(like * 0, E4M3), like.new_ones(())
        self._scale, self._saturated = like.new_ones(()), torch.zeros((), dtype=torch.int64, device=like.device)
        self.share = like.new_ones(())

    @property
    def operand(self) -> Operand:
        return Operand(self._codes, self._inverse)

    def add(self, fresh: Tensor, first: bool) -> None:
        total = fresh if first else fresh + self.restored()
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
    norms: list[Tensor], norm: Tensor, scale: float, most: float, clipped: Sequence[str]
) -> tuple[list[Tensor], Tensor]:
    """What the gradient of each parameter is divided by, and all of them together are smaller by; `clipped` names what
    each is clipped together with."""
    groups = list(dict.fromkeys(clipped))
    if not most or len(groups) == 1:
        clipping = (norm / most).clamp(min=1.0) if most else torch.ones_like(norm)
        return [clipping] * len(norms), clipping
    parts = {
        group: joint([tensor for tensor, own in zip(norms, clipped, strict=True) if own == group]) / scale
        for group in groups
    }
    by = {group: (part / most).clamp(min=1.0) for group, part in parts.items()}
    after = joint([parts[group] / by[group] for group in groups])
    return [by[group] for group in clipped], (norm / after).clamp(min=1.0)


class Weights:
    """float32: the parameters themselves."""

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Parameter] = ()) -> None:
        """`layers` are those of them that products in low precision read."""
        self._parameters, self._layers = parameters, layers

    @contextmanager
    def present(self) -> Iterator[None]:
        """The parameters have their values in the body."""
        yield

    def draws(self, seed: int) -> None:
        """What comes is drawn from the seed, where anything is."""

    def raised(self) -> None:
        """Parameters become what an update begins from."""

    def round(self, parameters: Sequence[Tensor]) -> None:
        """Parameters that a step has changed become what is kept of them."""

    def kept(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._parameters]


class HalfWeights(Weights):
    """fp16 under one scale a tensor, as in FP8-LM. The parameters are float32 while a step needs them, and nothing
    lies in them between two steps."""

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Parameter] = ()) -> None:
        super().__init__(parameters, layers)
        self._storage = self._stored()
        self._masters: dict[Tensor, Operand] = {}
        self._sizes = {parameter: parameter.untyped_storage().nbytes() for parameter in parameters}
        self.round(parameters)
        self._release()

    def _stored(self) -> Storage:
        """By powers of two: what is rounded already is then the same once more, as in a step that changes nothing."""
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
    """The same, and beside them E4M3 of what layers multiply by, as MS-AMP's O3 has it: a step's passes see that alone,
    and its update begins from fp16."""

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
    """bf16, rounded at random: up with the probability that is the share of the step that a value has gone.

    The mean of many roundings is the value, so that updates too small for bf16 are not lost. Each step draws from a
    seed of its own.
    """

    def _stored(self) -> Storage:
        self._drawn = torch.Generator(self._parameters[0].device)
        self._drawn.manual_seed(0)
        return Storage(lambda x: Operand(stochastic_bf16(x, self._drawn)), lambda kept: kept.data.to(torch.float32))

    def draws(self, seed: int) -> None:
        self._drawn.manual_seed(seed)


def stochastic_bf16(x: Tensor, generator: torch.Generator) -> Tensor:
    """Of float32: sixteen random bits are added below the last one that is kept, and cut off with the others there."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    cut = ((x.contiguous().view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)


_MASTERS = {
    "fp32": Weights, "fp16-scaled": HalfWeights, "fp16-fp8": EightBitWeights, "bf16-stochastic": StochasticWeights,
}  # fmt: skip
# Of so many weights at a time the values before a step are kept, to say how far they moved.
_MOST_ELEMENTS = 1 << 24


class _Group(NamedTuple):
    """A bucket of parameters whose rate is multiplied by `rate` and which decay by `decay`; `first` is the place of its
    first one in the model, whose gradients are clipped as those of all of them."""

    bucket: Bucket
    rate: float
    decay: float
    first: int


# The usual betas of each optimizer; sgd's first one is its momentum.
_BETAS = {"adamw": BETAS, "sgd": (0.9, 0.0), "lion": (0.9, 0.99), "adafactor": (0.0, 0.0)}
_EPSILONS = {"adafactor": 1e-3}


class LoopOptimizer:
    """AdamW, or another one of float32 weights. `update_norms` and `weight_norms` are those of the last step by
    parameter, in the order of the model."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: TrainerSettings) -> None:
        self._parameters = list(parameters.values())
        own, kept = self._parameters, settings.gradients
        parts = 1 if settings.parallel == "zero" else settings.micro_batches  # an owner is given their mean, once
        self.gradients = Gradients(own) if kept == "fp32" else LowGradients(own, parts, kept == "fp8")
        self._groups = list(_groups(parameters, settings))
        self._rule = RULES.get(settings.optimizer)
        first, second = _BETAS[settings.optimizer]
        self._betas = (
            first if settings.beta1 < 0 else settings.beta1, second if settings.beta2 < 0 else settings.beta2
        )  # fmt: skip
        self._epsilon = settings.eps or _EPSILONS.get(settings.optimizer, EPSILON)
        self._rounded = rounded_update(settings.updates)
        layers = [parameter for name, parameter in parameters.items() if kind_of(name, parameter.ndim) == "layer"]
        self.weights = _MASTERS[settings.master](self._parameters, layers)
        self._norms: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def step(self, rate: float, divisors: Sequence[Tensor], skip: Tensor) -> None:
        """Take the gradients divided by `divisors`, one a parameter, on the device; no change where `skip` is 1."""
        self.weights.raised()
        for bucket, own, decay, place in self._groups:
            before = [parameter.detach().clone() for parameter in bucket.parameters]
            bucket.gradients = self.gradients.of(bucket.parameters)
            first, second = bucket.restored()
            how = Update(rate * own, decay, self._betas, self._epsilon, divisors[place], skip)
            if self._rule is None:
                bucket.update(first, second, how)
            else:
                self._rule(bucket, first, second, how)
            self._rounded(before, bucket.parameters)
            if bucket.plain is None:
                bucket.keep(first, second)
            bucket.gradients = []
            self.weights.round(bucket.parameters)
            with torch.no_grad():
                torch._foreach_sub_(before, bucket.parameters)
                moved, sizes = torch._foreach_norm(before), torch._foreach_norm(bucket.parameters)
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
            name: [tensor for some in kept for tensor in some[order]]
            for order, name in enumerate(("first moment", "second moment", "steps"))
        }
        return {"weights": self.weights.kept(), "gradients": self.gradients.kept(), **moments}

    def memory(self) -> dict[str, list[Tensor]]:
        """What the next step depends on: gradients are found anew, how they are scaled is not."""
        return self.kept() | {"gradients": self.gradients.memory()}

    def recall(self, memory: Mapping[str, Sequence[Tensor]]) -> None:
        for name, tensors in self.memory().items():
            for tensor, kept in zip(tensors, memory[name], strict=True):
                tensor.copy_(kept)


def _groups(parameters: Mapping[str, nn.Parameter], settings: TrainerSettings) -> Iterator[_Group]:
    kinds: dict[tuple[float, float, str], list[tuple[int, Tensor]]] = {}
    for place, (name, parameter) in enumerate(parameters.items()):
        own = factor_of(name, parameter.ndim, settings.rates)
        decay = settings.weight_decay if parameter.ndim > 1 else 0.0  # of matrices, and neither of norms nor of biases
        clipped = group_of(name, parameter.ndim, settings.clip_by)
        kinds.setdefault((own, decay, clipped), []).append((place, parameter))
    for (own, decay, _), alike in kinds.items():
        for part in bucketed([tensor.numel() for _, tensor in alike], _MOST_ELEMENTS):
            some = [tensor for _, tensor in alike[part]]
            first, second = states_for(settings.optimizer, some)
            storages = _storages(settings.optimizer_states)
            if settings.optimizer in RULES:  # their second moments are none, or one for many
                storages = storages[0], _storages("fp32")[1]
            yield _Group(Bucket(some, [], first, second, storages, 0, True), own, decay, alike[part][0][0])


def rounded_update(kept: str) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
    """What makes an update low: what it changes is rounded, and added to the weights before in their dtype."""
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
