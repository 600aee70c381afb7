"""Bytes of each operator, by hand: tensors once, views none, what is broadcast as often as it lies in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from fp8bench.formats import operators
from fp8bench.formats.grids import E4M3
from tests.counts import for_each
from tests.tapes import tape_of

WIDE, HALF = torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.bfloat16)
ROW, TABLE, ROWS = torch.zeros(8), torch.zeros(100, 8), torch.tensor([1, 2, 3])
# An operator, what runs it, and the bytes that it reads and writes.
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
    "a product": ("mm", lambda: WIDE @ WIDE.t(), 128, 64),
    "our own quantiser": ("fp8bench::round", lambda: operators.values(HALF, E4M3), 64, 128),
    "many at once": ("_foreach_add_", lambda: torch._foreach_add_([WIDE, ROW], 1.0), 160, 160),
}  # fmt: skip
VIEWS: dict[str, Callable[[], object]] = {
    "turned": WIDE.t,
    "another shape": lambda: WIDE.view(8, 4).reshape(32),
    "spread": lambda: ROW.expand(4, 8),
    "a part": lambda: WIDE[1:, ::2],
    "in pieces": lambda: WIDE.split(2),
    "other bits": lambda: WIDE.view(torch.int32),
    "without a history": WIDE.detach,
    "room for a tensor": lambda: torch.empty(4, 8),
}


@for_each("name", MOVED)
def test_bytes_of_an_operator(name: str) -> None:
    operator, run, read, written = MOVED[name]
    row = [one for one in tape_of(run).operators if one.operator == operator]
    assert sum(one.bytes for one in row) == read + written
    assert [one.launches for one in row] == [1] * len(row)


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


def test_memory_that_nobody_wrote_is_noticed() -> None:
    assert tape_of(lambda: torch.empty(8).fill_(1).sum()).unwritten == 0
    assert tape_of(lambda: torch.empty(8)[2:].copy_(ROW[2:]).sum()).unwritten == 0
    assert tape_of(lambda: torch.empty(8).sum()).unwritten == 1

    def past_torch() -> object:
        made = torch.empty(8)
        made.numpy()[:] = 1
        return made

    assert tape_of(past_torch).unwritten == 1
