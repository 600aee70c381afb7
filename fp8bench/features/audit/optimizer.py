"""Optimizers under audit: the weights after some steps, held against those of the same steps with moments and weights
kept as promised."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.features.audit.operands import drawn
from fp8bench.features.audit.promises import BAND, Judged, Matrices, Promise, not_finite, unusable
from fp8bench.features.audit.steps import (
    Cast,
    Hyper,
    Steps,
    Unfused,
    Way,
    as_dtype,
    bf16,
    half,
    kept,
    mistakes,
    otherwise_scaled,
    same,
    stochastic,
)
from fp8bench.features.audit.subjects import Shape, Subject
from fp8bench.features.audit.values import FlatMoments
from fp8bench.formats.recipes import ScaleRounding
from fp8bench.model import DeviceFacts
from fp8bench.model.promises import AuditKind, KeptWeights, Signature, UpdateRule
from fp8bench.numerics.norms import relative_frobenius

# Mean squares of differences: a mistake is told where it lies so many times nearer than what was promised.
_NEARER = 16.0
# What comes nearer by so much is what was done, and nothing else is tried.
_SURELY = 0.01
# Rounding weights to float32 at every step, in sums and products of another order.
_FLOAT32, _ORDERS = 2.0**-24, 8.0
# The error of few weights that are rounded at random: so many standard errors of itself.
_DRAWN = 6.0
# So many standard errors of a mean, over all elements.
_BIASED = 6.0
# Weights are of this size, and some gradients change sign.
_SIZE, _STEADY = 0.25, 0.5
# Ways to keep moments that somebody may have taken for others.
_OTHERS = ("fp32", "bf16", "fp16", "fp8", "fp8-e5m2", "e4m3-256", "dynamic8-256", "dynamic4-128", "linear8-256")
# From here on mistakes are looked for that few steps do not show.
_LONG = 100
_LOW = {KeptWeights.BF16, KeptWeights.STOCHASTIC, KeptWeights.MASTER}
# Up to here 8-bit optimizers may leave a tensor as it is, and where their blocks do not divide it.
_SMALL = 4096


class Optimizer(Subject):
    """Made of one parameter (M, K), which takes `n` steps, with another gradient each."""

    kind = AuditKind.OPTIMIZER
    sides = (("m", "M"), ("k", "K"), ("n", "steps"))
    shapes = (Shape(64, 2, 64), Shape(16, 24, 256))
    odd = (Shape(1, 3, 96), Shape(33, 3, 47), Shape(130, 3, 40))
    many, held = Shape(16, 1000, 256), Shape(64, 1, 1024)
    timed = Shape(256, 2, 256)
    data = ("normal", "rows of different sizes", "many octaves", "one-hot rows", "small")

    def __init__(self, function: Callable[..., Any], signature: Signature, facts: DeviceFacts) -> None:
        self.function, self.signature, self.device, self.facts = function, signature, facts.key, facts
        self.dtype = torch.bfloat16 if signature.weights in _LOW else torch.float32

    def drawn(self, data: str, shape: Shape, seed: int) -> Matrices:
        """Gradients, which keep their sizes from step to step, and weights."""
        base = drawn(data, 0, shape.m, shape.k, seed, torch.float32)
        noise = drawn("normal", 1, shape.n * shape.m, shape.k, seed, torch.float32).view(shape.n, shape.m, shape.k)
        weights = drawn("normal", 2, shape.m, shape.k, seed, torch.float32)
        return (base * (_STEADY + noise)).to(self.dtype), (_SIZE * weights).to(self.dtype)

    def zeroed(self, matrices: Matrices) -> Matrices:
        return tuple(map(torch.zeros_like, matrices))

    def flops(self, shape: Shape) -> int:
        return 0

    def raw(self, arguments: Matrices) -> dict[str, Tensor]:
        gradients, start = arguments
        weights = self._stepped(gradients, start)[1].detach()
        return {"update": weights.to(torch.float64) - start.to(torch.float64)}

    def promises(self, matrices: Matrices) -> dict[str, Promise]:
        gradients, start = matrices
        return {"update": OptimizerPromise(start, gradients, self.ways(start), self._likely())}

    def state_bytes(self, matrices: Matrices) -> tuple[float, float] | None:
        """What its state takes of each element, and what was promised; None where it shows none."""
        optimizer, weights = self._stepped(*self.arguments(matrices))
        state = getattr(optimizer, "state", {}).get(weights)
        if not state:
            return None
        held = sum(_bytes(one) for one in state.values() if isinstance(one, Tensor)) / weights.numel()
        moments = self._kept()[: 1 if self.signature.rule is UpdateRule.SGD else 2]
        return held, sum(size for _, size in moments) + 4 * (self.signature.weights is KeptWeights.MASTER)

    def _stepped(self, gradients: Tensor, start: Tensor) -> tuple[Any, nn.Parameter]:
        weights = nn.Parameter(start.clone())
        optimizer = self.function([weights])
        for gradient in gradients:
            weights.grad = gradient.clone()  # which a step may use up
            optimizer.step()
        return optimizer, weights

    @cached_property
    def _hyper(self) -> Hyper:
        optimizer = self.function([nn.Parameter(torch.zeros(1, 16, dtype=self.dtype, device=self.device))])
        groups = getattr(optimizer, "param_groups", None)
        if not groups or not callable(getattr(optimizer, "step", None)):
            raise TypeError(f"it made {type(optimizer).__name__}, and step() and param_groups were expected")
        return Hyper.of(groups[0], self.signature.rule)

    def _kept(self) -> tuple[tuple[Cast, float], tuple[Cast, float]]:
        """How both moments are kept, and in how many bytes."""
        first, second = self.signature.precision, self.signature.second_moment
        recipe = first not in ("fp32", "bf16", "fp16") and FlatMoments.of(first) is None
        second = {"": "fp16" if recipe else first, "same": first}.get(second, second)
        return kept(first, self.facts), kept(second, self.facts, signed=False)

    def ways(self, start: Tensor) -> tuple[Steps, ...]:
        """All that keep the promise: the update may be made of the moments before or after they are cast."""
        word, rule = self.signature.weights, self.signature.rule
        (first, _), (second, _) = self._kept()
        base = Way(rule, self._hyper, first, second, *_WEIGHTS[word])
        found: list[Way] = [base, replace(base, late=True)]
        flat = FlatMoments.of(self.signature.precision)
        if flat is not None and (start.numel() < _SMALL or start.numel() % flat.block):
            found.append(replace(base, first=same, second=same))
        if word is KeptWeights.SCALED:
            found += [replace(one, weights=half(ScaleRounding.POWER_OF_TWO)) for one in found]
        plain = word is KeptWeights.BF16 and self.signature.precision == "bf16"
        return (*found, *((Unfused(rule, self._hyper, self.dtype),) if plain else ()))

    def _likely(self) -> dict[str, tuple[Cast, Cast]]:
        found = {word: (kept(word, self.facts)[0], kept(word, self.facts, signed=False)[0]) for word in _OTHERS}
        for cast, rounding in otherwise_scaled(self.signature.precision, self.facts):
            found[f"{self.signature.precision} under scales that are rounded as {rounding}"] = cast, cast
        return found


_FP32: Cast = partial(as_dtype, dtype=torch.float32)
# What is left of the weights, and what is shown of them.
_WEIGHTS: dict[KeptWeights, tuple[Cast, Cast]] = {
    KeptWeights.FP32: (_FP32, same),
    KeptWeights.BF16: (bf16, same),
    KeptWeights.STOCHASTIC: (stochastic(0), same),
    KeptWeights.MASTER: (_FP32, bf16),
    KeptWeights.SCALED: (half(), same),
}


@dataclass(frozen=True)
class OptimizerPromise:
    """Of weights and the gradients of some steps. The first of the `ways` is the plainest."""

    start: Tensor
    gradients: Tensor
    ways: tuple[Steps, ...]
    likely: dict[str, tuple[Cast, Cast]]

    def judge(self, found: Tensor, search: bool = True) -> Judged:
        """By the way that it lies nearest to, else by its error."""
        if wrong := unusable(found, tuple(self.start.shape)) or not_finite(found):
            return wrong
        exact = self._exact
        error, noise = relative_frobenius(found, exact), self._noise
        errors = [relative_frobenius(one, exact) for one in self._promised]
        own = min(relative_frobenius(found, one) for one in self._promised)
        spread = 1 + _DRAWN / math.sqrt(2 * found.numel()) if self._drawn else 1.0
        high, low = spread * BAND[1] * max(errors) + noise, BAND[0] * min(errors) / spread - noise
        code = why = ""
        if own > noise and (len(self.gradients) <= _LONG or not low <= error <= high):
            code, why = self._explained(found, own)
            if not code and error > high:
                why = f"no known mistake explains it; its error is {error:.3g}, and {errors[0]:.3g} was expected"
                code = "too-bad"
            elif not code and error < low:
                why = f"its error is {error:.3g}, and this promise has {errors[0]:.3g}: more bits are kept"
                code = "too-good"
        return Judged(code, why, error, errors[0])

    def agrees(self, one: Tensor, other: Tensor) -> bool:
        """Whether two results may be the same one, each with its error."""
        most = max(relative_frobenius(found, self._exact) for found in self._promised)
        return relative_frobenius(one, other) <= 2 * most + self._noise

    @cached_property
    def _exact(self) -> Tensor:
        return self._update(Way(self._plain.rule, self._plain.hyper))

    @property
    def _plain(self) -> Way:
        plain = self.ways[0]
        assert isinstance(plain, Way)
        return plain

    @property
    def _drawn(self) -> bool:
        return self._plain.weights is _WEIGHTS[KeptWeights.STOCHASTIC][0]

    @cached_property
    def _promised(self) -> tuple[Tensor, ...]:
        return tuple(map(self._update, self.ways))

    @cached_property
    def _noise(self) -> float:
        """What rounding to float32 makes of the update: of the weights, and of betas that are near to 1."""
        size = float(self._exact.norm()) or 1.0
        moved = 1 + math.sqrt(len(self.gradients)) * float(self.start.double().norm()) / size
        return _FLOAT32 * (_ORDERS * moved + 1 / (1 - max(self._plain.hyper.betas)))

    def _update(self, way: Steps) -> Tensor:
        return way.after(self.start, self.gradients) - self.start.to(torch.float64)

    def _explained(self, found: Tensor, own: float) -> tuple[str, str]:
        """Which way it leans; else the mistake that comes nearest, if it does so by far."""
        if lean := self._lean(found):
            return "biased", lean
        near, explained = math.inf, ("", "")
        for code, words, way in mistakes(self._plain, self.likely, len(self.gradients) > _LONG):
            apart = relative_frobenius(found, self._update(way))
            near, explained = (apart, (code, words)) if apart < near else (near, explained)
            if apart <= max(self._noise, _SURELY * own):
                break
        return explained if math.sqrt(_NEARER) * near < own else ("", "")

    def _lean(self, found: Tensor) -> str:
        """Which way weights that are rounded at random lean; '' where they do not, or are not."""
        if not self._drawn:
            return ""
        wanted = replace(self._plain, weights=same).after(self.start, self.gradients)
        step = torch.exp2(wanted.abs().clamp(min=2.0**-120).log2().floor() - 7)
        off = (found + self.start.to(torch.float64) - wanted) / step
        for words, sign in (("up", 1.0), ("away from zero", wanted.sign()), ("with the update", self._exact.sign())):
            leans = off * sign
            error = float(leans.std()) / math.sqrt(leans.numel())
            if abs(float(leans.mean())) > _BIASED * error > 0:
                return f"rounded at random, it leans {float(leans.mean()):+.2g} steps of bfloat16 {words}"
        return ""


def _bytes(tensor: Tensor) -> int:
    """Of what a tensor is made of, too."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_bytes(getattr(tensor, name)) for name in names)
    return tensor.untyped_storage().nbytes()
