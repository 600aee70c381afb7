"""A rank's share of a model in a training, on threads that are ranks; real ones train in test_rank_lab.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8bench.features.train.lab.together import TensorParallel
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.gpt import GPT
from fp8bench.nn.sizes import GPTConfig
from fp8bench.registry import precisions
from tests.facts import CPU
from tests.nn.parallel.ranks import Place, ThreadedGroup, on_ranks

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


@pytest.mark.parametrize("planted", [False, True])
def test_a_norm_that_counts_what_all_have_twice_is_another(planted: bool) -> None:
    wanted = float(torch.stack([one.detach().norm() for one in model().parameters()]).norm())

    def norm(place: Place) -> float:
        together, own = cut(place)
        if planted:
            together._cut = torch.ones_like(together._cut)
        return float(torch.stack(together.norms([one.detach().norm() for one in own.parameters()])).norm())

    assert all((one == pytest.approx(wanted, rel=1e-6)) is not planted for one in on_ranks(2, norm))
