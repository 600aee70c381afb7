"""How far steps of several ranks may be from those of one rank: as far as what rounds in a case explains, and no more.

Held is the relative distance of what three steps change. The limits stand between the furthest honest case (GPTs nano
and micro, every way, 2 and 4 ranks, up to nine seeds, text and random tokens, which is worst) and mistakes that were
planted in one of two ranks:

| what rounds most             | honest | limit | mistake that is further away                             |
|------------------------------|--------|-------|----------------------------------------------------------|
| order of float32 sums        | 5e-6   | 0.001 | 0.71: a gradient that is not added up                    |
| 16 bits, made or sent        | 0.014  | 0.03  | 0.045: a gradient that is sent 1.06 times as large       |
| FP8, sent                    | 0.042  | 0.12  | 0.15: 1.2 times                                          |
| FP8, a scale a row or block  | 0.12   | 0.2   | 0.3: 1.4 times                                           |
| FP8, a scale a tensor        | 0.28   | 0.4   | 0.47: 1.6 times; 0.76: a share's scale 4 times too large |
| fewer bits                   | 0.48   | 0.65  | 0.87: twice                                              |

A gradient that is not added up is further away than all of them. A share's scale that is twice too large (0.22) is not
told from rounding.
"""

from __future__ import annotations

from collections.abc import Iterable

from fp8bench.protocols import Precision

_EXACT, _IN_16_BITS, _NARROWER = 1e-3, 0.03, 0.65
_FP8_SENT, _FP8_BY_BLOCKS, _FP8_BY_TENSORS = 0.12, 0.2, 0.4
_BYTE = 8


def most_apart(precisions: Iterable[Precision], wire: str) -> float:
    """The limit of a case whose products are made in these precisions, and what is sent is `wire` ('' if that is no
    choice)."""
    return max(_of_wire(wire), *map(_of_products, precisions))


def _of_wire(wire: str) -> float:
    if wire in ("", "fp32", "torchao_fp32"):
        return _EXACT
    return _IN_16_BITS if wire == "bf16" else _FP8_SENT


def _of_products(precision: Precision) -> float:
    recipe = getattr(precision, "recipe", None)
    if recipe is None:
        return _EXACT if precision.name == "fp32" else _IN_16_BITS
    if min(one.fmt.bits for one in recipe.treatments) < _BYTE:
        return _NARROWER
    return _FP8_BY_TENSORS if recipe.per_tensor else _FP8_BY_BLOCKS
