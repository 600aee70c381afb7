"""Searches the largest batch that fits in memory, for each case.

The search assumes only that a larger batch needs more memory. Memory is nearly linear in the batch, so a line through
two attempts predicts the largest batch. The predicted batch and its neighbour are tried next. If the prediction
fails, the search doubles and halves the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fp8bench.errors import WorkerError, WorkerFault, WorkerLost
from fp8bench.measure.handle import Worker
from fp8bench.measure.limits import RequestTimeLimits
from fp8bench.measure.passes import CaseOutcome, ran_out_of_memory
from fp8bench.model import Capacity, DeviceFacts, Level, MemoryUse, PlannedCase
from fp8bench.protocols import Observer
from fp8bench.registry import workloads
from fp8bench.units import size

# After a batch has failed, extrapolate a line for at most this many batches. After that, search by bisection.
_MAX_PREDICTIONS = 4
# If the prediction exceeds the last attempt by more than this factor, a third of the predicted batch is tried first.
_MAX_BATCH_GROWTH_FACTOR = 8
# The number of steps that are timed with the largest batch.
_TIMED_STEPS = 8


@dataclass(frozen=True)
class BatchAttempt:
    """The result of trying a batch. `number` is the batch divided by the batch multiple. `taken` is the memory in bytes
    that the batch needed, None if it was not counted.
    """

    number: int
    fits: bool
    taken: int | None = None
    why: str = ""


@dataclass
class LargestNumberSearch:
    """Searches the largest number from 1 to `largest_number` that fits in memory. The first attempt is `start`.

    `room` is the available memory in bytes, None if unknown.
    """

    start: int
    largest_number: int
    room: int | None
    attempts: list[BatchAttempt] = field(default_factory=list)
    _number_increment: int = 1
    _prediction_count: int = 0

    @property
    def largest_fitting(self) -> BatchAttempt | None:
        return max(
            (attempt for attempt in self.attempts if attempt.fits), key=lambda attempt: attempt.number, default=None
        )

    @property
    def smallest_failing(self) -> BatchAttempt | None:
        return min(
            (attempt for attempt in self.attempts if not attempt.fits), key=lambda attempt: attempt.number, default=None
        )

    def run(self, attempt: Callable[[int], BatchAttempt]) -> None:
        """Calls `attempt` with numbers until one fits and the next larger one does not. Also ends if `largest_number`
        fits, or if 1 does not fit.
        """
        number: int | None = self.start
        while number is not None:
            self.attempts.append(attempt(number))
            number = self._choose_next_number()

    def _choose_next_number(self) -> int | None:
        fitting, failing = self.largest_fitting, self.smallest_failing
        if failing is None:
            assert fitting is not None
            return self._choose_larger_number(fitting.number) if fitting.number < self.largest_number else None
        largest_fitting_number = fitting.number if fitting is not None else 0
        if failing.number - largest_fitting_number <= 1:
            return None
        predicted_largest_number = self._predict_largest_number()
        if (
            predicted_largest_number is None
            or predicted_largest_number >= failing.number
            or self._prediction_count >= _MAX_PREDICTIONS
        ):
            return (largest_fitting_number + failing.number) // 2
        self._prediction_count += 1
        return max(predicted_largest_number, largest_fitting_number + 1)

    def _choose_larger_number(self, fitting_number: int) -> int:
        candidate_number = self._predict_largest_number()
        if candidate_number is None:
            return min(2 * fitting_number, self.largest_number)
        # The line predicts no larger number than one that fits. Search upwards in growing steps.
        if candidate_number <= fitting_number:
            candidate_number = fitting_number + self._number_increment
            self._number_increment *= 2
        return min(
            candidate_number
            if candidate_number <= _MAX_BATCH_GROWTH_FACTOR * fitting_number
            else candidate_number // 3,
            self.largest_number,
        )

    def _predict_largest_number(self) -> int | None:
        """Predicts the largest number that fits in `room`, by a line through the two largest attempts with known
        memory. Returns None without `room` or such a line.
        """
        measured_attempts = sorted(
            (attempt.number, attempt.taken) for attempt in self.attempts if attempt.taken is not None
        )
        if self.room is None or len(measured_attempts) < 2:
            return None
        (smaller, smaller_bytes), (larger, larger_bytes) = measured_attempts[-2:]
        if larger_bytes <= smaller_bytes:
            return None
        return larger + (self.room - larger_bytes) * (larger - smaller) // (larger_bytes - smaller_bytes)


LARGEST_BATCH = 1 << 20
# The largest power of two that is tried as the required multiple of a precision's batch.
_MAX_BATCH_MULTIPLE = 1024
# A multiple is accepted unless the precision refuses it times one of these factors. They are odd, to reveal that a
# larger power of two is needed.
_TRIED_BATCH_FACTORS = (1, 3, 5, 7)

# A function that plans a case again with the given batch. It returns None if the suite refuses this batch.
PlanWithBatch = Callable[[PlannedCase, int, DeviceFacts], PlannedCase | None]


class NoSearch(Exception):
    """The largest batch could not be searched. The message has the reason."""


@dataclass(frozen=True)
class CapacitySearchRule:
    """How to search the largest batch. `limit` is the memory in bytes that a batch must fit into; None is the
    device's memory. `plan_with_batch` plans a case with a given batch.
    """

    limit: int | None
    plan_with_batch: PlanWithBatch


@dataclass(frozen=True)
class CapacityPass:
    """Searches the largest batch that fits in memory, for each case, by running it with various batches. The result
    is stored in the case's outcome.
    """

    _worker: Worker
    _device_facts: Mapping[str, DeviceFacts]
    _time_limits: RequestTimeLimits
    _observer: Observer
    _capacity_search_rule: CapacitySearchRule

    def find_largest_batches(self, outcomes: Sequence[CaseOutcome]) -> None:
        for outcome in outcomes:
            facts = self._device_facts[outcome.planned.case.device]
            largest_batch_search = _BatchSearch(
                outcome.planned, facts, self._worker, self._time_limits, self._observer, self._capacity_search_rule
            )
            outcome.note(capacity=largest_batch_search.find_batch_capacity())
        if any(self._device_facts[outcome.planned.case.device].accelerated for outcome in outcomes):
            # Counting memory may leave a profiler attached to the process. It would slow down launches, so the timing
            # needs a new process.
            self._worker.restart()
        for outcome in outcomes:
            self._time_largest_batch(outcome)

    def _time_largest_batch(self, outcome: CaseOutcome) -> None:
        """Times steps with the largest batch. Emulated cases are skipped, because an emulation does not show the
        speed of hardware.
        """
        planned, capacity = outcome.planned, outcome.draft.capacity
        facts = self._device_facts[planned.case.device]
        if capacity is None or not capacity.batch or planned.support.is_emulated:
            return
        planned_batch = self._capacity_search_rule.plan_with_batch(planned, capacity.batch, facts)
        assert planned_batch is not None
        self._observer.working(planned.case, f"timing a batch of {capacity.batch}", 1.0)
        try:
            time_limit = self._time_limits.for_first_step(planned_batch.work, 2 * _TIMED_STEPS)
            step_seconds = self._worker.with_time_limit(time_limit).pace(planned_batch.case, facts, _TIMED_STEPS)
        except WorkerError as error:
            self._worker.restart()
            outcome.append_detail_text(f"its largest batch could not be timed: {error}")
            return
        outcome.note(capacity=replace(capacity, seconds=step_seconds))


@dataclass(frozen=True)
class _BatchSearch:
    _planned_case: PlannedCase
    _device_facts: DeviceFacts
    _worker: Worker
    _time_limits: RequestTimeLimits
    _observer: Observer
    _capacity_rule: CapacitySearchRule

    def find_batch_capacity(self) -> Capacity:
        axis, byte_limit = workloads.get(self._planned_case.case.workload).batch_axis, self._capacity_rule.limit
        planned_batch_size = dict(self._planned_case.case.params).get(axis)
        batch_attempts: list[BatchAttempt] = []
        batch_size_multiple, room_bytes = 1, byte_limit or self._device_facts.memory_bytes
        try:
            # 1. Begin the search with the planned batch. Try only multiples of `batch_size_multiple`, because the
            # precision may refuse other batches.
            if (
                not isinstance(planned_batch_size, int)
                or isinstance(planned_batch_size, bool)  # in Python, bool is a kind of int
                or planned_batch_size < 1
            ):
                raise NoSearch(
                    f"its {axis} is {planned_batch_size!r}: the search needs a whole number from 1 to begin with"
                )
            batch_size_multiple = self._find_batch_multiple()
            largest_batch_number = self._find_plan_limit(batch_size_multiple)
            largest_number_search = LargestNumberSearch(
                min(max(1, planned_batch_size // batch_size_multiple), largest_batch_number),
                largest_batch_number,
                room_bytes,
                batch_attempts,
            )
            largest_number_search.run(lambda number: self._try_batch_number(number, batch_size_multiple))
        except NoSearch as cause:
            return Capacity(axis, byte_limit, grain=batch_size_multiple, why=str(cause), attempts=len(batch_attempts))
        # 2. Report the largest batch that ran, and why the next one did not.
        largest = largest_number_search.largest_fitting
        smallest_failing = largest_number_search.smallest_failing
        beyond, reason = (
            (smallest_failing.number * batch_size_multiple, smallest_failing.why)
            if smallest_failing is not None
            else (None, "")
        )
        if largest is None:
            return Capacity(
                axis, byte_limit, 0, batch_size_multiple, beyond=beyond, why=reason, attempts=len(batch_attempts)
            )
        # 3. An emulated case stores more bytes than hardware with this format would. Estimate the largest batch on
        # such hardware.
        batch = largest.number * batch_size_multiple
        device_batch = (
            self._estimate_device_batch(batch, batch_size_multiple, room_bytes)
            if self._planned_case.support.is_emulated
            else None
        )
        tokens = self._plan_batch(batch).work.tokens
        return Capacity(
            axis,
            byte_limit,
            batch,
            batch_size_multiple,
            tokens,
            largest.taken,
            beyond,
            reason,
            len(batch_attempts),
            device_batch,
        )

    def _try_batch_number(self, number: int, batch_multiple: int) -> BatchAttempt:
        batch, byte_limit = number * batch_multiple, self._capacity_rule.limit
        planned_batch = self._plan_batch(batch)
        self._observer.working(self._planned_case.case, f"trying a batch of {batch}", 1.0)
        try:
            used_bytes = self._worker.with_time_limit(self._time_limits.for_untimed_pass(planned_batch.work)).try_batch(
                planned_batch.case, self._device_facts, byte_limit
            )
        except WorkerError as cause:
            if ran_out_of_memory(cause):
                return BatchAttempt(number, False, None, f"memory ran out ({_shorten_error(cause)})")
            self._worker.restart()
            # A system may kill a process that uses too much memory, and C++ code may fail to allocate.
            if isinstance(cause, WorkerLost) and (cause.killed or "bad_alloc" in str(cause)):
                return BatchAttempt(number, False, None, str(cause))
            raise NoSearch(f"a batch of {batch} ended the search: {cause}") from None
        if byte_limit is not None and used_bytes is not None and used_bytes > byte_limit:
            return BatchAttempt(number, False, used_bytes, f"tensors need {size(used_bytes - byte_limit)} more")
        return BatchAttempt(number, True, used_bytes)

    def _find_batch_multiple(self) -> int:
        """Returns the power of two by which a batch must be divisible, so that the precision accepts it. Raises
        NoSearch if no such power is found.
        """
        batch_size_multiple = 1
        while batch_size_multiple <= _MAX_BATCH_MULTIPLE:
            planned_batches = [
                self._capacity_rule.plan_with_batch(
                    self._planned_case, batch_size_multiple * factor, self._device_facts
                )
                for factor in _TRIED_BATCH_FACTORS
            ]
            if all(planned is None or planned.support.level is not Level.REFUSED for planned in planned_batches):
                return batch_size_multiple
            batch_size_multiple *= 2
        raise NoSearch(f"the precision refuses multiples of all powers of two up to {_MAX_BATCH_MULTIPLE}")

    def _find_plan_limit(self, batch_multiple: int) -> int:
        """Returns the largest batch that the suite can plan, in multiples of `batch_multiple`. Raises NoSearch if the
        suite can plan none.
        """
        low, high = 0, LARGEST_BATCH // batch_multiple + 1
        while high - low > 1:
            middle_batch_number = (low + high) // 2
            is_planned = (
                self._capacity_rule.plan_with_batch(
                    self._planned_case, middle_batch_number * batch_multiple, self._device_facts
                )
                is not None
            )
            low, high = (middle_batch_number, high) if is_planned else (low, middle_batch_number)
        if low == 0:
            raise NoSearch("the suite refused all batches that were tried")
        return low

    def _estimate_device_batch(self, batch: int, batch_multiple: int, room_bytes: int) -> int | None:
        """Estimates the largest batch on hardware that stores the emulated formats. Two memory sizes, those of
        `batch` and of half that batch, define a line. The estimate is the batch at which the line reaches the
        available memory.
        """
        half_batch_size = batch // batch_multiple // 2 * batch_multiple
        smaller_peak, larger_peak = (
            self._measure_device_peak(number) if half_batch_size else None for number in (half_batch_size, batch)
        )
        # Memory can be extrapolated to larger batches only if the peak grows with the batch.
        if smaller_peak is None or larger_peak is None or larger_peak <= smaller_peak:
            return None
        return min(
            (batch + (room_bytes - larger_peak) * (batch - half_batch_size) // (larger_peak - smaller_peak))
            // batch_multiple
            * batch_multiple,
            LARGEST_BATCH,
        )

    def _measure_device_peak(self, batch: int) -> int | None:
        planned_batch = self._plan_batch(batch)
        self._observer.working(self._planned_case.case, f"estimating the memory of a batch of {batch}", 1.0)
        try:
            memory_use = self._worker.with_time_limit(self._time_limits.for_untimed_pass(planned_batch.work)).memory(
                planned_batch.case, self._device_facts
            )
        except WorkerError as cause:
            if not ran_out_of_memory(cause):
                self._worker.restart()
            return None
        return memory_use.on_device if isinstance(memory_use, MemoryUse) else None

    def _plan_batch(self, batch: int) -> PlannedCase:
        planned_batch = self._capacity_rule.plan_with_batch(self._planned_case, batch, self._device_facts)
        if planned_batch is None:
            raise NoSearch(f"the suite refuses a batch of {batch}")
        return planned_batch


def _shorten_error(cause: WorkerError) -> str:
    text = str(cause)
    first_line = text.splitlines()[0] if isinstance(cause, WorkerFault) and text else text
    return first_line if len(first_line) <= 160 else f"{first_line[:157]}..."
