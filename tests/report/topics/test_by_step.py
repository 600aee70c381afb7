"""Steps of a sampler: what each takes, by the clock's marks, and its errors, the first steps too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.measure.slots import segment
from fp8bench.model import CELL_PHASES, SlotSample, Timing
from fp8bench.report.elements import Items, Scatter, Table
from fp8bench.report.topics.by_step import is_of_step, step_seconds
from tests.counts import for_each
from tests.fakes import MS, steady
from tests.materials import Made, built, of_kind, part
from tests.runs import error, transformer

NOBODY, ELEMENTWISE, GEMM, ACCUMULATE = (
    CELL_PHASES.index(name) for name in ("unattributed", "elementwise", "gemm", "accumulate")
)
LENGTHS = (45, 107)
ERRORS = {"free": (1e-2, 3e-2), "single": (1e-2, 2e-2), "free_floor": (1e-3, 2e-3), "single_floor": (1e-3, 1e-3)}


def sampled(*milliseconds: int, calls: int = 3, accumulate: int = ACCUMULATE) -> Timing:
    """A sampler whose steps take so long, after a moment that is nobody's; calls differ by one that is slow."""
    codes, intervals = [NOBODY, ELEMENTWISE], [1000, 1000]
    for length in milliseconds:
        codes += [GEMM, ELEMENTWISE, accumulate, ELEMENTWISE]
        intervals += [length * MS * 9 // 10, length * MS // 10 - 3000, 2000, 1000]
    made = segment([*codes, NOBODY], [*intervals, 1000], part_ends="accumulate")
    slots = []
    for call in range(calls):
        slow = [interval * (100 if call == 1 else 1) for interval in (*intervals, 1000)]
        cells = made.cells([*codes, NOBODY], slow)
        assert cells is not None
        slots.append(SlotSample(call, (cells,), 0.1, 0.1))
    return Timing(made.segments, tuple(slots))


@for_each("lengths", [(45, 107, 128), (100, 10, 10, 10), (10, 10, 10, 100), (5,) * 50])
def test_each_step_has_its_own_time(lengths: tuple[int, ...]) -> None:
    """Exactly, but for what comes before the first and after the last; one slow call does not move the middle."""
    found = step_seconds(sampled(*lengths))
    assert len(found) == len(lengths)
    for seconds, length in zip(found, lengths, strict=True):
        assert seconds == pytest.approx(length / 1000, abs=4e-6)
    assert sum(found) == pytest.approx(sum(lengths) / 1000, rel=1e-3)


def test_steps_that_marks_do_not_tell_apart_have_no_times() -> None:
    assert step_seconds(steady(MS, 4)) == ()
    assert step_seconds(sampled(10, 10, accumulate=ELEMENTWISE)) == ()
    assert step_seconds(replace(sampled(10, 10), varying=True)) == ()
    assert step_seconds(sampled(10, 10, calls=0)) == ()


def sampling() -> Made:
    """The run of a transformer as if it were a sampler's: its first two cases timed by step, fp8 emulated."""
    run, findings = transformer()
    scales = {"bf16": 1.0, "fp16": 1.0, "fp8": 5.0}
    records = []
    for record in run.records:
        errors = [
            error(f"{kind}_step{step}_error", value * (1 if "floor" in kind else scales[record.case.mode]))
            for kind, values in ERRORS.items() for step, value in enumerate(values, 1)
        ]  # fmt: skip
        kept = replace(record, timing=sampled(*LENGTHS), measurements=(*record.measurements, *errors))
        records.append(kept)
    return replace(run, records=tuple(records)), findings


def test_every_step_of_every_case_has_a_row() -> None:
    (table,) = of_kind(part("by-step", sampling()), Table)
    assert [column.title for column in table.columns] == [
        "group", "case", "step", "time", "one step", "its floor", "sampled", "its floor",
    ]  # fmt: skip
    assert [[field.text for field in row][1:] for row in table.rows] == [
        ["bf16", "1", "45.0 ms", "1.0e-02", "1.0e-03", "1.0e-02", "1.0e-03"],
        ["bf16", "2", "107 ms", "2.0e-02", "1.0e-03", "3.0e-02", "2.0e-03"],
        ["fp16", "1", "45.0 ms", "1.0e-02", "1.0e-03", "1.0e-02", "1.0e-03"],
        ["fp16", "2", "107 ms", "2.0e-02", "1.0e-03", "3.0e-02", "2.0e-03"],
        ["fp8", "1", "emulated 45.0 ms", "5.0e-02", "1.0e-03", "5.0e-02", "1.0e-03"],
        ["fp8", "2", "emulated 107 ms", "1.0e-01", "1.0e-03", "1.5e-01", "2.0e-03"],
    ]


def test_what_it_comes_to_is_said_beside_its_floor() -> None:
    (told,) = of_kind(part("by-step", sampling()), Items)
    assert [text.text.partition(": ")[2] for text in told.items][1:] == [
        "of one step 2.0e-02 at most, in step 2; sampled 3.0e-02 at the end, 15 times its floor",
        "of one step 1.0e-01 at most, in step 2; sampled 1.5e-01 at the end, 75 times its floor",
    ]


def test_lines_that_are_the_same_are_one() -> None:
    """bf16 and fp16 have alike errors here, and all have one floor."""
    (chart,) = of_kind(part("by-step", sampling()), Scatter)
    assert chart.y.log and not chart.x.log
    drawn: dict[str, list[tuple[float | None, float]]] = {label: [] for label in chart.joined}
    for point in chart.points:
        drawn[point.series].append((point.x, point.y))
    assert drawn == {
        "bf16 sampled": [(1, 1e-2), (2, 3e-2)], "bf16 one step": [(1, 1e-2), (2, 2e-2)],
        "bf16 floor of sampled": [(1, 1e-3), (2, 2e-3)],
        "fp8 sampled": [(1, 5e-2), (2, pytest.approx(0.15))], "fp8 one step": [(1, 5e-2), (2, 0.1)],
    }  # fmt: skip


def test_a_run_without_a_sampler_has_no_such_part() -> None:
    assert built("by-step", transformer()) is None


def test_errors_of_steps_stand_nowhere_else() -> None:
    (table,) = of_kind(part("numbers", sampling()), Table)
    assert [column.title for column in table.columns[2:]] == ["loss_error (one draw)", "gradient_error"]
    assert is_of_step("free_floor_step12_error") and not is_of_step("latent_error") and not is_of_step("step_error")
