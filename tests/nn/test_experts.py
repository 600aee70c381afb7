"""A block of experts against a dense loop over all of them, and the GPT that has such blocks."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.experts import BALANCE_WEIGHT, ROW_MULTIPLE, Experts
from fp8bench.nn.gpt import GPT
from fp8bench.nn.parts import gelu
from fp8bench.nn.sizes import GPTConfig
from fp8bench.nn.whole_layers import CachedWeights
from fp8bench.protocols import Arithmetic, Operand, Role, SilentPhases, WatchedArithmetic
from tests.counts import for_each
from tests.nn.layers import given

CONFIG = GPTConfig(61, 32, 2, 4, 4, 24, batch=2, sequence=12, experts=4)
EXACT = PlainArithmetic(torch.float64)


def experts(arithmetic: Arithmetic, count: int = 4) -> Experts:
    torch.manual_seed(1)
    block = Experts(count, 32, 24, False, 1.0, lambda name: arithmetic)
    with torch.no_grad():
        block.router.mul_(20)  # so that choices are clear and unbalanced
    return block


def dense(weights: dict[str, Tensor], x: Tensor, count: int = 4) -> tuple[Tensor, Tensor]:
    """Every expert on every token, with a zero gate for all but the best two; and the balancing loss."""
    scores = x @ weights["router"].T
    gate = torch.zeros_like(scores)
    for token, row in enumerate(scores):
        first, second = row.argsort(descending=True)[:2]
        both = torch.stack([row[first], row[second]]).exp()
        gate[token, first], gate[token, second] = both / both.sum()
    y = torch.zeros_like(x)
    for number in range(count):
        up, down = (weights[f"experts.{number}.{part}.weight"] for part in ("up", "down"))
        y = y + gate[:, number, None] * (gelu(x @ up.T) @ down.T)
    share = (gate > 0).double().mean(0) / 2
    return y, count * (share * scores.softmax(-1).mean(0)).sum()


@for_each("count", [2, 4, 7])
def test_outputs_and_all_gradients_are_those_of_the_dense_loop(count: int) -> None:
    block = experts(EXACT, count).double()
    x = torch.randn(3, 11, 32, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(3, 11, 32, dtype=torch.float64)
    y = block(x, SilentPhases())
    assert block.balance is not None
    gradients = torch.autograd.grad((y * pull).sum() + 3 * block.balance, (x, *block.parameters()))
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in block.named_parameters()}
    again = x.detach().clone().requires_grad_()
    wanted, balance = dense(weights, again.view(-1, 32), count)
    loss = (wanted.view_as(x) * pull).sum() + 3 * balance
    references = torch.autograd.grad(loss, (again, *weights.values()))
    assert torch.allclose(y, wanted.view_as(x), rtol=1e-12, atol=1e-12)
    assert float(block.balance.detach()) == pytest.approx(float(balance.detach()), rel=1e-12)
    torch.testing.assert_close(gradients, references, rtol=1e-10, atol=1e-12)


def test_products_are_of_whole_blocks_of_rows_in_the_arithmetic_given() -> None:
    seen: list[tuple[Role, int]] = []

    def watch(operand: Operand, source: Tensor | None, role: Role, before: Operand | None) -> None:
        assert source is not None
        seen.append((role, len(source)))

    block = experts(WatchedArithmetic(PlainArithmetic(torch.bfloat16), watch, turned=False))
    y = block(torch.randn(50, 32), SilentPhases())
    y.sum().backward()
    inputs = [rows for role, rows in seen if role is Role.INPUT]
    assert len(inputs) == 8 and all(rows % ROW_MULTIPLE == 0 and rows > 0 for rows in inputs)
    assert {role for role, _ in seen} == set(Role)


@pytest.mark.usefixtures("exact_products")
def test_one_product_for_all_experts_is_the_same_as_one_for_each() -> None:
    plain, result = PlainArithmetic(torch.bfloat16), []
    assert plain.groups
    for arithmetic, cached in ((plain, False), (plain, True), (WatchedArithmetic(plain, lambda *told: None), False)):
        block = experts(arithmetic)
        with torch.no_grad():
            block.router[2] = -9 * block.router.sum(0)
        x = given(45, 32).abs().requires_grad_()
        cast = CachedWeights(block).cast(SilentPhases()) if cached else nullcontext()
        with mock.patch.object(plain, "multiply_groups", wraps=plain.multiply_groups) as grouped, cast:
            y = block(x, SilentPhases())
        assert grouped.call_count == (2 if arithmetic is plain else 0)
        (y * given(45, 32, seed=5)).sum().backward()
        result.append([y, x.grad, *(parameter.grad for parameter in block.parameters())])
    assert all(torch.equal(one, two) and torch.equal(one, three) for one, two, three in zip(*result, strict=True))


def mixture(checkpointing: bool = False, config: GPTConfig = CONFIG) -> GPT:
    torch.manual_seed(3)
    return GPT(config, lambda name: EXACT, EXACT.carrier, checkpointing=checkpointing).double()


def batch(config: GPTConfig = CONFIG) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(config.vocabulary, (config.batch, config.sequence + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def test_the_balancing_loss_is_in_the_gradients_and_not_in_the_loss() -> None:
    model, (tokens, targets) = mixture(), batch()
    loss = model(tokens, targets, SilentPhases())
    loss.backward()
    logits = model.logits(tokens, SilentPhases())
    plain = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert float(loss.detach()) == float(plain.detach())
    router = model.blocks[0].mlp.router  # type: ignore[union-attr]
    parts = [block.mlp.balance for block in model.blocks]  # type: ignore[union-attr]
    (expected,) = torch.autograd.grad(plain + BALANCE_WEIGHT * torch.stack(parts).sum(), [router])  # type: ignore[arg-type]
    assert torch.allclose(router.grad, expected, rtol=1e-10, atol=1e-14)  # type: ignore[arg-type]
    each = model(tokens, targets, SilentPhases(), "none")
    assert each.shape == (24,) and float(each.mean().detach()) == pytest.approx(float(plain.detach()), rel=1e-12)
