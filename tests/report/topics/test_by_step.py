"""Steps of a sampler: what each takes, by the clock's marks, and its errors, the first steps too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.measure.slots import segment
from fp8bench.model import CELL_PHASES, SlotSample, Timing
from fp8bench.report.topics.numbers import is_of_step, step_seconds
from tests.counts import for_each
from tests.fakes import MS, steady
from tests.materials import Made, built, part
from tests.runs import error, transformer
from tests.told_before import Told, as_before

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
    assert is_of_step("free_floor_step12_error") and not is_of_step("latent_error") and not is_of_step("step_error")


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


@as_before
def test_by_step() -> Told:
    yield "every step of every case has a row; lines that are the same are one", part("by-step", sampling())
    yield "errors of steps stand nowhere else", part("numbers", sampling())
    yield "a run without a sampler has no such part", built("by-step", transformer())
