"""Global switches: set inside, restored outside, whatever the body does."""

from __future__ import annotations

import pytest
import torch

from fp8bench.protocols import Role, float32_products
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU


@for_each("name", precisions.names())
@for_each("before", ["highest", "high", "medium"])
def test_scope_sets_and_restores(name: str, before: str) -> None:
    with float32_products(before):
        with precisions.get(name).scope():
            assert torch.get_float32_matmul_precision() == ("high" if name == "tf32" else "highest")
        assert torch.get_float32_matmul_precision() == before


@for_each("name", ["tf32", "fp32", "fp8"])
def test_scope_restores_when_the_body_raises(name: str) -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError, match="inside"), precisions.get(name).scope():
        raise RuntimeError("inside")
    assert torch.get_float32_matmul_precision() == before


def test_tf32_scope_leaves_products_on_a_cpu_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    arithmetic = precisions.get("tf32").arithmetic(CPU)
    a = arithmetic.cast(torch.randn(96, 300, generator=generator), Role.INPUT)
    b = arithmetic.cast(torch.randn(64, 300, generator=generator), Role.WEIGHT)
    with precisions.get("fp32").scope():
        plain = arithmetic.product(a, b, torch.float32)
    with precisions.get("tf32").scope():
        allowed = arithmetic.product(a, b, torch.float32)
    assert torch.equal(plain, allowed)


@for_each("before", [True, False])
@for_each("name", ["tf32", "fp32", "fp8"])
def test_scope_tells_convolutions_too(name: str, before: bool) -> None:
    """cuDNN has a switch of its own, which lets fp32 convolutions be TF32 unless it is turned off."""
    outside = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = before
    try:
        with precisions.get(name).scope():
            assert torch.backends.cudnn.allow_tf32 is (name == "tf32")
        assert torch.backends.cudnn.allow_tf32 is before
    finally:
        torch.backends.cudnn.allow_tf32 = outside
