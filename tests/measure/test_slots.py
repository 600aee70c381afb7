"""How many calls a slot has, how long the device waits ahead of them, and the cells that a step is cut into."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fp8bench.measure.slots import (
    MAX_BLOCKS,
    MAX_COLD_CALLS,
    MAX_FILLING_SECONDS,
    MIN_BLOCK_NS,
    SlotShape,
    choose_slot_filling,
    choose_timing_slot_shape,
    cut_step_into_cells,
    make_phase_segmentation,
)
from fp8bench.model import CELL_PHASES
from tests.counts import for_each
from tests.fakes import CAST, GEMM, UNATTRIBUTED

seconds = st.floats(1e-7, 1e3)


@for_each(
    ("step", "cache", "queues", "shape"),
    [
        *((step, "hot", False, SlotShape(calls, 1)) for step, calls in ((1e-7, 80_000), (1e-6, 8_000), (3e-3, 3))),
        (3.999999e-3, "hot", False, SlotShape(2, 1)),
        *((step, "hot", False, SlotShape(1, 0)) for step in (4e-3, 30e-3, 9.0)),
        *(
            (step, "hot", True, SlotShape(3, discard, choose_slot_filling(1e-5, 3)))
            for step, discard in ((3.9e-3, 1), (9.0, 0))
        ),
        (1e-3, "rotating", False, SlotShape(8, 1)),
        (1e-3, "cold", False, SlotShape(MAX_COLD_CALLS, 1)),
        (30e-3, "cold", False, SlotShape(1, 0)),
        (
            1e-3,
            "cold",
            True,
            SlotShape(MAX_COLD_CALLS, 1, choose_slot_filling(1e-5, MAX_COLD_CALLS)),
        ),  # each has a flush before it
    ],
)
def test_a_slot_has_blocks_and_cells(step: float, cache: str, queues: bool, shape: SlotShape) -> None:
    assert choose_timing_slot_shape(step, 1e-5, cache, queues) == shape


@given(seconds, st.integers(1, 100_000))
def test_the_device_waits_as_long_as_the_host_needs(host: float, calls: int) -> None:
    filling = choose_slot_filling(host, calls)
    assert choose_slot_filling(0.0, calls) is None, "there is nothing to run ahead of"
    assert 1 <= filling.calls <= calls and filling.seconds <= MAX_FILLING_SECONDS
    assert filling.seconds >= min(MAX_FILLING_SECONDS, 1.2 * host * filling.calls)


MARKS = st.lists(
    st.tuples(st.integers(0, len(CELL_PHASES) - 1), st.integers(0, 3 * MIN_BLOCK_NS)), min_size=1, max_size=80
)


def split(marks: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [code for code, _ in marks], [interval for _, interval in marks]


@given(MARKS, st.data())
def test_cells_sum_to_the_step_in_every_call(marks: list[tuple[int, int]], data: st.DataObject) -> None:
    codes, intervals = split(marks)
    made = cut_step_into_cells(codes, intervals)
    cells = made.cells(codes, intervals)
    assert sum(cells) == sum(intervals)
    for code, name in enumerate(CELL_PHASES):
        in_cells = sum(cell for cell, phase in zip(cells, made.segments.phases, strict=True) if phase == name)
        assert in_cells == sum(interval for own, interval in marks if own == code)
    later = data.draw(st.lists(st.integers(0, 10**9), min_size=len(codes), max_size=len(codes)))
    cells = made.cells(codes, later)
    for number in range(len(cells)):
        assert cells[number] == sum(t for t, cell in zip(later, made.cell_by_interval, strict=True) if cell == number)


@given(MARKS)
def test_a_block_ends_with_its_part(marks: list[tuple[int, int]]) -> None:
    codes, intervals = split(marks)
    made = cut_step_into_cells(codes, intervals, part_ends="gemm")
    blocks = [made.segments.blocks[cell] for cell in made.cell_by_interval]
    assert all(after > block for code, block, after in zip(codes, blocks, blocks[1:], strict=False) if code == GEMM)
    if GEMM not in codes:
        assert made == cut_step_into_cells(codes, intervals)


@given(MARKS, MARKS)
def test_other_marks_have_no_cells(marks: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    made = cut_step_into_cells(*split(marks))
    codes, intervals = split(others)
    assert (made.cells(codes, intervals) is None) == (codes != split(marks)[0])


@given(MARKS)
def test_blocks_are_long_enough_and_few_enough(marks: list[tuple[int, int]]) -> None:
    codes, intervals = split(marks)
    made = cut_step_into_cells(codes, intervals)
    blocks = made.segments.blocks
    assert list(blocks) == sorted(blocks)
    assert max(blocks) <= MAX_BLOCKS
    lengths = [0] * (max(blocks) + 1)
    for cell, interval in zip(made.cell_by_interval, intervals, strict=True):
        lengths[blocks[cell]] += interval
    assert all(length >= MIN_BLOCK_NS for length in lengths[:-1])
    pairs = list(zip(blocks, made.segments.phases, strict=True))
    assert len(pairs) == len(set(pairs))


@for_each(
    ("codes", "intervals", "phases", "blocks"),
    [
        # A short step is one block: its cells are its phases.
        ([UNATTRIBUTED, CAST, GEMM, CAST, UNATTRIBUTED], [1, 2, 3, 4, 5], ("unattributed", "cast", "gemm"), (0, 0, 0)),
        # A block ends with the mark that fills it; the next starts with new cells.
        ([GEMM, CAST, GEMM, CAST], [MIN_BLOCK_NS - 1, 1, MIN_BLOCK_NS, 5], ("gemm", "cast") * 2, (0, 0, 1, 2)),
        # A thousand equal intervals of a second give the maximum number of blocks, not a thousand.
        ([GEMM] * 1024, [10**9] * 1024, ("gemm",) * MAX_BLOCKS, tuple(range(MAX_BLOCKS))),
    ],
)
def test_a_step_ends_at_its_last_mark(
    codes: list[int], intervals: list[int], phases: tuple[str, ...], blocks: tuple[int, ...]
) -> None:
    segments = cut_step_into_cells(codes, intervals).segments
    assert (segments.phases, segments.blocks) == (phases, blocks)


def test_steps_that_vary_are_kept_by_phase() -> None:
    made = make_phase_segmentation([GEMM, CAST])
    cells = made.cells([GEMM, CAST], [3, 4])
    assert made.segments.phases == CELL_PHASES and set(made.segments.blocks) == {0}
    assert cells[GEMM] == 3 and cells[CAST] == 4 and sum(cells) == 7
