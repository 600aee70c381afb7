"""Optimizers under audit.

The weights after some steps are held against those of the same steps with moments and weights kept as promised, or with
one of the mistakes that people make. Everything between two casts is in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fp8bench.features.audit.auditor import Shape, Subject
from fp8bench.features.audit.operands import (
    Cast,
    cut,
    drawn,
    fp32,
    kept,
    low,
    nearest,
    otherwise_scaled,
    promised_by,
    same,
    stochastic,
)
from fp8bench.features.audit.promises import BAND, Matrices, Promise, in_band, unusable
from fp8bench.features.audit.values import AuditFinding, FlatMoments, fail
from fp8bench.formats.grids import BF16, FP16
from fp8bench.formats.recipes import TENSOR, TENSOR_POWER_OF_TWO
from fp8bench.model.promises import AuditKind, KeptWeights, UpdateRule
from fp8bench.numerics.norms import relative_frobenius

# A mistake is named that lies so many times nearer than the promise, in mean squares.
_NEARER = 16.0
# A mistake at this share of the promise's distance is what was done: no other is tried.
_SURELY = 0.01
# The step of float32, and how many of them an order of sums and products may make of a step.
_FLOAT32, _ORDERS = 2.0**-24, 8.0
# So many bfloat16 weights may be rounded to the other side, because they lie nearer to a tie than orders of sums.
_FLIPS = 16
# The error of weights rounded at random may differ by so many of its standard errors.
_DRAWN = 6.0
# A mean over all elements is a bias if it exceeds so many of its standard errors.
_BIASED = 6.0
# Ways to keep moments that are tried as mistakes.
_OTHERS = ("fp32", "bf16", "fp16", "fp8", "fp8-e5m2", "e4m3-256", "dynamic8-256", "dynamic4-128", "linear8-256")
# With more steps than this, mistakes are looked for that few steps do not show.
_LONG = 100
# 8-bit optimizers may leave tensors of fewer elements as they are, and those that blocks do not divide.
_SMALL = 4096


# What a rule reads of an optimizer's `param_groups`; the last two may be missing.
_ADAM = ("lr", "weight_decay", "betas", "eps")
_SGD = ("lr", "weight_decay", "momentum", "dampening", "nesterov")
_OPTIONAL = _SGD[-2:]
_READ = {UpdateRule.ADAMW: _ADAM, UpdateRule.ADAM: _ADAM, UpdateRule.SGD: _SGD}


class Hyper(NamedTuple):
    """The hyperparameters of a step, by torch's names."""

    lr: float
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: float = 0.0

    @classmethod
    def of(cls, group: Mapping[str, Any], rule: UpdateRule) -> Hyper:
        """Raises ValueError where one is missing, or an option is on that is not audited."""
        if lacks := [name for name in _READ[rule] if name not in (*group, *_OPTIONAL)]:
            raise ValueError(f"its param_groups lack {', '.join(lacks)}: nobody can say what a step should be")
        if refused := [name for name in ("amsgrad", "maximize") if group.get(name)]:
            raise ValueError(f"{refused[0]} is not audited: leave it out")
        given: dict[str, Any] = {
            name: tuple(map(float, group[name])) if name == "betas" else float(group[name])
            for name in _READ[rule] if name in group
        }  # fmt: skip
        hyper = cls(**given)
        if hyper.lr == 0:
            raise ValueError("its learning rate is 0: a step changes nothing")
        if not all(0 <= beta < 1 for beta in hyper.betas):
            first, second = hyper.betas
            raise ValueError(f"its betas are {first:g} and {second:g}: each has to be from 0, and below 1")
        return hyper


State = tuple[Tensor, Tensor, Tensor]
Decay = Literal["", "decoupled", "coupled", "unscaled", "none"]


