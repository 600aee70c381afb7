"""One sample per round: the fastest call, cell by cell; and figures from longer stretches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.analysis.findings import find
from fp8bench.analysis.metrics import iterate_case_metrics
from fp8bench.analysis.samples import (
    compute_sustained_figures,
    get_sustained_samples,
    list_step_samples,
    make_mean_sample,
    phase_medians,
    phase_samples,
    relative_samples,
    sustained_ratio,
)
from fp8bench.model import CELL_PHASES, Level, Provenance, Record, Segments, SlotSample, SustainedTurn, Timing
from fp8bench.model.stopping import ClockSample, DeviceSettling
from fp8bench.report.panels import group_into_panels
from tests.counts import for_each
from tests.fakes import MS, record, steady, timing
from tests.runs import render_whole, run_of


def slots(*rounds: Sequence[Sequence[int]], phases: Sequence[str] = ("cast", "gemm"), start: int = 0) -> Timing:
    """A slot per argument; a slot is a list of calls, a call a list of cells in nanoseconds."""
    made = tuple(
        SlotSample(start + number, tuple(tuple(call) for call in calls), 1.0, 1.0)
        for number, calls in enumerate(rounds)
    )
    return Timing(Segments(tuple(phases), tuple(range(len(phases)))), made)


def test_a_rounds_sample_uses_the_same_number_of_calls() -> None:
    measured = slots([(3, 10), (1, 20)], [(5, 7), (5, 8)])
    assert list_step_samples(measured) == pytest.approx((11e-9, 12e-9))
    assert phase_samples(measured, "cast") == pytest.approx((1e-9, 5e-9))
    assert phase_samples(measured, "gemm") == pytest.approx((10e-9, 7e-9))
    # The minimum of more calls is lower by chance alone.
    measured = slots([(9,), (5,), (1,)], [(8,), (6,)], phases=("gemm",))
    assert list_step_samples(measured) == pytest.approx((5e-9, 6e-9))
    assert phase_samples(steady(MS, 3), "cast") == ()
    empty = Timing(Segments(("gemm",), (0,)), ())
    assert list_step_samples(empty) == () and phase_samples(empty, "gemm") == () and phase_medians(empty) == {}
    assert phase_medians(timing((0,), (0,))) == {"gemm": (0.0, 0.0)}
    calls = [(1, 10, 8), (2, 10, 4), (9, 10, 3)]
    found = phase_medians(timing(*calls, phases=("cast", "gemm", "cast")))
    assert list(found) == ["cast", "gemm"]
    assert found["cast"] == pytest.approx((9e-9, 9 / 19))
    assert found["gemm"] == pytest.approx((10e-9, 10 / 19))


@st.composite
def timings(draw: st.DrawFn) -> Timing:
    phases = draw(st.lists(st.sampled_from(CELL_PHASES), min_size=1, max_size=6))
    call = st.tuples(*[st.integers(0, 10**12)] * len(phases))
    return slots(*draw(st.lists(st.lists(call, min_size=1, max_size=4), min_size=1, max_size=6)), phases=phases)


@given(timings())
def test_the_phases_of_a_round_sum_to_its_step(measured: Timing) -> None:
    steps = list_step_samples(measured)
    parts = [phase_samples(measured, phase) for phase in CELL_PHASES]
    assert len(steps) == len(measured.slots)
    sums = [math.fsum(values) for values in zip(*[part for part in parts if part], strict=True)]
    assert sums == pytest.approx(steps, rel=1e-12)
    fewest = min(len(slot.calls_ns) for slot in measured.slots)
    for step, slot in zip(steps, measured.slots, strict=True):
        assert step <= min(map(sum, slot.calls_ns[:fewest])) * 1e-9 * (1 + 1e-12)
    assert all(type(value) is float for value in steps)


def test_no_figure_of_a_round_is_above_the_mean_of_its_calls() -> None:
    """Both calls waited for a core 36 of 43 ms: the figure was 21 ms, the mean 3.5. Shares of phases are unchanged."""
    waiting = slots([(20 * MS, MS), (21 * MS, MS)], [(3 * MS, MS), (3 * MS, MS)])
    first, second = waiting.slots
    measured = replace(waiting, slots=(replace(first, waited_seconds=0.036), replace(second, waited_seconds=0.0)))
    assert list_step_samples(waiting) == pytest.approx((21e-3, 4e-3))
    assert list_step_samples(measured) == pytest.approx((3.5e-3, 4e-3))
    assert phase_samples(measured, "gemm") == pytest.approx((3.5e-3 / 21, 1e-3))
    assert make_mean_sample(measured) == pytest.approx((3.75e-3,))
    shorter = slots([(20,), (1,), (1,)], [(4,)], phases=("gemm",))  # each slot has only its first call
    assert list_step_samples(shorter) == pytest.approx((22e-9 / 3, 4e-9))


def test_no_figure_of_a_round_is_far_below_its_threads_processor_time() -> None:
    """The thread waited 6.1 ms between two calls, outside any call's time: the figure was 72 us instead of 430."""
    (slot,) = slots([(437_000,)] * 9 + [(2_900_000,)], phases=("gemm",)).slots
    seconds = sum(map(sum, slot.calls_ns)) * 1e-9
    for thread, wanted in ((0.0068, 437e-6), (None, (seconds - 6.1e-3) / 10)):
        measured = Timing(Segments(("gemm",), (0,)), (replace(slot, waited_seconds=6.1e-3, thread_seconds=thread),))
        assert list_step_samples(measured) == pytest.approx((wanted,))


