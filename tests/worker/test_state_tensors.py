"""A state's tensors with their roles; values that steps have spoilt, and those not finite from the start."""

from __future__ import annotations

import itertools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8bench.model import MemoryRole
from fp8bench.worker import finite
from fp8bench.worker import state_tensors as module
from fp8bench.worker.finite import InitialFiniteElements, LostFiniteElements
from fp8bench.worker.state_tensors import iterate_tensors, state_tensors
from tests.counts import for_each


def role(found: Any, tensor: Tensor) -> object:
    """The role of a tensor, 'unheld' if the state does not hold it."""
    return found.get(tensor.untyped_storage().data_ptr(), "unheld")


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("kept",)

    def __init__(self, kept: object) -> None:
        self.kept = kept


def generating(tensor: Tensor) -> Iterator[Tensor]:
    while True:
        yield tensor


def started(tensor: Tensor) -> Iterator[Tensor]:
    generator = generating(tensor)
    next(generator)
    return generator


@for_each(
    "wrap",
    [
        lambda x: x,
        lambda x: [x],
        lambda x: {"a": (1, {"b": x})},
        lambda x: {x},
        lambda x: deque([x]),
        lambda x: types.SimpleNamespace(deep=[[[x]]]),
        Slotted,
        lambda x: lambda: x,
        lambda x: partial(max, x),
        lambda x: Slotted(x).__getattribute__,
        lambda x: x.clone,
        lambda x: itertools.cycle([x]),
        started,
        lambda x: (x for _ in [0]),
        lambda x: x[1:].view(-1, 1),
        lambda x: lambda y=x: y,
    ],
)
def test_a_tensor_is_found_wherever_it_is_held(wrap: Callable[[Tensor], object]) -> None:
    x = torch.empty(10)
    found = state_tensors(wrap(x))
    assert role(found, x) is None and len(found) == 1


def test_a_state_that_holds_itself_ends_and_looking_keeps_nothing_alive() -> None:
    state: list[Any] = [torch.empty(0), torch.empty(3, device="meta"), torch.eye(3).to_sparse()]
    state.append(state)
    assert state_tensors(state) == {}
    x = torch.empty(3)
    seen = weakref.ref(x)
    held = state_tensors([x])
    del x
    assert seen() is None and len(held) == 1


def test_what_modules_and_optimisers_hold_is_known() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(5, 3)
    model(x).sum().backward()
    optimizer.step()
    found = state_tensors({"model": model, "optimizer": optimizer, "x": x})
    for weight in model.parameters():
        assert role(found, weight) is MemoryRole.WEIGHTS
        assert weight.grad is not None and role(found, weight.grad) is MemoryRole.GRADIENTS
        moments = optimizer.state[weight]
        assert role(found, moments["exp_avg"]) is role(found, moments["exp_avg_sq"]) is MemoryRole.OPTIMIZER
    assert role(found, model[1].running_mean) is None and role(found, x) is None
    assert role(state_tensors(optimizer), model[0].weight) is MemoryRole.WEIGHTS
    trained = torch.empty(3, requires_grad=True)  # outside any module; tensors computed from it do not count
    computed = trained * 2
    found = state_tensors((trained, computed))
    assert role(found, trained) is MemoryRole.WEIGHTS and role(found, computed) is None


@dataclass
class Holder:
    """A state that declares its tensors."""

    said: Any
    more: list[object] = field(default_factory=list)

    def memory_roles(self) -> Any:
        return self.said


def test_a_states_own_words_go_before_all_else_and_outer_ones_before_inner() -> None:
    x = torch.empty(3, requires_grad=True)
    y = torch.empty(3)
    z = torch.empty(3)
    x.grad = torch.empty(3)
    inner = Holder({MemoryRole.OPTIMIZER: [x, y], MemoryRole.DATA: z})
    found = state_tensors(Holder({MemoryRole.ACTIVATIONS: {"x": x}}, [inner, x]))
    assert role(found, x) is MemoryRole.ACTIVATIONS and role(found, x.grad) is MemoryRole.GRADIENTS
    assert role(found, y) is MemoryRole.OPTIMIZER and role(found, z) is MemoryRole.DATA


def test_of_a_tensor_that_is_spread_over_ranks_what_lies_here_is_found() -> None:
    """DTensor lists its device mesh among the wrapped parts."""

    class Spread(torch.nn.Parameter):
        def __tensor_flatten__(self) -> tuple[list[str], object]:
            return ["here", "mesh"], None

    inner = torch.ones(3)
    spread = Spread(torch.ones(1))
    vars(spread).update(here=inner, mesh=object())
    assert [tensor is inner for tensor in iterate_tensors([spread])] == [True]


State = SimpleNamespace
Step = Callable[[State], Any]


def lost(state: State, step: Step, first: Step = lambda state: None) -> LostFiniteElements:
    known = InitialFiniteElements(state)
    first(state)
    known.begin(state)
    for _ in range(2):
        step(state)
    return known.find_lost_numbers(state)


def mask() -> torch.Tensor:
    return torch.full((4, 4), -torch.inf).triu(1)


def test_a_number_that_becomes_nan_is_lost_and_located() -> None:
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
    assert lost(State(x=torch.full((3, 4), 1e20), mask=mask(), weight=weight), SPOILT[how]).nonfinite_count > 0


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
    assert lost(state, HONEST[how], HONEST[how]).nonfinite_count == 0


def test_what_there_is_no_time_for_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as finite nor as lost: tensors unchecked before the steps do not count."""
    state = State(x=torch.ones(3), scratch=torch.full((8,), torch.nan))
    monkeypatch.setattr(finite, "READ_SECONDS", -1.0)
    known = InitialFiniteElements(state)
    known.begin(state)
    monkeypatch.setattr(finite, "READ_SECONDS", 0.5)
    state.x.fill_(torch.nan)
    assert known.find_lost_numbers(state) == LostFiniteElements()


def test_a_state_of_very_many_objects_is_not_walked_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()
    clock = SimpleNamespace(thread_time=lambda: 1e-4 * next(looks))
    monkeypatch.setattr(finite, "READ_SECONDS", 0.02)
    monkeypatch.setattr(finite, "time", clock)
    monkeypatch.setattr(module, "time", clock)
    state = State(x=torch.ones(3), many=[(number, [number]) for number in range(10_000)])
    known = InitialFiniteElements(state)
    state.x.fill_(torch.nan)
    before = next(looks)
    assert known.find_lost_numbers(state).nonfinite_count == 3 and next(looks) - before < 250