@dataclass(frozen=True)
class OptimizerWay:
    """One way to take steps. `first`, `second` and `weights` cast the moments and weights after a step; `shown`
    casts the weights that the caller sees. With `late` the update uses the moments as they were cast. The other
    fields plant a mistake: which moments' `bias` is corrected, where `epsilon` is added, how weights `decay`, what
    the `count` of a step is taken for, which moments it `remembers`, and a `factor` of the update."""

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
        how, amount = self.decay or own, self.hyper.weight_decay
        if how == "coupled":
            return weights, gradient + amount * weights
        share = {"decoupled": self.hyper.lr * amount, "unscaled": amount, "none": 0.0}[how]
        return weights * (1 - share), gradient

    def _adam(self, state: State, gradient: Tensor, count: int) -> State:
        weights, gradient = self._decayed(state[0], gradient)
        value, other = self.hyper.betas
        first = value * self.remembers[0] * state[1] + (1 - value) * gradient
        second = other * self.remembers[1] * state[2] + (1 - other) * gradient * gradient
        first_kept, second_kept = self.first(first), self.second(second)
        upper, lower = (first_kept, second_kept) if self.late else (first, second)
        count = max(self.count(count), 1)
        upper = upper / (1 - value**count if self.bias[0] else 1)
        root = math.sqrt(1 - other**count) if self.bias[1] else 1.0
        epsilon = self.hyper.eps
        if self.epsilon == "inside":
            lower = (lower / root**2 + epsilon).sqrt()
        else:
            lower = (lower.sqrt() + epsilon) / root if self.epsilon == "early" else lower.sqrt() / root + epsilon
        return self.weights(weights - self.factor * self.hyper.lr * upper / lower), first_kept, second_kept

    def _sgd(self, state: State, gradient: Tensor, count: int) -> State:
        weights, gradient = self._decayed(state[0], gradient)
        momentum = self.hyper.momentum
        fresh = gradient if count == 1 else (1 - self.hyper.dampening) * gradient
        first = momentum * self.remembers[0] * state[1] + fresh
        first_kept = self.first(first)
        used = first_kept if self.late else first
        step = gradient + momentum * used if self.hyper.nesterov else used
        return self.weights(weights - self.factor * self.hyper.lr * step), first_kept, state[2]


_TORCH = {UpdateRule.ADAMW: "AdamW", UpdateRule.ADAM: "Adam", UpdateRule.SGD: "SGD"}


@dataclass(frozen=True)
class Unfused:
    """torch's own optimizer, each of whose operations rounds to the dtype of the weights."""

    rule: UpdateRule
    hyper: Hyper
    dtype: torch.dtype

    def after(self, start: Tensor, gradients: Tensor) -> Tensor:
        weights = torch.nn.Parameter(start.to(self.dtype, copy=True))
        made: Any = getattr(torch.optim, _TORCH[self.rule])
        optimizer = made([weights], foreach=False, **{name: getattr(self.hyper, name) for name in _READ[self.rule]})
        for gradient in gradients:
            weights.grad = gradient.to(self.dtype)
            optimizer.step()
        return weights.detach().to(torch.float64)


# A mistake: its code, its words, and the fields of an OptimizerWay that are otherwise.
Row = tuple[str, str, dict[str, Any]]
_ROWS: tuple[Row, ...] = (
    ("bias-correction", "neither moment's bias is corrected", {"bias": (False, False)}),
    ("bias-correction", "the first moment's bias alone is corrected", {"bias": (True, False)}),
    ("bias-correction", "the second moment's bias alone is corrected", {"bias": (False, True)}),
    ("epsilon", "epsilon lies under the square root", {"epsilon": "inside"}),
    ("epsilon", "epsilon is added before the bias is corrected", {"epsilon": "early"}),
    ("state-lost", "no moment is kept from one step to the next", {"remembers": (False, False)}),
    ("state-lost", "the first moment is not kept from one step to the next", {"remembers": (False, True)}),
    ("state-lost", "the second moment is not kept from one step to the next", {"remembers": (True, False)}),
    ("flushed", "the second moment is float16 without a scale", {"second": low(FP16)}),
    ("step-count", "steps are not counted", {"count": lambda count: 1}),
    ("step-count", "each step is counted twice", {"count": lambda count: 2 * count}),
    ("step-count", "the count is one ahead", {"count": lambda count: count + 1}),
    ("decay", "weights decay not at all", {"decay": "none"}),
    ("decay", "weights decay without the learning rate", {"decay": "unscaled"}),
    ("decay", "weights decay by the gradient, into the moments", {"decay": "coupled"}),
    ("decay", "weights decay by themselves, past the moments", {"decay": "decoupled"}),
    ("update-lost", "weights are bfloat16, and small updates are lost", {"weights": low(BF16), "shown": same}),
    ("update-lost", "weights are cut to bfloat16", {"weights": cut, "shown": same}),
    ("rate", "steps go away from the minimum", {"factor": -1.0}),
    ("rate", "steps go twice as far", {"factor": 2.0}),
    ("rate", "steps go half as far", {"factor": 0.5}),
)
# What few steps do not show.
_LATE: tuple[Row, ...] = (
    ("step-count", "the count stands still at 256, as one in bfloat16 does", {"count": lambda count: min(count, 256)}),
    ("step-count", "the count begins anew after 256, as one of 8 bits does", {"count": lambda count: count % 256}),
    ("step-count", "the count begins anew after 128, as one of 8 bits does", {"count": lambda count: count % 128}),
)


