"""How far steps of several ranks may be from those of one rank: as far as what rounds in a case explains, and no more.

Held is what three steps change, by three figures: its relative distance over all weights, that of the weight that is
furthest away, and its gain, how many times one rank's change is in it. Noise falls out of a gain but for what it
shortens, half its square, so that a gain sees much less than a distance.

| what rounds most             | honest: distance, furthest, gain | limits              |
|------------------------------|----------------------------------|---------------------|
| order of float32 sums        | 5e-6, 5e-5, 1e-6                 | 0.001, 0.001, 0.001 |
| 16 bits, made or sent        | 0.014, 0.02, 0.001               | 0.03, 0.04, 0.01    |
| FP8, gradients sent          | 0.042, 0.05, 0.002               | 0.12, 0.15, 0.01    |
| FP8, weights or tokens sent  | 0.13, 0.16, 0.006                | 0.2, 0.25, 0.02     |
| FP8, a scale a row or block  | 0.12, 0.13, 0.005                | 0.2, 0.25, 0.02     |
| FP8, a scale a tensor        | 0.28, 0.3, 0.03                  | 0.4, 0.5, 0.08      |
| fewer bits                   | 0.54, 0.66, 0.15                 | 0.65, 0.9, 0.21     |

Weights and tokens that are sent in FP8 are cast once more where products cast them: what both leave is added up.

A mistake in scales, or in a mean that is sent in FP8, may be far below rounding: nn/parallel/witness.py and
fp8_wire.py see those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from fp8bench.protocols import Precision

if TYPE_CHECKING:
    from fp8bench.nn.parallel.step import Apart


class Limits(NamedTuple):
    """Of the relative distance of all that steps change, of that of the weight furthest away, and of how far the gain
    is from 1."""

    update: float
    furthest: float
    gain: float

    def and_of(self, other: Limits) -> Limits:
        """Of two roundings that know nothing of each other: distances add up by their squares, gains as they are."""
        distances = math.hypot(self.update, other.update), math.hypot(self.furthest, other.furthest)
        return Limits(*distances, self.gain + other.gain)

    def why_not(self, apart: Apart) -> str:
        """What of it is too much to be rounding; '' where nothing is."""
        name, furthest = apart.furthest
        update = apart.update
        held = (
            ("the relative distance of all weights' changes", update.error, self.update),
            (f"the relative distance of the change of {name}", furthest.error, self.furthest),
            (f"the distance from 1 of their gain {update.gain:.3g}", abs(update.gain - 1), self.gain),
        )
        told = [
            f"{what} is {value:.3g}, and at most {most:g} of it may be rounding"
            for what, value, most in held
            if not value <= most
        ]
        return "; ".join(told)


_EXACT, _IN_16_BITS, _NARROWER = Limits(1e-3, 1e-3, 1e-3), Limits(0.03, 0.04, 0.01), Limits(0.65, 0.9, 0.21)
_FP8_SENT, _FP8_BY_BLOCKS = Limits(0.12, 0.15, 0.01), Limits(0.2, 0.25, 0.02)
_FP8_TOKENS_SENT, _FP8_BY_TENSORS = _FP8_BY_BLOCKS, Limits(0.4, 0.5, 0.08)
_BYTE = 8


def most_apart(precisions: Iterable[Precision], wire: str) -> Limits:
    """The limits of a case whose products are made in these precisions, and what is sent is `wire` ('' if that is no
    choice)."""
    made = max(map(_of_products, precisions))
    return made.and_of(_FP8_TOKENS_SENT) if wire == "fp8" else max(made, _of_wire(wire))


def _of_wire(wire: str) -> Limits:
    if wire in ("", "fp32", "stream", "torchao_fp32"):
        return _EXACT
    return _IN_16_BITS if wire == "bf16" else _FP8_SENT


def _of_products(precision: Precision) -> Limits:
    recipe = getattr(precision, "recipe", None)
    if recipe is None:
        return _EXACT if precision.name == "fp32" else _IN_16_BITS
    if min(one.fmt.bits for one in recipe.treatments) < _BYTE:
        return _NARROWER
    return _FP8_BY_TENSORS if recipe.per_tensor else _FP8_BY_BLOCKS
