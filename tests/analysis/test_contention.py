"""Whether other work took the processor, from clocks written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.analysis.contention import AHEAD, FAR_AHEAD, contended, disturbed_slots
from fp8bench.model import Segments, SlotSample, Timing

WALL = 0.010


def clocked(*slots: tuple[float, float | None, int | None, float | None]) -> Timing:
    """Slots of 10 ms: processor time of the process and of the thread that runs the steps, as shares of it; how often
    it was preempted, and seconds stolen."""
    samples = [
        SlotSample(
            number, ((10_000_000,),), WALL, process * WALL,
            thread_seconds=None if thread is None else thread * WALL, preemptions=preempted, stolen_seconds=stolen,
        )
        for number, (process, thread, preempted, stolen) in enumerate(slots)
    ]  # fmt: skip
    return Timing(Segments(("gemm",), (0,)), tuple(samples))


CALM = (1.0, 1.0, 0, 0.0)
LATE = (0.8, 0.8, 2, 0.0)


@pytest.mark.parametrize(
    ("process", "ahead", "on"),
    [(0.92, AHEAD, False), (0.90, AHEAD, True), (0.21, FAR_AHEAD, False), (0.19, FAR_AHEAD, True)],
)
@pytest.mark.parametrize("counted", [(None, None, None), (0.3, 0, 0.0), (0.3, None, None)])
def test_the_time_of_the_process_decides_alone(
    process: float, ahead: float, on: bool, counted: tuple[float | None, int | None, float | None]
) -> None:
    """With one thread, and in runs that counted nothing else; wall / processor time above 1.1, and above 5."""
    assert contended(clocked(*[(process, *counted)] * 8), ahead) == on


@pytest.mark.parametrize(("late", "on"), [(4, False), (5, True), (8, True), (0, False)])
def test_it_must_be_so_in_most_slots(late: int, on: bool) -> None:
    """More than half."""
    timing = clocked(*[LATE] * late, *[CALM] * (8 - late))
    assert contended(timing) == on and disturbed_slots(timing, AHEAD) == late


@pytest.mark.parametrize(
    ("thread", "preempted", "stolen", "on"),
    [
        (0.8, 1, None, True),
        (0.8, 0, 0.0, False),
        (0.8, None, None, False),
        (0.92, 5, 0.1, False),
        (None, 5, 0.1, False),
        (0.8, 0, 0.001, True),
        (0.8, None, 0.001, True),
        (0.8, 0, 0.0009, False),
    ],
)
def test_of_several_threads_the_one_that_runs_the_steps_is_asked(
    thread: float | None, preempted: int | None, stolen: float | None, on: bool
) -> None:
    """The process has more processor time than wall clock, as spinning threads do: it hides who was late.

    The thread counts only if somebody took a core: here it was 2 ms late in each slot, half of which is 1 ms.
    """
    assert contended(clocked(*[(1.8, thread, preempted, stolen)] * 8)) == on


def test_stolen_time_comes_in_lumps_longer_than_a_slot() -> None:
    """10 ms in one of eight slots that were 2 ms late each."""
    assert contended(clocked((1.8, 0.8, 0, 0.01), *[(1.8, 0.8, 0, 0.0)] * 7))
    assert not contended(clocked((1.8, 0.4, 0, 0.01), *[(1.8, 0.4, 0, 0.0)] * 7))


def test_preemptions_of_calm_slots_are_no_evidence() -> None:
    """Nine in slots where the thread kept up; it was late in the others by itself."""
    late, calm = (1.8, 0.8, 0, 0.0), (1.8, 1.0, 3, 0.0)
    assert not contended(clocked(*[late] * 5, *[calm] * 3))
    assert disturbed_slots(clocked(*[late] * 5, *[calm] * 3), AHEAD) == 0


def test_a_thread_that_got_less_than_a_fifth_of_its_core() -> None:
    """Far behind in most slots, whatever its neighbours burnt."""
    timing = clocked(*[(1.3, 0.19, 4, None)] * 8)
    assert contended(timing, FAR_AHEAD) and not contended(clocked(*[(1.3, 0.21, 4, None)] * 8), FAR_AHEAD)


def test_without_slots_nobody_was_late() -> None:
    timing = replace(clocked(CALM), slots=())
    assert not contended(timing) and disturbed_slots(timing, AHEAD) == 0
