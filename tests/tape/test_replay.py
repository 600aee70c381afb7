"""One phase of a step done again by itself: bit for bit what the step did, or a reason why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8bench.model import UNATTRIBUTED
from fp8bench.tape.replay import CannotReplay, PhaseReplay, Recording
from tests.counts import for_each
from tests.pretended_device import run_pretended

ROOM = 1 << 20


# Opens a phase of a test's step.
Mark = Callable[[str], AbstractContextManager[None]]
Step = Callable[[Mark], object]


def recorded(step: Step, phase: str = "gemm", most_bytes: int = ROOM, check: bool = True) -> PhaseReplay:
    stack = [UNATTRIBUTED]

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        stack.append(name)
        yield
        stack.pop()

    recording = Recording(phase, stack, most_bytes, check)
    with recording:
        step(mark)
    return recording.replay()


def names(replay: PhaseReplay) -> list[str]:
    return [str(call.operator).removeprefix("aten.").partition(".")[0] for call in replay.calls]


def in_place_between(mark: Mark) -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with mark("gemm"):
        a = x @ y
    with mark("cast"):
        x.mul_(3)
        a.relu_()
    with mark("gemm"):
        b = x @ a
        b[1:].t().add_(x[:, 1:])
        b += a


def views_of_its_own(mark: Mark) -> None:
    x = torch.arange(24.0)
    view = x.view(2, 3, 4).transpose(0, 2)
    with mark("gemm"):
        view[1].add_(1)
        x.cumsum(0)
        torch.as_strided(x, (3, 3), (2, 1), 5).zero_()
        x.sum()


def random_numbers(mark: Mark) -> None:
    own = torch.Generator().manual_seed(3)
    with mark("gemm"):
        torch.nn.functional.dropout(torch.ones(64), 0.5)
    with mark("cast"):
        torch.rand(7)
    with mark("gemm"):
        torch.empty(16).uniform_(generator=own)
        torch.rand(5, generator=own)
        torch.rand(5)


class Doubled(torch.autograd.Function):
    """A function with a custom backward in a separate phase."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Mark) -> Tensor:
        ctx.mark = mark
        ctx.save_for_backward(x)
        with mark("gemm"):
            return x @ x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with ctx.mark("gemm"):
            return gradients[0] @ x.t() + x.t() @ gradients[0], None


def forward_and_backward(mark: Mark) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with mark("elementwise"):
        loss = Doubled.apply(x.sin(), mark).softmax(-1).var()
    with mark("elementwise"):
        loss.backward()


def several_at_once(mark: Mark) -> None:
    weights = [torch.randn(5) for _ in range(3)]
    gradients = [torch.randn(5) for _ in range(3)]
    with mark("gemm"):
        torch._foreach_mul_(weights, 0.5)
        torch._foreach_add_(weights, gradients, alpha=-0.1)
        low, high = torch.aminmax(torch.stack(weights))
        values, places = torch.sort(torch.cat([low[None], high[None], weights[0]]))
        values.index_select(0, places % 3).clamp_(min=0)


STEPS = (in_place_between, views_of_its_own, random_numbers, forward_and_backward, several_at_once)


@for_each("step", STEPS)
def test_a_phase_gives_what_the_step_gave(step: Step) -> None:
    replay = recorded(step)
    state = torch.get_rng_state()
    assert replay.find_replay_difference() == ""
    replay.run(3)
    assert replay.find_replay_difference() == "" and replay.find_lost_values() == ""
    assert torch.equal(torch.get_rng_state(), state) == (step is not random_numbers)  # only run() draws on
    with replay.keep_random_states():
        state = torch.get_rng_state()
        replay.run(2)
    assert torch.equal(torch.get_rng_state(), state)


def test_it_keeps_what_the_step_was_given_and_gives_memory_back() -> None:
    total = torch.zeros(3)

    def adds(mark: Mark) -> None:
        with mark("gemm"):
            total.add_(1.0)

    def chained(mark: Mark) -> None:
        x = torch.ones(4)
        with mark("gemm"):
            x.sin().cos().tan()

    replay = recorded(adds)
    replay.run(4)
    assert total.tolist() == [1.0] * 3 and replay.calls[0].args[0].tolist() == [4.0] * 3
    replay.restore()
    assert replay.calls[0].args[0].tolist() == [0.0] * 3
    replay = recorded(chained)  # as in the step, memory is freed after its last use
    assert [len(call.freed_registers) for call in replay.calls] == [0, 1, 2] and replay.register_count == 3


