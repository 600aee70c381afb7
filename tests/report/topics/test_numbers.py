"""Errors by metric and precision, what the data are made of, scales from data, and a sampler step by step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fp8bench.measure.slots import cut_step_into_cells
from fp8bench.model import CELL_PHASES, LayerScale, Record, SlotSample, TensorStatistics, Timing
from fp8bench.report.elements import Table, Text
from fp8bench.report.page.section import MAX_ROWS
from fp8bench.report.topics.numbers import is_step_error_metric, sampler_step_seconds
from tests.counts import for_each
from tests.fakes import MS, steady
from tests.materials import Made, built, many, of_kind, part, with_errors
from tests.runs import error, gemm, measured, render_whole, transformer
from tests.told_before import Told, as_before

TITLE = "data, before any scaling"


def with_last(made: Made, mode: str) -> Made:
    run, findings = made
    last = run.records[-1]
    case = replace(last.case, precision=mode)
    moved = {case.id: replace(findings[last.case.id], case=case)}
    return replace(run, records=(*run.records[:-1], replace(last, case=case))), {**findings, **moved}


@as_before
def test_numbers() -> Told:
    for mode in ("fp8:scale=pow2:accumulator=short", "mxfp8", "somebody's", "fp8:bits=9", "fp8-delayed:history=0"):
        (table,) = of_kind(part("numbers", with_last(transformer(), mode)), Table)
        yield f"{mode} is told with its options, or not at all", table.rows[-1][0]
    run, findings = gemm()
    first = replace(run.records[0], measurements=(error("product_error", 1e-7),))
    several = replace(run, records=(first, *run.records[1:])), findings
    yield "of several groups the smallest and the largest", part("numbers", several)
    odd = with_errors(transformer(), 1e-3, math.nan, math.inf)
    yield "an error that is no number is said, and counts as the largest", part("numbers", odd)
    yield "infinite errors of a measured run", of_kind(part("numbers", measured()), Text)


def block(made: Made, width: int = 100) -> list[str]:
    """The lines of the first panel's data table with its title, or none."""
    lines = render_whole(*made, width).splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(TITLE)]
    return lines[starts[0] : lines.index("", starts[0])] if starts else []


def with_data(*statistics: TensorStatistics) -> Made:
    run, findings = transformer()
    return replace(run, records=(replace(run.records[0], statistics=statistics), *run.records[1:])), findings


@as_before
def test_data() -> Told:
    within = TensorStatistics("x", "", 9, 1.0, (("bf16", 0.0, 0.0), ("fp16", 0.0, 0.0)))
    yield "a format that holds everything is named and has no column", block(with_data(within))
    bare = with_data(TensorStatistics("x", "", 9, 1.0))
    yield "statistics that name no format show what they have", block(bare)
    for mode in ("fp8-unit", "fp9-unit"):
        yield f"what would be lost here is not lost in a unit-scaled model: {mode}", block(with_last(bare, mode))[0]
    yield "groups share one table of the worst", block(gemm())
    run, findings = gemm()
    first = run.records[0].case.setting

    def forget(record: Record) -> Record:
        return record if record.case.setting == first else replace(record, statistics=())

    known = replace(run, records=tuple(map(forget, run.records))), findings
    yield "only groups whose data are known are counted", block(known)
    yield "no data, no table", block(transformer())


def test_a_table_of_scales_has_an_end() -> None:
    run, findings = many(160)
    scales = (LayerScale("mlp.up", "input", 3.5, 128.0), LayerScale("mlp.up", "gradient", 7e-5, 8e8, 12))
    elements = part(
        "scales", (replace(run, records=tuple(replace(record, scales=scales) for record in run.records)), findings)
    )
    (table,) = of_kind(elements, Table)
    assert MAX_ROWS - 2 < len(table.rows) <= MAX_ROWS
    assert any("the table has no room for m=" in text.text for text in of_kind(elements, Text))


NOBODY, ELEMENTWISE, GEMM, ACCUMULATE = (
    CELL_PHASES.index(name) for name in ("unattributed", "elementwise", "gemm", "accumulate")
)
LENGTHS = (45, 107)
ERRORS = {"free": (1e-2, 3e-2), "single": (1e-2, 2e-2), "free_floor": (1e-3, 2e-3), "single_floor": (1e-3, 1e-3)}


def sampled(*milliseconds: int, calls: int = 3, accumulate: int = ACCUMULATE) -> Timing:
    """A sampler whose steps take these times, after some time outside of steps; one call is slow."""
    codes, intervals = [NOBODY, ELEMENTWISE], [1000, 1000]
    for length in milliseconds:
        codes += [GEMM, ELEMENTWISE, accumulate, ELEMENTWISE]
        intervals += [length * MS * 9 // 10, length * MS // 10 - 3000, 2000, 1000]
    made = cut_step_into_cells([*codes, NOBODY], [*intervals, 1000], part_ends="accumulate")
    slots = []
    for call in range(calls):
        slow = [interval * (100 if call == 1 else 1) for interval in (*intervals, 1000)]
        cells = made.cells([*codes, NOBODY], slow)
        assert cells is not None
        slots.append(SlotSample(call, (cells,), 0.1, 0.1))
    return Timing(made.segments, tuple(slots))


@for_each("lengths", [(45, 107, 128), (100, 10, 10, 10), (10, 10, 10, 100), (5,) * 50])
def test_each_step_has_its_own_time(lengths: tuple[int, ...]) -> None:
    """One slow call does not move the median."""
    measured = sampler_step_seconds(sampled(*lengths))
    assert len(measured) == len(lengths)
    for seconds, length in zip(measured, lengths, strict=True):
        assert seconds == pytest.approx(length / 1000, abs=4e-6)
    assert sum(measured) == pytest.approx(sum(lengths) / 1000, rel=1e-3)


def test_steps_that_marks_do_not_tell_apart_have_no_times() -> None:
    assert sampler_step_seconds(steady(MS, 4)) == ()
    assert sampler_step_seconds(sampled(10, 10, accumulate=ELEMENTWISE)) == ()
    assert sampler_step_seconds(replace(sampled(10, 10), varying=True)) == ()
    assert sampler_step_seconds(sampled(10, 10, calls=0)) == ()
    assert (
        is_step_error_metric("free_floor_step12_error")
        and not is_step_error_metric("latent_error")
        and not is_step_error_metric("step_error")
    )


def sampling() -> Made:
    """A transformer run posing as a sampler's: its first two cases timed by step, fp8 emulated."""
    run, findings = transformer()
    scales = {"bf16": 1.0, "fp16": 1.0, "fp8": 5.0}
    records = []
    for record in run.records:
        errors = [
            error(f"{kind}_step{step}_error", value * (1 if "floor" in kind else scales[record.case.mode]))
            for kind, values in ERRORS.items()
            for step, value in enumerate(values, 1)
        ]
        kept = replace(record, timing=sampled(*LENGTHS), measurements=(*record.measurements, *errors))
        records.append(kept)
    return replace(run, records=tuple(records)), findings


@as_before
def test_by_step() -> Told:
    yield "every step of every case has a row; lines that are the same are one", part("by-step", sampling())
    yield "errors of steps stand nowhere else", part("numbers", sampling())
    yield "a run without a sampler has no such part", built("by-step", transformer())
