"""Ranks that are threads, with equal rows of parameters each, against AdamW over whole ones, or a share of a model;
mistakes are planted. Real ones train in test_rank_lab.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8bench.features.train.lab import together as ranks_together
from fp8bench.features.train.lab.optimizer import Optimizer, joint
from fp8bench.features.train.lab.together import FullySharded, TensorParallel, digest_of
from fp8bench.features.train.request import TrainerSettings
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.gpt import GPT
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import SilentPhases
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU
from tests.nn.parallel.ranks import Place, ThreadedGroup, on_ranks

# Rows that three ranks share equally, and not; fewer than there are ranks.
SHAPES = {"embedding": (24, 16), "norm.weight": (16,), "blocks.0.mlp.up.weight": (31, 8), "head.weight": (2, 5)}
STEPS = 3
PHASE = SilentPhases()
Learnt = tuple[list[float], list[Tensor], tuple[str, ...]]


def ranks_of(place: Place, kind: type[FullySharded], exchanges: type[ThreadedGroup]) -> FullySharded:
    handle: Any = place
    return kind(exchanges(handle), own_amax=True)


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def alone(ranks: int, **settings: Any) -> tuple[list[float], list[Tensor]]:
    """All ranks' gradients, averaged for the whole model."""
    own, norms = parameters(), []
    optimizer = Optimizer(own, TrainerSettings(**settings))
    for step in range(STEPS):
        for one, *parts in zip(own.values(), *(gradients(step, rank) for rank in range(ranks)), strict=True):
            one.grad = torch.stack(parts).sum(0) / ranks
        norms.append(float(joint(optimizer.gradients.norms())))
        with optimizer.weights.present():
            optimizer.step(1e-2, [torch.tensor(1.0)] * 99, torch.tensor(0.0))
        norms += [float(joint(optimizer.update_norms)), float(joint(optimizer.weight_norms))]
    with optimizer.weights.present():
        return norms, [one.detach().clone() for one in own.values()]


def sharded(
    ranks: int,
    kind: type[FullySharded] = FullySharded,
    exchanges: type[ThreadedGroup] = ThreadedGroup,
    **settings: Any,
) -> list[Learnt]:
    def run(place: Place) -> Learnt:
        together, wholes, norms = ranks_of(place, kind, exchanges), parameters(), []
        optimizer = Optimizer(together.own(wholes), TrainerSettings(**settings))
        for step in range(STEPS):
            with optimizer.weights.present(), together.present(PHASE):
                optimizer.gradients.begin()
                for one, found in zip(wholes.values(), gradients(step, place.number), strict=True):
                    one.grad = found
                together.average(optimizer.gradients, PHASE)
                assert all(one.grad is None for one in wholes.values())
                norms.append(float(joint(together.norms(optimizer.gradients.norms()))))
                optimizer.step(1e-2, [torch.tensor(1.0)] * 99, torch.tensor(0.0))
                norms += [
                    float(joint(together.norms(some))) for some in (optimizer.update_norms, optimizer.weight_norms)
                ]
        assert not any(one.untyped_storage().nbytes() for one in wholes.values())
        with optimizer.weights.present(), together.present(PHASE):
            return norms, [one.detach().clone() for one in wholes.values()], together.faults()

    return on_ranks(ranks, run)


