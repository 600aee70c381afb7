"""Sums of a coverage."""

from __future__ import annotations

from fp8bench.model.coverage import Coverage, HeldProduct, Holder, OtherProduct

FOUND = Coverage(
    (
        Holder("a", "linear", (8, 4), flops=60, converted=True),
        Holder("b", "linear", (8, 4), flops=20, reason="skipped by b", rule="skipped"),
        Holder("c", "conv2d", (8, 4, 3, 3), flops=100, converted=True),
    ),
    (OtherProduct("bmm", "attn", 20), OtherProduct("own::op", "attn", None, 3)),
    200,
)


def test_shares() -> None:
    assert FOUND.converted_flops == 160
    assert FOUND.share == 0.8
    assert FOUND.unknown == 3
    assert Coverage().share == 0.0


def test_kinds_begin_with_the_most() -> None:
    assert list(FOUND.by_kind().items()) == [("conv2d", (100, 100)), ("linear", (80, 60))]


def test_a_product_counts_its_sums_too() -> None:
    assert HeldProduct(2, 3, 4, times=5).flops == 240