def led(own: Timing, reference: Timing, control: Timing | None = None) -> tuple[Record, Record]:
    return record(own), record(reference, "fp32", is_reference=True, control=control)


def test_relative_time_uses_common_rounds_and_the_control() -> None:
    case, reference = led(timing((2,), (20,), (3,)), timing((4,), (40,), (4,)))
    assert relative_samples(case, reference) == pytest.approx((0.5, 0.5, 0.75))
    case, reference = led(timing((6,)), timing((4,)), timing((9,)))
    assert relative_samples(case, reference) == pytest.approx((1.0,))
    case, reference = led(steady(6, 4, start=2), steady(4, 5), steady(9, 4, start=1))
    assert relative_samples(case, reference) == pytest.approx((1.0, 1.0, 1.0))
    reference = replace(reference, control=Timing(Segments(("gemm",), (0,)), ()))
    assert relative_samples(case, reference) == pytest.approx((1.5,) * 3)
    assert relative_samples(*led(steady(1, 3, start=9), steady(1, 3))) == ()
    # A clock with microsecond ticks may read zero for an empty step.
    assert relative_samples(*led(timing((6,), (6,), (0,)), timing((0,), (4,), (4,)))) == pytest.approx((1.5, 0.0))
    case, reference = led(steady(6, 3, start=9), steady(100, 3), steady(100, 3))
    apart = replace(case, paired_with=steady(4, 3, start=9))
    assert relative_samples(apart, reference) == pytest.approx((1.5,) * 3)
    assert relative_samples(replace(apart, control=steady(9, 3, start=9)), reference) == pytest.approx((1.0,) * 3)


def test_cases_without_a_speed_have_no_relative_time() -> None:
    case, reference = led(steady(6, 3), steady(4, 3))
    emulated = record(steady(6, 3), level=Level.EMULATED)
    assert relative_samples(case, reference) and not relative_samples(emulated, reference)
    assert not relative_samples(case, record(steady(4, 3), "fp32", Level.EMULATED, is_reference=True))
    assert not relative_samples(reference, reference)
    assert not relative_samples(replace(case, paired=False), reference)
    assert not relative_samples(replace(case, timing=None), reference)
    assert not relative_samples(case, replace(reference, timing=None))
    assert not relative_samples(case, None)


LOOKS = (ClockSample(0.0, 1.9e9, 50.0), ClockSample(4.0, 1.7e9, 60.0))


