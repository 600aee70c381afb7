"""The products of matrices that a call makes: their sides, by the same arguments that FLOPs are counted from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fp8bench.model.coverage import HeldProduct
from fp8bench.tape.recorder import Call, arguments_of, name_of, tensors_in

Named = Mapping[str, Any]


def _matrices(left: str, right: str, named: Named) -> list[tuple[int, int, int, int]]:
    """M, N, K and how many of them, of (..., M, K) times (..., K, N)."""
    *times, m, k = named[left].shape
    return [(m, named[right].shape[-1], k, math.prod(times))]


def _grouped(named: Named) -> list[tuple[int, int, int, int]]:
    """All groups as one: rows, columns or contractions of the groups beside each other."""
    left, right = named["self"], named["mat2"]
    return [(left.shape[-2], right.shape[-1], left.shape[-1], 1)]


def _convolved(named: Named) -> list[tuple[int, int, int, int]]:
    outputs, window, places, groups = _sides(named, named[""])
    return [(places, outputs, window, groups)]


def _convolved_back(named: Named) -> list[tuple[int, int, int, int]]:
    outputs, window, places, groups = _sides(named, named["grad_output"])
    for_input, for_weight = named["output_mask"][:2]
    products = [((places, window, outputs, groups), for_input), ((outputs, window, places, groups), for_weight)]
    return [product for product, wanted in products if wanted]


def _sides(named: Named, out: Any) -> tuple[int, int, int, int]:
    """Of each group: outputs, the numbers of a window, places; and how many groups there are."""
    weight, x = named["weight"], named.get("input", named.get("self"))
    places, groups = (x if named.get("transposed") else out), int(named.get("groups", 1))
    return (
        weight.shape[0] // groups, math.prod(weight.shape[1:]), places.shape[0] * math.prod(places.shape[2:]), groups
    )  # fmt: skip


def _of(left: str, right: str) -> Callable[[Named], list[tuple[int, int, int, int]]]:
    return lambda named: _matrices(left, right, named)


# Of each operator that multiplies matrices, by name.
SHAPES: dict[str, Callable[[Named], list[tuple[int, int, int, int]]]] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm", "_scaled_mm_v2"), _of("self", "mat2")),
    **dict.fromkeys(("addmm", "_addmm_activation"), _of("mat1", "mat2")),
    **dict.fromkeys(("baddbmm",), _of("batch1", "batch2")),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped),
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"), _convolved),
    "convolution_backward": _convolved_back,
}  # fmt: skip


def products_of(call: Call) -> list[HeldProduct]:
    """None for operators that make no products of matrices, or do so within something larger (attention, an LSTM)."""
    shapes = SHAPES.get(name_of(call))
    if shapes is None:
        return []
    named = {**arguments_of(call), "": next(tensors_in(call.result), None)}
    return [HeldProduct(m, n, k, times, call.backward) for m, n, k, times in shapes(named)]
