"""What a tape sees of a step: phases, directions, operators without gradients, and inside tensors around tensors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from fp8bench.protocols import Phases
from fp8bench.tape.recorder import OperatorTape
from tests.tapes import only, tape_in_phases, tape_of


class Doubled(torch.autograd.Function):
    """Marks its own backward, as layers of ours do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, phase: Phases) -> Tensor:
        ctx.phase = phase
        with phase.gemm:
            return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        with ctx.phase.cast:
            return gradients[0] * 2, None


def test_operators_have_the_innermost_phase_and_their_direction() -> None:
    x = torch.ones(4, requires_grad=True)

    def step(phase: Phases) -> None:
        with phase.elementwise:
            y = Doubled.apply(x, phase).exp()
        with phase.accumulate:
            y.sum().backward()

    tape = tape_in_phases(step)
    found = [(one.phase, one.operator, one.backward) for one in tape.operators if one.operator in ("mul", "exp", "sum")]
    assert found == [
        ("gemm", "mul", False), ("elementwise", "exp", False), ("accumulate", "sum", False),
        ("accumulate", "mul", True), ("cast", "mul", True),
    ]  # fmt: skip
    assert [one.phase for one in tape.phases] == ["cast", "gemm", "accumulate", "elementwise"]


def test_equal_calls_are_one_row_and_no_tensor_is_kept_alive() -> None:
    row = only(tape_of(lambda: [torch.ones(3).exp() for _ in range(4)]), "exp")
    assert (row.calls, row.inputs, row.outputs) == (4, ("fp32[3]",), ("fp32[3]",))
    mode = OperatorTape()
    with mode:
        x = torch.ones(8)
        y = x.exp()
        gone = weakref.ref(y)
        del y
    gc.collect()
    assert gone() is None and len(mode.calls) == 2


def test_without_gradients_the_same_operators_arrive() -> None:
    """Under inference mode they come whole, and are taken apart."""
    x, w, q = torch.ones(2, 3, 4), torch.ones(5, 4), torch.ones(1, 2, 8, 4)

    def step() -> None:
        F.linear(x, w)
        F.scaled_dot_product_attention(q, q, q)

    with torch.inference_mode():
        tape = tape_of(step)
    assert tape.operators == tape_of(step).operators and tape.flops == 2 * 6 * 4 * 5 + 2 * 2 * 2 * 8 * 8 * 4


class Wrapped(torch.Tensor):
    """A tensor around another one, as those of torchao are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = tree_map(lambda one: one.inner.to(torch.float32) if isinstance(one, Wrapped) else one, args)
        return func(*inside, **(kwargs or {}))


def test_of_a_tensor_around_others_the_operators_inside_are_seen() -> None:
    tape = tape_of(lambda: torch.mm(Wrapped(torch.ones(4, 8, dtype=torch.bfloat16)), torch.ones(8, 2)))
    assert only(tape, "mm").inputs == ("fp32[4,8]", "fp32[8,2]") and only(tape, "_to_copy").inputs == ("bf16[4,8]",)
