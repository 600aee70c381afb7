"""AdamW of a training against torch's own and by hand; weights, gradients and moments in low precision."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8bench.features.train.arms import LEVELS
from fp8bench.features.train.lab.optimizer import (
    AutomaticScale,
    Optimizer,
    StochasticWeights,
    joint,
    stochastic_bf16,
)
from fp8bench.features.train.lab.rates import share_of_rate
from fp8bench.features.train.request import TrainerSettings
from fp8bench.formats.grids import E4M3
from fp8bench.formats.scaled import values
from tests.counts import for_each

SHAPES = {
    "embedding": (24, 16),
    "blocks.0.norm.weight": (16,),
    "blocks.0.mlp.up.weight": (32, 16),
    "head.weight": (24, 16),
}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int, size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) * size for shape in SHAPES.values()]


def made(**settings: Any) -> tuple[Optimizer, list[nn.Parameter]]:
    own = parameters()
    return Optimizer(own, TrainerSettings(**settings)), list(own.values())


def found(optimizer: Optimizer, own: list[nn.Parameter], *micro_batches: list[Tensor]) -> None:
    """What backward does."""
    optimizer.gradients.begin()
    for several in micro_batches:
        torch.stack([(one * other).sum() for one, other in zip(own, several, strict=True)]).sum().backward()


def step(optimizer: Optimizer, rate: float = 1e-2, divisor: float = 1.0, skip: bool = False) -> None:
    optimizer.step(rate, [torch.tensor(float(divisor))] * len(SHAPES), torch.tensor(float(skip)))


def test_it_is_adamw_by_hand() -> None:
    """Of gradients that were multiplied by 1024 and clipped to a quarter; matrices decay, kinds have their rates."""
    optimizer, own = made(rates=(("embedding", 0.5), ("norm", 2.0)), weight_decay=0.1)
    start = [one.detach().double() for one in own]
    weights, first, second = start, [one * 0 for one in start], [one * 0 for one in start]
    for number in range(4):
        some = gradients(number)
        found(optimizer, own, [one * 1024 for one in some])
        norm = torch.cat([one.flatten() for one in some]).norm()
        assert float(joint(optimizer.gradients.norms())) == pytest.approx(1024 * float(norm), rel=1e-5)
        step(optimizer, divisor=4 * 1024)
        clipped = [one.double() / 4 for one in some]
        first = [0.9 * m + 0.1 * g for m, g in zip(first, clipped, strict=True)]
        second = [0.999 * v + 0.001 * g * g for v, g in zip(second, clipped, strict=True)]
        before, corrections, weights = weights, (1 - 0.9 ** (number + 1), 1 - 0.999 ** (number + 1)), []
        for w, m, v, rate in zip(before, first, second, (0.005, 0.02, 0.01, 0.01), strict=True):
            kept = w * (1 - rate * 0.1) if w.ndim > 1 else w
            weights.append(kept - rate * (m / corrections[0]) / ((v / corrections[1]).sqrt() + 1e-8))
        norms = zip(optimizer.update_norms, optimizer.weight_norms, strict=True)
        for one, wanted, earlier, (moved, size) in zip(own, weights, before, norms, strict=True):
            torch.testing.assert_close(one.detach().double(), wanted, rtol=1e-5, atol=1e-6)
            assert float(moved) == pytest.approx(float((wanted - earlier).norm()), rel=1e-3)
            assert float(size) == pytest.approx(float(wanted.norm()), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "bytes_each"),
    [
        ({}, {"weights": 4, "gradients": 4, "first moment": 4, "second moment": 4}),
        (
            {"optimizer_states": "bf16", "gradients": "bf16"},
            {"weights": 4, "gradients": 2, "first moment": 2, "second moment": 2},
        ),
        (
            {"optimizer_states": "fp8lm", "gradients": "fp8", "master": "fp16-scaled"},
            {"weights": 2, "gradients": 1, "first moment": 1, "second moment": 2},
        ),
    ],
)  # fmt: skip
def test_what_is_kept(settings: dict[str, Any], bytes_each: dict[str, int]) -> None:
    """Bytes of the tensors there are, a float32 scale a tensor included; before the first step as after it, and a step
    that is skipped changes nothing."""
    optimizer, own = made(**settings)
    count, low = sum(one.numel() for one in own), len(own)
    with optimizer.weights.present():
        start = [one.detach().clone() for one in own]
        for number in range(2):
            with torch.no_grad():
                assert all(math.isfinite(float(one.sum())) for one in own)
            kept = {name: sum(one.nbytes for one in some) for name, some in optimizer.kept().items()}
            for name, each in bytes_each.items():
                assert kept[name] - each * count in (0, 4 * low), name
            found(optimizer, own, gradients(number))
            step(optimizer)
        moved = [one.detach().clone() for one in own]
        assert all(bool((one != other).any()) for one, other in zip(start, moved, strict=True))
        found(optimizer, own, gradients(3))
        step(optimizer, skip=True)
        assert all(torch.equal(one, other) for one, other in zip(moved, own, strict=True))
        assert not any(float(one) for one in optimizer.update_norms)
    if "master" in settings:
        assert not any(one.untyped_storage().nbytes() for one in own), "nothing lies there between two steps"
        with optimizer.weights.present():
            assert all(torch.equal(one, other) for one, other in zip(moved, own, strict=True))
            shares = [one.detach() * 2.0 ** (15 - math.frexp(float(one.detach().abs().max()))[1]) for one in own]
            assert all(torch.equal(one, one.half().float()) for one in shares), "values of fp16 under a power of two"


def test_weights_of_ms_amps_o3_are_fp8_in_passes_and_fp16_in_updates() -> None:
    """Bytes a weight of its levels by their table: 11, 6 (of 16, as is published: 62.5% less) and, of a layer, 7."""
    count, layer = sum(math.prod(shape) for shape in SHAPES.values()), math.prod(SHAPES["blocks.0.mlp.up.weight"])
    sizes = {}
    for name, level in LEVELS.items():
        optimizer, own = made(**dict(level.settings))
        with optimizer.weights.present():
            found(optimizer, own, gradients(0))
            step(optimizer)
        kept = optimizer.kept()
        sizes[name] = sum(one.nbytes for word, some in kept.items() if word != "steps" for one in some if one.ndim)
    assert sizes == {"msamp-o1": 11 * count, "msamp-o2": 6 * count, "msamp-o3": 6 * count + layer}

    with optimizer.weights.present():
        passes = [one.detach().clone() for one in own]
        optimizer.weights.raised()
        masters = [one.detach().clone() for one in own]
    assert [torch.equal(one, other) for one, other in zip(passes, masters, strict=True)] == [True, True, False, True]
    amax = float(masters[2].abs().max())
    scale = 2.0 ** math.floor(math.log2(448 / amax))
    assert torch.equal(passes[2], (masters[2] * scale).to(torch.float8_e4m3fn).float() / scale)


@for_each("kind", ["bf16", "fp8"])
def test_gradients_are_rounded_with_every_micro_batch(kind: str) -> None:
    """As by hand: the sum so far and what is new, in the format, and float32 in between."""
    optimizer, own = made(gradients=kind, micro_batches=2)
    parts = gradients(1), gradients(2)
    found(optimizer, own, *parts)
    for one, first, second in zip(own, *parts, strict=True):
        if kind == "bf16":
            wanted = (second + first.bfloat16().float()).bfloat16().float()
        else:
            scale = E4M3.largest / (2 * first.abs().max())
            wanted = _rounded(second + _rounded(first, scale), scale)
        torch.testing.assert_close(optimizer.gradients.of([one])[0], wanted, rtol=1e-6, atol=0)
        assert one.grad is None


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    return values((x * scale).clamp(-E4M3.largest, E4M3.largest), E4M3, None) / scale


def test_an_automatic_scale_backs_off_and_comes_back() -> None:
    """Where more than a hundred-thousandth of the values saturate; doubled over a thousand steps."""
    like = torch.zeros(100, 1000)
    fresh = torch.randn(100, 1000, generator=torch.Generator().manual_seed(0))
    scale = AutomaticScale(like, micro_batches=2)
    for largest, wanted in ((2.0, 1.0), (8.0, 0.5), (8.0, 0.25)):
        scale.add(fresh, first=True)
        later = torch.zeros_like(fresh)
        later[0, :2] = largest * fresh.abs().max()  # two of 100,000 twice: above the share of all that was added
        later[1, 0] = later[0, 0]
        scale.add(later, first=False)
        scale.end()
        assert float(scale.share) == wanted
    scale.add(fresh, first=True)
    for _ in range(1000):
        scale.end()
    assert float(scale.share) == pytest.approx(0.5, rel=1e-3)
    scale.add(torch.full_like(fresh, math.inf), first=True)
    scale.end()
    assert bool(scale.restored().isnan().all()) and float(scale.share) == pytest.approx(0.5, rel=1e-3)


def test_the_rate_of_each_step() -> None:
    """In a line to the full rate, then along a cosine to the floor."""
    settings = TrainerSettings(warmup=0.1, floor=0.1)
    shares = [share_of_rate(settings, one, 101) for one in range(101)]
    assert shares[:10] == pytest.approx([0.1 * (one + 1) for one in range(10)])
    assert shares[10] == 1 and shares[-1] == pytest.approx(0.1) and shares[55] == pytest.approx(0.55)
    assert all(one > other for one, other in pairwise(shares[10:]))
    assert share_of_rate(TrainerSettings(warmup=0.0), 0, 1) == 1.0


def test_stochastic_rounding_keeps_the_mean_and_what_bf16_has() -> None:
    """Values go to the two neighbours alone, up as often as their share of the way; those of bf16 stay, and so does
    what is not finite."""
    drawn = torch.Generator().manual_seed(0)
    for value in (1.0 + 2.0**-9, -3.0 - 2.0**-8, 1e-30 * (1 + 2.0**-10), 7.3):
        x = torch.full((200_000,), value)
        found = stochastic_bf16(x, drawn).to(torch.float64)
        bits = x[:1].view(torch.int32) & ~0xFFFF
        low, high = (float(one.view(torch.float32)) for one in (bits, bits + (1 << 16)))
        assert set(found.tolist()) <= {low, high}
        exact = (float(x[0]) - low) / (high - low)
        assert float((found == high).double().mean()) == pytest.approx(exact, abs=0.005)
    same = torch.randn(1000).bfloat16()
    assert torch.equal(stochastic_bf16(same.float(), drawn), same)
    odd = stochastic_bf16(torch.tensor([math.inf, -math.inf, math.nan]), drawn)
    assert odd[0] == math.inf and odd[1] == -math.inf and bool(odd[2].isnan())


def test_updates_too_small_for_bf16_are_kept_on_average() -> None:
    """A weight of 1 that goes down by 0.0001 a step: a thousand steps take 0.1 from the mean of many, and nothing from
    bf16 rounded to the nearest. Between two steps there are two bytes a weight, and the same seed rounds alike."""
    own = [nn.Parameter(torch.ones(4096))]
    weights, nearest = StochasticWeights(own), torch.ones(4096)
    for number in range(1000):
        weights.draws(number)
        nearest = (nearest - 1e-4).bfloat16().float()
        with weights.present(), torch.no_grad():
            own[0] -= 1e-4
            weights.round(own)
    assert sum(one.nbytes for one in weights.kept()) == 2 * 4096 and not own[0].untyped_storage().nbytes()
    assert torch.equal(nearest, torch.ones(4096))
    (kept,) = weights.kept()
    assert float(kept.double().mean()) == pytest.approx(0.9, abs=0.002)
    again = [nn.Parameter(torch.full((64,), 1.001)) for _ in range(2)]
    twice = [StochasticWeights([one]) for one in again]
    assert torch.equal(twice[0].kept()[0], twice[1].kept()[0])
