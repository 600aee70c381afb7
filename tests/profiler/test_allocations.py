"""Allocations and releases: a hand-made peak, and the events of torch's profiler."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8bench.model import HeldBlock, MemoryRole
from fp8bench.profiler import allocations as stream_module
from fp8bench.profiler.allocations import (
    AllocationStream,
    Event,
    LiveAllocationAddresses,
    MemoryChange,
    MemoryRoleNote,
    PhaseStart,
    find_memory_course,
)
from tests.counts import for_each

START = PhaseStart("unattributed")


def changes(*pairs: tuple[int, int] | None) -> list[Event]:
    """Changes by address and size; None begins the stretch."""
    return [START if pair is None else MemoryChange(*pair) for pair in pairs]


@for_each(
    ("events", "peak"),
    [
        (changes(), None),
        (changes((1, 5), (1, -5)), None),
        (changes(None), 0),
        (changes((1, 5), (1, -5), None, (1, 3)), 3),
        (changes((1, 5), None, (2, 7), (2, -7), (3, 3)), 12),
        (changes((1, 5), None, (9, -4), (2, 3)), 8),  # an unknown address, allocated earlier
        (changes((1, 5), None, (1, 6), (2, 1)), 7),  # the first release was reported on a second thread
        (changes(None, (1, 5), (2, 2), (1, -5), (1, 9)), 11),
    ],
)
def test_the_most_held_at_once_from_the_first_turn_on(events: list[Event], peak: int | None) -> None:
    found = find_memory_course(events)
    assert (None if found is None else found.peak) == peak
    assert found is None or sum(stretch.size for stretch in found.held) == peak


def test_what_is_held_when_backward_begins() -> None:
    before = [MemoryChange(7, 70), MemoryChange(8, 80, 1), MemoryChange(8, -80, 1)]
    forward = [START, MemoryChange(1, 10), MemoryChange(2, 20), MemoryChange(2, -20), MemoryChange(3, 30)]
    backward = [
        MemoryChange(4, 40, 2),
        MemoryChange(3, -30, 2),
        MemoryChange(1, -10, 3),
        MemoryChange(9, 900),
        MemoryChange(9, -900),
    ]
    found = find_memory_course([*before, *forward, *backward])
    assert found is not None and {stretch.address: stretch.size for stretch in found.forward} == {7: 70, 1: 10, 3: 30}
    assert found.peak == 1010 and {stretch.address for stretch in found.held} == {7, 4, 9}
    none = find_memory_course([*before, *forward])
    assert none is not None and none.forward == ()


def held(*events: Event) -> dict[int, HeldBlock]:
    """Bytes held at the peak, by address; a large block at address 0 sets the peak."""
    found = find_memory_course(events)
    assert found is not None
    return {stretch.address: stretch for stretch in found.held if stretch.address}


def test_when_a_block_came_and_went() -> None:
    found = held(
        MemoryChange(1, 1),
        PhaseStart("elementwise"),
        MemoryChange(2, 1),
        MemoryChange(3, 1),
        MemoryChange(4, 1),
        PhaseStart("gemm"),
        PhaseStart("elementwise"),
        MemoryChange(5, 1),
        MemoryChange(6, 1),
        MemoryChange(0, 1000),
        MemoryChange(0, -1000),
        MemoryChange(3, -1),
        MemoryChange(6, -1),
        MemoryChange(7, 1, node=1),
        MemoryChange(2, -1, node=1),
        MemoryChange(7, -1, node=2),
        MemoryChange(5, -1, node=2),
    )
    assert found == {
        1: HeldBlock(1, 1, lasting=True),
        2: HeldBlock(2, 1, "elementwise", awaited=True),
        3: HeldBlock(3, 1, "elementwise"),
        4: HeldBlock(4, 1, "elementwise", awaited=True, lasting=True),
        5: HeldBlock(5, 1, "elementwise", awaited=True),
        6: HeldBlock(6, 1, "elementwise", brief=True),
    }


def test_backward_has_nodes_where_forward_has_pieces() -> None:
    found = held(
        PhaseStart("elementwise"),
        MemoryChange(1, 1),
        MemoryChange(2, 1, node=1),
        MemoryChange(3, 1, node=1),
        MemoryChange(4, 1),
        MemoryChange(0, 1000, node=2),
        MemoryChange(0, -1000, node=2),
        MemoryChange(2, -1, node=2),
        MemoryChange(3, -1, node=1),
    )
    assert (found[2].backward, found[2].brief, found[2].awaited) == (True, False, False)
    assert (found[3].backward, found[3].brief) == (True, True)
    assert found[1].awaited and found[4].awaited and not found[4].backward


def test_what_the_allocator_no_longer_has_is_gone() -> None:
    events: list[Event] = [
        MemoryChange(1, 100),
        MemoryChange(2, 50),
        LiveAllocationAddresses(frozenset({2, 9})),
        PhaseStart("gemm"),
        MemoryChange(1, 30),
    ]
    found = find_memory_course(events)
    assert found is not None and found.peak == 80
    assert [(stretch.address, stretch.size) for stretch in found.held] == [(2, 50), (1, 30)]


def test_words_are_about_what_lies_there_when_they_are_said() -> None:
    low = MemoryRole.LOW_WEIGHTS
    weights = MemoryRole.WEIGHTS
    found = held(
        MemoryRoleNote((1,), weights),
        MemoryChange(1, 1),
        START,
        MemoryChange(2, 1),
        MemoryRoleNote((1, 2, 9), low),
        MemoryChange(2, -1),
        MemoryChange(2, 1),
        MemoryChange(3, 1),
        MemoryRoleNote((3,), weights),
        MemoryRoleNote((3,), low),
        MemoryRoleNote((3,), weights),
        MemoryChange(0, 1000),
    )
    assert found[1].said == (low,) and found[2].said == () and found[3].said == (weights, low)


def test_any_stream_comes_to_what_a_plain_count_says() -> None:
    draw = random.Random(7)
    events: list[Event] = [START]
    alive: dict[int, int] = {}
    most: dict[int, int] = {}
    for _ in range(10_000):
        address = draw.randrange(1, 200)
        if address in alive:
            events.append(MemoryChange(address, -alive.pop(address), draw.choice((0, 0, 3))))
        else:
            alive[address] = draw.randrange(1, 1000)
            events.append(MemoryChange(address, alive[address], draw.choice((0, 0, 4))))
        if draw.random() < 0.2:
            events.append(PhaseStart(draw.choice(("gemm", "cast"))))
        if sum(alive.values()) > sum(most.values()):
            most = dict(alive)
    found = find_memory_course(events)
    assert found is not None and found.peak == sum(most.values()) == max(phase.allocated for phase in found.phases)
    assert {stretch.address: stretch.size for stretch in found.held} == most


def heard(stream: AllocationStream) -> list[Event]:
    events = stream.stop()
    assert events is not None and not torch.autograd._profiler_enabled()
    return events


def test_words_stand_where_they_were_said() -> None:
    stream = AllocationStream("cpu")
    stream.note(PhaseStart("before anybody listens"))
    stream.start()
    first = torch.empty(10)
    stream.note(PhaseStart("gemm"))
    second = torch.empty(20)
    stream.note(MemoryRoleNote((second.data_ptr(),), MemoryRole.WEIGHTS))
    del first
    events = heard(stream)
    assert [one.size if isinstance(one, MemoryChange) else one for one in events] == [
        40,
        PhaseStart("gemm"),
        80,
        MemoryRoleNote((second.data_ptr(),), MemoryRole.WEIGHTS),
        -40,
    ]
    assert stream.stop() is None


def test_of_another_device_nothing_is_heard() -> None:
    stream = AllocationStream("cuda:1")
    stream.start()
    kept = torch.empty(10)
    stream.note(PhaseStart("gemm"))
    assert heard(stream) == [PhaseStart("gemm")] and kept.numel() == 10


def test_allocations_outside_of_operations_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    told = stream_module._iterate_changes_and_notes
    monkeypatch.setattr(
        stream_module, "_iterate_changes_and_notes", lambda tree: told([one for one in tree if one.name != "[memory]"])
    )
    stream = AllocationStream("cpu")
    stream.start()
    kept = torch.empty(10)
    del kept
    assert [one.size for one in heard(stream) if isinstance(one, MemoryChange)] == [40, -40]


def test_backward_runs_where_all_of_it_is_heard() -> None:
    """A regression: the profiler missed what autograd's GPU thread frees after a node, so memory roles were lost."""
    threads = torch._C._is_multithreading_enabled
    stream = AllocationStream("cpu")
    stream.start()
    assert not threads()
    heard(stream)
    assert threads()
    stream.start(alone=False)
    assert threads()
    stream.keep_backward_in_thread()
    assert not threads()
    heard(stream)
    assert threads()


class Doubled(torch.autograd.Function):
    """A function of somebody's own: tensors of 1111 values forward, of 2222 backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.empty(1111)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        torch.empty(2222)
        return 2 * gradients[0]


def passes_of(events: list[Event], values: int) -> list[bool]:
    return [one.node > 0 for one in events if isinstance(one, MemoryChange) and one.size == 4 * values]


def test_backward_is_distinguished_from_forward_and_recomputation() -> None:
    x = torch.empty(333, requires_grad=True)
    block = lambda x: Doubled.apply(x).exp()  # type: ignore[no-untyped-call]  # noqa: E731
    for again in (False, True):
        stream = AllocationStream("cpu")
        stream.start()
        (checkpoint(block, x, use_reentrant=False) if again else block(x)).sum().backward()  # type: ignore[no-untyped-call]
        events = heard(stream)
        assert passes_of(events, 1111) == [False] * (1 + again) and passes_of(events, 2222) == [True]
        assert again or (passes_of(events, 333)[:2] == [False, False] and all(passes_of(events, 333)[2:]))
