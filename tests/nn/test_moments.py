"""AdamW's moments in low precision, against AdamW by hand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fp8bench.formats.grids import E4M3, FP16
from fp8bench.formats.recipes import TENSOR
from fp8bench.formats.scaled import values
from fp8bench.nn.moments import (
    MomentBucket,
    MomentStorageMethod,
    choose_storages,
    make_scaled_storage,
    split_into_buckets,
)
from tests.counts import for_each
from tests.nn.layers import arithmetic_of

Doubles = npt.NDArray[np.float64]


def tensors(seed: int, size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(24, columns, generator=generator) * size for columns in (32, 48)]


def storages_of(precision: str, same: bool = False) -> tuple[MomentStorageMethod, MomentStorageMethod]:
    return choose_storages(arithmetic_of(precision), same)


def bucket(precision: str, fused: bool = False, same: bool = False, steps: int = 7) -> MomentBucket:
    stored = storages_of(precision, same)
    second = [tensor.square() for tensor in tensors(3, 1e-3)]
    return MomentBucket(tensors(1, 0.02), tensors(4, 1e-3), tensors(2, 1e-3), second, stored, steps, fused)


def step(made: MomentBucket) -> None:
    first, second = made.restore()
    made.update(first, second)
    if made.fp32_moments is None:
        made.store(first, second)


def adamw_by_hand(w: Doubles, g: Doubles, m: Doubles, v: Doubles, t: int) -> tuple[Doubles, Doubles, Doubles]:
    """Loshchilov and Hutter's algorithm 2, in fp64, with torch's settings."""
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g**2
    corrected = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w - 3e-4 * 0.1 * w - 3e-4 * corrected, m, v


@for_each("fused", [True, False])
def test_fp32_moments_are_adamw_by_hand(fused: bool) -> None:
    made = bucket("fp32", fused)
    w, g = ([item.double().numpy() for item in some] for some in (made.parameters, made.gradients))
    m, v = ([item.double().numpy() for item in some] for some in made.restore())
    start = [item.copy() for item in w]
    for t in (8, 9, 10):
        step(made)
        for i in range(2):
            w[i], m[i], v[i] = adamw_by_hand(w[i], g[i], m[i], v[i], t)
    for result, expected, before in zip(made.parameters, w, start, strict=True):
        moved = result.double().numpy() - before
        assert np.linalg.norm(moved - (expected - before)) < 1e-4 * np.linalg.norm(expected - before)
    for result, expected in zip((*made.restore()[0], *made.restore()[1]), (*m, *v), strict=True):
        assert np.linalg.norm(result.double().numpy() - expected) < 1e-6 * np.linalg.norm(expected)


@for_each(("precision", "low", "high"), [("bf16", 5e-4, 4e-3), ("fp16", 5e-5, 4e-4), ("fp8", 0.01, 0.04)])
def test_moments_are_rounded_to_their_precision_between_steps(precision: str, low: float, high: float) -> None:
    exact, made = bucket("fp32"), bucket(precision)
    for expected, result in zip(exact.restore()[0], made.restore()[0], strict=True):
        assert low < (result - expected).norm() / expected.norm() < high
    first, second = made.restore()
    stored = [item.clone() for item in first]
    second = [item.clone() for item in second]
    twin = MomentBucket(tensors(1, 0.02), made.gradients, stored, second, storages_of("fp32"), 7, False)
    step(made)
    step(twin)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(made.parameters, twin.parameters, strict=True))


@for_each(
    ("precision", "same", "second"),
    [
        ("fp32", True, "as it is"),
        ("bf16", False, "bf16"),
        ("bf16", True, "bf16"),
        ("fp16", True, "scaled"),
        ("fp16", False, "scaled"),
        ("fp8", False, "scaled"),
        ("fp8", True, "e4m3"),
    ],
)
def test_the_second_moment_is_kept_as_its_precision_needs(precision: str, same: bool, second: str) -> None:
    x = tensors(6)[0].square() * 1e-9
    expected = {
        "as it is": x,
        "bf16": x.bfloat16().float(),
        "scaled": make_scaled_storage(FP16).restore(make_scaled_storage(FP16).store(x)),
        "e4m3": values(x, E4M3, TENSOR),
    }[second]
    first, storage = storages_of(precision, same)
    assert torch.equal(storage.restore(storage.store(x)), expected)
    assert storage.casts is first.casts is (precision != "fp32")


@for_each(
    ("elements", "most", "parts"),
    [([4, 4, 4], 8, [2, 1]), ([9, 1], 8, [1, 1]), ([1, 9, 1], 8, [1, 1, 1]), ([1, 1], 8, [2]), ([], 8, [])],
)
def test_buckets_are_full_and_never_empty(elements: list[int], most: int, parts: list[int]) -> None:
    cut = list(split_into_buckets(elements, most))
    assert [len(elements[part]) for part in cut] == parts
    assert [item for part in cut for item in elements[part]] == elements
