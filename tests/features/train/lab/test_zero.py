"""Ranks that are threads, which own whole weights: against one process that rounds what travels by another library, bit
by bit; bytes by hand; mistakes are planted. Real ones train in test_rank_lab.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.arms import LEVELS
from fp8bench.features.train.lab.optimizer import Optimizer
from fp8bench.features.train.lab.zero import ZeroTensors
from fp8bench.features.train.request import WIRES, TrainerSettings
from fp8bench.nn.parallel.exchanges import FP8Wire, owners
from fp8bench.protocols import SilentPhases
from tests.nn.parallel.ranks import Place, ThreadedGroup, on_board, on_ranks

SHAPES = {"embedding": (24, 16), "norm.weight": (16,), "blocks.0.mlp.up.weight": (31, 8), "head.weight": (2, 5)}
SIZES = [384, 16, 248, 10]
STEPS = 3
PHASE = SilentPhases()
Learnt = tuple[list[Tensor], tuple[str, ...], dict[str, int]]


@pytest.fixture(autouse=True)
def _on_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FP8Wire, "_result", lambda wire, program, phase: on_board(wire.group, program))


def parameters() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()}


def gradients(step: int, rank: int) -> list[Tensor]:
    """Of very different sizes from tensor to tensor and rank to rank."""
    draw = torch.Generator().manual_seed(100 * rank + step)
    return [
        torch.randn(shape, generator=draw) * 10.0 ** (3 * place - 4 + rank)
        for place, shape in enumerate(SHAPES.values())
    ]


def as_sent(values: Tensor, wire: str, amax: float | None = None) -> Tensor:
    """By the definition, in another library's formats."""
    own = values.detach().clone().numpy()
    if wire == "fp32":
        return values.detach().clone()
    if wire == "bf16":
        return torch.from_numpy(own.astype(ml_dtypes.bfloat16).astype(np.float32))
    amax = float(np.abs(own).max()) if amax is None else amax
    scale = np.float32(2.0 ** np.floor(np.log2(448 / amax)) if amax else 1.0)
    return torch.from_numpy((own * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / scale)


def mean(brought: Sequence[Tensor], wire: str) -> Tensor:
    amax = max(float(one.abs().max()) for one in brought)
    total = torch.zeros_like(brought[0])
    for one in brought:
        total += as_sent(one, wire, amax)
    return (as_sent(total, wire) if wire == "bf16" else total) / len(brought)  # bf16 is added up in bf16


def alone(ranks: int, wire: str, **settings: Any) -> list[Tensor]:
    """The weights as they are sent after all steps."""
    own = parameters()
    optimizer = Optimizer(own, TrainerSettings(**settings))
    for step in range(STEPS):
        optimizer.gradients.begin()
        for one, *parts in zip(own.values(), *(gradients(step, rank) for rank in range(ranks)), strict=True):
            one.grad = mean(parts, wire)
        optimizer.gradients.given()
        with optimizer.weights.present():
            optimizer.step(1e-2, [torch.tensor(1.0)] * 99, torch.tensor(0.0))
    with optimizer.weights.present():
        return [as_sent(one, wire) for one in own.values()]


def owned(
    ranks: int, wire: str, plant: Callable[[ZeroTensors, int], object] = lambda together, rank: None, **settings: Any
) -> list[Learnt]:
    def run(place: Place) -> Learnt:
        handle: Any = place
        together, wholes = ZeroTensors(ThreadedGroup(handle), True, wire), parameters()
        optimizer = Optimizer(together.own(wholes), TrainerSettings(**settings))
        plant(together, place.number)
        place.sent.clear()
        faults: tuple[str, ...] = ()
        for step in range(STEPS):
            with optimizer.weights.present(), together.present(PHASE):
                optimizer.gradients.begin()
                for one, found in zip(wholes.values(), gradients(step, place.number), strict=True):
                    one.grad = found
                together.average(optimizer.gradients, PHASE)
                sent = dict(place.sent)
                optimizer.step(1e-2, [torch.tensor(1.0)] * 99, torch.tensor(0.0))
            place.sent.clear()
        with optimizer.weights.present(), together.present(PHASE):
            faults = together.faults()
            return [one.detach().clone() for one in wholes.values()], faults, sent

    return on_ranks(ranks, run)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_bits_of_one_process_that_rounds_what_travels(ranks: int, wire: str) -> None:
    """And of two ranks each sum is of any order."""
    wanted = alone(ranks, wire)
    for found, faults, _ in owned(ranks, wire):
        assert not faults
        for one, other in zip(found, wanted, strict=True):
            if ranks == 2 or wire == "fp8":
                assert torch.equal(one, other)
            else:
                torch.testing.assert_close(one, other, rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize("settings", [{"master": "fp16-scaled"}, {"optimizer_states": "fp8lm"}, {"updates": "fp8"},
                                      {"optimizer": "adafactor"}, {"gradients": "bf16"},
                                      {"gradients": "fp8", "micro_batches": 4, "parallel": "zero"},
                                      *(dict(level.settings) for level in LEVELS.values())], ids=str)  # fmt: skip
def test_whole_weights_are_kept_and_updated_in_whatever_way_one_process_does(settings: dict[str, Any]) -> None:
    """An owner is given one mean of all micro-batches, and leaves no room for others."""
    wanted = alone(2, "fp8", **settings | {"micro_batches": 1})
    for found, faults, _ in owned(2, "fp8", **settings):
        assert not faults and all(map(torch.equal, found, wanted))


def test_a_rank_sends_a_byte_a_number_and_four_a_scale() -> None:
    """By hand: codes of others' gradients to them, codes of its own weights to each; largest magnitudes and scales."""
    for ranks in (2, 3):
        places = owners(SIZES, ranks)
        own = [sum(size for size, owner in zip(SIZES, places, strict=True) if owner == rank) for rank in range(ranks)]
        most = max(places.count(rank) for rank in range(ranks))
        for rank, (_, _, sent) in enumerate(owned(ranks, "fp8")):
            assert sent["Handed"] == sum(SIZES) - own[rank] + own[rank] * (ranks - 1)
            assert sent["Largest"] == int(4 * ranks * most * 2 * (ranks - 1) / ranks)
            assert sent["AllGather"] == 4 * most * (ranks - 1)


def twice(together: ZeroTensors, rank: int) -> None:
    """What rank 1 sends is by twice the scale that it says."""
    if rank == 1 and together._owned.fp8 is not None:
        own = together._owned.fp8._sent
        together._owned.fp8._sent = lambda program, x, phase: own(program, x * 2, phase)  # type: ignore[method-assign]


def half_read(together: ZeroTensors, rank: int) -> None:
    """It reads the gradients that it owns by another scale."""
    if rank == 1:
        own = together._owned.means
        together._owned.means = lambda some, phase: [one / 2 for one in own(some, phase)]  # type: ignore[method-assign]


def misheard(together: ZeroTensors, rank: int) -> None:
    """One weight of another's comes by a bit otherwise."""
    if rank == 1:
        own = together._owned.put

        def put(kept: Any, wholes: Any, phase: Any) -> None:
            own(kept, wholes, phase)
            wholes[0].view(-1)[0] *= 1.0625

        together._owned.put = put  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("wire", "plant", "ranks", "words"),
    [
        ("fp8", twice, {0}, "a gradient that is not the mean"), ("fp8", twice, {0, 1}, "a weight that is not what"),
        ("fp8", half_read, {1}, "a gradient that is not the mean of what all have brought: "),
        ("bf16", half_read, {1}, "a gradient"), ("fp32", half_read, {1}, "a gradient"),
        ("bf16", misheard, {1}, "has a weight that is not what its owner has sent: embedding"),
        ("fp32", misheard, {1}, "embedding"), ("fp8", misheard, {1}, "embedding"),
    ],
)  # fmt: skip
def test_wrong_scales_and_what_did_not_arrive_are_found(
    wire: str, plant: Callable[[ZeroTensors, int], object], ranks: set[int], words: str
) -> None:
    found = {rank for rank, (_, faults, _) in enumerate(owned(2, wire, plant)) if words in " ".join(faults)}
    assert found >= ranks


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_overflows_on_one_rank_is_not_finite_for_its_owner(
    wire: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4M3 has no infinity: 448 in its place would be an update. It is said of the step, and is no fault."""
    draw = gradients
    monkeypatch.setitem(
        globals(), "gradients",
        lambda step, rank: [one.fill_(value) if rank else one for one in draw(step, rank)],
    )  # fmt: skip
    seen: list[bool] = []

    def look(together: ZeroTensors, rank: int) -> None:
        own = together._owned.means

        def means(some: Any, phase: Any) -> Any:
            found = own(some, phase)
            seen.extend(bool(one.isfinite().any()) for one in found)
            return found

        together._owned.means = means  # type: ignore[method-assign]

    assert not any(faults for _, faults, _ in owned(2, wire, look)) and seen and not any(seen)


def test_each_rank_needs_a_weight() -> None:
    with pytest.raises(UsageError, match=r"--parallel zero: 5 ranks have no weight each, there are 4\. Give fewer"):
        owned(5, "fp8")
