"""Steps of an optimizer as somebody may make them: rightly, with moments and weights kept in few bits, or with one of
the mistakes that people make. Everything between two casts is in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8bench.features.audit.operands import rounded
from fp8bench.features.audit.subjects import promised_by
from fp8bench.features.audit.values import FlatMoments
from fp8bench.formats.grids import E4M3, E5M2, FP16
from fp8bench.formats.operators import values
from fp8bench.formats.recipes import ROUNDINGS, ScaleRounding, Treatment
from fp8bench.model import DeviceFacts
from fp8bench.model.promises import UpdateRule
from fp8bench.nn.moments import scaled

# What is left of a moment, or of weights, between two steps.
Cast = Callable[[Tensor], Tensor]
_FLOATS = {"e4m3": E4M3, "e5m2": E5M2}
# The smallest scale that 8-bit optimizers divide by.
_LEAST_SCALE = 1e-12
_SCALE_BYTES = 4


def same(x: Tensor) -> Tensor:
    return x


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(torch.float64)


bf16: Cast = partial(as_dtype, dtype=torch.bfloat16)


def half(rounding: ScaleRounding = ScaleRounding.EXACT) -> Cast:
    """float16 under one scale a tensor."""
    storage = scaled(FP16, rounding)
    return lambda x: storage.restore(storage.keep(x.to(torch.float32))).to(torch.float64)


def _cut(x: Tensor) -> Tensor:
    """bfloat16 toward zero."""
    bits = x.to(torch.float32).view(torch.int32) & ~0xFFFF
    return bits.view(torch.float32).to(torch.float64)


def stochastic(seed: int) -> Cast:
    """bfloat16, upward as often as the number is near to the upper one."""
    random = torch.Generator().manual_seed(seed)

    def cast(x: Tensor) -> Tensor:
        bits = x.to(torch.float32).view(torch.int32)
        up = torch.randint(0, 1 << 16, x.shape, generator=random, dtype=torch.int32)
        return ((bits + up) & ~0xFFFF).view(torch.float32).to(torch.float64)

    return cast


def kept(word: str, facts: DeviceFacts, signed: bool = True) -> tuple[Cast, float]:
    """The values that are left, by the word that says how moments are kept, and the bytes that one takes; of the
    second moment not `signed`."""
    flat = FlatMoments.of(word)
    if flat is not None:
        fmt = _FLOATS.get(flat.codes)
        bits = 4 if flat.codes == "dynamic4" else 8
        known = _linear(signed) if flat.codes == "linear8" else dynamic_map(bits, signed)
        codes = partial(values, fmt=fmt) if fmt else partial(_mapped, known=known)
        cast = partial(_flat, block=flat.block, largest=fmt.largest if fmt else 1.0, codes=codes)
        return cast, bits / 8 + _SCALE_BYTES / flat.block
    if word in ("fp32", "bf16"):
        dtype = torch.float32 if word == "fp32" else torch.bfloat16
        return partial(as_dtype, dtype=dtype), dtype.itemsize
    if word == "fp16":
        return half(), torch.float16.itemsize
    treatment = promised_by(word, facts).treatments[1]  # a moment lies as its weight does
    assert treatment is not None
    return partial(_recipe, treatment=treatment), treatment.fmt.bits / 8


def otherwise_scaled(word: str, facts: DeviceFacts) -> Iterator[tuple[Cast, str]]:
    """A precision's casts under scales that are rounded in another way, and how."""
    treatment = None if FlatMoments.of(word) else promised_by(word, facts).treatments[1]
    if treatment is None or treatment.scaling is None:
        return
    for rounding in ROUNDINGS[treatment.scaling.scale]:
        if rounding is not treatment.scaling.rounding:
            other = replace(treatment, scaling=replace(treatment.scaling, rounding=rounding))
            yield partial(_recipe, treatment=other), rounding.value


def _recipe(x: Tensor, treatment: Treatment) -> Tensor:
    return rounded(x.to(torch.float32), treatment).values.to(torch.float64)


