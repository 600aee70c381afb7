"""The largest batch that fits, case by case.

The search assumes only that a larger batch needs more memory. Memory is nearly linear in the batch: two attempts give
the line that meets the free memory, and that batch and its neighbour are tried next. Where it is not linear, doubling
and halving still end the search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fp8bench.errors import WorkerError, WorkerFault, WorkerLost
from fp8bench.measure.handle import Worker
from fp8bench.measure.limits import Limits
from fp8bench.measure.passes import CaseOutcome, ran_out_of_memory
from fp8bench.model import Capacity, DeviceFacts, Level, MemoryUse, PlannedCase
from fp8bench.protocols import Observer
from fp8bench.registry import workloads
from fp8bench.units import size

# Guesses by the line between what fits and what does not; after these, halving.
_MOST_INTERPOLATIONS = 4
# A guess further than this many times what was tried is approached by a third of the way first.
_FAR = 8
# Steps that are timed with the largest batch.
_TIMED_STEPS = 8


@dataclass(frozen=True)
class BatchAttempt:
    """One number that was tried; `taken` is its memory in bytes, None where nobody counted."""

    number: int
    fits: bool
    taken: int | None = None
    why: str = ""


@dataclass
class Search:
    """Searches from `start` up to `top`; `room` is where attempts are expected to stop fitting, None if unknown."""

    start: int
    top: int
    room: int | None
    attempts: list[BatchAttempt] = field(default_factory=list)
    _stride: int = 1
    _interpolated: int = 0

    @property
    def fitting(self) -> BatchAttempt | None:
        return max(
            (attempt for attempt in self.attempts if attempt.fits), key=lambda attempt: attempt.number, default=None
        )

    @property
    def failing(self) -> BatchAttempt | None:
        return min(
            (attempt for attempt in self.attempts if not attempt.fits), key=lambda attempt: attempt.number, default=None
        )

    def run(self, attempt: Callable[[int], BatchAttempt]) -> None:
        """Tries sizes until the largest that fits is next to the smallest that does not, or all fit, or none."""
        number: int | None = self.start
        while number is not None:
            self.attempts.append(attempt(number))
            number = self._next()

    def _next(self) -> int | None:
        low, high = self.fitting, self.failing
        if high is None:
            assert low is not None
            return self._further(low.number) if low.number < self.top else None
        floor = low.number if low is not None else 0
        if high.number - floor <= 1:
            return None
        guess = self._guess()
        if guess is None or guess >= high.number or self._interpolated >= _MOST_INTERPOLATIONS:
            return (floor + high.number) // 2
        self._interpolated += 1
        return max(guess, floor + 1)

    def _further(self, low: int) -> int:
        guess = self._guess()
        if guess is None:
            return min(2 * low, self.top)
        if guess <= low:
            guess = low + self._stride
            self._stride *= 2
        return min(guess if guess <= _FAR * low else guess // 3, self.top)

    def _guess(self) -> int | None:
        """The largest number that fits by the line through the two largest attempts with a count; None without such a
        line."""
        counted = sorted((attempt.number, attempt.taken) for attempt in self.attempts if attempt.taken is not None)
        if self.room is None or len(counted) < 2:
            return None
        (first, smaller_bytes), (second, larger_bytes) = counted[-2:]
        if larger_bytes <= smaller_bytes:
            return None
        return second + (self.room - larger_bytes) * (second - first) // (larger_bytes - smaller_bytes)


LARGEST_BATCH = 1 << 20
# The largest number that batches may have to be multiples of.
_COARSEST = 1024
# Odd numbers, so that a refusal of everything but multiples of two or more shows.
_PROBES = (1, 3, 5, 7)

# Plans the same case with a different batch; None where its suite refuses that batch.
WithBatch = Callable[[PlannedCase, int, DeviceFacts], PlannedCase | None]


class NoSearch(Exception):
    """The reason why the search failed."""


@dataclass(frozen=True)
class CapacityRule:
    """`limit` is how many bytes to fit into (None: as many as the device has)."""

    limit: int | None
    with_batch: WithBatch


@dataclass(frozen=True)
class CapacityPass:
    """Runs cases with other batches, and notes the largest in their outcomes."""

    _worker: Worker
    _facts: Mapping[str, DeviceFacts]
    _limits: Limits
    _observer: Observer
    _rule: CapacityRule

    def search(self, outcomes: Sequence[CaseOutcome]) -> None:
        for outcome in outcomes:
            facts = self._facts[outcome.planned.case.device]
            search = _BatchSearch(outcome.planned, facts, self._worker, self._limits, self._observer, self._rule)
            outcome.note(capacity=search.capacity())
        if any(self._facts[outcome.planned.case.device].accelerated for outcome in outcomes):
            self._worker.restart()  # counting may leave a profiler attached, which would slow launches
        for outcome in outcomes:
            self._time(outcome)

    def _time(self, outcome: CaseOutcome) -> None:
        """Times steps with the largest batch. The speed of an emulation means nothing."""
        planned, found = outcome.planned, outcome.draft.capacity
        facts = self._facts[planned.case.device]
        if found is None or not found.batch or planned.support.is_emulated:
            return
        tried = self._rule.with_batch(planned, found.batch, facts)
        assert tried is not None
        self._observer.working(planned.case, f"timing a batch of {found.batch}", 1.0)
        try:
            limit = self._limits.first(tried.work, 2 * _TIMED_STEPS)
            seconds = self._worker.within(limit).pace(tried.case, facts, _TIMED_STEPS)
        except WorkerError as error:
            self._worker.restart()
            outcome.add_detail(f"no pace of its largest batch: {error}")
            return
        outcome.note(capacity=replace(found, seconds=seconds))


@dataclass(frozen=True)
class _BatchSearch:
    _planned: PlannedCase
    _facts: DeviceFacts
    _worker: Worker
    _limits: Limits
    _observer: Observer
    _rule: CapacityRule

    def capacity(self) -> Capacity:
        axis, limit = workloads.get(self._planned.case.workload).batch_axis, self._rule.limit
        start = dict(self._planned.case.params).get(axis)
        attempts: list[BatchAttempt] = []
        grain, room = 1, limit or self._facts.memory_bytes
        try:
            # 1. Search from the batch that the plan asks for, in steps that keep the shapes of products.
            if not isinstance(start, int) or isinstance(start, bool) or start < 1:
                raise NoSearch(f"its {axis} is {start!r}, and must be a whole number from 1 to search from")
            grain = self._grain()
            top = self._top(grain)
            search = Search(min(max(1, start // grain), top), top, room, attempts)
            search.run(lambda number: self._attempt(number, grain))
        except NoSearch as cause:
            return Capacity(axis, limit, grain=grain, why=str(cause), attempts=len(attempts))
        # 2. Report the largest batch that ran, and why the next one did not.
        best, failing = search.fitting, search.failing
        beyond, reason = (failing.number * grain, failing.why) if failing is not None else (None, "")
        if best is None:
            return Capacity(axis, limit, 0, grain, beyond=beyond, why=reason, attempts=len(attempts))
        # 3. An emulation keeps more than hardware would: estimate the device's own limit.
        batch = best.number * grain
        on_device = self._on_device(batch, grain, room) if self._planned.support.is_emulated else None
        tokens = self._planned_with(batch).work.tokens
        return Capacity(axis, limit, batch, grain, tokens, best.taken, beyond, reason, len(attempts), on_device)

    def _attempt(self, number: int, grain: int) -> BatchAttempt:
        batch, limit = number * grain, self._rule.limit
        tried = self._planned_with(batch)
        self._observer.working(self._planned.case, f"trying a batch of {batch}", 1.0)
        try:
            taken = self._worker.within(self._limits.numbers(tried.work)).try_batch(tried.case, self._facts, limit)
        except WorkerError as cause:
            if ran_out_of_memory(cause):
                return BatchAttempt(number, False, None, f"memory ran out ({_first_line(cause)})")
            self._worker.restart()
            if isinstance(cause, WorkerLost) and (cause.killed or "bad_alloc" in str(cause)):
                return BatchAttempt(number, False, None, str(cause))
            raise NoSearch(f"a batch of {batch} ended it: {cause}") from None
        if limit is not None and taken is not None and taken > limit:
            return BatchAttempt(number, False, taken, f"tensors need {size(taken - limit)} more")
        return BatchAttempt(number, True, taken)

    def _grain(self) -> int:
        """The smallest power of two such that batches in multiples of it suit the precision."""
        grain = 1
        while grain <= _COARSEST:
            tried = [self._rule.with_batch(self._planned, grain * odd, self._facts) for odd in _PROBES]
            if all(planned is None or planned.support.level is not Level.REFUSED for planned in tried):
                return grain
            grain *= 2
        raise NoSearch(f"no multiples of {_COARSEST} or less suit the precision")

    def _top(self, grain: int) -> int:
        low, high = 0, LARGEST_BATCH // grain + 1
        while high - low > 1:
            middle = (low + high) // 2
            taken = self._rule.with_batch(self._planned, middle * grain, self._facts) is not None
            low, high = (middle, high) if taken else (low, middle)
        if low == 0:
            raise NoSearch("no batch of those that were tried is taken")
        return low

    def _on_device(self, batch: int, grain: int, room: int) -> int | None:
        """The largest batch where hardware keeps the formats, by the line through one that was run and half of it."""
        half = batch // grain // 2 * grain
        smaller_peak, larger_peak = (self._device_peak(number) if half else None for number in (half, batch))
        # Peaks that do not grow with the batch give no line to extend.
        if smaller_peak is None or larger_peak is None or larger_peak <= smaller_peak:
            return None
        return min(
            (batch + (room - larger_peak) * (batch - half) // (larger_peak - smaller_peak)) // grain * grain,
            LARGEST_BATCH,
        )

    def _device_peak(self, batch: int) -> int | None:
        tried = self._planned_with(batch)
        self._observer.working(self._planned.case, f"deriving the memory of a batch of {batch}", 1.0)
        try:
            use = self._worker.within(self._limits.numbers(tried.work)).memory(tried.case, self._facts)
        except WorkerError as cause:
            if not ran_out_of_memory(cause):
                self._worker.restart()
            return None
        return use.on_device if isinstance(use, MemoryUse) else None

    def _planned_with(self, batch: int) -> PlannedCase:
        tried = self._rule.with_batch(self._planned, batch, self._facts)
        if tried is None:
            raise NoSearch(f"the suite does not take {batch}")
        return tried


def _first_line(cause: WorkerError) -> str:
    text = str(cause)
    line = text.splitlines()[0] if isinstance(cause, WorkerFault) and text else text
    return line if len(line) <= 160 else f"{line[:157]}..."
