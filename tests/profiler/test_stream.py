"""What torch's profiler tells of allocations: whose they are in time, forward, backward or computed again."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8bench.model import MemoryRole
from fp8bench.profiler import allocations as stream_module
from fp8bench.profiler.allocations import AllocationStream, Begun, Event, Said, Sized


def heard(stream: AllocationStream) -> list[Event]:
    """What was heard, which is something."""
    events = stream.stop()
    assert events is not None and not torch.autograd._profiler_enabled()
    return events


def test_words_stand_where_they_were_said() -> None:
    stream = AllocationStream("cpu")
    stream.note(Begun("before anybody listens"))
    stream.start()
    first = torch.empty(10)
    stream.note(Begun("gemm"))
    second = torch.empty(20)
    stream.note(Said((second.data_ptr(),), MemoryRole.WEIGHTS))
    del first
    events = heard(stream)
    assert [one.size if isinstance(one, Sized) else one for one in events] == [
        40, Begun("gemm"), 80, Said((second.data_ptr(),), MemoryRole.WEIGHTS), -40,
    ]  # fmt: skip
    assert stream.stop() is None


def test_of_another_device_nothing_is_heard() -> None:
    stream = AllocationStream("cuda:1")
    stream.start()
    kept = torch.empty(10)
    stream.note(Begun("gemm"))
    assert heard(stream) == [Begun("gemm")] and kept.numel() == 10


def test_what_lies_in_no_operation_is_heard_of_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does with a GPU's allocations, those without an event around them are left out here."""
    told = stream_module._told
    monkeypatch.setattr(stream_module, "_told", lambda tree: told([one for one in tree if one.name != "[memory]"]))
    stream = AllocationStream("cpu")
    stream.start()
    kept = torch.empty(10)
    del kept
    assert [one.size for one in heard(stream) if isinstance(one, Sized)] == [40, -40]


def test_backward_runs_where_all_of_it_is_heard() -> None:
    """Autograd's own thread for a GPU gives back what a node was handed after that, where the profiler hears nothing.

    Half of some layers had no roles of memory for that, under a CUDA runtime that computes nothing.
    """
    threads = torch._C._is_multithreading_enabled
    stream = AllocationStream("cpu")
    stream.start()
    assert not threads()
    heard(stream)
    assert threads()
    stream.start(alone=False)
    assert threads()
    stream.alone()
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
    """Of allocations of so many fp32 values: whether each was made by a backward pass."""
    return [one.node > 0 for one in events if isinstance(one, Sized) and one.size == 4 * values]


def test_backward_is_told_from_forward_and_from_what_is_computed_again() -> None:
    """By torch's own operations and by a function of somebody's own; of a block that keeps its input only."""
    x = torch.empty(333, requires_grad=True)
    block = lambda x: Doubled.apply(x).exp()  # type: ignore[no-untyped-call]  # noqa: E731
    for again in (False, True):
        stream = AllocationStream("cpu")
        stream.start()
        (checkpoint(block, x, use_reentrant=False) if again else block(x)).sum().backward()  # type: ignore[no-untyped-call]
        events = heard(stream)
        assert passes_of(events, 1111) == [False] * (1 + again) and passes_of(events, 2222) == [True]
        assert again or (passes_of(events, 333)[:2] == [False, False] and all(passes_of(events, 333)[2:]))


def test_a_thread_of_pythons_is_not_heard_and_nothing_breaks() -> None:
    stream = AllocationStream("cpu")

    def work() -> None:
        stream.note(Begun("cast"))
        torch.empty(77)

    stream.start()
    stream.note(Begun("gemm"))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.empty(10)
    assert [one.size if isinstance(one, Sized) else one for one in heard(stream)] == [Begun("gemm"), 40, -40]