def mistakes(
    way: OptimizerWay, others: Mapping[str, tuple[Cast, Cast]], long: bool
) -> Iterator[tuple[str, str, OptimizerWay]]:
    """Yields code and words of each mistake that steps which should be `way` may have made, and the way of taking
    them. `others` are other ways to keep both moments."""
    for code, words, changes in _LATE if long else _ROWS:
        yield code, words, replace(way, **changes)
    if long:
        return
    first, second = way.hyper.betas
    coarse = float(cut(torch.tensor(first))), float(cut(torch.tensor(second)))
    yield "betas", "its betas are exchanged", replace(way, hyper=way.hyper._replace(betas=(second, first)))
    yield "betas", "its betas are cut to bfloat16", replace(way, hyper=way.hyper._replace(betas=coarse))
    for words, (upper, lower) in others.items():
        code = "not-cast" if words == "fp32" else "scale-rounding" if "scales" in words else "other-precision"
        yield code, f"both moments are kept as {words}", replace(way, first=upper, second=lower)
        yield code, f"the first moment is kept as {words}", replace(way, first=upper)
        yield code, f"the second moment is kept as {words}", replace(way, second=lower)


def _bf16_steps(x: Tensor) -> Tensor:
    return torch.exp2(x.to(torch.float64).abs().clamp(min=2.0**-120).log2().floor() - 7)


# What is left of the weights, and what is shown of them.
_WEIGHTS: dict[KeptWeights, tuple[Cast, Cast]] = {
    KeptWeights.FP32: (fp32, same),
    KeptWeights.BF16: (low(BF16), same),
    KeptWeights.STOCHASTIC: (stochastic(0), same),
    KeptWeights.MASTER: (fp32, low(BF16)),
    KeptWeights.SCALED: (low(FP16, TENSOR), same),
}


@dataclass(frozen=True)
class OptimizerPromise:
    """Steps from `start` along `gradients`. All `ways` keep the promise, `plain` first; `likely` are the casts of
    moments that are tried as mistakes."""

    gradients: Tensor
    start: Tensor
    plain: OptimizerWay
    ways: Sequence[OptimizerWay | Unfused]
    likely: dict[str, tuple[Cast, Cast]]

    def judge(self, result: Tensor, search: bool = True) -> AuditFinding:
        if wrong := unusable(result, tuple(self.start.shape)):
            return wrong
        exact = self._exact
        error, noise = relative_frobenius(result, exact), self._noise
        errors = [relative_frobenius(tensor, exact) for tensor in self._promised]
        own = min(relative_frobenius(result, tensor) for tensor in self._promised)
        spread = 1 + _DRAWN / math.sqrt(2 * self._carrying) if self._drawn else 1.0
        high, low = spread * BAND[1] * max(errors) + noise, BAND[0] * min(errors) / spread - noise
        inside = low <= error <= high
        if own > noise and (len(self.gradients) <= _LONG or not inside):
            if mistake := self._explained(result, own):
                return fail(*mistake, error, errors[0])
            if not inside:
                return in_band(error, errors[0], limits=(low, high))
        return AuditFinding(error=error, expected=errors[0])

    @cached_property
    def _exact(self) -> Tensor:
        return self._update(OptimizerWay(self.plain.rule, self.plain.hyper))

    @property
    def _drawn(self) -> bool:
        return self.plain.weights is _WEIGHTS[KeptWeights.STOCHASTIC][0]

    @property
    def _carrying(self) -> float:
        """Returns how many elements make the error: of one-hot rows a few do, and how these are rounded is chance."""
        squares = (self._promised[0] - self._exact).square()
        return max(1.0, float(squares.sum() ** 2 / squares.square().sum().clamp(min=1e-300)))

    @cached_property
    def _promised(self) -> tuple[Tensor, ...]:
        return tuple(map(self._update, self.ways))

    @cached_property
    def _noise(self) -> float:
        """Orders of sums err at random from step to step; betas and the factor of decay, rounded to float32, err to the
        same side in all steps that are remembered."""
        hyper, steps, size = self.plain.hyper, len(self.gradients), float(self._exact.norm()) or 1.0
        start = float(self.start.double().norm()) / size
        decayed = min(float(steps), 1 / (hyper.lr * hyper.weight_decay)) if hyper.weight_decay else 0.0
        sided = decayed * (1 + start) + 1 / (1 - max(hyper.betas))
        flips = 0.0 if self.plain.shown is same else _FLIPS * float(_bf16_steps(self.start).square().mean())
        return _FLOAT32 * (_ORDERS * (1 + math.sqrt(steps) * start) + sided) + math.sqrt(flips) / size

    def _update(self, way: OptimizerWay | Unfused) -> Tensor:
        return way.after(self.start, self.gradients) - self.start.to(torch.float64)

    def _explained(self, result: Tensor, own: float) -> tuple[str, str] | None:
        if lean := self._lean(result):
            return "biased", lean
        rows = mistakes(self.plain, self.likely, len(self.gradients) > _LONG)
        updates = ((code, words, self._update(way)) for code, words, way in rows)
        distance, surely = partial(relative_frobenius, result), max(self._noise, _SURELY * own)
        return nearest(updates, distance, own / math.sqrt(_NEARER), surely)

    def _lean(self, result: Tensor) -> str:
        """Says which way weights that are rounded at random lean; '' if they do not, or are not."""
        if not self._drawn:
            return ""
        wanted = replace(self.plain, weights=same).after(self.start, self.gradients)
        off = (result + self.start.to(torch.float64) - wanted) / _bf16_steps(wanted)
        for words, sign in (("up", 1.0), ("away from zero", wanted.sign()), ("with the update", self._exact.sign())):
            leans = off * sign
            error = float(leans.std()) / math.sqrt(leans.numel())
            if abs(float(leans.mean())) > _BIASED * error > 0:
                return f"rounded at random, it leans {float(leans.mean()):+.2g} steps of bfloat16 {words}"
        return ""


