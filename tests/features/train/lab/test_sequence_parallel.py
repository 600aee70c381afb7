"""Ranks that are threads and have tokens of the stream each, against the whole model; mistakes are planted. Real ones
train in test_rank_lab.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8bench.features.train.lab import sequence_parallel
from fp8bench.features.train.lab.optimizer import Gradients
from fp8bench.features.train.lab.sequence_parallel import BF16Group, NotedGroup, SequenceParallel
from fp8bench.features.train.request import WIRES
from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.exchanges import FP8Group, FP8Wire
from fp8bench.nn.parallel.ways import cut_of
from fp8bench.protocols import SilentPhases
from tests.features.train.lab.test_together import CONFIG, model
from tests.nn.parallel.ranks import Place, ThreadedGroup, on_board, on_ranks

PHASE = SilentPhases()


class Threaded(NotedGroup, ThreadedGroup):
    """As the arm computes it."""


class ThreadedBF16(NotedGroup, BF16Group, ThreadedGroup):
    """In 16 bits."""


class ThreadedFP8(NotedGroup, FP8Group):
    """By codes."""


@pytest.fixture(autouse=True)
def _on_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FP8Wire, "_result", lambda wire, program, phase: on_board(wire.group, program))
    kinds = {"fp32": Threaded, "bf16": ThreadedBF16, "fp8": ThreadedFP8}
    monkeypatch.setattr(sequence_parallel, "STREAMS", kinds)


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    drawn = torch.randint(CONFIG.vocabulary, (2, CONFIG.batch, CONFIG.sequence), generator=draw)
    return drawn[0], drawn[1]


def small() -> GPT:
    """Whose attention is not all or nothing, so that rounding changes little."""
    made = model()
    with torch.no_grad():
        for one in made.parameters():
            one.mul_(0.3)
    return made


Plant = Callable[[SequenceParallel, int], object]
Learnt = tuple[float, dict[str, Tensor], tuple[str, ...]]


def cut(wire: str, plant: Plant = lambda together, rank: None) -> list[Learnt]:
    def run(place: Place) -> Learnt:
        handle: Any = place
        together, own = SequenceParallel(ThreadedGroup(handle), CONFIG, True, wire), small()
        together.take(own)
        named = dict(own.named_parameters())
        gradients = Gradients(list(together.own(named).values()))
        plant(together, place.number)
        with together.present(PHASE):
            gradients.begin()
            loss = own(*batch(), PHASE)
            loss.backward()
            together.average(gradients, PHASE)
            return float(loss.detach()), dict(zip(named, gradients.filled(), strict=True)), together.faults()

    return on_ranks(2, run)


@pytest.mark.parametrize(("wire", "near"), [("fp32", 1e-5), ("bf16", 0.03), ("fp8", 0.2)])
def test_loss_and_gradients_are_the_whole_models(wire: str, near: float) -> None:
    """Norms of blocks see a rank's tokens alone, and have sums of gradients; what all have is alike to the bit."""
    whole = small()
    loss = whole(*batch(), PHASE)
    loss.backward()
    ranks = cut(wire)
    for rank, (own, gradients, faults) in enumerate(ranks):
        assert not faults and own == ranks[0][0] == pytest.approx(float(loss.detach()), rel=near / 10)
        for name, parameter in whole.named_parameters():
            assert parameter.grad is not None
            how, wanted = cut_of(name, CONFIG), parameter.grad
            if how is None:
                assert torch.equal(gradients[name], ranks[0][1][name]), name
            else:
                wanted = how.share(wanted, rank, 2)
            assert (gradients[name] - wanted).norm() <= near * wanted.norm(), name


class Forgetful(ThreadedGroup):
    """Of one sum rank 1 has its own part alone, of one that is not noted yet."""

    def own_part(self, parts: Tensor) -> Tensor:
        whole, place = super().own_part(parts), self.handle
        place.sent["sums"] = place.sent.get("sums", 0) + 1
        return parts[1] if self.rank == 1 and place.sent["sums"] == 3 else whole


class NotedForgetful(NotedGroup, Forgetful):
    """And notes what it has got."""


def twice(together: SequenceParallel, rank: int) -> None:
    """What rank 1 sends is by twice the scale that it says."""
    if rank == 1:
        wire: Any = together.stream.wire  # type: ignore[attr-defined]
        own = wire._sent
        wire._sent = lambda program, x, phase: own(program, x * 2, phase)


WORDS = "was given tokens of the stream that are not what all ranks have brought"


def found(ranks: list[Learnt]) -> set[int]:
    return {rank for rank, (_, _, faults) in enumerate(ranks) if WORDS in faults}


def test_a_sum_that_is_not_everybodys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sequence_parallel.STREAMS, "fp32", NotedForgetful)
    assert found(cut("fp32")) == {1}


def test_a_wrong_scale_is_found_by_all_who_get_it() -> None:
    assert found(cut("fp8", twice)) == {0, 1}


def test_each_wire_has_a_stream() -> None:
    assert set(sequence_parallel.STREAMS) == set(WIRES)
