"""Finds the largest batch of an arm that fits into a given memory, and times steps with this batch."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from fp8bench.errors import WorkerError
from fp8bench.features.train.lab.models import make_config
from fp8bench.features.train.seed import FIRST_CALL_SECONDS, call_lab
from fp8bench.features.train.values import Arm, SeedTask, Training
from fp8bench.measure.capacity import LARGEST_BATCH, BatchAttempt, LargestNumberSearch, NoSearch
from fp8bench.measure.handle import Worker
from fp8bench.measure.passes import ran_out_of_memory
from fp8bench.model import Capacity
from fp8bench.units import size

# This many untimed steps warm up the device.
_WARM_UP_STEPS = 2
_TIMED_STEPS = 8


def find_largest_arm_batch(training: Training, arm: Arm, limit: int, worker: Worker) -> Capacity:
    """Returns the largest batch whose tensors fit into `limit` bytes, and the seconds of steps with this batch. The
    worker drops all arms that it has.
    """
    # The arm's setting `batch` would replace the batch size that is tried.
    arm = replace(arm, settings=tuple(pair for pair in arm.settings if pair[0] != "batch"))
    largest_batch_search = LargestNumberSearch(make_config(training.request.settings, 1).batch, LARGEST_BATCH, limit)
    lab = call_lab(worker, FIRST_CALL_SECONDS)

    def make_task(batch: int, times: int = 1) -> SeedTask:
        task = training.make_task((arm,))
        micro_batches = times * task.settings.micro_batches
        return replace(task, settings=replace(task.settings, batch=batch, micro_batches=micro_batches))

    def try_batch(batch: int) -> BatchAttempt:
        try:
            cost = lab.measure_memory(make_task(batch))
        except WorkerError as error:
            if not ran_out_of_memory(error):
                raise NoSearch(f"a batch of {batch} ended it: {error}") from None
            return BatchAttempt(batch, False, None, "memory ran out")
        if cost.memory is None:
            raise NoSearch(cost.why)
        bytes_over_limit = cost.memory.peak - limit
        reason = f"tensors need {size(bytes_over_limit)} more" if bytes_over_limit > 0 else ""
        return BatchAttempt(batch, not reason, cost.memory.peak, reason)

    def time_steps(batch: int, times: int) -> tuple[int, list[float]]:
        (state,) = lab.begin(make_task(batch, times))
        lab.loop(arm.name, _WARM_UP_STEPS)
        return state.tokens, [lab.loop(arm.name, 1) for _ in range(_TIMED_STEPS)]

    try:
        largest_batch_search.run(try_batch)
        if training.device.accelerated:
            worker.restart()  # counting memory may leave a profiler attached, which would slow down kernel launches
        largest_fitting_attempt = largest_batch_search.largest_fitting
        smallest_failing_attempt = largest_batch_search.smallest_failing
        failing_batch, reason = (
            (smallest_failing_attempt.number, smallest_failing_attempt.why)
            if smallest_failing_attempt is not None
            else (None, "")
        )
        capacity = Capacity(
            "batch",
            limit,
            largest_fitting_attempt.number if largest_fitting_attempt else 0,
            1,
            beyond=failing_batch,
            why=reason,
        )
        if largest_fitting_attempt is None:
            return capacity
        # Compare steps with one and with two micro-batches: the difference is the time of a micro-batch, and the
        # remaining time is the update.
        tokens, seconds = time_steps(largest_fitting_attempt.number, 1)
        _, twice_seconds = time_steps(largest_fitting_attempt.number, 2)
    except (NoSearch, WorkerError) as error:
        worker.restart()
        return Capacity("batch", limit, why=str(error))
    # The fastest steps are the least disturbed ones. Noise may still make the difference negative.
    update_seconds = max(0.0, 2 * fmean(sorted(seconds)[:2]) - fmean(sorted(twice_seconds)[:2]))
    return replace(
        capacity, tokens=tokens, peak=largest_fitting_attempt.taken, seconds=tuple(seconds), update=update_seconds
    )