# The standard deviation of an optimizer's weights; gradients are (this + noise) x a base, so that some change sign.
_SIZE, _STEADY = 0.25, 0.5
_LOW = {KeptWeights.BF16, KeptWeights.STOCHASTIC, KeptWeights.MASTER}


class OptimizerSubject(Subject):
    """Is made of one parameter (M, K), which takes `n` steps with another gradient each."""

    kind = AuditKind.OPTIMIZER
    sides = (("m", "M"), ("k", "K"), ("n", "steps"))
    shapes = (Shape(64, 2, 64), Shape(16, 24, 256))
    odd = (Shape(1, 3, 96), Shape(33, 3, 47), Shape(130, 3, 40))
    many = Shape(16, 1000, 256)
    timed = Shape(256, 2, 256)
    zeroed = (0, 1)
    data = ("normal", "rows of different sizes", "many octaves", "one-hot rows", "small")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.signature.weights in _LOW else torch.float32

    def drawn(self, data: str, shape: Shape, seed: int) -> Matrices:
        """Returns gradients, which keep their sizes from step to step, and weights."""
        base = drawn(data, 0, shape.m, shape.k, seed, torch.float32)
        noise = drawn("normal", 1, shape.n * shape.m, shape.k, seed, torch.float32).view(shape.n, shape.m, shape.k)
        weights = drawn("normal", 2, shape.m, shape.k, seed, torch.float32)
        return (base * (_STEADY + noise)).to(self.dtype), (_SIZE * weights).to(self.dtype)

    def raw(self, arguments: Matrices) -> dict[str, Tensor]:
        gradients, start = arguments
        weights = torch.nn.Parameter(start.clone())
        optimizer = self.function([weights])
        for gradient in gradients:
            weights.grad = gradient.clone()  # which a step may use up
            optimizer.step()
        return {"update": weights.detach().to(torch.float64) - start.to(torch.float64)}

    def promises(self, matrices: Matrices) -> dict[str, Promise]:
        """All ways keep the promise: updates may use moments before or after they are cast."""
        precision, word, rule, facts = self.signature.precision, self.signature.weights, self.signature.rule, self.facts
        flat, (gradients, start) = FlatMoments.of(precision), matrices
        scaled = precision not in ("fp32", "bf16", "fp16") and flat is None
        default = {"": "fp16" if scaled else precision, "same": precision}
        second = kept(default.get(self.signature.second_moment, self.signature.second_moment), facts, signed=False)
        plain = OptimizerWay(rule, self._hyper, kept(precision, facts), second, *_WEIGHTS[word])
        ways = [plain, replace(plain, late=True)]
        if flat is not None and (start.numel() < _SMALL or start.numel() % flat.block):
            ways.append(replace(plain, first=same, second=same))
        if word is KeptWeights.SCALED:
            ways += [replace(way, weights=low(FP16, TENSOR_POWER_OF_TWO)) for way in ways]
        unfused = [Unfused(rule, self._hyper, self.dtype)] if (word, precision) == (KeptWeights.BF16, "bf16") else []
        likely = {other: (kept(other, facts), kept(other, facts, signed=False)) for other in _OTHERS}
        for rounding, own in otherwise_scaled(None if flat else promised_by(precision, facts).treatments[1]):
            cast = low(own.fmt, own.scaling)
            likely[f"{precision} under scales that are rounded as {rounding}"] = cast, cast
        return {"update": OptimizerPromise(gradients, start, plain, [*ways, *unfused], likely)}

    @cached_property
    def _hyper(self) -> Hyper:
        optimizer = self.function([torch.nn.Parameter(torch.zeros(1, 16, dtype=self.dtype, device=self.device))])
        groups = getattr(optimizer, "param_groups", None)
        if not groups or not callable(getattr(optimizer, "step", None)):
            raise TypeError(f"it made {type(optimizer).__name__}, and step() and param_groups were expected")
        return Hyper.of(groups[0], self.signature.rule)
