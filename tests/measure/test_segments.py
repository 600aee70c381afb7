"""Cells: they sum to the step, mean the same in every call, and are refused to steps with other marks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fp8bench.measure.slots import LEAST_BLOCK_NS, MOST_BLOCKS, by_phase, segment
from fp8bench.model import CELL_PHASES

CAST, GEMM, NOBODY = (CELL_PHASES.index(name) for name in ("cast", "gemm", "unattributed"))
MARKS = st.lists(
    st.tuples(st.integers(0, len(CELL_PHASES) - 1), st.integers(0, 3 * LEAST_BLOCK_NS)), min_size=1, max_size=80
)


def split(marks: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [code for code, _ in marks], [interval for _, interval in marks]


@given(MARKS)
def test_cells_sum_to_the_step(marks: list[tuple[int, int]]) -> None:
    """Nothing is counted twice and nothing is lost, in the whole and in each phase."""
    codes, intervals = split(marks)
    made = segment(codes, intervals)
    cells = made.cells(codes, intervals)
    assert cells is not None
    assert sum(cells) == sum(intervals)
    for code, name in enumerate(CELL_PHASES):
        in_cells = sum(cell for cell, phase in zip(cells, made.segments.phases, strict=True) if phase == name)
        assert in_cells == sum(interval for own, interval in marks if own == code)


@given(MARKS)
def test_no_block_goes_on_behind_a_part(marks: list[tuple[int, int]]) -> None:
    """Nor does a phase that ends parts change anything where the step has none of it."""
    codes, intervals = split(marks)
    made = segment(codes, intervals, part_ends="gemm")
    blocks = [made.segments.blocks[cell] for cell in made.cell_of]
    assert all(after > block for code, block, after in zip(codes, blocks, blocks[1:], strict=False) if code == GEMM)
    if GEMM not in codes:
        assert made == segment(codes, intervals)


@given(MARKS, st.data())
def test_the_same_marks_fall_into_the_same_cells(marks: list[tuple[int, int]], data: st.DataObject) -> None:
    """Whatever the times of another call are: the cells are those of the calibrating step."""
    codes, intervals = split(marks)
    made = segment(codes, intervals)
    other = data.draw(st.lists(st.integers(0, 10**9), min_size=len(codes), max_size=len(codes)))
    cells = made.cells(codes, other)
    assert cells is not None
    for number in range(len(cells)):
        assert cells[number] == sum(t for t, cell in zip(other, made.cell_of, strict=True) if cell == number)


@given(MARKS, MARKS)
def test_other_marks_have_no_cells(marks: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    """One mark more, less or different, and a cell would mean something else."""
    made = segment(*split(marks))
    codes, intervals = split(others)
    assert (made.cells(codes, intervals) is None) == (codes != split(marks)[0])


@given(MARKS)
def test_blocks_are_long_enough_and_few_enough(marks: list[tuple[int, int]]) -> None:
    """Every block but the last has its least length, and there is a bound on their number."""
    codes, intervals = split(marks)
    made = segment(codes, intervals)
    blocks = made.segments.blocks
    assert list(blocks) == sorted(blocks)
    assert max(blocks) <= MOST_BLOCKS
    lengths = [0] * (max(blocks) + 1)
    for cell, interval in zip(made.cell_of, intervals, strict=True):
        lengths[blocks[cell]] += interval
    assert all(length >= LEAST_BLOCK_NS for length in lengths[:-1])
    pairs = list(zip(blocks, made.segments.phases, strict=True))
    assert len(pairs) == len(set(pairs))


def test_a_short_step_is_one_block() -> None:
    """Its cells are its phases."""
    made = segment([NOBODY, CAST, GEMM, CAST, NOBODY], [1, 2, 3, 4, 5])
    assert made.segments.phases == ("unattributed", "cast", "gemm")
    assert made.segments.blocks == (0, 0, 0)
    assert made.cells([NOBODY, CAST, GEMM, CAST, NOBODY], [10, 20, 30, 40, 50]) == (60, 60, 30)


def test_a_long_step_is_cut_at_its_marks() -> None:
    """A block ends with the mark that fills it; the next begins anew with cells of its own."""
    long = LEAST_BLOCK_NS
    made = segment([GEMM, CAST, GEMM, CAST], [long - 1, 1, long, 5])
    assert made.cell_of == (0, 1, 2, 3)
    assert made.segments.blocks == (0, 0, 1, 2)
    assert made.segments.phases == ("gemm", "cast", "gemm", "cast")


def test_a_very_long_step_has_longer_blocks() -> None:
    """A thousand equal intervals of a second make as many blocks as there may be, not a thousand."""
    made = segment([GEMM] * 1024, [10**9] * 1024)
    assert len(made.segments.blocks) == MOST_BLOCKS
    assert max(made.segments.blocks) == MOST_BLOCKS - 1


def test_steps_that_vary_are_kept_by_phase() -> None:
    """One cell for every phase there is."""
    made = by_phase([GEMM, CAST])
    assert made.segments.phases == CELL_PHASES
    assert set(made.segments.blocks) == {0}
    cells = made.cells([GEMM, CAST], [3, 4])
    assert cells is not None and cells[GEMM] == 3 and cells[CAST] == 4 and sum(cells) == 7
