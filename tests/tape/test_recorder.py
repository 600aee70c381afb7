"""A step on a tape: phases, directions, operators inside nested tensor classes; and their bytes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from fp8bench.formats import operators
from fp8bench.formats.grids import E4M3
from fp8bench.protocols import Phases
from fp8bench.tape import timed_calls
from fp8bench.tape.recorder import OperatorTape
from tests.counts import for_each
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
    result = [
        (one.phase, one.operator, one.backward) for one in tape.operators if one.operator in ("mul", "exp", "sum")
    ]
    assert result == [
        ("gemm", "mul", False),
        ("elementwise", "exp", False),
        ("accumulate", "sum", False),
        ("accumulate", "mul", True),
        ("cast", "mul", True),
    ]
    assert [phase.phase for phase in tape.phases] == ["cast", "gemm", "accumulate", "elementwise"]


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


WIDE, HALF = torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.bfloat16)
ROW, TABLE, ROWS = torch.zeros(8), torch.zeros(100, 8), torch.tensor([1, 2, 3])
PAIR = torch.arange(32).view(4, 8) < 2
# An operator, a call that runs it, and its bytes read and written.
MOVED: dict[str, tuple[str, Callable[[], object], int, int]] = {
    "two tensors": ("add", lambda: WIDE + WIDE.clone(), 256, 128),
    "one tensor twice": ("mul", lambda: WIDE * WIDE, 128, 128),
    "a row for all": ("add", lambda: WIDE + ROW, 128 + 32, 128),
    "a row that was spread": ("mul", lambda: WIDE * ROW.expand(4, 8), 128 + 32, 128),
    "windows that overlap": ("clone", lambda: torch.zeros(10).unfold(0, 4, 1).clone(), 40, 112),
    "in place": ("add_", lambda: WIDE.add_(1), 128, 128),
    "over what was there": ("copy_", lambda: WIDE.copy_(HALF), 64, 128),
    "nothing read": ("fill_", lambda: WIDE.fill_(1), 0, 128),
    "a cast": ("_to_copy", WIDE.bfloat16, 128, 64),
    "into memory given": ("sum", lambda: torch.sum(WIDE, 0, out=torch.empty(8)), 128, 32),
    "rows of a table": ("embedding", lambda: F.embedding(ROWS, TABLE), 96 + 24, 96),
    "rows by index": ("index", lambda: TABLE[ROWS], 96 + 24, 96),
    "rows put": ("index_put_", lambda: TABLE.index_put_((ROWS,), torch.ones(3, 8)), 24 + 96, 96),
    "rows added": (
        "index_put_", lambda: TABLE.index_put_((ROWS,), torch.ones(3, 8), accumulate=True), 24 + 96 + 96, 96,
    ),
    "rows copied": ("index_copy_", lambda: TABLE.index_copy_(0, ROWS, torch.ones(3, 8)), 24 + 96, 96),
    "rows filled": ("index_fill_", lambda: TABLE.index_fill_(0, ROWS, 1.0), 24, 96),
    "a number for rows": ("index_put_", lambda: TABLE.index_put_((ROWS,), torch.ones(())), 24 + 4, 96),
    "a number by mask": ("index_put_", lambda: WIDE.index_put_((WIDE > 1,), torch.ones(())), 32 + 4, 128),
    "numbers by mask": ("index_put_", lambda: WIDE.index_put_((PAIR,), torch.ones(2)), 32 + 8, 8),
    "a number for places": ("scatter_", lambda: TABLE.scatter_(0, ROWS[:, None], 1.0), 24, 12),
    "numbers for places": ("scatter_", lambda: TABLE.scatter_(0, ROWS[:, None], torch.ones(3, 1)), 24 + 12, 12),
    "rows in a bag": (
        "_embedding_bag_forward_only", lambda: F.embedding_bag(ROWS, TABLE, ROWS[:1] - 1, mode="sum"), 96 + 24 + 8,
        32 + 8 + 8,
    ),
    "a product that nothing is added to": (
        "addmm", lambda: torch.addmm(torch.empty(4, 4), WIDE, WIDE.t(), beta=0), 128, 64,
    ),
    "a product": ("mm", lambda: WIDE @ WIDE.t(), 128, 64),
    "our own quantiser": ("fp8bench::round", lambda: operators.values(HALF, E4M3), 64, 128),
    "many at once": ("_foreach_add_", lambda: torch._foreach_add_([WIDE, ROW], 1.0), 160, 160),
}  # fmt: skip
VIEWS: dict[str, Callable[[], object]] = {
    "turned": WIDE.t,
    "another shape": lambda: WIDE.view(8, 4).reshape(32),
    "spread": lambda: ROW.expand(4, 8),
    "a part": lambda: WIDE[1:, ::2],
    "another shape, in place": lambda: WIDE.view(1, 4, 8).squeeze_(0).unsqueeze_(0),
    "in pieces": lambda: WIDE.split(2),
    "other bits": lambda: WIDE.view(torch.int32),
    "without a history": WIDE.detach,
    "room for a tensor": lambda: torch.empty(4, 8),
}


@for_each("name", MOVED)
def test_bytes_of_an_operator(name: str) -> None:
    operator, run, read, written = MOVED[name]
    row = [one for one in tape_of(run).operators if one.operator == operator]
    assert sum(operator.bytes for operator in row) == read + written
    assert [operator.launches for operator in row] == [1] * len(row)


@for_each("name", VIEWS)
def test_views_move_nothing_and_are_not_kept(name: str) -> None:
    tape = tape_of(VIEWS[name])
    assert not tape.operators and not tape.phases


def test_sums_are_those_of_the_rows_by_phase_and_by_dtype() -> None:
    tape = tape_of(lambda: (HALF @ HALF.t()).float() + 1)
    (phase,) = tape.phases
    assert phase.by_dtype == (("bf16", 64 + 32 + 32), ("fp32", 64 + 64 + 64)) and phase.launches == tape.launches == 3
    assert phase.bytes == sum(dict(phase.by_dtype).values()) == tape.bytes
    assert phase.by_path == (("bf16", 2 * 4 * 4 * 8),) and tape.by_path == {"bf16": 256}


def test_unwritten_memory_is_noticed() -> None:
    assert tape_of(lambda: torch.empty(8).fill_(1).sum()).unwritten == 0
    assert tape_of(lambda: torch.empty(8)[2:].copy_(ROW[2:]).sum()).unwritten == 0
    assert tape_of(lambda: torch.empty(8).sum()).unwritten == 1
    assert tape_of(lambda: torch.addmm(torch.empty(4, 4), WIDE, WIDE.t(), beta=0)).unwritten == 0
    assert tape_of(lambda: torch.addmm(torch.empty(4, 4), WIDE, WIDE.t())).unwritten == 1

    def past_torch() -> object:
        made = torch.empty(8)
        made.numpy()[:] = 1
        return made

    assert tape_of(past_torch).unwritten == 1


@for_each("operator", ["copy_", "copy", "_copy_from"])
def test_a_copy_reads_its_source_wherever_it_stands(operator: str) -> None:
    source, target = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    args = (source, target) if operator == "_copy_from" else (target, source)
    func = getattr(torch.ops.aten, operator).default
    assert timed_calls._find_source_dtype(func, args) is torch.bfloat16
    assert timed_calls._find_source_dtype(torch.ops.aten._to_copy.default, (source,)) is torch.bfloat16
