"""Measures one arm: a case that is timed in the rounds of its group. An arm has states in the worker process, and
timed slots (several calls of its step in a row).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fp8bench.errors import WorkerError, WorkerFault, WorkerHung, WorkerLost
from fp8bench.measure.handle import Worker
from fp8bench.measure.limits import DEFAULT_TIME_LIMITS, HANG_SECONDS, RequestTimeLimits
from fp8bench.measure.slots import (
    REPEAT_BELOW_SECONDS,
    StepSegmentation,
    choose_block_ns,
    choose_slot_filling,
    choose_timing_slot_shape,
    cut_step_into_cells,
    make_phase_segmentation,
    sum_by_phase,
)
from fp8bench.model import (
    CELL_PHASES,
    UNATTRIBUTED,
    DeviceFacts,
    LateSteps,
    LayerScale,
    PlannedCase,
    Rotation,
    Segments,
    SlotSample,
    StepEffect,
    Timing,
)
from fp8bench.model.raw import Filling, RawSlot, RawStep
from fp8bench.protocols.axes import CACHE, ROTATING
from fp8bench.registry import precisions, workloads


@dataclass
class QuantiserCompilation:
    """Holds whether a run compiles its quantisers, which are the emulated casts. `why_eager` is '' while they are
    compiled, and the reason if they are not.

    An emulated cast runs as a dozen operations, or as one kernel by torch.compile, which is much faster and has
    bitwise equal results. Compilation takes seconds and is never timed. If compilation ends a worker, `why_eager` is
    set for the rest of the run, because it would end the next worker too.
    """

    why_eager: str = ""


# The number of states of a short step. The time of a short step depends on the addresses of its tensors: a product of
# 0.3 ms varies by 0.25% on one processor, and by more than the noise band on another. Each slot uses one of the states.
STATES_PER_SHORT_STEP = 4
# If a step takes at least this many seconds, its first call alone determines the size of its slots.
LONG_STEP_SECONDS = 5.0
_CALIBRATING_CALLS = 3
_MAX_RECOMPILATIONS = 2
# Phase codes of a step that marks no phases: the whole step is unattributed.
_UNMARKED_STEP_PHASE_CODES = (CELL_PHASES.index(UNATTRIBUTED),)
_REQUESTED_LATE_REASON = "they were first requested during the timing"

# A callback that gets an arm and a text about what is being done with this arm.
ActivityCallback = Callable[["MeasuredArm", str], None]


@dataclass
class MeasuredArm:
    """A case that is timed in rounds: the keys of its states in the worker, the number of calls in a slot, and the
    timed slots.
    """

    key: str
    planned: PlannedCase
    facts: DeviceFacts
    limits: RequestTimeLimits = DEFAULT_TIME_LIMITS
    calls: int = 1
    untimed_call_count: int = 0
    step_seconds: float = 0.0
    host_seconds: float = 0.0
    filling: Filling | None = None
    rotation: Rotation | None = None
    calibration_step: RawStep | None = None
    segmentation: StepSegmentation | None = None
    phase_marks_vary: bool = False
    copy_keys: list[str] = field(default_factory=list)
    slots: list[SlotSample] = field(default_factory=list)
    scales: tuple[LayerScale, ...] = ()
    not_finite: float = 0.0
    why_eager: str | None = None
    has_eager_calls: bool = False
    has_fused_calls: bool = False
    vector_bits: frozenset[int] = frozenset()

    @property
    def is_emulated(self) -> bool:
        return self.planned.support.is_emulated

    @property
    def cache_mode(self) -> str:
        return str(CACHE.of(dict(self.planned.case.params)))

    @property
    def has_device_queue(self) -> bool:
        """Returns whether steps are enqueued on an accelerator, without emulation."""
        return self.facts.accelerated and not self.is_emulated

    def prepare(
        self, worker: Worker, quantisers: QuantiserCompilation | None = None, tell: ActivityCallback | None = None
    ) -> None:
        """Builds the state, compiles its quantisers, and times a few steps. Their time determines the number of calls
        in a slot, and their phases define the cells (timed parts of a step).

        The first, untimed step has no earlier scale, so timed steps may need further quantisers. Without `quantisers`
        nothing is compiled, and `why_eager` stays None.
        """
        # 1. Calibrate static scales first, because the state that is built next uses them.
        first_step_time_limit = self.limits.for_first_step(self.planned.work)
        static_scales = self.planned.case.static
        if static_scales is not None:
            worker.with_time_limit(self.limits.for_first_step(self.planned.work, static_scales.batches)).calibrate(
                self.planned.case, self.facts
            )
        # 2. Build the state, and compile the quantisers that building it and its first step requested.
        worker.with_time_limit(first_step_time_limit).prepare(self.key, self.planned.case, self.facts)
        self._compile_quantisers(worker, quantisers, tell)
        fastest_step = self._time_fastest_step(worker, first_step_time_limit)
        # 3. Timed steps may request further quantisers. Compile these, and time the step again.
        for _ in range(_MAX_RECOMPILATIONS):
            if not self._compile_quantisers(worker, quantisers, tell):
                break
            fastest_step = self._time_fastest_step(worker, first_step_time_limit)
        # 4. Choose the number of calls per slot from the fastest step. A disturbed step is slower and would give too
        # few calls. The lower limit of 1e-7 s avoids a division by 0.
        self.step_seconds = max(fastest_step.seconds, 1e-7)
        self.calibration_step = fastest_step
        self.segmentation = cut_step_into_cells(
            fastest_step.codes, fastest_step.intervals_ns, part_ends=self._last_phase_of_part
        )
        slot_shape = choose_timing_slot_shape(
            self.step_seconds, self.host_seconds, self.cache_mode, self.has_device_queue
        )
        self.calls, self.filling = slot_shape.calls, slot_shape.filling
        self.untimed_call_count = slot_shape.untimed_call_count
        if self.cache_mode == ROTATING:
            self.rotation = worker.with_time_limit(HANG_SECONDS).rotation(self.key)

    def prepare_state_copies(self, worker: Worker) -> None:
        """Prepares more copies of a short step's state, at other addresses, while memory suffices.

        Cases on an accelerator get no copies, because even a short step may hold gigabytes that other cases need.
        Cases that compile their step get none either, because preparing them takes long.
        """
        is_step_short = self.step_seconds < REPEAT_BELOW_SECONDS and not self.planned.work.setup_seconds
        needs_state_copies = (
            is_step_short and not self.is_emulated and not self.facts.accelerated and self.rotation is None
        )
        first_step_time_limit = self.limits.for_first_step(self.planned.work)
        for copy_number in range(1, STATES_PER_SHORT_STEP if needs_state_copies else 1):
            try:
                worker.with_time_limit(first_step_time_limit).prepare(
                    f"{self.key} #{copy_number}", self.planned.case, self.facts
                )
            except WorkerFault as fault:
                if not fault.out_of_memory:
                    raise
                return
            self.copy_keys.append(f"{self.key} #{copy_number}")

    def _compile_quantisers(
        self, worker: Worker, quantisers: QuantiserCompilation | None, tell: ActivityCallback | None
    ) -> bool:
        """Compiles the quantisers (emulated casts) that the state has requested. Returns False if there was nothing
        to compile.
        """
        if quantisers is None or quantisers.why_eager:
            self.why_eager = None if quantisers is None else quantisers.why_eager
            return False
        quantiser_count, self.why_eager = worker.with_time_limit(HANG_SECONDS).quantisers()
        if not quantiser_count:
            return False
        if tell is not None:
            tell(self, f"compiling {quantiser_count} quantiser{'s' * (quantiser_count != 1)}")
        compile_time_limit = self.limits.for_compiling(self.planned.work, quantiser_count)
        try:
            worker.with_time_limit(compile_time_limit).compile_quantisers(self.key)
        except (WorkerLost, WorkerHung) as error:
            has_hung = isinstance(error, WorkerHung)
            quantisers.why_eager = (
                f"compiling took more than {compile_time_limit:g} s" if has_hung else f"compiling failed: {error}"
            )
            raise CompilingFailed(self) from error
        self.why_eager = worker.with_time_limit(HANG_SECONDS).quantisers()[1]
        return True

    def _time_fastest_step(self, worker: Worker, limit: float) -> RawStep:
        single_call_slot = worker.with_time_limit(limit).slot(self.key, 1, 0, None)
        slot = single_call_slot
        # The time of an emulated step is never compared, so one call is enough to size its slots.
        if single_call_slot.steps[0].seconds < LONG_STEP_SECONDS and not self.is_emulated:
            limit = self.limits.for_slot(single_call_slot.steps[0].seconds, _CALIBRATING_CALLS)
            queue_filling = (
                choose_slot_filling(single_call_slot.host_seconds, _CALIBRATING_CALLS)
                if self.has_device_queue
                else None
            )
            slot = worker.with_time_limit(limit).slot(self.key, _CALIBRATING_CALLS, 0, queue_filling)
        self.host_seconds = slot.host_seconds
        # Cells begin and end at phase marks, so choose among the steps with the most marks.
        max_mark_count = max(len(step.codes) for step in slot.steps)
        return min((step for step in slot.steps if len(step.codes) == max_mark_count), key=lambda step: step.seconds)

    def match_cells(self, leading_arm: MeasuredArm) -> None:
        """Gives this arm cells (timed parts of a step) that are comparable with those of `leading_arm`, the first arm
        of the session. If the steps of both have equal marks, both arms get the same cells. Otherwise this arm's step
        is cut into about as many blocks as that of `leading_arm`.

        The best case of a step is the sum of the fastest time of each cell, so an arm with more and shorter cells would
        look faster.
        """
        assert (
            self.calibration_step is not None
            and leading_arm.calibration_step is not None
            and leading_arm.segmentation is not None
        )
        if self.calibration_step.codes == leading_arm.calibration_step.codes:
            self.segmentation = leading_arm.segmentation
            return
        step_ns, leader_ns = sum(self.calibration_step.intervals_ns), sum(leading_arm.calibration_step.intervals_ns)
        min_block_ns = max(1, round(choose_block_ns(leader_ns) * step_ns / max(leader_ns, 1)))
        self.segmentation = cut_step_into_cells(
            self.calibration_step.codes, self.calibration_step.intervals_ns, min_block_ns, self._last_phase_of_part
        )

    def run(self, worker: Worker, round_number: int, position: int | None = None) -> None:
        """Times one slot in the worker and stores it. `position` is the position of the slot within the round.

        If the first calls of a slot are discarded, sometimes one more call is discarded, at random. Otherwise a
        disturbance that comes every n calls would hit a discarded call always or never.
        """
        generator = random.Random(f"{self.key} {round_number}")
        discarded_call_count = self.untimed_call_count and self.untimed_call_count + generator.randrange(2)
        slot_time_limit = self.limits.for_slot(self.step_seconds, self.calls + discarded_call_count)
        state_copy_key = generator.choice([self.key, *self.copy_keys])
        self.add_slot(
            worker.with_time_limit(slot_time_limit).slot(
                state_copy_key, self.calls, discarded_call_count, self.filling
            ),
            round_number,
            position,
        )

    def check_states(self, worker: Worker) -> None:
        """Raises WorkerFault if the timed steps damaged a state of the arm. Steps with NaN or infinity may take a
        different time than steps with finite numbers.
        """
        for key in (self.key, *self.copy_keys):
            state_check = worker.with_time_limit(self.limits.for_untimed_pass(self.planned.work)).check(key)
            if state_check.wrong:
                raise WorkerFault("after its steps", state_check.wrong)
            self.not_finite = max(self.not_finite, state_check.not_finite)
        if self.planned.case.static is not None or precisions.get(self.planned.case.precision).whole_layers:
            self.scales = worker.with_time_limit(self.limits.for_untimed_pass(self.planned.work)).scales(self.key)

    @property
    def _last_phase_of_part(self) -> str:
        return workloads.get(self.planned.case.workload).part_ends

    def examine_late_steps(self, worker: Worker) -> dict[str, Any]:
        """Examines steps that run after the timing (late steps), to find out what work the timed steps did. Returns
        fields for the case's record, except those that the worker cannot measure.

        The examined state is chosen at random, so that the suite's code cannot know which state it is.
        """
        work, case = self.planned.work, self.planned.case
        if case.ranks > 1:
            return {}
        remote_bench = worker.with_time_limit(self.limits.for_untimed_pass(work))
        # Choose one of the states at random in each session. If a suite cheats in only one state, some sessions catch
        # it.
        key = random.choice([self.key, *self.copy_keys])
        late_steps = LateSteps()
        with suppress(WorkerFault):
            try:
                # The timing is complete. Run further slots, without storing times, until the worker has examined enough
                # steps.
                remote_bench.begin_late(key)
                while remote_bench.is_late_due(key):
                    remote_bench.slot(key, self.calls, self.untimed_call_count, self.filling)
            finally:
                late_steps = remote_bench.end_late(key)
        late_step_fields: dict[str, Any] = {"late": late_steps}
        # FLOPs that vary from step to step cannot be reported as one number.
        if late_steps.flops is not None and not late_steps.varies:
            late_step_fields["late_flops"] = round(late_steps.flops)
        if late_steps.told_apart:
            late_step_fields["effect"] = StepEffect(False, late_steps.told_apart)
        return late_step_fields

    def release_states(self, worker: Worker) -> ArmFailed | None:
        """Frees the states in the worker. Returns an ArmFailed if threads of the case still run, because they would
        disturb other cases.
        """
        running_threads = [thread for key in (self.key, *self.copy_keys) for thread in worker.release(key)]
        if not running_threads:
            return None
        shown_thread_names = ", ".join(running_threads[:5])
        return ArmFailed(
            self,
            WorkerFault(
                "LeftRunning",
                f"{len(running_threads)} threads or processes that its preparation started still run after its state "
                f"was freed ({shown_thread_names})",
            ),
        )

    def add_slot(self, raw: RawSlot, round_number: int, position: int | None = None) -> None:
        """Stores a slot (several timed calls): for each step, the times of its cells, which are timed parts of a step.
        If the steps of an arm differ in their phase marks, stores the total time of each phase instead, in all slots.
        """
        assert self.segmentation is not None
        # One step with eager quantisers is enough to report the whole case as eager.
        self.has_eager_calls |= raw.eager_quantisers > 0
        self.has_fused_calls |= raw.fused_quantisers > 0
        self.vector_bits |= set(raw.vector_bits)
        cell_ns_by_step = _divide_step_times_into_cells(raw.steps, self.segmentation.cells)
        # A step whose phase marks differ from those of the calibrating step has different cells. So use totals per
        # phase.
        if self.phase_marks_vary or any(row is None for row in cell_ns_by_step):
            self._convert_to_phase_totals()
            cell_ns_by_step = _divide_step_times_into_cells(raw.steps, sum_by_phase)
        calls_ns = tuple(row for row in cell_ns_by_step if row is not None)
        self.slots.append(
            SlotSample(
                round_number,
                calls_ns,
                raw.wall_seconds,
                raw.cpu_seconds,
                raw.host_seconds,
                raw.thread_seconds,
                raw.preemptions,
                raw.stolen_seconds,
                raw.waited_seconds,
                position,
                ranks=raw.ranks,
                memory_retries=raw.memory_retries,
            )
        )

    def _convert_to_phase_totals(self) -> None:
        if self.phase_marks_vary:
            return
        assert self.segmentation is not None
        phase_codes = [CELL_PHASES.index(phase) for phase in self.segmentation.segments.phases]
        sum_cells_by_phase = partial(sum_by_phase, phase_codes)
        self.slots = [replace(slot, calls_ns=tuple(map(sum_cells_by_phase, slot.calls_ns))) for slot in self.slots]
        self.segmentation = make_phase_segmentation(self.segmentation.codes)
        self.phase_marks_vary = True

    def record_fields(self) -> dict[str, Any]:
        return {
            "timing": self.timing(),
            "scales": self.scales,
            "not_finite": self.not_finite,
            "rotation": self.rotation,
        }

    def timing(self) -> Timing:
        segments = self.segmentation.segments if self.segmentation else Segments((), ())
        phase_code_counts = Counter(self.segmentation.codes if self.segmentation else ())
        phase_entry_counts = tuple((CELL_PHASES[code], count) for code, count in sorted(phase_code_counts.items()))
        eager_reason = (
            (self.why_eager or _REQUESTED_LATE_REASON) if self.has_eager_calls and self.why_eager is not None else ""
        )
        slots, vector_bits = tuple(self.slots), tuple(sorted(self.vector_bits))
        return Timing(
            segments, slots, phase_entry_counts, self.phase_marks_vary, eager_reason, self.has_fused_calls, vector_bits
        )


def _divide_step_times_into_cells(
    steps: Sequence[RawStep], cut: Callable[[Sequence[int], Sequence[int]], tuple[int, ...] | None]
) -> list[tuple[int, ...] | None]:
    """Returns for each step the times of its cells (its smallest timed parts). A step without marks between phases is
    divided in the proportions of the last step with such marks.
    """
    cell_ns_by_step: list[tuple[int, ...] | None] = []
    last_marked_cell_ns: tuple[int, ...] | None = None
    for step in steps:
        if step.codes == _UNMARKED_STEP_PHASE_CODES and last_marked_cell_ns is not None:
            cell_ns_by_step.append(_divide_ns_over_cells(sum(step.intervals_ns), last_marked_cell_ns))
        else:
            last_marked_cell_ns = cut(step.codes, step.intervals_ns)
            cell_ns_by_step.append(last_marked_cell_ns)
    return cell_ns_by_step


def _divide_ns_over_cells(total: int, cells: tuple[int, ...]) -> tuple[int, ...]:
    """Divides `total` nanoseconds in the proportions of `cells`. The largest part gets the rounding remainder."""
    cell_total_ns = max(sum(cells), 1)
    rescaled_cell_ns = [total * cell // cell_total_ns for cell in cells]
    rescaled_cell_ns[rescaled_cell_ns.index(max(rescaled_cell_ns))] += total - sum(rescaled_cell_ns)
    return tuple(rescaled_cell_ns)


class CompilingFailed(Exception):
    """The worker ended or hung while it compiled an arm's quantisers. The arm can run without compiling them."""

    def __init__(self, arm: MeasuredArm) -> None:
        super().__init__(arm.key)
        self.arm = arm


class ArmFailed(Exception):
    """An arm could not be prepared or timed. `cause` is the worker's error."""

    def __init__(self, arm: MeasuredArm, cause: WorkerError) -> None:
        super().__init__(str(cause))
        self.arm = arm
        self.cause = cause


@contextmanager
def raise_as_arm_failure(arm: MeasuredArm) -> Iterator[None]:
    """Converts a WorkerError that the `with` block raises to an ArmFailed that names this arm."""
    try:
        yield
    except WorkerError as error:
        raise ArmFailed(arm, error) from error
