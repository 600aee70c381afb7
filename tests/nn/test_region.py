"""A phase around operators that torch differentiates itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from fp8bench.nn.linear import region
from tests.counts import for_each


class Diary:
    """A marker that writes down when it is entered and left."""

    def __init__(self) -> None:
        self.pages: list[str] = []

    def __enter__(self) -> None:
        self.pages.append("in")

    def __exit__(self, *exc: object) -> None:
        self.pages.append("out")

    @property
    def open(self) -> bool:
        return self.pages[-1:] == ["in"]


class Watched(torch.autograd.Function):
    """Doubles, and notes whether a marker is open in each direction."""

    @staticmethod
    def forward(ctx, x, diary, seen):  # type: ignore[no-untyped-def]
        ctx.diary, ctx.seen = diary, seen
        seen.append(("forward", diary.open))
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.seen.append(("backward", ctx.diary.open))
        return 2 * gradient, None, None


def test_the_marker_is_open_in_forward_and_in_backward_and_nowhere_else() -> None:
    diary = Diary()
    inside: list[tuple[str, bool]] = []
    outside: list[tuple[str, bool]] = []
    x = torch.ones(3, requires_grad=True)
    before = Watched.apply(x, diary, outside)
    middle = region(diary, lambda y: Watched.apply(y, diary, inside), before)
    after = Watched.apply(middle, diary, outside)
    after.sum().backward()
    assert inside == [("forward", True), ("backward", True)]
    assert outside == [("forward", False)] * 2 + [("backward", False)] * 2
    assert diary.pages == ["in", "out"] * 2
    assert x.grad is not None and torch.equal(x.grad, torch.full((3,), 8.0))


def attention(q: Tensor, k: Tensor, v: Tensor, **options: bool) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, **options)


@for_each("times", [1, 3])
def test_attention_is_marked_and_its_gradients_are_untouched(times: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 8, 4, generator=generator, requires_grad=True) for _ in range(3)]
    diary = Diary()
    total = sum(
        (region(diary, attention, *tensors, is_causal=True).square().sum() for _ in range(times)), torch.zeros(())
    )
    assert diary.pages == ["in", "out"] * times
    total.backward()
    assert diary.pages == ["in", "out"] * 2 * times
    found = [tensor.grad for tensor in tensors]
    plain = [tensor.detach().requires_grad_() for tensor in tensors]
    (times * attention(*plain, is_causal=True).square().sum()).backward()
    for one, other in zip(found, plain, strict=True):
        assert one is not None and other.grad is not None
        torch.testing.assert_close(one, other.grad)


def test_a_tensor_without_gradient_is_refused() -> None:
    """Its closing marker would never fire in backward."""
    diary = Diary()
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="needs no gradient"):
        region(diary, torch.add, x, torch.ones(3))
    assert diary.pages == []


def test_without_gradients_the_region_is_a_plain_block() -> None:
    diary = Diary()
    with torch.no_grad():
        result = region(diary, torch.add, torch.ones(3), torch.ones(3))
    assert torch.equal(result, torch.full((3,), 2.0)) and not result.requires_grad
    assert diary.pages == ["in", "out"]


def test_while_compiling_the_region_is_a_plain_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the marker's type is looked at, which torch 2.11 cannot trace; the result is the operation's own."""

    class Untraceable(Diary):
        @property  # type: ignore[misc]
        def __class__(self) -> type:
            raise AssertionError("isinstance was asked")

    diary = Untraceable()
    x = torch.ones(3, requires_grad=True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    result = region(diary, torch.exp, x)
    assert result.grad_fn is not None and result.grad_fn.name() == "ExpBackward0"
    result.sum().backward()
    assert diary.pages == ["in", "out"]


def test_without_gradients_the_marker_is_closed_when_the_body_raises() -> None:
    diary = Diary()
    with torch.no_grad(), pytest.raises(RuntimeError):
        region(diary, torch.mm, torch.ones(2, 3), torch.ones(2, 3))
    assert diary.pages == ["in", "out"]