def _flat(x: Tensor, block: int, largest: float, codes: Cast) -> Tensor:
    """Under a scale for each run of the tensor; the last one may be short."""
    line = x.to(torch.float32).flatten()
    runs = torch.nn.functional.pad(line, (0, -len(line) % block)).view(-1, block)
    scales = runs.abs().amax(1, keepdim=True).clamp(min=_LEAST_SCALE) / largest
    return (codes(runs / scales) * scales).flatten()[: len(line)].view(x.shape).to(torch.float64)


def _mapped(x: Tensor, known: Tensor) -> Tensor:
    """The nearest value of the map; halfway between two the upper one."""
    return known[torch.bucketize(x, (known[1:] + known[:-1]) / 2, right=True)]


@cache
def dynamic_map(bits: int, both: bool) -> Tensor:
    """The values of Dettmers's dynamic data type, with negative ones or not: powers of ten, and within one of them
    as many equal steps as the bits leave that its exponent does not take. Without a sign four bits are sixteen equal
    steps, and none of them is zero (torchao's 4-bit optimizers)."""
    if bits == 4 and not both:
        return torch.linspace(0, 1, 17)[1:]
    octaves = bits - 1
    found = [0.0, 1.0]
    for place in range(octaves):
        steps = 2 ** (place + (not both))
        edges = torch.linspace(0.1, 1, steps + 1)
        middles = (10.0 ** (place - octaves + 1) * ((edges[1:] + edges[:-1]) / 2)).tolist()
        found += [*middles, *(-one for one in middles if both)]
    return torch.tensor(sorted(found))


def _linear(both: bool) -> Tensor:
    """Equal steps of eight bits."""
    return torch.arange(-127, 128) / 127 if both else torch.arange(256) / 255


class Hyper(NamedTuple):
    """What an optimizer says in its `param_groups`."""

    rate: float
    decay: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    @classmethod
    def of(cls, group: Mapping[str, Any], rule: UpdateRule) -> Hyper:
        """ValueError where something lacks, or is asked for that no promise here covers."""
        names = ("lr", "weight_decay", *(("momentum",) if rule is UpdateRule.SGD else ("betas", "eps")))
        if lacks := [name for name in names if name not in group]:
            raise ValueError(f"its param_groups lack {', '.join(lacks)}: nobody can say what a step should be")
        if refused := [name for name in ("amsgrad", "maximize") if group.get(name)]:
            raise ValueError(f"{refused[0]} is not audited: leave it out")
        rate, decay = float(group["lr"]), float(group["weight_decay"])
        if rate == 0:
            raise ValueError("its learning rate is 0: a step changes nothing")
        if rule is UpdateRule.SGD:
            dampening, nesterov = float(group.get("dampening", 0)), bool(group.get("nesterov"))
            return cls(rate, decay, momentum=float(group["momentum"]), dampening=dampening, nesterov=nesterov)
        first, second = (float(one) for one in group["betas"])
        return cls(rate, decay, (first, second), float(group["eps"]))


class Steps(Protocol):
    """A way to make steps."""

    def after(self, start: Tensor, gradients: Tensor) -> Tensor:
        """The weights after a step for each gradient, float64."""


State = tuple[Tensor, Tensor, Tensor]
Decay = Literal["", "decoupled", "coupled", "unscaled", "none"]


