"""The largest batch that fits: what each answer of a worker means, and a search against trying them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench.errors import WorkerFault, WorkerHung, WorkerLost
from fp8bench.measure.capacity import BatchAttempt, CapacityPass, CapacitySearchRule, LargestNumberSearch
from fp8bench.measure.handle import Worker
from fp8bench.measure.limits import DEFAULT_TIME_LIMITS
from fp8bench.measure.passes import CaseOutcome
from fp8bench.model import Capacity, DeviceFacts, MemoryUse, PlannedCase, Request
from fp8bench.plan.make import make_plan, replace_batch_size
from fp8bench.protocols import SilentObserver
from tests.counts import for_each
from tests.facts import CPU, H200
from tests.fakes import Listener

NO_MEMORY = WorkerFault("OutOfMemoryError", "CUDA out of memory.\nTried to allocate", "trace", out_of_memory=True)
LIMIT = 1000


@dataclass
class Filled(Worker):
    """A worker whose batch takes `takes` bytes, on hardware `holds`; it raises what `dies` returns for a batch."""

    takes: Callable[[int], int | None] = lambda batch: 10 * batch
    dies: Callable[[int], Exception | None] = lambda batch: None
    holds: Callable[[int], MemoryUse | str] = lambda batch: "nobody counts"
    paces: Callable[[int], tuple[float, ...]] = lambda batch: ()
    axis: str = "batch"
    log: list[tuple[int, int | None]] = field(default_factory=list)
    restarts: int = 0

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        assert limit >= 60
        if name == "memory":
            return self.holds(int(arguments[0].param(self.axis)))
        if name == "pace":
            return self.paces(int(arguments[0].param(self.axis)))
        assert name == "try_batch"
        case, _, memory_limit = arguments
        batch = int(case.param(self.axis))
        self.log.append((batch, memory_limit))
        error = self.dies(batch)
        if error is not None:
            raise error
        return self.takes(batch)

    def close(self) -> None: ...

    def restart(self) -> None:
        self.restarts += 1


def planned(suite: str = "transformer", facts: DeviceFacts = CPU, dtype: str = "fp32", **axes: str) -> PlannedCase:
    """The first case of a suite."""
    request = Request(suite, (dtype,), axes=tuple((name, (value,)) for name, value in axes.items()))
    return make_plan(request, (facts,)).groups[0].cases[0]


def search(
    worker: Filled,
    case: PlannedCase | None = None,
    limit: int | None = LIMIT,
    facts: DeviceFacts = CPU,
    observer: SilentObserver | None = None,
) -> Capacity:
    outcome = CaseOutcome(case or planned(batch="2"))
    rule = CapacitySearchRule(limit, replace_batch_size)
    CapacityPass(
        worker, {facts.key: facts}, DEFAULT_TIME_LIMITS, observer or SilentObserver(), rule
    ).find_largest_batches([outcome])
    assert outcome.draft.capacity is not None
    return outcome.draft.capacity


def test_the_largest_whose_tensors_do_not_pass_the_limit() -> None:
    worker, observer = Filled(), Listener()
    found = search(worker, observer=observer)
    assert found == Capacity("batch", LIMIT, 100, 1, 100 * 96 * 2, 1000, 101, "tensors need 10 B more", 5)
    assert {(100, LIMIT), (101, LIMIT)} <= set(worker.log) and worker.restarts == 0
    assert ("fp32", "trying a batch of 101", 1.0) in observer.told


def test_steps_are_timed_with_the_largest_batch_but_not_of_an_emulation() -> None:
    def crashes(batch: int) -> tuple[float, ...]:
        raise WorkerLost("the worker crashed during 'pace'")

    paces: Callable[[int], tuple[float, ...]] = lambda batch: (batch / 10, batch / 5)  # noqa: E731
    assert search(Filled(paces=paces)).seconds == (10.0, 20.0)
    assert search(Filled(paces=paces), planned(dtype="fp8", batch="2")).seconds == ()
    lost = Filled(paces=crashes)
    found = search(lost)
    assert (found.batch, found.seconds, lost.restarts) == (100, (), 1)


def test_a_worker_that_the_system_has_ended_had_no_memory_left() -> None:
    gone = WorkerLost("the worker crashed during 'try_batch': it was ended by SIGKILL", killed=True)
    worker = Filled(dies=lambda batch: gone if batch > 33 else None)
    found = search(worker)
    assert (found.batch, found.beyond, found.why) == (33, 34, str(gone))
    assert worker.restarts == sum(batch > 33 for batch, _ in worker.log)


@for_each(
    ("holds", "dtype", "limit", "batch"),
    [
        (lambda batch: 4 * batch, "fp8", LIMIT, 250),
        (lambda batch: 100 + 4 * batch, "fp8", LIMIT, 225),
        (lambda batch: 4 * batch + (3 if batch == 100 else 0), "fp8", LIMIT, 247),  # rounded down to a batch that fits
        (lambda batch: None, "fp8", LIMIT, None),
        (lambda batch: 7, "fp8", LIMIT, None),
        (lambda batch: 4 * batch, "fp32", LIMIT, None),  # not emulated: the largest batch did run
        (lambda batch: 4 * batch, "fp8", 19, None),  # one sequence fits, and half a sequence is not a batch
    ],
)
def test_what_hardware_would_fit_is_on_the_line_through_two_batches(
    holds: Callable[[int], int | None], dtype: str, limit: int, batch: int | None
) -> None:
    worker = Filled(holds=lambda size: MemoryUse(10 * size, on_device=holds(size)))
    assert search(worker, planned(dtype=dtype, batch="2"), limit).on_device == batch


def test_a_batch_whose_memory_nobody_tells_costs_the_figure_alone() -> None:

    def ends(batch: int) -> MemoryUse:
        raise WorkerHung("no answer to 'memory'")

    worker = Filled(holds=ends)
    found = search(worker, planned(dtype="fp8", batch="2"))
    assert (found.batch, found.on_device) == (100, None) and worker.restarts == 2
    assert search(Filled(), planned(dtype="fp8", batch="2")).on_device is None


@for_each(
    "error",
    [
        WorkerFault("ValueError", "no such thing", "trace"),
        WorkerLost("the worker crashed during 'try_batch': it was ended by SIGSEGV"),
        WorkerHung("no answer to 'try_batch' within 240 s"),
    ],
)
def test_what_is_no_matter_of_memory_ends_the_search_with_its_reason(error: Exception) -> None:
    worker = Filled(dies=lambda batch: error if batch > 20 else None)
    found = search(worker)
    assert found.batch is None and found.beyond is None and found.attempts >= 2
    assert "ended the search" in found.why and str(error) in found.why
    assert worker.restarts == 1


@pytest.mark.parametrize(
    ("takes", "most", "limit", "found", "why"),
    [
        # A device out of memory raises; if torch's allocator counts nothing, only that shows what fits.
        (lambda batch: 10 * batch, 33, None, (33, 34, 330), "memory ran out (OutOfMemoryError: CUDA out of memory.)"),
        (lambda batch: None, 77, None, (77, 78, None), "memory ran out (OutOfMemoryError: CUDA out of memory.)"),
        # Not even the smallest fits: the answer is zero.
        (lambda batch: 5000 + batch, None, LIMIT, (0, 1, None), "tensors need 3.91 KiB more"),
        # The transformer's axis ends at 4096.
        (lambda batch: 7, None, LIMIT, (4096, None, 7), ""),
    ],
)
def test_the_reason_that_ended_the_search_is_stored(
    takes: Callable[[int], int | None],
    most: int | None,
    limit: int | None,
    found: tuple[int, int | None, int | None],
    why: str,
) -> None:
    worker = Filled(takes, lambda batch: NO_MEMORY if most is not None and batch > most else None)
    answer = search(worker, limit=limit)
    assert (answer.batch, answer.beyond, answer.peak) == found and (answer.tokens == 0) == (answer.batch == 0)
    assert (answer.why, answer.limit, worker.restarts) == (why, limit, 0)


def test_native_products_that_need_multiples_are_tried_in_multiples() -> None:
    fp8 = planned("mlp", H200, "fp8", tokens="512")
    assert fp8.runs
    worker = Filled(takes=lambda tokens: tokens, axis="tokens")
    found = search(worker, fp8, limit=1000, facts=H200)
    assert (found.axis, found.grain, found.batch, found.beyond) == ("tokens", 16, 992, 1008)
    assert all(tokens % 16 == 0 for tokens, _ in worker.log)
    assert worker.restarts == 1, "a GPU's worker is fresh afterwards"
    bf16 = search(Filled(takes=lambda tokens: tokens, axis="tokens"), planned("mlp", H200, "bf16"), 1000, H200)
    assert (bf16.grain, bf16.batch) == (1, 1000)


def test_another_batch_is_planned_like_the_first() -> None:
    rowwise = (("mlp", "fp8-rowwise"),)
    request = Request("transformer", ("bf16", "fp8"), axes=(("batch", ("4",)),), precision_map=rowwise)
    four = make_plan(request, (CPU,)).groups[0].cases[2]
    twelve = replace_batch_size(four, 12, CPU)
    assert twelve.support == four.support and twelve.work.tokens == 3 * four.work.tokens
    assert twelve.case == replace(
        four.case, params=tuple((name, 12 if name == "batch" else value) for name, value in four.case.params)
    )
    assert replace_batch_size(four, 0, CPU) is None and replace_batch_size(four, 4097, CPU) is None
    # A batch norm over one value.
    assert replace_batch_size(planned("conv", image="1", batch="2"), 1, CPU) is None


Takes = Callable[[int], int]


def searched(
    takes: Takes, room: int, start: int, top: int, known: int | None = -1, counted_up_to: float = float("inf")
) -> LargestNumberSearch:
    """A search over batches with these needs; needs above `counted_up_to` fail without a count."""

    def attempt(number: int) -> BatchAttempt:
        assert 1 <= number <= top, "out of bounds"
        taken = takes(number)
        return BatchAttempt(number, taken <= room, taken if taken <= counted_up_to else None)

    search = LargestNumberSearch(start, top, room if known == -1 else known)
    search.run(attempt)
    tried = [attempt.number for attempt in search.attempts]
    assert len(tried) == len(set(tried)), "one was tried twice"
    return search


def largest(takes: Takes, room: int, top: int) -> int:
    return max((number for number in range(1, top + 1) if takes(number) <= room), default=0)


def answer(search: LargestNumberSearch) -> int:
    """Its answer, after trying both neighbours."""
    best = search.largest_fitting.number if search.largest_fitting else 0
    failing = search.smallest_failing
    assert (failing.number == best + 1) if failing is not None else (best == search.largest_number)
    return best


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.integers(0, 50), min_size=1, max_size=120),
    least=st.integers(1, 400),
    room=st.integers(1, 3000),
    start=st.integers(1, 200),
    counted=st.floats(0, 4000),
    known=st.sampled_from([-1, None, 1, 10**9]),
)
def test_it_finds_what_trying_all_finds(
    steps: list[int], least: int, room: int, start: int, counted: float, known: int | None
) -> None:
    needs = [least]
    for step in steps:
        needs.append(needs[-1] + step)
    top = len(needs)

    def takes(number: int) -> int:
        return needs[number - 1]

    search = searched(takes, room, min(start, top), top, known, counted)
    assert answer(search) == largest(takes, room, top)
    assert len(search.attempts) <= 2 * top.bit_length() + 12


@for_each("room", [10_000, 123_456, 10**6, 987_654_321])
@for_each("slope", [1, 7, 1000])
@for_each("start", [1, 2, 8])
def test_a_line_takes_at_most_six_attempts(room: int, slope: int, start: int) -> None:
    search = searched(lambda number: 5000 + slope * number, room, start, 1 << 20)
    assert answer(search) == min(max((room - 5000) // slope, 0), 1 << 20)
    assert len(search.attempts) <= 6


def test_nothing_is_tried_that_takes_far_more_than_there_is() -> None:
    room = 10**6
    search = searched(lambda number: 1000 + 100 * number + max(0, number - 50) * 900, room, 2, 1 << 20)
    assert answer(search) == 1044
    assert max(attempt.taken or 0 for attempt in search.attempts) < 4 * room


@for_each(
    ("search", "best", "first"),
    [
        (searched(lambda number: 100 * number, 1000, 512, 1 << 20), 10, [512, 256]),
        (searched(lambda number: 10**9, 1000, 6, 1 << 20), 0, [6]),
        (searched(lambda number: 7, 1000, 2, 37), 37, [2]),
        # A GPU whose allocator counts nothing: only running out of memory shows what fits.
        (
            searched(lambda number: number, 300, 4, 1 << 20, None, counted_up_to=0),
            300,
            [4, 8, 16, 32, 64, 128, 256, 512],
        ),
    ],
)
def test_the_search_starts_at_the_given_batch(search: LargestNumberSearch, best: int, first: list[int]) -> None:
    assert answer(search) == best and [attempt.number for attempt in search.attempts][: len(first)] == first


def test_what_goes_wrong_ends_the_search_with_what_was_tried() -> None:
    tried: list[BatchAttempt] = []

    def attempt(number: int) -> BatchAttempt:
        if number > 8:
            raise ValueError("another matter")
        return BatchAttempt(number, True, number)

    with pytest.raises(ValueError, match="another matter"):
        LargestNumberSearch(4, 100, None, tried).run(attempt)
    assert [attempt.number for attempt in tried] == [4, 8]
