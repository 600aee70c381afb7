"""What steps have spoilt, and what was not finite from the start."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8bench.worker import finite
from fp8bench.worker.finite import FiniteState, Lost
from tests.counts import for_each

State = SimpleNamespace
Step = Callable[[State], Any]


def lost(state: State, step: Step, first: Step = lambda state: None) -> Lost:
    """After an untimed step and two timed ones."""
    known = FiniteState(state)
    first(state)
    known.begin(state)
    for _ in range(2):
        step(state)
    return known.lost(state)


def mask() -> torch.Tensor:
    return torch.full((4, 4), -torch.inf).triu(1)


def test_a_number_that_becomes_nan_is_lost_and_told() -> None:
    found = lost(State(x=torch.ones(3, 4), y=torch.ones(8)), lambda state: state.x[0].fill_(torch.nan))
    assert found[:2] == (4, 20) and found.share == 0.2
    assert str(found) == "its state is not finite: 4 of 20 numbers, the first in a tensor of 3 x 4 (float32)"


SPOILT: dict[str, Step] = {
    "inf": lambda state: state.x.mul_(1e30),
    "-inf": lambda state: state.x.fill_(-torch.inf),
    "made anew": lambda state: setattr(state, "x", state.x * 1e30),
    "wholly -inf": lambda state: setattr(state, "made", torch.log(torch.zeros(3))),
    "a number": lambda state: setattr(state, "loss", torch.tensor(torch.nan)),
    "kept in a list": lambda state: setattr(state, "losses", [torch.tensor(torch.inf)]),
    "beside a mask": lambda state: state.mask.copy_(mask().masked_fill(mask() == 0, torch.nan)),
    "a gradient": lambda state: setattr(state.weight, "grad", torch.full((2,), torch.nan)),
    "e4m3": lambda state: setattr(state, "x8", torch.tensor([torch.nan]).to(torch.float8_e4m3fn)),
    "e5m2": lambda state: setattr(state, "x8", torch.tensor([torch.inf]).to(torch.float8_e5m2)),
    "bfloat16": lambda state: setattr(state, "half", torch.tensor([torch.inf], dtype=torch.bfloat16)),
    "complex": lambda state: setattr(state, "z", torch.tensor([complex(1, torch.inf)])),
}  # fmt: skip


@for_each("how", SPOILT)
def test_what_a_step_spoils_is_found(how: str) -> None:
    weight = torch.ones(2, requires_grad=True)
    assert lost(State(x=torch.full((3, 4), 1e20), mask=mask(), weight=weight), SPOILT[how]).lost > 0


def shift(state: State) -> None:
    state.mask.copy_(state.mask.roll(1, 0))


def lazy(state: State) -> None:
    if not hasattr(state, "made"):
        state.made = torch.full((3,), torch.inf)


HONEST: dict[str, Step] = {
    "nothing": lambda state: None,
    "finite": lambda state: state.x.add_(1),
    "a mask that moves": shift,
    "a mask made in the first step": lazy,
    "a mask made in each step": lambda state: setattr(state, "made", mask()),
    "scores under a mask": lambda state: setattr(state, "scores", torch.ones(4, 4) + state.mask),
    "a buffer that is filled bit by bit": lambda state: state.scratch[:2].fill_(1.0),
    "integers": lambda state: setattr(state, "index", torch.arange(3)),
    "nothing in it": lambda state: setattr(state, "empty", torch.empty(0)),
}  # fmt: skip


@for_each("how", HONEST)
def test_what_was_not_finite_from_the_start_is_an_input(how: str) -> None:
    scratch = torch.full((8,), torch.nan)
    state = State(x=torch.ones(3, 4), mask=mask(), scratch=scratch, x8=scratch.to(torch.float8_e4m3fn))
    assert lost(state, HONEST[how], HONEST[how]).lost == 0


def test_what_there_is_no_time_for_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as finite nor as lost: what nobody saw before the steps is not held against them."""
    state = State(x=torch.ones(3), scratch=torch.full((8,), torch.nan))
    monkeypatch.setattr(finite, "SECONDS", -1.0)
    known = FiniteState(state)
    known.begin(state)
    monkeypatch.setattr(finite, "SECONDS", 0.5)
    state.x.fill_(torch.nan)
    assert known.lost(state) == Lost()


def test_a_state_of_very_many_objects_is_not_walked_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its time, too; the tensors that come first are looked at."""
    monkeypatch.setattr(finite, "SECONDS", 0.02)
    state = State(x=torch.ones(3), many=[(number, [number]) for number in range(300_000)])
    known = FiniteState(state)
    state.x.fill_(torch.nan)
    begun = time.thread_time()
    assert known.lost(state).lost == 3
    assert time.thread_time() - begun < 0.3