def turns(
    *milliseconds: float, settled: Sequence[bool] = (), clock: float | None = None, watts: float | None = None
) -> tuple[SustainedTurn, ...]:
    """Four stretches of 25 steps each."""
    courses = [DeviceSettling(LOOKS, one, 8.0) for one in settled] or [None] * len(milliseconds)
    return tuple(
        SustainedTurn(25, (25 * one / 1e3,) * 4, course, clock, watts)
        for one, course in zip(milliseconds, courses, strict=True)
    )


def pair(own: tuple[SustainedTurn, ...], base: tuple[SustainedTurn, ...], **options: Any) -> tuple[Record, Record]:
    """A case of 5 ms and its reference of 10 ms, both in slots."""
    reference = record(steady(10 * MS, 24), "fp32", is_reference=True, control=steady(10 * MS, 24), sustained=base)
    return record(steady(5 * MS, 24), sustained=own, **options), reference


def test_sustained_figures_are_medians_of_turns() -> None:
    case, reference = pair(
        turns(5.5, 5.4, 5.9, settled=(True, False, True), clock=1.7e9, watts=650.0), turns(10.0, 10.0, 10.0)
    )
    finding = {one.case.mode: one for one in find([reference, case], {})}["bf16"]
    found = compute_sustained_figures(case, finding)
    assert get_sustained_samples(case) == pytest.approx((5.5e-3, 5.4e-3, 5.9e-3))
    assert (found.seconds, found.low, found.high) == pytest.approx((5.5e-3, 5.4e-3, 5.9e-3))
    assert (found.turns, found.settled_turn_count, found.clock, found.watts) == (3, 2, 1.7e9, 650.0)
    assert found.ratio_to_slots == pytest.approx(1.1)
    assert compute_sustained_figures(record(steady(5 * MS, 24)), finding) is None


def test_the_sustained_ratio_pairs_valid_turns() -> None:
    case, reference = pair(turns(6.0, 7.2, 8.64, 10.4), turns(10.0, 12.0, 14.4, 17.3))
    ratio = sustained_ratio(case, reference)
    assert ratio.level == 0.99 and ratio.low < 0.6 < ratio.high < 0.605
    few = sustained_ratio(*pair(turns(6.0, 5.0), turns(10.0, 10.0)))
    assert few.level == 0.0 and (few.low, few.high) == pytest.approx((0.5, 0.6))
    odd = (SustainedTurn(0, (1.0,)), SustainedTurn(5, ()), SustainedTurn(5, (math.nan,)), SustainedTurn(5, (-1.0,)))
    assert get_sustained_samples(record(steady(5 * MS, 24), sustained=odd)) == ()


@for_each("options", [{"level": Level.EMULATED}, {"paired": False}, {"paired_with": steady(10 * MS, 24)}])
def test_cases_without_a_speed_have_no_sustained_ratio(options: dict[str, Any]) -> None:
    case, reference = pair(turns(6.0, 6.0, 6.0), turns(10.0, 10.0, 10.0), **options)
    assert sustained_ratio(case, reference) is None and sustained_ratio(reference, reference) is None
    assert sustained_ratio(case, None) is None


def test_sustained_time_is_a_figure_and_a_table() -> None:
    case, reference = pair(turns(5.5, 5.5, 5.5, clock=1.7e9), turns(10.0, 10.0, 10.0))
    findings = {one.case.id: one for one in find([reference, case], {})}
    metric = next(
        metric for metric in iterate_case_metrics(case, findings[case.case.id]) if metric.name == "sustained_time"
    )
    told_of_it = metric.unit, metric.value, metric.count, metric.provenance
    assert told_of_it == ("s", pytest.approx(5.5e-3), 3, Provenance.MEASURED)
    told = {metric.name: metric.value for metric in iterate_case_metrics(case, findings[case.case.id])}
    assert told["sustained_clock"] == 1.7e9 and "sustained_power" not in told and "sm_clock" not in told
    run = run_of([reference, case])
    assert group_into_panels(run, findings)
    assert "3, unknown" in " ".join(render_whole(run, findings, 120).split())
