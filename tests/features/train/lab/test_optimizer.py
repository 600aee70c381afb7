"""Optimizers against torch's, papers or definitions by hand: rules, rates, loss scales; weights, gradients, moments and
updates in low precision; and HighAccumulation."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8bench
from fp8bench.errors import UsageError
from fp8bench.features.train.arms import MSAMP_LEVELS
from fp8bench.features.train.lab import rates
from fp8bench.features.train.lab.low_precision import AutomaticScale, round_to_bf16_randomly
from fp8bench.features.train.lab.models import check_trainer_settings
from fp8bench.features.train.lab.rates import (
    LossScale,
    RateSchedule,
    find_clip_group,
    find_learning_rate_factor,
    join_norms,
    make_loss_scale,
)
from fp8bench.features.train.lab.step_optimizer import StepOptimizer, make_step_optimizer, wrap_user_optimizer
from fp8bench.features.train.request import SCHEDULES, TrainerSettings
from fp8bench.features.train.step import compute_clip_divisors
from fp8bench.formats.grids import E4M3
from fp8bench.formats.scaled import values
from tests.counts import for_each

SHAPES = {
    "embedding": (24, 16),
    "blocks.0.norm.weight": (16,),
    "blocks.0.mlp.up.weight": (32, 16),
    "head.weight": (24, 16),
}
STEPS = 6
RATE = 1e-2


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def parameters() -> dict[str, nn.Parameter]:
    return dict(zip(SHAPES, map(nn.Parameter, drawn(1)), strict=True))


def gradients(step: int) -> list[Tensor]:
    return drawn(100 + step)


def values_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def made(**settings: Any) -> tuple[StepOptimizer, list[nn.Parameter]]:
    own = parameters()
    return make_step_optimizer(own, TrainerSettings(rate=RATE, **settings)), list(own.values())


def backward(optimizer: StepOptimizer, own: list[nn.Parameter], *micro_batches: list[Tensor]) -> None:
    optimizer.gradients.begin()
    for several in micro_batches:
        torch.stack([(weight * part).sum() for weight, part in zip(own, several, strict=True)]).sum().backward()


def step(optimizer: StepOptimizer, divisor: float = 1.0, skip: bool = False) -> None:
    optimizer.step(1.0, [torch.tensor(float(divisor))] * len(SHAPES), torch.tensor(float(skip)))


@for_each(
    ("settings", "bytes_each"),
    [
        ({}, (4, 4, 4, 4)),
        ({"optimizer_states": "bf16", "gradients": "bf16"}, (4, 2, 2, 2)),
        ({"optimizer_states": "fp8lm", "gradients": "fp8", "master": "fp16-scaled"}, (2, 1, 1, 2)),
    ],
)
def test_bytes_of_what_is_kept(settings: dict[str, Any], bytes_each: tuple[int, ...]) -> None:
    """Tensors have a float32 scale from the start. A skipped step changes nothing."""
    optimizer, own = made(**settings)
    count = sum(weight.numel() for weight in own)
    names = ("weights", "gradients", "first moment", "second moment")
    with optimizer.weights.materialise():
        start = values_of(own)
        for number in range(2):
            assert all(weight.isfinite().all() for weight in own)
            kept = {name: sum(tensor.nbytes for tensor in some) for name, some in optimizer.stored_tensors().items()}
            for name, each in zip(names, bytes_each, strict=True):
                assert kept[name] - each * count in (0, 4 * len(own)), name
            backward(optimizer, own, gradients(number))
            step(optimizer)
        moved = values_of(own)
        assert not any(map(torch.equal, start, moved))
        backward(optimizer, own, gradients(3))
        step(optimizer, skip=True)
        assert all(map(torch.equal, moved, own)) and not any(map(float, optimizer.update_norms))
    if "master" in settings:
        assert not any(weight.untyped_storage().nbytes() for weight in own), "nothing lies there between two steps"
        with optimizer.weights.materialise():
            assert all(map(torch.equal, moved, own))
            scaled = [weight * 2.0 ** (15 - math.frexp(float(weight.abs().max()))[1]) for weight in moved]
            assert all(torch.equal(weight, weight.half().float()) for weight in scaled), "of fp16 under a power of two"


def test_weights_of_ms_amps_o3_are_fp8_in_passes_and_fp16_in_updates() -> None:
    """Bytes a weight follow the published table: 11, 6 (62.5% less than 16), and 7 for a layer."""
    count = sum(math.prod(shape) for shape in SHAPES.values())
    layer = math.prod(SHAPES["blocks.0.mlp.up.weight"])
    sizes = {}
    for name, level in MSAMP_LEVELS.items():
        optimizer, own = made(**dict(level.settings))
        with optimizer.weights.materialise():
            backward(optimizer, own, gradients(0))
            step(optimizer)
        kept = optimizer.stored_tensors()
        sizes[name] = sum(part.nbytes for word in kept if word != "steps" for part in kept[word] if part.ndim)
    assert sizes == {"msamp-o1": 11 * count, "msamp-o2": 6 * count, "msamp-o3": 6 * count + layer}

    with optimizer.weights.materialise():
        passes = values_of(own)
        optimizer.weights.load_high_precision()
        masters = values_of(own)
    assert list(map(torch.equal, passes, masters)) == [True, True, False, True]
    scale = 2.0 ** math.floor(math.log2(448 / float(masters[2].abs().max())))
    assert torch.equal(passes[2], (masters[2] * scale).to(torch.float8_e4m3fn).float() / scale)


@for_each("kind", ["bf16", "fp8"])
def test_gradients_are_rounded_with_every_micro_batch(kind: str) -> None:
    """The running sum is rounded, the new part added, and the result rounded again."""
    optimizer, own = made(gradients=kind, micro_batches=2)
    parts = gradients(1), gradients(2)
    backward(optimizer, own, *parts)

    def rounded(x: Tensor, scale: Tensor) -> Tensor:
        return values((x * scale).clamp(-E4M3.largest, E4M3.largest), E4M3, None) / scale

    for weight, first, second in zip(own, *parts, strict=True):
        if kind == "bf16":
            wanted = (second + first.bfloat16().float()).bfloat16().float()
        else:
            scale = E4M3.largest / (2 * first.abs().max())
            wanted = rounded(second + rounded(first, scale), scale)
        torch.testing.assert_close(optimizer.gradients.get_gradients([weight])[0], wanted, rtol=1e-6, atol=0)
        assert weight.grad is None


def test_an_automatic_scale_backs_off_and_comes_back() -> None:
    """Above a saturated share of 1e-5 it halves; over a thousand steps it doubles."""
    like = torch.zeros(100, 1000)
    fresh = torch.randn(100, 1000, generator=torch.Generator().manual_seed(0))
    scale = AutomaticScale(like, micro_batches=2)
    for largest, wanted in ((2.0, 1.0), (8.0, 0.5), (8.0, 0.25)):
        scale.add(fresh, is_first=True)
        later = torch.zeros_like(fresh)
        later[0, :2] = largest * fresh.abs().max()  # two of 100,000 twice: above the allowed share of the total
        later[1, 0] = later[0, 0]
        scale.add(later, is_first=False)
        scale.finish_step()
        assert float(scale.share) == wanted
    scale.add(fresh, is_first=True)
    for _ in range(1000):
        scale.finish_step()
    assert float(scale.share) == pytest.approx(0.5, rel=1e-3)
    scale.add(torch.full_like(fresh, math.inf), is_first=True)
    scale.finish_step()
    assert bool(scale.restore().isnan().all()) and float(scale.share) == pytest.approx(0.5, rel=1e-3)


def test_stochastic_rounding_keeps_the_mean_and_what_bf16_has() -> None:
    """A value goes to one of its two neighbours with the probability given by distance.

    bf16 values, infinities and NaN are unchanged.
    """
    drawn = torch.Generator().manual_seed(0)
    for value in (1.0 + 2.0**-9, -3.0 - 2.0**-8, 1e-30 * (1 + 2.0**-10), 7.3):
        x = torch.full((200_000,), value)
        rounded = round_to_bf16_randomly(x, drawn).to(torch.float64)
        bits = x[:1].view(torch.int32) & ~0xFFFF
        low, high = (float(word.view(torch.float32)) for word in (bits, bits + (1 << 16)))
        assert set(rounded.tolist()) <= {low, high}
        exact = (float(x[0]) - low) / (high - low)
        assert float((rounded == high).double().mean()) == pytest.approx(exact, abs=0.005)
    same = torch.randn(1000).bfloat16()
    assert torch.equal(round_to_bf16_randomly(same.float(), drawn), same)
    odd = round_to_bf16_randomly(torch.tensor([math.inf, -math.inf, math.nan]), drawn)
    assert odd[0] == math.inf and odd[1] == -math.inf and bool(odd[2].isnan())


def trained(skipped: int = -1, **settings: Any) -> list[list[Tensor]]:
    """The weights after every step, with gradients multiplied by 4 and divided again."""
    own = parameters()
    optimizer = make_step_optimizer(own, TrainerSettings(rate=RATE, **settings))
    weights = []
    for step in range(STEPS):
        for parameter, gradient in zip(own.values(), gradients(step), strict=True):
            parameter.grad = gradient * (torch.nan if step == skipped else 4.0)
        optimizer.step(1.0, [torch.tensor(4.0)] * len(own), torch.tensor(float(step == skipped)))
        weights.append(values_of(own.values()))
    return weights


@for_each(
    "settings", [{}, {"updates": "fp8"}, {"optimizer_states": "fp8lm", "master": "fp16-scaled", "gradients": "fp8"}]
)
def test_a_step_that_is_not_measured_changes_weights_alike(settings: dict[str, Any]) -> None:
    weights = []
    for measured in (True, False):
        optimizer, own = made(**settings)
        with optimizer.weights.materialise():
            backward(optimizer, own, gradients(0))
            optimizer.step(1.0, [torch.tensor(1.0)] * len(SHAPES), torch.tensor(0.0), measured)
            weights.append(values_of(own))
        assert bool(torch.stack(optimizer.update_norms).any()) == (measured or "updates" in settings)
        assert bool(torch.stack(optimizer.weight_norms).all())
    assert all(map(torch.equal, *weights))


def torchs(make: Any, skipped: int, rates: Iterable[float] = (1e-2,) * 4) -> list[list[Tensor]]:
    own = list(parameters().values())
    optimizer = make(
        [
            {"params": [weight], "weight_decay": 0.1 if weight.ndim > 1 else 0.0, "lr": rate}
            for weight, rate in zip(own, rates, strict=True)
        ]
    )
    weights = []
    for step in range(STEPS):
        if step != skipped:
            for parameter, gradient in zip(own, gradients(step), strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        weights.append(values_of(own))
    return weights


SGD = torch.optim.SGD
ADAMW = torch.optim.AdamW
ADAFACTOR = torch.optim.Adafactor


@for_each("skipped", [-1, 0, 2])
@for_each(
    ("settings", "make"),
    [
        ({"optimizer": "sgd"}, partial(SGD, lr=1e-2, momentum=0.9)),
        ({"optimizer": "sgd:momentum=0"}, partial(SGD, lr=1e-2)),
        ({"optimizer": "sgd:momentum=0.5"}, partial(SGD, lr=1e-2, momentum=0.5)),
        ({}, partial(ADAMW, lr=1e-2, fused=True)),
        ({"optimizer": "adamw:betas=0.8,0.95"}, partial(ADAMW, lr=1e-2, betas=(0.8, 0.95), fused=True)),
        ({"optimizer": "adafactor"}, partial(ADAFACTOR, lr=1e-2)),
    ],
)
def test_updates_are_torchs(settings: dict[str, Any], make: Any, skipped: int) -> None:
    for own, theirs in zip(trained(skipped, **settings), torchs(make, skipped), strict=True):
        torch.testing.assert_close(own, theirs, rtol=0, atol=0)


def test_factors_of_the_rate_are_those_of_torchs_groups() -> None:
    own = trained(rates=(("embedding", 0.5), ("norm", 2.0), ("blocks.0.mlp", 0.25)))
    theirs = torchs(partial(ADAMW, fused=True), -1, (0.005, 0.02, 0.0025, 0.01))
    torch.testing.assert_close(own, theirs, rtol=0, atol=0)


def test_norms_are_those_of_updates_and_weights() -> None:
    optimizer, own = made()
    before = values_of(own)
    some = gradients(0)
    backward(optimizer, own, some)
    assert float(join_norms(optimizer.gradients.norms())) == pytest.approx(
        float(join_norms([part.norm() for part in some]))
    )
    step(optimizer)
    moved = [(weight.detach() - old).norm() for weight, old in zip(own, before, strict=True)]
    torch.testing.assert_close(optimizer.update_norms, moved)
    torch.testing.assert_close(optimizer.weight_norms, [weight.detach().norm() for weight in own])


@for_each("optimizer", ["adamw", "sgd"])
def test_an_update_in_fp8_is_rounded_and_the_weights_are_not(optimizer: str) -> None:
    start = [weight.detach() for weight in parameters().values()]
    high = trained(optimizer=optimizer)[0]
    low = trained(optimizer=optimizer, updates="fp8")[0]
    for before, after, rounded in zip(start, high, low, strict=True):
        scale = torch.tensor(448.0) / (after - before).abs().max()
        update = ((after - before) * scale).to(torch.float8_e4m3fn).float() * scale.reciprocal()
        assert torch.equal(rounded, before + update)
    assert not torch.equal(high[0], low[0])


def test_states_of_other_optimizers() -> None:
    kept = made(optimizer="sgd", optimizer_states="fp8lm")[0].stored_tensors()
    assert kept["first moment"][0].dtype == torch.float8_e4m3fn and "second moment" not in kept
    kept = made(optimizer="adafactor")[0].stored_tensors()
    counts = [sum(tensor.numel() for tensor in kept[name]) for name in ("first moment", "second moment")]
    assert counts == [24 + 32 + 24, 16 * 4]


OWN = """
import torch

