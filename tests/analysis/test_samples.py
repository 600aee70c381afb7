"""One sample a round: the fastest of its calls, cell by cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.analysis.samples import mean_sample, phase_medians, phase_samples, relative_samples, step_samples
from fp8bench.model import CELL_PHASES, Level, Record, Segments, SlotSample, Timing
from tests.fakes import MS, record, steady, timing


def slots(*rounds: Sequence[Sequence[int]], phases: Sequence[str] = ("cast", "gemm"), start: int = 0) -> Timing:
    """A slot for each argument, which holds its calls, which hold their cells in nanoseconds."""
    made = tuple(
        SlotSample(start + number, tuple(tuple(call) for call in calls), 1.0, 1.0)
        for number, calls in enumerate(rounds)
    )
    return Timing(Segments(tuple(phases), tuple(range(len(phases)))), made)


def test_a_round_is_its_fastest_cells() -> None:
    """Which may be of different calls."""
    measured = slots([(3, 10), (1, 20)], [(5, 7), (5, 8)])
    assert step_samples(measured) == pytest.approx((11e-9, 12e-9))
    assert phase_samples(measured, "cast") == pytest.approx((1e-9, 5e-9))
    assert phase_samples(measured, "gemm") == pytest.approx((10e-9, 7e-9))


def test_cells_of_one_phase_count_together() -> None:
    measured = slots([(1, 20, 300)], [(2, 30, 400)], phases=("cast", "gemm", "cast"))
    assert phase_samples(measured, "cast") == pytest.approx((301e-9, 402e-9))


def test_as_many_calls_of_each_slot_as_all_have() -> None:
    """A minimum of more calls is lower for that alone."""
    measured = slots([(9,), (5,), (1,)], [(8,), (6,)], phases=("gemm",))
    assert step_samples(measured) == pytest.approx((5e-9, 6e-9))


def test_a_phase_that_a_step_does_not_have_has_no_samples() -> None:
    """None is not zero."""
    assert phase_samples(steady(MS, 3), "cast") == ()


def test_without_slots_there_are_no_samples() -> None:
    empty = Timing(Segments(("gemm",), (0,)), ())
    assert step_samples(empty) == () and phase_samples(empty, "gemm") == () and phase_medians(empty) == {}


@st.composite
def timings(draw: st.DrawFn) -> Timing:
    """Any samples: a few cells, rounds and calls."""
    phases = draw(st.lists(st.sampled_from(CELL_PHASES), min_size=1, max_size=6))
    call = st.tuples(*[st.integers(0, 10**12)] * len(phases))
    return slots(*draw(st.lists(st.lists(call, min_size=1, max_size=4), min_size=1, max_size=6)), phases=phases)


@given(timings())
def test_the_phases_of_a_round_sum_to_its_step(measured: Timing) -> None:
    """Nothing is lost between the metrics of a case, and no step is longer than one of its calls."""
    steps = step_samples(measured)
    parts = [phase_samples(measured, phase) for phase in CELL_PHASES]
    assert len(steps) == len(measured.slots)
    sums = [math.fsum(values) for values in zip(*[part for part in parts if part], strict=True)]
    assert sums == pytest.approx(steps, rel=1e-12)
    fewest = min(len(slot.calls_ns) for slot in measured.slots)
    for step, slot in zip(steps, measured.slots, strict=True):
        assert step <= min(map(sum, slot.calls_ns[:fewest])) * 1e-9 * (1 + 1e-12)
    assert all(type(value) is float for value in steps)


def test_no_figure_of_a_round_is_above_the_mean_of_its_calls() -> None:
    """Both calls waited for a core, 36 of 43 ms: it was 21 ms beside a mean of 3.5. Phases keep their shares."""
    waiting = slots([(20 * MS, MS), (21 * MS, MS)], [(3 * MS, MS), (3 * MS, MS)])
    first, second = waiting.slots
    measured = replace(waiting, slots=(replace(first, waited_seconds=0.036), replace(second, waited_seconds=0.0)))
    assert step_samples(waiting) == pytest.approx((21e-3, 4e-3))
    assert step_samples(measured) == pytest.approx((3.5e-3, 4e-3))
    assert phase_samples(measured, "gemm") == pytest.approx((3.5e-3 / 21, 1e-3))
    assert mean_sample(measured) == pytest.approx((3.75e-3,))
    shorter = slots([(20,), (1,), (1,)], [(4,)], phases=("gemm",))  # the first call is all that each slot has
    assert step_samples(shorter) == pytest.approx((22e-9 / 3, 4e-9))


def led(own: Timing, reference: Timing, control: Timing | None = None) -> tuple[Record, Record]:
    """A native case and its native reference."""
    return record(own), record(reference, "fp32", is_reference=True, control=control)


def test_relative_time_is_by_round() -> None:
    """In the round in which the machine was slow, it was slow for both."""
    case, reference = led(timing((2,), (20,), (3,)), timing((4,), (40,), (4,)))
    assert relative_samples(case, reference) == pytest.approx((0.5, 0.5, 0.75))


def test_the_reference_counts_by_both_entries() -> None:
    """By their geometric mean, as in a verdict."""
    case, reference = led(timing((6,)), timing((4,)), timing((9,)))
    assert relative_samples(case, reference) == pytest.approx((1.0,))


def test_only_common_rounds_count() -> None:
    """Those that the case, the reference and its control were in."""
    case, reference = led(steady(6, 4, start=2), steady(4, 5), steady(9, 4, start=1))
    assert relative_samples(case, reference) == pytest.approx((1.0, 1.0, 1.0))
    reference = replace(reference, control=Timing(Segments(("gemm",), (0,)), ()))
    assert relative_samples(case, reference) == pytest.approx((1.5,) * 3)
    assert relative_samples(*led(steady(1, 3, start=9), steady(1, 3))) == ()


def test_a_round_whose_reference_took_no_time_does_not_count() -> None:
    """A clock of a microsecond may say so of a step that does nothing."""
    assert relative_samples(*led(timing((6,), (6,), (0,)), timing((0,), (4,), (4,)))) == pytest.approx((1.5, 0.0))


def test_a_case_that_sat_apart_is_held_against_its_own_company() -> None:
    """Its control is the one of those rounds; without one the reference's other control is not taken."""
    case, reference = led(steady(6, 3, start=9), steady(100, 3), steady(100, 3))
    apart = replace(case, paired_with=steady(4, 3, start=9))
    assert relative_samples(apart, reference) == pytest.approx((1.5,) * 3)
    assert relative_samples(replace(apart, control=steady(9, 3, start=9)), reference) == pytest.approx((1.0,) * 3)


