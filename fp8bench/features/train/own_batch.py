"""The largest batch of an arm that fits into some memory, by running it and the next one, and its pace."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from fp8bench.errors import WorkerError
from fp8bench.features.train.lab.models import config_of
from fp8bench.features.train.seed import FIRST_SECONDS, lab_of
from fp8bench.features.train.values import Arm, SeedTask, Training
from fp8bench.measure.capacity import LARGEST_BATCH, BatchAttempt, NoSearch, Search
from fp8bench.measure.handle import Worker
from fp8bench.measure.passes import ran_out_of_memory
from fp8bench.model import Capacity
from fp8bench.units import size

# Steps that warm up, and steps that are timed.
_WARM, _TIMED = 2, 8


def find_own_batch(training: Training, arm: Arm, limit: int, worker: Worker) -> Capacity:
    """Returns the largest batch within `limit` bytes of tensors, with the seconds of its steps. Drops the arms that the
    worker has."""
    # An arm with other micro-batches has a separate batch, which would replace the one that is tried.
    arm = replace(arm, settings=tuple(pair for pair in arm.settings if pair[0] != "batch"))
    search = Search(config_of(training.request.settings, 1).batch, LARGEST_BATCH, limit)
    lab = lab_of(worker, FIRST_SECONDS)

    def task_with(batch: int, times: int = 1) -> SeedTask:
        task = training.task((arm,))
        micro_batches = times * task.settings.micro_batches
        return replace(task, settings=replace(task.settings, batch=batch, micro_batches=micro_batches))

    def attempt(batch: int) -> BatchAttempt:
        try:
            cost = lab.alone(task_with(batch))
        except WorkerError as error:
            if not ran_out_of_memory(error):
                raise NoSearch(f"a batch of {batch} ended it: {error}") from None
            return BatchAttempt(batch, False, None, "memory ran out")
        if cost.memory is None:
            raise NoSearch(cost.why)
        beyond = cost.memory.peak - limit
        reason = f"tensors need {size(beyond)} more" if beyond > 0 else ""
        return BatchAttempt(batch, not reason, cost.memory.peak, reason)

    def time(batch: int, times: int) -> tuple[int, list[float]]:
        (state,) = lab.begin(task_with(batch, times))
        lab.loop(arm.name, _WARM)
        return state.tokens, [lab.loop(arm.name, 1) for _ in range(_TIMED)]

    try:
        search.run(attempt)
        if training.device.accelerated:
            worker.restart()  # counting may leave a profiler attached, which would slow launches
        best, failing = search.fitting, search.failing
        beyond, reason = (failing.number, failing.why) if failing is not None else (None, "")
        found = Capacity("batch", limit, best.number if best else 0, 1, beyond=beyond, why=reason)
        if best is None:
            return found
        # Twice the micro-batches take as much longer as micro-batches take; the rest is the update.
        (tokens, seconds), (_, twice) = time(best.number, 1), time(best.number, 2)
    except (NoSearch, WorkerError) as error:
        worker.restart()
        return Capacity("batch", limit, why=str(error))
    update = max(0.0, 2 * fmean(sorted(seconds)[:2]) - fmean(sorted(twice)[:2]))
    return replace(found, tokens=tokens, peak=best.taken, seconds=tuple(seconds), update=update)
