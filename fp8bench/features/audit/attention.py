"""Attention under audit. Its weights are a softmax, so that no result can be told to the last bit: errors are told.

What is promised: queries, keys and values as the precision casts them along their contractions. Scores and weights may
stay in float32, or be rounded on their way: a result has to have the error of one of these ways, or lie between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8bench.features.audit.data import drawn, rounded
from fp8bench.features.audit.promises import Judged, Promise, in_band, not_finite, unusable
from fp8bench.features.audit.subjects import Shape, Subject
from fp8bench.formats.recipes import Treatment
from fp8bench.model.promises import AuditKind
from fp8bench.numerics.norms import relative_frobenius

_BATCH = 2
# Mean squares of errors: a mistake is told where it lies so many times nearer than what was promised.
_NEARER = 16.0
# What an exponential in float32, and sums in any order, may add.
_FLOAT32 = 2.0**-18
# An error that is nearer than this to an expected one is that one.
_JUST = 0.999
Matrices = tuple[Tensor, ...]


class Attention(Subject):
    """Called with queries, keys and values, (2, heads, places, size) each; scores are scaled by 1 / sqrt(size)."""

    kind = AuditKind.ATTENTION
    shapes = (Shape(64, 4, 64), Shape(128, 2, 32), Shape(96, 3, 128))
    odd = (Shape(1, 2, 64), Shape(33, 3, 64), Shape(65, 2, 32), Shape(130, 1, 128))
    timed = Shape(128, 1, 64)
    data = ("normal", "uniform", "integers", "small", "outliers across the contraction")

    def drawn(self, data: str, shape: Shape, seed: int) -> Matrices:
        m, n, k = shape
        made = (drawn(data, place, _BATCH * n * m, k, seed, torch.float32) for place in range(3))
        # Scores of a few units: a softmax of larger ones is a choice, and tells nothing of how they were made.
        scaled = (one / one.square().mean().sqrt().clamp(min=2.0**-30) for one in made)
        return tuple(one.view(_BATCH, n, m, k).to(self.promised.carrier) for one in scaled)

    def zeroed(self, matrices: Matrices) -> Matrices:
        return *matrices[:2], torch.zeros_like(matrices[2])

    def flops(self, shape: Shape) -> int:
        return 4 * _BATCH * shape.n * shape.m**2 * shape.k

    def arguments(self, matrices: Matrices) -> Matrices:
        return tuple(one.to(self.device, copy=True) for one in matrices)

    def raw(self, arguments: Matrices) -> dict[str, Tensor]:
        return {"attention": self._one(self.function(*arguments))}

    def promises(self, matrices: Matrices) -> dict[str, Promise]:
        return {"attention": AttentionPromise(matrices, self.promised.treatments[0], self.signature.causal)}


@dataclass(frozen=True)
class AttentionPromise:
    """Of queries, keys and values as they came, all cast by one treatment."""

    given: Matrices
    treatment: Treatment | None
    causal: bool

    def judge(self, found: Tensor, search: bool = True) -> Judged:
        """By its error, and by the mistakes that people make in attention."""
        if wrong := unusable(found, tuple(self.given[0].shape)) or not_finite(found):
            return wrong
        exact, wanted = self._exact(), self._promised()
        error = relative_frobenius(found, exact)
        ways = wanted, self._promised(weights=True), self._promised(weights=True, scores=True)
        expected = [relative_frobenius(one.to(found.dtype), exact) for one in ways]
        low, high = _JUST * min(expected), max(*expected, _FLOAT32) / _JUST
        lossy = self.treatment is not None and self.treatment.fmt.bits <= 8
        if (not lossy or low <= error) and error <= high:
            return Judged(error=error, expected=high)
        own = _distance(found, wanted)
        nearest = min(((_distance(found, one), code, why) for code, why, one in self._mistakes()), default=None)
        if nearest is not None and nearest[0] * _NEARER < own:
            return Judged(nearest[1], nearest[2], False, error, high)
        band = in_band(error, high if error > high or not lossy else low, "")
        return Judged(error=error, expected=high) if band.code == "too-good" and not lossy else band

    def agrees(self, one: Tensor, other: Tensor) -> bool:
        """Whether two results may be the same one, each with its error."""
        allowed = 2 * max(relative_frobenius(self._promised(weights=True).to(one.dtype), self._exact()), _FLOAT32)
        return relative_frobenius(one, other.to(torch.float64)) <= allowed

    def _exact(self) -> Tensor:
        q, k, v = (one.to(torch.float64) for one in self.given)
        return _weights(q, k, self.causal) @ v

    def _promised(self, weights: bool = False, scores: bool = False) -> Tensor:
        """With what lies between kept in float64, or in the carrier and cast, as operators that are not fused do."""
        q, k, v = self._cast()
        carrier = self.given[0].dtype
        between = _scores(q, k)
        if scores:  # before they are scaled, and after
            size = math.sqrt(q.shape[-1])
            between = ((between * size).to(carrier).to(q.dtype) / size).to(carrier).to(q.dtype)
        found = _softmax(between, self.causal)
        if weights:
            found = _along_last(found.to(carrier), self.treatment)
        return found @ v

    def _cast(self) -> Matrices:
        """All three, each along the contraction of its product: that of values is the places."""
        q, k, v = self.given
        return (
            _along_last(q, self.treatment), _along_last(k, self.treatment),
            _along_last(v.transpose(-1, -2), self.treatment).transpose(-1, -2),
        )  # fmt: skip

    def _mistakes(self) -> Iterator[tuple[str, str, Tensor]]:
        q, k, v = self._cast()
        size = math.sqrt(q.shape[-1])
        wide = [one.to(torch.float64) for one in self.given]
        if self.treatment is not None:
            yield "not-cast", "queries, keys and values as they came: nothing was cast", self._exact()
            yield "not-cast", "scores of what was cast, and values as they came", _weights(q, k, self.causal) @ wide[2]
        wrong = _weights(q * size, k, self.causal) @ v
        yield "scale", "its scores are not divided by the square root of the size", wrong
        yield "scale", "its scores are divided by the size", _weights(q / size, k, self.causal) @ v
        yield "base", "2 to the scores and not e", _weights(q * math.log(2), k, self.causal) @ v
        yield "mask", f"it is {'not ' * self.causal}causal", _weights(q, k, not self.causal) @ v
        if self.causal and q.shape[-2] > 1:
            yield "mask", "each place sees the next one, too", _weights(q, k, True, 1) @ v
            yield "mask", "no place sees itself, but the first", _weights(q, k, True, -1) @ v
        yield "softmax", "the softmax runs over queries", _scores(q, k).softmax(-2) @ v
        if q.shape[1] > 1:
            yield "heads", "queries of another head", _weights(q.roll(1, 1), k, self.causal) @ v
            yield "heads", "values of another head", _weights(q, k, self.causal) @ v.roll(1, 1)
        yield "layout", "places in another order", (_weights(q, k, self.causal) @ v).flip(-2)
        yield "factor", "twice as large", 2 * (_weights(q, k, self.causal) @ v)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def _weights(q: Tensor, k: Tensor, causal: bool, later: int = 0) -> Tensor:
    """The softmax of the scores; in causal ones each place sees itself, the earlier ones and so many `later` ones."""
    return _softmax(_scores(q, k), causal, later)


def _softmax(scores: Tensor, causal: bool, later: int = 0) -> Tensor:
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(later)
        seen[0, 0] = True
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1)


def _along_last(x: Tensor, treatment: Treatment | None) -> Tensor:
    """Each head's matrix cast by itself, in float64."""
    if treatment is None:
        return x.to(torch.float64)
    heads = x.reshape(-1, *x.shape[-2:])
    cast = torch.stack([rounded(one.contiguous(), treatment).values for one in heads])
    return cast.view(x.shape).to(torch.float64)


def _distance(found: Tensor, other: Tensor) -> float:
    return float((found.to(torch.float64) - other).square().mean())
