"""Attributing a step's products to layers: compared with counts by hand, in both directions, to the last FLOP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8bench.errors import UsageError
from fp8bench.model.step import Coverage, Holder
from fp8bench.nn.holders import find_product_weights
from fp8bench.tape.coverage import measure_coverage
from tests.counts import for_each
from tests.nn.converted_models import Experts
from tests.tapes import tape_of


def training(model: nn.Module, *given: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(*given).square().mean().backward()

    return step


def covered(model: nn.Module, step: Callable[[], None], **options: Any) -> Coverage:
    return measure_coverage(model, find_product_weights(model), step, **options)


def of(coverage: Coverage, name: str) -> Holder:
    (holder,) = (holder for holder in coverage.holders if holder.name == name)
    return holder


class Block(nn.Module):
    """Attention by hand, a layer that is called twice, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)
        self.twice = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mixed = (q @ k.mT).softmax(-1) @ v
        return F.linear(self.twice(self.twice(mixed) + x), self.tied.weight)


# One product of (2 x 8) rows with 16 x 16 weights.
ONE = 2 * 16 * 16 * 16


def test_each_product_has_its_holder() -> None:
    model, x = Block(), torch.randn(2, 8, 16)
    coverage = covered(model, training(model, x))
    assert of(coverage, "qkv").flops == 3 * ONE * 2
    assert of(coverage, "twice").flops == 2 * ONE * 3 and of(coverage, "twice").calls == 2
    assert (of(coverage, "never").flops, of(coverage, "never").rule) == (0, "not-called")
    outside = {(call.operator, call.module): call.flops for call in coverage.others}
    assert outside == {("bmm", ""): 6 * 2 * 2 * 8 * 8 * 16, ("mm", ""): 3 * ONE}
    reasons = {(call.operator, call.weight): call.reason for call in coverage.others}
    assert reasons["mm", "tied.weight"] == "a function multiplies by the weight directly, so no layer can be converted"
    assert reasons["bmm", ""].startswith("a function multiplies tensors, and none")
    assert (
        of(coverage, "tied").reason == "a function multiplies by its weight, and the step never calls the layer itself"
    )
    assert of(coverage, "never").reason == "the step never calls it"
    assert sorted((product.m, product.n, product.k, product.backward) for product in of(coverage, "qkv").products) == [
        (16, 48, 16, False),
        (48, 16, 16, True),
    ]
    assert coverage.share == (6 + 6) * ONE / coverage.flops


def test_sums_are_the_tapes_and_forward_is_a_third_of_a_layer_s() -> None:
    model, x = Block(), torch.randn(2, 8, 16)
    step = training(model, x)
    coverage, tape = covered(model, step), tape_of(step)
    assert coverage.flops == tape.flops
    assert sum(one.flops for one in coverage.holders) + sum(call.flops or 0 for call in coverage.others) == tape.flops
    with torch.no_grad():
        forward = covered(model, lambda: model(x))
    assert of(forward, "qkv").flops == 3 * ONE and of(forward, "twice").flops == 2 * ONE
    with torch.inference_mode():
        assert covered(model, lambda: model(x)).flops == forward.flops