def test_it_has_the_operators_of_its_phase_alone() -> None:
    def step(mark: Mark) -> None:
        x = torch.ones(2, 2)
        with mark("gemm"):
            x @ x
            with mark("cast"):
                x.double()
            x.sin()
        x.cos()

    assert names(recorded(step)) == ["mm", "sin"]
    assert names(recorded(step, "cast")) == ["_to_copy"]
    assert names(recorded(step, UNATTRIBUTED)) == ["ones", "cos"]


def test_numbers_that_a_replay_spoils_are_reported() -> None:
    def overflowing(mark: Mark) -> None:
        x = torch.ones(4)
        with mark("gemm"):
            x.mul_(1e30)

    replay, lost = recorded(overflowing), []
    for _ in range(2):
        replay.run(1)
        lost.append(replay.find_lost_values())
    assert lost == ["", "after many repetitions its written memory is no longer finite"]


def reads_the_host(mark: Mark) -> None:
    values = np.zeros(4, dtype=np.float32)
    x = torch.from_numpy(values)
    with mark("gemm"):
        x.sin()
        values += 1
        x.cos()


def sparse(mark: Mark) -> None:
    x = torch.eye(3).to_sparse()
    with mark("gemm"):
        torch.mm(x, torch.ones(3, 3))


def moves(mark: Mark) -> None:
    x = torch.ones(4)
    with mark("gemm"):
        x.resize_(6).zero_()


@for_each(
    ("step", "why"),
    [
        (sparse, "which has no plain memory"),
        (moves, "aten.resize_.default gives a tensor different memory"),
        (lambda mark: None, "it calls no operator of torch"),
    ],
)
def test_what_cannot_be_done_again_says_why(step: Step, why: str) -> None:
    with pytest.raises(CannotReplay, match=why):
        recorded(step)
    said = "aten.sin.default (operator 1 of the phase) gives other numbers than in the step"
    assert recorded(reads_the_host).find_replay_difference() == said


def test_no_more_is_kept_than_may_be() -> None:

    def step(mark: Mark) -> None:
        x = torch.ones(1000)
        with mark("gemm"):
            x.sin()
        x.zero_()

    assert recorded(step, most_bytes=8000).bytes == 8000
    with pytest.raises(CannotReplay, match="more than the 7999 bytes that may be kept"):
        recorded(step, most_bytes=7999)


ON_A_DEVICE = """
from fp8bench.model import UNATTRIBUTED
from fp8bench.protocols import Markers, ReportingMarker
from fp8bench.tape import replay as recording
from fp8bench.tape.recorder import OperatorTape

# The pretended device's tensors are a class of their own, and its memory is elsewhere.
known, make = {}, Pretended.__init__
def noted(self, wrapped):
    make(self, wrapped)
    known[self.untyped_storage()._cdata] = self
Pretended.__init__ = noted
recording._explain_refusal = lambda func, inputs: ""
recording._view_storage = lambda spec, storage, device: known[storage._cdata]

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with phases.gemm:
            return x.mul(2)

    @staticmethod
    def backward(ctx, grad):
        elsewhere.append(threading.get_ident() != main)
        with phases.gemm:
            return grad.mul(3)

main, elsewhere, stack = threading.get_ident(), [], [UNATTRIBUTED]
x, ones = Pretended(torch.ones(4)).requires_grad_(), Pretended(torch.ones(4))
phases = Markers(lambda name: ReportingMarker(name, stack, lambda told: None))
with (mode := recording.Recording("gemm", stack, 1 << 30, check=False)):
    grads = torch.autograd.grad(Product.apply(x), x, ones)
replay = mode.replay()
registers = [None] * replay.register_count
print(elsewhere, [call.execute(registers).wrapped.tolist()[0] for call in replay.calls])
phases = (tape := OperatorTape()).phases
with tape:
    grads = torch.autograd.grad(Product.apply(x), x, ones)
print([(one.phase, one.backward) for one in tape.calls])
"""


@pytest.mark.slow
def test_backward_on_a_devices_own_thread_is_recorded_and_replayed() -> None:
    assert run_pretended(ON_A_DEVICE) == ["[True] [2.0, 3.0]", "[('gemm', False), ('gemm', True)]"]