def test_what_is_no_speed_has_no_relative_time() -> None:
    """Neither an emulated side, nor the reference itself, nor one that shared no round."""
    case, reference = led(steady(6, 3), steady(4, 3))
    emulated = record(steady(6, 3), level=Level.EMULATED)
    assert relative_samples(case, reference) and not relative_samples(emulated, reference)
    assert not relative_samples(case, record(steady(4, 3), "fp32", Level.EMULATED, is_reference=True))
    assert not relative_samples(reference, reference)
    assert not relative_samples(replace(case, paired=False), reference)
    assert not relative_samples(replace(case, timing=None), reference)
    assert not relative_samples(case, replace(reference, timing=None))
    assert not relative_samples(case, None)


@given(st.integers(0, 6), st.integers(1, 6), st.integers(0, 6), st.integers(1, 6), st.integers(0, 6), st.integers(0, 6))
def test_as_many_relative_samples_as_common_rounds(
    own: int, rounds: int, lead: int, lead_rounds: int, second: int, second_rounds: int
) -> None:
    """Whichever rounds each was in."""
    case, reference = led(steady(7, rounds, own), steady(7, lead_rounds, lead), steady(7, second_rounds, second))
    both = set(range(own, own + rounds)) & set(range(lead, lead + lead_rounds))
    if second_rounds:
        both &= set(range(second, second + second_rounds))
    assert relative_samples(case, reference) == pytest.approx((1.0,) * len(both))


def test_the_cells_of_a_phase_count_together() -> None:
    """Call by call: the median of sums, not the sum of medians."""
    calls = [(1, 10, 8), (2, 10, 4), (9, 10, 3)]
    found = phase_medians(timing(*calls, phases=("cast", "gemm", "cast")))
    assert list(found) == ["cast", "gemm"]
    assert found["cast"] == pytest.approx((9e-9, 9 / 19))
    assert found["gemm"] == pytest.approx((10e-9, 10 / 19))


def test_a_call_of_no_time_has_no_share() -> None:
    assert phase_medians(timing((0,), (0,))) == {"gemm": (0.0, 0.0)}
