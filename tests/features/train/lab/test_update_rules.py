"""SGD, Lion and Adafactor against torch's own or the paper; schedules and loss scales against torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.models import check
from fp8bench.features.train.lab.optimizer import Optimizer
from fp8bench.features.train.lab.rates import LossScale, Plateau, factor_of, group_of, share_of_rate
from fp8bench.features.train.request import SCHEDULES, TrainerSettings
from tests.counts import for_each

SHAPES = {"embedding": (24, 16), "blocks.0.attn.qkv.weight": (32, 16), "norm.weight": (16,)}
STEPS = 6


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def trained(skipped: int = -1, **settings: Any) -> list[list[Tensor]]:
    """The weights after every step; gradients come multiplied by 4 and are divided again."""
    own = parameters()
    optimizer = Optimizer(own, TrainerSettings(weight_decay=0.1, **settings))
    found = []
    for step in range(STEPS):
        skip = step == skipped
        for one, gradient in zip(own.values(), gradients(step), strict=True):
            one.grad = gradient * (torch.nan if skip else 4.0)
        optimizer.step(1e-2, [torch.tensor(4.0)] * len(own), torch.tensor(float(skip)))
        found.append([one.detach().clone() for one in own.values()])
    return found


def torchs(make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], skipped: int = -1) -> list[list[Tensor]]:
    own = list(parameters().values())
    decaying = [{"params": [one], "weight_decay": 0.1 if one.ndim > 1 else 0.0} for one in own]
    optimizer = make(decaying)
    found = []
    for step in range(STEPS):
        if step != skipped:
            for one, gradient in zip(own, gradients(step), strict=True):
                one.grad = gradient.clone()
            optimizer.step()
        found.append([one.detach().clone() for one in own])
    return found


@pytest.mark.parametrize("skipped", [-1, 0, 2])
@pytest.mark.parametrize("momentum", [-1.0, 0.0, 0.5])
def test_sgd_is_torchs_bit_for_bit(momentum: float, skipped: int) -> None:
    wanted = torchs(lambda some: torch.optim.SGD(some, 1e-2, momentum=0.9 if momentum < 0 else momentum), skipped)
    for own, theirs in zip(trained(skipped, optimizer="sgd", beta1=momentum), wanted, strict=True):
        assert all(map(torch.equal, own, theirs))


@pytest.mark.parametrize("skipped", [-1, 2])
@pytest.mark.parametrize("eps", [0.0, 0.2])
def test_adafactor_is_torchs_but_for_numbers_that_it_has_on_the_host(eps: float, skipped: int) -> None:
    wanted = torchs(lambda some: torch.optim.Adafactor(some, 1e-2, eps=(None, eps or 1e-3)), skipped)
    for own, theirs in zip(trained(skipped, optimizer="adafactor", eps=eps), wanted, strict=True):
        for one, other in zip(own, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_lion_is_that_of_the_paper() -> None:
    """Algorithm 2 in double precision; signs agree wherever their arguments are not within rounding of 0."""
    weights = [one.detach().double() for one in parameters().values()]
    moments = [torch.zeros_like(one) for one in weights]
    for step, own in enumerate(trained(optimizer="lion")):
        for weight, moment, gradient in zip(weights, moments, gradients(step), strict=True):
            update = torch.sign(0.9 * moment + 0.1 * gradient.double())
            decay = 0.1 if weight.ndim > 1 else 0.0
            weight.sub_(1e-2 * (update + decay * weight))
            moment.mul_(0.99).add_(0.01 * gradient.double())
        for one, other in zip(own, weights, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)


def test_adamw_takes_betas_and_epsilon() -> None:
    wanted = torchs(lambda some: torch.optim.AdamW(some, 1e-2, betas=(0.8, 0.95), eps=1e-3, fused=True))
    for own, theirs in zip(trained(beta1=0.8, beta2=0.95, eps=1e-3), wanted, strict=True):
        assert all(map(torch.equal, own, theirs))
    assert not torch.equal(trained()[-1][0], wanted[-1][0])


@for_each("optimizer", ["adamw", "sgd", "lion"])
def test_an_update_in_fp8_is_rounded_and_the_weights_are_not(optimizer: str) -> None:
    start = [one.detach() for one in parameters().values()]
    high, low = trained(optimizer=optimizer)[0], trained(optimizer=optimizer, updates="fp8")[0]
    for before, after, rounded in zip(start, high, low, strict=True):
        scale = torch.tensor(448.0) / (after - before).abs().max()
        update = ((after - before) * scale).to(torch.float8_e4m3fn).float() * scale.reciprocal()
        assert torch.equal(rounded, before + update)
    assert not torch.equal(high[0], low[0])


def test_moments_in_low_precision_go_with_those_that_have_some() -> None:
    for optimizer in ("sgd", "lion"):
        low = trained(optimizer=optimizer, optimizer_states="fp8lm")
        assert not torch.equal(low[-1][0], trained(optimizer=optimizer)[-1][0])
        own = Optimizer(parameters(), TrainerSettings(optimizer=optimizer, optimizer_states="fp8lm"))
        assert own.kept()["first moment"][0].dtype == torch.float8_e4m3fn
    with pytest.raises(UsageError, match="adafactor keeps means of rows and columns"):
        check(TrainerSettings(optimizer="adafactor", optimizer_states="bf16"))
    rows = Optimizer(parameters(), TrainerSettings(optimizer="adafactor")).kept()
    assert sum(one.numel() for one in rows["first moment"]) == 24 + 32
    assert sum(one.numel() for one in rows["second moment"]) == 16 + 16 + 16


def shares(steps: int, **settings: Any) -> list[float]:
    return [share_of_rate(TrainerSettings(**settings), step, steps) for step in range(steps)]


def by_torch(steps: int, make: Callable[[torch.optim.Optimizer], Any], rate: float = 1.0) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0.1, 0.3])
def test_one_cycle_is_torchs(warmup: float) -> None:
    wanted = by_torch(50, lambda one: torch.optim.lr_scheduler.OneCycleLR(
        one, 1.0, total_steps=50, pct_start=warmup, final_div_factor=1 / 25 / 0.1, cycle_momentum=False,
    ))  # fmt: skip
    assert shares(50, schedule="one-cycle", warmup=warmup) == pytest.approx(wanted, rel=1e-6)


def test_linear_is_torchs_and_wsd_and_the_others_by_hand() -> None:
    wanted = by_torch(41, lambda one: torch.optim.lr_scheduler.LinearLR(one, 1.0, 0.1, 40))
    assert shares(41, schedule="linear", warmup=0.0) == pytest.approx(wanted)
    stable = shares(100, schedule="wsd", decay=0.2, floor=0.0)
    assert stable[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert stable[10:80] == [1.0] * 70
    assert stable[80:] == pytest.approx([(19 - step) / 20 for step in range(20)])
    assert shares(10, schedule="constant", warmup=0.0) == [1.0] * 10
    roots = shares(100, schedule="inverse-sqrt", floor=0.0)
    assert roots[9] == 1.0 and roots[39] == pytest.approx(0.5) and roots[99] == pytest.approx((10 / 100) ** 0.5)


@for_each("schedule", SCHEDULES)
@for_each("steps", [1, 2, 3, 10])
@for_each("share", [0.0, 0.5, 1.0])
def test_no_schedule_leaves_its_bounds(schedule: str, steps: int, share: float) -> None:
    found = shares(steps, schedule=schedule, warmup=share, decay=share, floor=0.1)
    assert all(0 < one <= 1 for one in found), found


def test_plateau_is_torchs() -> None:
    losses = [3.0, 2.5, 2.4999, 2.6, 2.7, 2.4, 2.4, 2.4, 2.4, 2.5, 2.6, 2.7, 2.8, 2.9, 3.0, 3.1, 1.0, 1.0]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, min_lr=0.1)
    plateau = Plateau(TrainerSettings(schedule="plateau", patience=1))
    for number, loss in enumerate(losses):
        theirs.step(loss)
        plateau.seen(number, loss)
        plateau.seen(number, 99.0)  # the same look once more
        other = Plateau(TrainerSettings(schedule="plateau", patience=1))
        other.recall(plateau.memory())
        plateau = other
        assert plateau.share == pytest.approx(optimizer.param_groups[0]["lr"]), number
    assert plateau.share < 1


@pytest.mark.parametrize(("first", "factor", "growth"), [(2.0**8, 2.0, 3), (2.0**10, 4.0, 2), (2.0**16, 1.5, 1)])
def test_a_dynamic_loss_scale_is_torchs(first: float, factor: float, growth: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_factor=factor, backoff_factor=1 / factor,
                                  growth_interval=growth)  # fmt: skip
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    own = LossScale(first, growth, factor)
    for overflow in (0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0):
        optimizer.zero_grad()
        scaler.scale((weight * (torch.inf if overflow else 1.0)).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        own.seen(not overflow)
        assert own.scale == pytest.approx(scaler.get_scale())


def test_rates_are_those_of_the_most_exact_name() -> None:
    rates = (("attn", 2.0), ("blocks.0", 3.0), ("blocks.0.attn.out", 5.0), ("layer", 7.0), ("norm", 11.0))
    wanted = {
        ("blocks.1.attn.qkv.weight", 2): 2.0, ("blocks.0.attn.qkv.weight", 2): 3.0,
        ("blocks.0.attn.out.weight", 2): 5.0, ("blocks.10.attn.out.weight", 2): 2.0,
        ("blocks.1.mlp.up.weight", 2): 7.0, ("blocks.1.norm_attn.weight", 1): 11.0,
        ("blocks.0.norm_attn.weight", 1): 3.0, ("norm.weight", 1): 11.0, ("head.weight", 2): 1.0, ("embedding", 2): 1.0,
    }  # fmt: skip
    assert {key: factor_of(*key, rates) for key in wanted} == wanted
    for name in ("atn", "blocks.7", "blocks.0.att"):
        with pytest.raises(UsageError, match="unknown parameters of --rates"):
            check(TrainerSettings(rates=((name, 2.0),)))
    check(TrainerSettings(rates=rates))


def test_what_is_clipped_together() -> None:
    names = [("embedding", 2), ("positions", 2), ("blocks.0.attn.qkv.weight", 2), ("blocks.1.mlp.up.weight", 2),
             ("blocks.1.norm_mlp.weight", 1), ("norm.weight", 1), ("head.weight", 2)]  # fmt: skip
    assert [group_of(*one, "kind") for one in names] == ["embedding"] * 2 + ["attn", "mlp", "norm", "norm", "head"]
    assert [group_of(*one, "block") for one in names] == [
        "embedding", "positions", "blocks.0", "blocks.1", "blocks.1", "norm", "head",
    ]  # fmt: skip
    assert {group_of(*one, "all") for one in names} == {""} and len({group_of(*one, "tensor") for one in names}) == 7