@dataclass(frozen=True)
class Way:
    """`first`, `second` and `weights` are what is left of the moments and weights after a step, `shown` what the
    caller sees of the weights. `late`: the update is made of the moments as they are kept, and not as computed.

    What follows is as it should be unless somebody has made a mistake: which moments' `bias` is corrected, where
    `epsilon` is added, how weights `decay`, what the `count` of a step is taken for, which moments it `remembers`, and
    by which `factor` the update is multiplied.
    """

    rule: UpdateRule
    hyper: Hyper
    first: Cast = same
    second: Cast = same
    weights: Cast = same
    shown: Cast = same
    late: bool = False
    bias: tuple[bool, bool] = (True, True)
    epsilon: Literal["outside", "inside", "early"] = "outside"
    decay: Decay = ""
    count: Callable[[int], int] = int
    remembers: tuple[bool, bool] = (True, True)
    factor: float = 1.0

    def after(self, start: Tensor, gradients: Tensor) -> Tensor:
        weights = self.weights(start.to(torch.float64))
        state = weights, torch.zeros_like(weights), torch.zeros_like(weights)
        step = self._sgd if self.rule is UpdateRule.SGD else self._adam
        for count, gradient in enumerate(gradients, 1):
            state = step(state, gradient.to(torch.float64), count)
        return self.shown(state[0])

    def _decayed(self, weights: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        own = "decoupled" if self.rule is UpdateRule.ADAMW else "coupled"
        how, amount = self.decay or own, self.hyper.decay
        if how == "coupled":
            return weights, gradient + amount * weights
        share = {"decoupled": self.hyper.rate * amount, "unscaled": amount, "none": 0.0}[how]
        return weights * (1 - share), gradient

    def _adam(self, state: State, gradient: Tensor, count: int) -> State:
        weights, gradient = self._decayed(state[0], gradient)
        one, other = self.hyper.betas
        first = one * self.remembers[0] * state[1] + (1 - one) * gradient
        second = other * self.remembers[1] * state[2] + (1 - other) * gradient * gradient
        first_kept, second_kept = self.first(first), self.second(second)
        upper, lower = (first_kept, second_kept) if self.late else (first, second)
        count = max(self.count(count), 1)
        upper = upper / (1 - one**count if self.bias[0] else 1)
        root = math.sqrt(1 - other**count) if self.bias[1] else 1.0
        epsilon = self.hyper.epsilon
        if self.epsilon == "inside":
            lower = (lower / root**2 + epsilon).sqrt()
        else:
            lower = (lower.sqrt() + epsilon) / root if self.epsilon == "early" else lower.sqrt() / root + epsilon
        return self.weights(weights - self.factor * self.hyper.rate * upper / lower), first_kept, second_kept

    def _sgd(self, state: State, gradient: Tensor, count: int) -> State:
        weights, gradient = self._decayed(state[0], gradient)
        momentum = self.hyper.momentum
        fresh = gradient if count == 1 else (1 - self.hyper.dampening) * gradient
        first = momentum * self.remembers[0] * state[1] + fresh
        first_kept = self.first(first)
        used = first_kept if self.late else first
        step = gradient + momentum * used if self.hyper.nesterov else used
        return self.weights(weights - self.factor * self.hyper.rate * step), first_kept, state[2]


_TORCH = {UpdateRule.ADAMW: "AdamW", UpdateRule.ADAM: "Adam", UpdateRule.SGD: "SGD"}


@dataclass(frozen=True)
class Unfused:
    """torch's own steps, each of whose operations rounds to the dtype of the weights."""

    rule: UpdateRule
    hyper: Hyper
    dtype: torch.dtype

    def after(self, start: Tensor, gradients: Tensor) -> Tensor:
        hyper, weights = self.hyper, torch.nn.Parameter(start.to(self.dtype, copy=True))
        own: dict[str, Any] = {"betas": hyper.betas, "eps": hyper.epsilon}
        if self.rule is UpdateRule.SGD:
            own = {"momentum": hyper.momentum, "dampening": hyper.dampening, "nesterov": hyper.nesterov}
        made: Any = getattr(torch.optim, _TORCH[self.rule])
        optimizer = made([weights], lr=hyper.rate, weight_decay=hyper.decay, foreach=False, **own)
        for gradient in gradients:
            weights.grad = gradient.to(self.dtype)
            optimizer.step()
        return weights.detach().to(torch.float64)


# Code, words, and what of a Way is otherwise.
Row = tuple[str, str, dict[str, Any]]
_OF_MOMENTS: tuple[Row, ...] = (
    ("bias-correction", "neither moment's bias is corrected", {"bias": (False, False)}),
    ("bias-correction", "the first moment's bias alone is corrected", {"bias": (True, False)}),
    ("bias-correction", "the second moment's bias alone is corrected", {"bias": (False, True)}),
    ("epsilon", "epsilon lies under the square root", {"epsilon": "inside"}),
    ("epsilon", "epsilon is added before the bias is corrected", {"epsilon": "early"}),
    ("state-lost", "neither moment is kept from one step to the next", {"remembers": (False, False)}),
    ("state-lost", "the first moment is not kept from one step to the next", {"remembers": (False, True)}),
    ("state-lost", "the second moment is not kept from one step to the next", {"remembers": (True, False)}),
)
_OF_COUNTS: tuple[Row, ...] = (
    ("flushed", "the second moment is float16 without a scale", {"second": partial(as_dtype, dtype=torch.float16)}),
    ("step-count", "steps are not counted", {"count": lambda count: 1}),
    ("step-count", "each step is counted twice", {"count": lambda count: 2 * count}),
    ("step-count", "the count is one ahead", {"count": lambda count: count + 1}),
)
_OF_MOMENTUM: tuple[Row, ...] = (
    ("state-lost", "the momentum is not kept from one step to the next", {"remembers": (False, False)}),
)
_OF_WEIGHTS: tuple[Row, ...] = (
    ("decay", "weights decay not at all", {"decay": "none"}),
    ("decay", "weights decay without the learning rate", {"decay": "unscaled"}),
    ("decay", "weights decay by the gradient, into the moments", {"decay": "coupled"}),
    ("decay", "weights decay by themselves, past the moments", {"decay": "decoupled"}),
    ("update-lost", "weights are bfloat16, and small updates are lost", {"weights": bf16, "shown": same}),
    ("update-lost", "weights are cut to bfloat16", {"weights": _cut, "shown": same}),
    ("rate", "steps go away from the minimum", {"factor": -1.0}),
    ("rate", "steps go twice as far", {"factor": 2.0}),
    ("rate", "steps go half as far", {"factor": 0.5}),
)
_LATE: tuple[Row, ...] = (
    ("step-count", "the count stands still at 256, as one in bfloat16 does", {"count": lambda count: min(count, 256)}),
    ("step-count", "the count begins anew after 256, as one of 8 bits does", {"count": lambda count: count % 256}),
    ("step-count", "the count begins anew after 128, as one of 8 bits does", {"count": lambda count: count % 128}),
)
_MOMENTS = {
    "both moments are": ("first", "second"), "the first moment is": ("first",), "the second moment is": ("second",),
}  # fmt: skip


def mistakes(way: Way, others: Mapping[str, tuple[Cast, Cast]], long: bool) -> Iterator[tuple[str, str, Way]]:
    """Their codes, in words, and the steps that they make where these should be `way`; of `long` rows of steps those
    that few do not show. `others` are ways to keep both moments that somebody may have taken instead."""
    one, other = way.hyper.betas
    cut = float(_cut(torch.tensor(one))), float(_cut(torch.tensor(other)))
    rows: Iterable[Row]
    if way.rule is UpdateRule.SGD:
        rows = () if long else (*_OF_MOMENTUM, *_otherwise(others, {"the momentum is": ("first",)}), *_OF_WEIGHTS)
    else:
        rows = _LATE if long else (
            *_OF_MOMENTS, *_otherwise(others, _MOMENTS), *_OF_COUNTS, *_OF_WEIGHTS,
            ("betas", "its betas are exchanged", {"hyper": way.hyper._replace(betas=(other, one))}),
            ("betas", "its betas are cut to bfloat16", {"hyper": way.hyper._replace(betas=cut)}),
        )  # fmt: skip
    for code, words, changes in rows:
        yield code, words, replace(way, **changes)


def _otherwise(others: Mapping[str, tuple[Cast, Cast]], names: Mapping[str, tuple[str, ...]]) -> Iterator[Row]:
    for words, (first, second) in others.items():
        code = "not-cast" if words == "fp32" else "scale-rounding" if "scales" in words else "other-precision"
        casts = {"first": first, "second": second}
        for name, moments in names.items():
            yield code, f"{name} kept as {words}", {moment: casts[moment] for moment in moments}