@for_each("settings", [{}, {"master": "fp16-scaled"}, {"optimizer_states": "bf16"}], ids=str)
def test_rows_are_updated_as_the_whole_is(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """However few of them travel together; norms are those of all ranks, each row counted once."""
    norms, weights = alone(3, **settings)
    for most in (1 << 22, 100):
        monkeypatch.setattr(ranks_together, "_MOST_SHARDED", most)
        found = sharded(3, **settings)
        for own, one, faults in found:
            assert not faults and own == found[0][0] == pytest.approx(norms, rel=1e-6)
            for after, wanted in zip(one, weights, strict=True):
                torch.testing.assert_close(after, wanted, rtol=1e-6, atol=1e-7)


def test_a_rank_keeps_its_rows_alone() -> None:
    def kept(place: Place) -> dict[str, int]:
        optimizer = Optimizer(ranks_of(place, FullySharded, ThreadedGroup).own(parameters()), TrainerSettings())
        return {name: sum(one.nbytes for one in some) for name, some in optimizer.kept().items()}

    rows = 4 * (8 * 16 + 6 + 11 * 8 + 5)
    for own in on_ranks(3, kept):
        assert own == dict.fromkeys(("weights", "gradients", "first moment", "second moment"), rows) | {"steps": 16}


class Forgets(ThreadedGroup):
    """One rank goes on by its own gradients."""

    def own_part(self, parts: Tensor) -> Tensor:
        whole = super().own_part(parts)
        return parts[1] * self.size if self.rank == 1 else whole


class OfANeighbour(ThreadedGroup):
    """Every rank gets another's rows."""

    def own_part(self, parts: Tensor) -> Tensor:
        return super().own_part(parts.roll(1, 0))


class Undivided(ThreadedGroup):
    """A sum, and no mean."""

    def own_part(self, parts: Tensor) -> Tensor:
        return super().own_part(parts) * self.size


class Misplaces(ThreadedGroup):
    """One rank puts rows together in another order."""

    def all_parts(self, x: Tensor) -> Tensor:
        every = super().all_parts(x)
        return every.roll(1, 0) if self.rank == 2 else every


class Swap(FullySharded):
    """Two ranks keep each other's rows, from the first step on."""

    def own(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        place, self.share = self.share, (0, 2, 1)[self.share]
        try:
            return super().own(parameters)
        finally:
            self.share = place


class CountsTwice(FullySharded):
    """The rows of the head."""

    def norms(self, own: Any) -> list[Tensor]:
        return super().norms([*own[:-1], own[-1] * 2])


@for_each(("kind", "ranks"), [(Forgets, {1}), (OfANeighbour, {0, 1, 2}), (Undivided, {0, 1, 2})], ids=str)
def test_gradients_that_are_no_mean_are_found_by_whom_they_are_given(
    kind: type[ThreadedGroup], ranks: set[int]
) -> None:
    faults_of = [" ".join(faults) for _, _, faults in sharded(3, exchanges=kind)]
    found = {rank for rank, faults in enumerate(faults_of) if "not the mean" in faults}
    assert found == ranks


def test_rows_at_another_place_are_found_and_so_is_a_norm_that_counts_twice() -> None:
    assert [bool(faults) for _, _, faults in sharded(3, exchanges=Misplaces)] == [False, False, True]
    swapped = "finds those of rank 2 in place of the rows of rank 1 in the weights that were put together"
    assert [faults[0] for _, _, faults in sharded(3, Swap)] == [swapped] * 3
    assert sharded(3, CountsTwice)[0][0] != pytest.approx(alone(3)[0], rel=1e-3)


@for_each("value", [float("nan"), float("inf"), 3e38])
def test_what_is_not_finite_is_no_fault(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said of the step; so is what overflows in the sum."""
    draw: Callable[[int, int], list[Tensor]] = gradients
    monkeypatch.setitem(globals(), "gradients", lambda step, rank: [one.fill_(value) for one in draw(step, rank)])
    for norms, _, faults in sharded(3):
        assert not faults and not norms[0] < float("inf")


def test_a_digest_knows_where_a_value_lies() -> None:
    """In a tensor and among several: or a rank with two others' rows swapped says the same as its neighbours."""
    one, other = torch.randn(2, 3, 5)
    digests = [digest_of(some) for some in ((one, other), (other, one), (one.flip(0), other), (one, other.roll(1)))]
    assert len(set(digests)) == 4 and all(0 <= digest < 1 << 63 for digest in digests)


CONFIG = GPTConfig(64, 16, 1, 2, 2, 32, 2, 8)


def model() -> GPT:
    """The same on every rank, whose random state is everybody's."""
    made = GPT(CONFIG, lambda name: PlainArithmetic(torch.float32), torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for one in made.parameters():
            one.copy_(torch.randn(one.shape, generator=generator))
    return made


def cut(place: Place, takes: int | None = None, own_amax: bool = False) -> tuple[TensorParallel, GPT]:
    handle: Any = place
    group = ThreadedGroup(handle)
    together, whole = TensorParallel(group, CONFIG, own_amax), model()
    group.rank = place.number if takes is None else takes
    together.take(whole)
    together.own(dict(whole.named_parameters()))
    return together, whole


def test_layers_keep_their_paths_and_norms_count_everything_once() -> None:
    """Those of several figures of all parameters, too, one behind the other."""
    whole = {name: one.detach().norm() for name, one in model().named_parameters()}

    def norms(place: Place) -> tuple[list[str], list[Tensor], int]:
        together, own = cut(place)
        parameters = dict(own.named_parameters())
        found = [one.detach().norm() for one in parameters.values()]
        return list(parameters), together.norms([*found, *found]), len(together.common(parameters))

    for names, found, common in on_ranks(2, norms):
        assert names == list(whole) and common == len(names) - 4
        torch.testing.assert_close(torch.stack(found), torch.stack([*whole.values()] * 2))


def test_shares_that_are_not_the_whole_are_found() -> None:
    def faults(place: Place, takes: int | None) -> tuple[str, ...]:
        return cut(place, takes)[0].faults()

    assert on_ranks(2, lambda place: faults(place, None)) == [(), ()]
    assert all("does not make it whole" in one for (one,) in on_ranks(2, lambda place: faults(place, 0)))


def test_scales_are_shared_of_what_is_cut_and_of_nothing_else() -> None:
    """And of nothing where each rank has its own. NaN is no largest magnitude."""

    def scales(place: Place) -> tuple[list[bool], list[float]]:
        together, _ = cut(place)
        arithmetic = precisions.get("fp8").arithmetic(CPU)
        found = {name: together.scaled(name, arithmetic) for name in ("blocks.0.attn.qkv", "blocks.0.mlp.down", "head")}
        same = [one is arithmetic for one in found.values()]
        same.append(cut(place, own_amax=True)[0].scaled("blocks.0.attn.qkv", arithmetic) is arithmetic)
        own = torch.tensor([1.0, float("nan")][place.number])
        return same, [float(together._over_ranks(torch.tensor(1.0 + place.number))), float(together._over_ranks(own))]

    for found in on_ranks(2, scales):
        assert found == ([False, False, True, True], [2.0, float("inf")])


@for_each("planted", [False, True])
def test_a_norm_that_counts_what_all_have_twice_is_another(planted: bool) -> None:
    wanted = float(torch.stack([one.detach().norm() for one in model().parameters()]).norm())

    def norm(place: Place) -> float:
        together, own = cut(place)
        if planted:
            together._cut = torch.ones_like(together._cut)
        return float(torch.stack(together.norms([one.detach().norm() for one in own.parameters()])).norm())

    assert all((one == pytest.approx(wanted, rel=1e-6)) is not planted for one in on_ranks(2, norm))
