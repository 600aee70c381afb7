"""An optimizer of one's own: gradients that add up in float32, updates in fp8, by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8bench
from fp8bench.features.train.lab.own_optimizer import TorchOptimizer


def made(updates: str = "fp8", **options: Any) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(16, 8, bias=False, dtype=torch.bfloat16)
    make = options.pop("make", torch.optim.SGD)
    return model, fp8bench.HighAccumulation(
        model.parameters(), lambda masters: make(masters, lr=0.1, **options), updates
    )


def backward(model: nn.Linear, seed: int) -> Tensor:
    """Of one micro-batch; the gradient that it finds."""
    x, pull = (torch.randn(4, one, generator=torch.Generator().manual_seed(seed)).bfloat16() for one in (16, 8))
    model(x).backward(pull)
    return (pull.t() @ x).float()


def test_two_micro_batches_add_up_in_float32_and_the_update_is_fp8() -> None:
    model, optimizer = made()
    start = model.weight.detach().float()
    wanted = backward(model, 1) + backward(model, 2)
    (master,) = optimizer.masters
    assert torch.equal(master.grad, wanted) and model.weight.grad is None
    assert not torch.equal(wanted, wanted.bfloat16().float())
    optimizer.step()
    update = (start - 0.1 * wanted) - start
    scale = torch.tensor(448.0) / update.abs().max()
    rounded = (update * scale).to(torch.float8_e4m3fn).float() * scale.reciprocal()
    assert torch.equal(master.detach(), start + rounded)
    assert torch.equal(model.weight.detach(), master.detach().bfloat16())
    optimizer.zero_grad()
    assert master.grad is None


def test_updates_too_small_for_the_weights_are_not_lost() -> None:
    model, optimizer = made("fp32")
    start = model.weight.detach().clone()
    for _ in range(400):
        model.weight.grad = None
        (model.weight.sum() * 1e-4).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(optimizer.masters[0].detach(), start.float() - 400 * 1e-5, atol=1e-5)
    assert not torch.equal(model.weight.detach(), start)


def test_it_is_kept_and_goes_on_to_the_same_bits() -> None:
    model, optimizer = made(make=torch.optim.AdamW)
    backward(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    kept, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    other, second = made(make=torch.optim.AdamW)
    other.load_state_dict(weights)
    second.load_state_dict(kept)
    for one, own in ((model, optimizer), (other, second)):
        backward(one, 2)
        own.step()
    assert torch.equal(optimizer.masters[0], second.masters[0]) and torch.equal(model.weight, other.weight)


def test_a_training_clips_and_skips_by_its_masters() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 8, bias=False, dtype=torch.bfloat16)
    optimizer = TorchOptimizer(
        "make", model, lambda one: fp8bench.HighAccumulation(
            one.parameters(), lambda masters: torch.optim.SGD(masters, lr=0.1), "fp32"
        ), None,
    )  # fmt: skip
    start = model.weight.detach().clone()
    optimizer.gradients.begin()
    wanted = backward(model, 3)
    assert torch.equal(optimizer.gradients.norms()[0], wanted.norm())
    optimizer.step(0.0, [torch.tensor(2.0)], torch.tensor(1.0))
    assert torch.equal(model.weight, start)
    optimizer.step(0.0, [torch.tensor(2.0)], torch.tensor(0.0))
    assert torch.equal(model.weight.detach(), (start.float() - 0.1 * wanted / 2).bfloat16())


def test_what_it_cannot_round_to() -> None:
    with pytest.raises(fp8bench.Fp8benchError, match="updates must be fp8, bf16 or fp32, got 'fp4'"):
        made("fp4")