class Checkpointed(nn.Module):
    """Two layers that are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.both, x, use_reentrant=self.reentrant)
        return result

    def both(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x).relu())
        return result


@for_each(("reentrant", "again"), [(True, (1, 1)), (False, (1, 0))])
def test_what_is_computed_again_belongs_to_its_layer(reentrant: bool, again: tuple[int, int]) -> None:
    model, x = Checkpointed(reentrant), torch.randn(2, 8, 16, requires_grad=True)
    coverage = covered(model, training(model, x))
    assert [holder.flops for holder in coverage.holders] == [(3 + times) * ONE for times in again]
    assert not coverage.others


@for_each("way", ["linear", "left", "bmm", "matmul", "grouped", "einsum"])
def test_experts_have_their_products_in_both_directions(way: str) -> None:
    model, x = Experts(way), torch.randn(3, 8, 16, requires_grad=True)
    coverage = covered(model, training(model, x))
    (holder,) = coverage.holders  # 'position' is not a weight
    assert (holder.name, holder.kind, holder.converted) == ("stack", "experts", way != "einsum")
    assert coverage.flops == 3 * 2 * 3 * 8 * 16 * 32 and coverage.share == float(way != "einsum")
    if way == "einsum":
        assert holder.rule == "operator" and coverage.flops == sum(call.flops or 0 for call in coverage.others)
    else:
        assert holder.flops == coverage.flops


def test_what_native_products_would_want() -> None:
    model = nn.Sequential(nn.Linear(16, 20), nn.Linear(20, 32), nn.Conv2d(1, 2, 3))
    x = torch.randn(7, 16, requires_grad=True)

    def step() -> None:
        hidden = model[1](model[0](x))
        model[2](hidden[None]).sum().backward()

    coverage = covered(model, step, multiple=16)
    assert [holder.native for holder in coverage.holders] == [
        "native products take contractions and columns in multiples of 16: pad M=7, N=20 to 16, 32",
        "native products take contractions and columns in multiples of 16: pad M=7, K=20 to 16, 32",
        "torch has no convolution in formats this narrow: values are rounded, and convolved in fp32",
    ]
    assert all(holder.converted for holder in coverage.holders)


def test_a_bias_that_is_expanded_is_no_weight_of_a_product() -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.layer.bias.expand(8, -1), x, self.layer.weight.T)

    model, x = ByHand(), torch.randn(8, 16)
    assert [call.weight for call in covered(model, lambda: model(x)).others] == ["layer.weight"]


def test_a_step_that_fails_leaves_nothing_and_one_without_products_is_refused() -> None:
    model, x = Block(), torch.randn(2, 8, 17)
    with pytest.raises(RuntimeError):
        covered(model, training(model, x))
    assert not nn.modules.module._global_forward_hooks and not nn.modules.module._global_forward_pre_hooks
    assert torch.autograd.is_multithreading_enabled() and torch.overrides._get_current_function_mode() is None
    model(torch.randn(2, 8, 16))
    with pytest.raises(UsageError, match="a step of ReLU multiplies no matrices: there is nothing to convert"):
        covered(nn.ReLU(), lambda: torch.ones(2).relu())


def test_an_operator_without_a_formula_is_named() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x @ x.mT + torch.eye(8))

    model = nn.Sequential(nn.Linear(16, 16), Odd())
    x = torch.randn(8, 16)
    coverage = covered(model, lambda: model(x))
    unknown = [(call.operator, call.module) for call in coverage.others if call.flops is None]
    assert unknown == [("linalg_inv_ex", "1")] and coverage.unknown == 1


class Alternating(nn.Module):
    """Another branch every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(16, 16), nn.Linear(16, 16), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(self.a(x)) if self.calls % 2 else self.a(x)  # type: ignore[no-any-return]


class Late(nn.Module):
    """A layer that is made in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.late = nn.Linear(16, 16), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.late, nn.Identity):
            self.late = nn.Linear(16, 16)
        return self.late(self.a(x))  # type: ignore[no-any-return]


@for_each(
    ("make", "said"),
    [
        (Alternating, "steps are not alike: the first multiplies 20.5 kFLOP, the second 8.19 kFLOP (b); the"),
        (Late, "the first step creates parameters after copies were converted and optimizers made: late.weight, late"),
        (Block, ""),
    ],
)
def test_steps_that_are_not_alike_and_layers_that_come_late_are_said_to_be(make: type[nn.Module], said: str) -> None:
    model = make()
    remarks = covered(model, training(model, torch.randn(8, 16))).remarks
    assert "".join(remarks).startswith(said) and bool(remarks) is bool(said)


def test_steps_of_another_size_are_not_alike_and_random_draws_are() -> None:
    model, sizes = nn.Linear(16, 16), iter((8, 7, 100, 98))
    (remark,) = covered(model, lambda: model(torch.randn(next(sizes), 16))).remarks
    assert "4.10 kFLOP, the second 3.58 kFLOP; the" in remark
    assert covered(model, lambda: model(torch.randn(next(sizes), 16))).remarks == ()
    dropping = nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 16))
    assert covered(dropping, training(dropping, torch.randn(8, 16))).remarks == ()
