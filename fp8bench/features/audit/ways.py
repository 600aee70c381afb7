"""Steps of an optimizer as somebody may make them: rightly, with moments and weights kept in few bits, or with one of
the mistakes that people make. Everything between two casts is in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8bench.features.audit.kept_moments import Cast, as_dtype, same
from fp8bench.model.promises import UpdateRule

State = tuple[Tensor, Tensor, Tensor]


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


class Mistaken(NamedTuple):
    """Its code, in words, and the steps that it makes."""

    code: str
    words: str
    way: Way


def mistakes(way: Way, others: Mapping[str, tuple[Cast, Cast]]) -> Iterator[Mistaken]:
    """Of steps that should be `way`. `others` are ways to keep both moments that somebody may have taken instead."""
    for code, words, changes in _of_moments(others) if way.rule is not UpdateRule.SGD else _of_momentum(others):
        yield Mistaken(code, words, replace(way, **changes))
    for words, decay in _DECAYS.items():
        yield Mistaken("decay", f"weights decay {words}", replace(way, decay=decay))
    lost = replace(way, weights=_bf16, shown=same)
    yield Mistaken("update-lost", "weights are bfloat16, and small updates are lost", lost)
    yield Mistaken("update-lost", "weights are cut to bfloat16", replace(lost, weights=_cut))
    for words, factor in (("away from the minimum", -1.0), ("twice as far", 2.0), ("half as far", 0.5)):
        yield Mistaken("rate", f"steps go {words}", replace(way, factor=factor))
    one, other = way.hyper.betas
    swapped = way.hyper._replace(betas=(other, one))
    cut = way.hyper._replace(betas=(float(_cut(torch.tensor(one))), float(_cut(torch.tensor(other)))))
    if way.rule is not UpdateRule.SGD:
        yield Mistaken("betas", "its betas are exchanged", replace(way, hyper=swapped))
        yield Mistaken("betas", "its betas are cut to bfloat16", replace(way, hyper=cut))


def late_mistakes(way: Way) -> Iterator[Mistaken]:
    """Those that many steps show."""
    if way.rule is not UpdateRule.SGD:
        for words, count in _LATE_COUNTS.items():
            yield Mistaken("step-count", words, replace(way, count=count))


Decay = Literal["", "decoupled", "coupled", "unscaled", "none"]
_DECAYS: dict[str, Decay] = {
    "not at all": "none",
    "without the learning rate": "unscaled",
    "by the gradient, into the moments": "coupled",
    "by themselves, past the moments": "decoupled",
}
Rows = Iterator[tuple[str, str, dict[str, Any]]]


def _of_moments(others: Mapping[str, tuple[Cast, Cast]]) -> Rows:
    for words, bias in (("neither moment's", (False, False)), ("the first moment's", (True, False)),
                        ("the second moment's", (False, True))):  # fmt: skip
        yield "bias-correction", f"{words} bias {'alone ' * any(bias)}is corrected", {"bias": bias}
    yield "epsilon", "epsilon lies under the square root", {"epsilon": "inside"}
    yield "epsilon", "epsilon is added before the bias is corrected", {"epsilon": "early"}
    for words, remembers in (("neither moment is", (False, False)), ("the first moment is not", (False, True)),
                             ("the second moment is not", (True, False))):  # fmt: skip
        yield "state-lost", f"{words} kept from one step to the next", {"remembers": remembers}
    for words, (first, second) in others.items():
        code = _code(words)
        yield code, f"both moments are kept as {words}", {"first": first, "second": second}
        yield code, f"the first moment is kept as {words}", {"first": first}
        yield code, f"the second moment is kept as {words}", {"second": second}
    yield "flushed", "the second moment is float16 without a scale", {"second": _half}
    for words, count in _COUNTS.items():
        yield "step-count", words, {"count": count}


def _of_momentum(others: Mapping[str, tuple[Cast, Cast]]) -> Rows:
    yield "state-lost", "the momentum is not kept from one step to the next", {"remembers": (False, False)}
    for words, (first, _) in others.items():
        yield _code(words), f"the momentum is kept as {words}", {"first": first}


def _code(words: str) -> str:
    return "not-cast" if words == "fp32" else "scale-rounding" if "scales" in words else "other-precision"


_COUNTS: dict[str, Callable[[int], int]] = {
    "steps are not counted": lambda count: 1,
    "each step is counted twice": lambda count: 2 * count,
    "the count is one ahead": lambda count: count + 1,
}
_LATE_COUNTS: dict[str, Callable[[int], int]] = {
    "the count stands still at 256, as one in bfloat16 does": lambda count: min(count, 256),
    "the count begins anew after 256, as one of 8 bits does": lambda count: count % 256,
    "the count begins anew after 128, as one of 8 bits does": lambda count: count % 128,
}


def _bf16(x: Tensor) -> Tensor:
    return as_dtype(x, torch.bfloat16)


def _half(x: Tensor) -> Tensor:
    return as_dtype(x, torch.float16)


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