class Signs(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.sign_()
        super().step()
"""


@for_each("updates", ["fp32", "fp8"])
def test_an_optimizer_of_your_own_by_file_and_name(updates: str, tmp_path: Path) -> None:
    """It takes the rate and the keys, and its states are stored in low precision as those of listed ones."""
    (tmp_path / "signs.py").write_text(OWN)
    word = f"{tmp_path / 'signs.py'}:Signs:momentum=0.9"
    stored = made(optimizer=word, optimizer_states="bf16", updates=updates)[0]
    own, plain = (trained(optimizer=word, updates=updates, **more) for more in ({}, {"optimizer_states": "bf16"}))
    assert not torch.equal(own[-1][0], plain[-1][0]) and "first moment" not in stored.stored_tensors()
    weights = parameters()
    moved = [(after - before.detach()) for after, before in zip(own[0], weights.values(), strict=True)]
    wanted = [-RATE * part.sign() for part in gradients(0)]
    torch.testing.assert_close(moved, wanted, rtol=0.1 if updates == "fp8" else 1e-4, atol=0)


@for_each(
    ("word", "message"),
    [
        ("muon", "got 'muon': it updates matrices only"),
        ("LBFGS", "computes the loss several times"),
        ("sparseadam", "takes sparse gradients"),
        ("lion", "one of adamw, sgd, adafactor, or FILE.py:CLASS"),
        ("adamw:momentum=1", "adamw with only the keys betas, eps, weight_decay"),
        ("adamw:betas=0.9", "two numbers from 0 to 0.999999 as betas, like betas=0.9,0.999"),
        ("sgd:weight_decay=-1", "a number from 0 to 10 as weight_decay, like weight_decay=0.1"),
    ],
)
def test_what_is_no_optimizer(word: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainerSettings(optimizer=word)


def test_own_optimizers_that_cannot_be_stepped() -> None:
    model = nn.Linear(4, 4)
    for make, why in ((torch.optim.LBFGS, "several times"), (torch.optim.SparseAdam, "sparse gradients")):
        with pytest.raises(UsageError, match=why):
            wrap_user_optimizer("make", model, lambda model, make=make: make(list(model.parameters())), None)


def shares(steps: int, schedule: str) -> list[float]:
    rate_schedule = RateSchedule(TrainerSettings(schedule=schedule), steps)
    return [rate_schedule.rate_share(step) for step in range(steps)]


def test_schedules_by_hand() -> None:
    cosine = shares(101, "cosine")
    assert cosine[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert cosine[10] == pytest.approx(1) and cosine[-1] == pytest.approx(0.1) and cosine[55] == pytest.approx(0.55)
    assert all(share > later for share, later in pairwise(cosine[10:])) and shares(1, "cosine:warmup=0") == [1.0]
    assert shares(41, "linear:warmup=0")[::20] == pytest.approx([1.0, 0.55, 0.1])
    one_cycle = shares(50, "one-cycle:warmup=0.3")
    assert one_cycle[0] == pytest.approx(1 / 25) and max(one_cycle) == one_cycle[14] == 1.0
    assert one_cycle[-1] == pytest.approx(0.1)
    stable = shares(100, "wsd:floor=0")
    assert stable[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert stable[10:80] == pytest.approx([1.0] * 70)
    assert stable[80:] == pytest.approx([(19 - step) / 20 for step in range(20)])
    assert shares(10, "constant:warmup=0") == [1.0] * 10
    roots = shares(100, "inverse-sqrt:floor=0")
    assert [roots[9], roots[39], roots[99]] == pytest.approx([1.0, 0.5, (10 / 100) ** 0.5])


@for_each("schedule", SCHEDULES)
@for_each("steps", [1, 2, 3, 10])
@for_each("share", [0.0, 0.5, 1.0])
def test_no_schedule_leaves_its_bounds(schedule: str, steps: int, share: float) -> None:
    assert all(0 < part <= 1 + 1e-9 for part in shares(steps, f"{schedule}:warmup={share}"))


def test_plateau_halves_after_three_bad_losses_and_is_resumed() -> None:
    losses = [3.0, 2.5, 2.4999, 2.6, 2.7, 2.4, 2.4, 2.4, 2.4, 2.5, 2.6, 2.7, 2.8, 2.9, 3.0, 3.1, 1.0, 1.0]
    settings = TrainerSettings(schedule="plateau:warmup=0")
    schedule = RateSchedule(settings, 100)
    seen = []
    for step, loss in enumerate(losses):
        schedule.rate_share(step)
        schedule.record_held_out(loss)
        memory = schedule.get_state()
        schedule = RateSchedule(settings, 100)
        schedule.set_state(memory)
        seen.append(schedule.rate_share(step))
    assert seen == [1.0] * 4 + [0.5] * 4 + [0.25] * 3 + [0.125] * 3 + [0.1] * 4


def test_a_dynamic_loss_scale_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "GROWTH_STEPS", 3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    own = make_loss_scale(TrainerSettings(loss_scale="dynamic"), 1.0)
    for overflow in (0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0):
        optimizer.zero_grad()
        scaler.scale((weight * (torch.inf if overflow else 1.0)).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        own.adapt_scale(not overflow)
        assert own.scale == pytest.approx(scaler.get_scale())


def test_loss_scales_stay_within_their_bounds() -> None:
    high = LossScale(2.0**32, is_dynamic=True, finite_steps=rates.GROWTH_STEPS - 1)
    low = LossScale(1.0, is_dynamic=True)
    fixed = make_loss_scale(TrainerSettings(), 1024.0)
    high.adapt_scale(True)
    low.adapt_scale(False)
    fixed.adapt_scale(False)
    assert (high.scale, low.scale, fixed.scale) == (2.0**32, 1.0, 1024.0)


def test_the_longest_name_gives_the_rate() -> None:
    factors = (("attn", 2.0), ("blocks.0", 3.0), ("blocks.0.attn.out", 5.0), ("layer", 7.0), ("norm", 11.0))
    wanted = {
        ("blocks.1.attn.qkv.weight", 2): 2.0,
        ("blocks.0.attn.qkv.weight", 2): 3.0,
        ("blocks.0.attn.out.weight", 2): 5.0,
        ("blocks.10.attn.out.weight", 2): 2.0,
        ("blocks.1.mlp.up.weight", 2): 7.0,
        ("blocks.1.norm_attn.weight", 1): 11.0,
        ("blocks.0.norm_attn.weight", 1): 3.0,
        ("norm.weight", 1): 11.0,
        ("head.weight", 2): 1.0,
        ("embedding", 2): 1.0,
    }
    assert {key: find_learning_rate_factor(*key, factors) for key in wanted} == wanted
    check_trainer_settings(TrainerSettings(rates=factors))


def test_groups_of_clipping() -> None:
    names = [
        ("embedding", 2),
        ("positions", 2),
        ("blocks.0.attn.qkv.weight", 2),
        ("blocks.1.mlp.up.weight", 2),
        ("blocks.1.norm_mlp.weight", 1),
        ("norm.weight", 1),
        ("head.weight", 2),
    ]
    for by, wanted in {
        "kind": ["embedding", "embedding", "attn", "mlp", "norm", "norm", "head"],
        "block": ["embedding", "positions", "blocks.0", "blocks.1", "blocks.1", "norm", "head"],
        "": [""] * 7,
        "tensor": [name for name, _ in names],
    }.items():
        assert [find_clip_group(*name, by) for name in names] == wanted


@for_each("groups", ["aaaa", "abab", "abcd"])
def test_each_group_is_clipped_as_torch_clips_it(groups: str) -> None:
    """Gradients of a group above the norm are divided by what torch divides them by; a small one stays."""
    some = [gradient * scale for gradient, scale in zip(gradients(0), (1.0, 8.0, 1e-3, 1.0), strict=True)]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in some]
    for parameter, gradient in zip(parameters, some, strict=True):
        parameter.grad = gradient.clone()
    for group in set(groups):
        together = [own for own, name in zip(parameters, groups, strict=True) if name == group]
        torch.nn.utils.clip_grad_norm_(together, 1.0)
    norms = [gradient.norm() * 4 for gradient in some]
    divisors, shrunk = compute_clip_divisors(norms, join_norms(norms) / 4, 4.0, 1.0, groups)
    for parameter, gradient, divisor in zip(parameters, some, divisors, strict=True):
        torch.testing.assert_close(gradient / divisor, parameter.grad, rtol=1e-5, atol=1e-7)
    after = join_norms([own.grad.norm() for own in parameters if own.grad is not None])
    assert float(shrunk) == pytest.approx(float(join_norms([own.norm() for own in some]) / after), rel=1e-5)


def accumulating(updates: str = "fp8", make: Any = SGD) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(16, 8, bias=False, dtype=torch.bfloat16)
    return model, fp8bench.HighAccumulation(model.parameters(), lambda masters: make(masters, lr=0.1), updates)


def found_by_backward(model: nn.Linear, seed: int) -> Tensor:
    """Runs backward on one micro-batch and returns the gradient it finds."""
    x, pull = (torch.randn(4, width, generator=torch.Generator().manual_seed(seed)).bfloat16() for width in (16, 8))
    model(x).backward(pull)
    return (pull.t() @ x).float()


def test_two_micro_batches_add_up_in_float32_and_the_update_is_fp8() -> None:
    model, optimizer = accumulating()
    start = model.weight.detach().float()
    wanted = found_by_backward(model, 1) + found_by_backward(model, 2)
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
    with pytest.raises(fp8bench.Fp8benchError, match="got 'fp4'"):
        accumulating("fp4")


def test_high_accumulation_takes_a_closure_as_torch_does() -> None:
    model, optimizer = accumulating()
    start = model.weight.detach().clone()
    loss = optimizer.step(lambda: found_by_backward(model, 1).sum())
    assert loss == found_by_backward(model, 1).sum() and not torch.equal(model.weight, start)


def test_high_accumulation_resumes_to_the_same_bits() -> None:
    model, optimizer = accumulating(make=ADAMW)
    found_by_backward(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    kept = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    other, second = accumulating(make=ADAMW)
    other.load_state_dict(weights)
    second.load_state_dict(kept)
    for trained_model, own in ((model, optimizer), (other, second)):
        found_by_backward(trained_model, 2)
        own.step()
    assert torch.equal(optimizer.masters[0], second.masters[0]) and torch.equal(model.weight, other.weight)


def test_high_accumulation_clips_and_skips_by_its_masters() -> None:
    model, high = accumulating("fp32")
    optimizer = wrap_user_optimizer("make", model, lambda model: high, None)
    start = model.weight.detach().clone()
    optimizer.gradients.begin()
    wanted = found_by_backward(model, 3)
    assert torch.equal(optimizer.gradients.norms()[0], wanted.norm())
    optimizer.step(1.0, [torch.tensor(2.0)], torch.tensor(1.0))
    assert torch.equal(model.weight, start)
    optimizer.step(1.0, [torch.tensor(2.0)], torch.tensor(0.0))
    assert torch.equal(model.weight.detach(), (start.float() - 0.1 * wanted / 2).bfloat16())
