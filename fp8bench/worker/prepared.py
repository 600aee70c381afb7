"""A case that is ready to be timed: its states, its phase clock, and slots (turns) of timed steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8bench.model import DeviceFacts, LateSteps, Phase
from fp8bench.model.raw import Filling, RawReplay, RawSlot, RawStep, StateCheck
from fp8bench.model.readings import Reading, ReadingOrUnavailable, subtract_counters
from fp8bench.model.run import MARKS_SHARE
from fp8bench.protocols import (
    Arithmetic,
    CannotCapture,
    Device,
    Phases,
    Precision,
    ScaleBook,
    SilentPhases,
    Stamper,
    Workload,
)
from fp8bench.protocols.axes import CACHE_FLUSH_FACTOR
from fp8bench.worker import fusing
from fp8bench.worker.checked_results import require_check_text
from fp8bench.worker.clock import BetweenCallsTimer, PhaseStampClock, require_agreeing_clocks, stamp_cost
from fp8bench.worker.finite import InitialFiniteElements
from fp8bench.worker.held_phase import HeldPhase, store_phase_inputs
from fp8bench.worker.host_counters import read_counters
from fp8bench.worker.state_tensors import get_address, iterate_tensors
from fp8bench.worker.static_scales import step
from fp8bench.worker.step_guards import RunningTasks, guard_untimed_pass, owns_process, require_silent_step
from fp8bench.worker.switches import precision_scope, restore_switches, without_garbage_collection

if TYPE_CHECKING:
    from fp8bench.worker.late_slots import LateStepInspection

# The allowed difference between the time of a call and the time between its stamps, because the clock itself takes
# time: seconds per call plus seconds per mark, or a share of the call's time if that is longer.
_ALLOWED_CALL_SECONDS, _ALLOWED_MARK_SECONDS, _CALL_SHARE = 20e-6, 0.2e-6, 0.05
# The allowed difference between the time of a slot and the time between its stamps, in seconds or relative to the slot.
# On an accelerator it is uncertain when the queue begins and ends.
_ALLOWED_SLOT_SECONDS, _SLOT_SHARE = 1e-3, 0.25
# The median of this many slots decides whether a step has changed the clock's time stamps. If these slots take longer
# than _ACCUSING_SECONDS, fewer are enough, but at least _MIN_ACCUSING_SLOTS.
_ACCUSING_SLOTS, _MIN_ACCUSING_SLOTS, _ACCUSING_SECONDS = 31, 5, 0.5
# This many replays of a captured step are timed by phase, and the fastest replay is used.
_MARKED_REPLAY_COUNT = 10
# At least one of this many steps has phase marks, however long marks take.
_MAX_STEPS_PER_MARKED_STEP = 32


def skip_rank_barrier() -> None:
    """Does nothing: the barrier of ranks if there is only one process."""


class State(NamedTuple):
    """A prepared state: the object that the workload prepared (`held`), the scales of its casts (or None), the check
    for finite numbers, and the arithmetics (casts and products) of its layers.
    """

    held: Any
    scales: ScaleBook | None
    finite: InitialFiniteElements
    arithmetics: tuple[Arithmetic, ...]


# The most states that a case uses in turn. Preparing more states would take longer than timing them.
MAX_STATES = 256


def make_cache_flush(facts: DeviceFacts) -> Callable[[], Any]:
    """Returns a function that overwrites the whole cache of a device, in the order of the device's other work.

    The function also reads memory, because writing zeros alone may bypass a cache. It adds integers, which no precision
    affects.
    """
    import torch

    flush_buffer = torch.zeros(CACHE_FLUSH_FACTOR * facts.cache_bytes // 4, dtype=torch.int32, device=facts.key)
    return partial(flush_buffer.add_, 1)


def count_bytes(state: object) -> int:
    return sum({get_address(part): part.untyped_storage().nbytes() for part in iterate_tensors(state)}.values())


def make_rotation(
    first: State, make_state: Callable[[], State], facts: DeviceFacts, device: Device
) -> tuple[State, ...]:
    """Returns the first state and more states, so many that each state has left the cache before it is used again.

    Makes at least one more state, unless memory runs out.
    """
    needed_state_count = max(2, math.ceil(CACHE_FLUSH_FACTOR * facts.cache_bytes / max(count_bytes(first.held), 1)))
    states = [first]
    while len(states) < min(needed_state_count, MAX_STATES):
        try:
            states.append(make_state())
        except Exception as error:
            if not device.is_out_of_memory(error):
                raise
            break
    return tuple(states)


@dataclass
class PreparedCase:
    """A case that is ready to be timed.

    `started` are the threads and processes that the preparation has started. Steps use the `states` in turn; a replay
    takes a step of every state. Before each call, outside of the timing, `flush_cache` empties the cache, and the
    workload loads the step's data if `loaded`. `wait_for_ranks` is the barrier of all ranks. `is_true_on_any_rank`
    returns whether its argument is true on any rank.
    """

    workload: Workload
    precision: Precision
    device: Device
    index: int
    states: tuple[State, ...]
    clock: PhaseStampClock
    stamper: Stamper
    started: RunningTasks
    flush_cache: Callable[[], Any] | None = None
    cache_bytes: int = 0
    replay: Callable[[], object] | None = None
    loaded: bool = False
    # One of this many steps has phase marks.
    steps_per_marked_step: int = 1
    held: HeldPhase | None = None
    wait_for_ranks: Callable[[], object] = skip_rank_barrier
    is_true_on_any_rank: Callable[[bool], bool] = bool
    # For each slot, the seconds by which its time stamps and its measured duration differ, beyond a tolerance. On a CPU
    # only the call with the smallest difference counts, on an accelerator the whole slot.
    _unexplained_slot_seconds: list[float] = field(default_factory=list)
    # The switches' values before the first slot. Only a slot can change them, because nothing runs between slots.
    _initial_switch_values: Sequence[Any] | None = None
    _late_slots: LateStepInspection | None = None
    _between_calls: BetweenCallsTimer | None = None
    _get_next_state: Callable[[], State] = field(init=False)

    def __post_init__(self) -> None:
        self._get_next_state = partial(next, cycle(self.states))
        if self.device.kind != "cpu":
            self._between_calls = BetweenCallsTimer(self.device.stamper(self.index))

    @property
    def state(self) -> Any:
        return self.states[0].held

    @property
    def scales(self) -> ScaleBook | None:
        return self.states[0].scales

    def _prepare_next_step(self) -> Any:
        """Prepares the next step (cache flush, scales, data) outside of the timing. Returns its state."""
        state = self._get_next_state() if self._late_slots is None else self.states[0]
        if self.flush_cache is not None:
            self.flush_cache()
        if state.scales is not None:
            state.scales.begin_step()
        if self.loaded:
            self.workload.load(state.held)
        if self._late_slots is not None:
            self._late_slots.begin_late_call()
        return state.held

    @property
    def _checked_clocks(self) -> dict[str, Callable[[], float]]:
        clocks: dict[str, Callable[[], float]] = {"time.perf_counter": lambda: time.perf_counter() * 1e9}
        if self.device.kind == "cpu":
            clocks["the clock of phases"] = self.clock.now
        return clocks

    def capture(self) -> str:
        """Captures one step of each state in a CUDA graph, which `replay` runs in one launch. Returns why this is
        impossible, or ''.

        Several states must together be larger than the last-level cache, or each step would find its data in the cache.
        """
        from fp8bench.numerics.operands import explain_host_dependence

        if len(self.states) > 1 and (held := sum(count_bytes(state.held) for state in self.states)) <= self.cache_bytes:
            return f"its {len(self.states)} states ({held} B) fit in the last-level cache ({self.cache_bytes} B)"

        def take_steps() -> None:
            for state in self.states:
                step(self.workload, state.held, state.scales, SilentPhases())

        with precision_scope(self.precision), restore_switches(), require_silent_step():
            self.loaded = bool(self.workload.loads)
            if self.loaded:
                self.workload.load(self.state)
            if why := explain_host_dependence(take_steps):
                return why
            try:
                self.replay = self.device.captured(self.index, take_steps)
            except CannotCapture as error:
                return str(error)
        return ""

    def replay_phases(self) -> RawStep | None:
        """Captures a step again, with events that mark its phases. Returns the fastest of a few replays, with the time
        of each phase; None if the device cannot capture such events.
        """
        stamper = self.device.captured_stamper(self.index)
        if stamper is None:
            return None
        clock = PhaseStampClock(stamper)
        marks: tuple[list[int], list[Any]] = [], []

        # Only the capture calls this function. A replay sets the events of the captured step again.
        def take_marked_step() -> None:
            nonlocal marks
            clock.begin()
            step(self.workload, self.state, self.scales, clock)
            marks = clock.end()

        with precision_scope(self.precision), restore_switches(), require_silent_step():
            try:
                run_captured_step = self.device.captured(self.index, take_marked_step)
            except CannotCapture:
                return None
            replays = []
            for _ in range(_MARKED_REPLAY_COUNT):
                if self.loaded:
                    self.workload.load(self.state)
                run_captured_step()
                self.device.synchronise(self.index)
                replays.append(RawStep(tuple(marks[0]), tuple(stamper.intervals_ns(marks[1]))))
        return min(replays, key=lambda step: step.seconds)

    def slot(self, calls: int, discard: int, filling: Filling | None = None) -> RawSlot:
        return self._time_slot(self.workload.step, calls, discard, filling)

    def replay_slot(self, calls: int, discard: int, filling: Filling | None) -> RawSlot:
        assert self.replay is not None, "nothing was captured"
        replay = self.replay
        steps_per_replay = len(self.states)
        slot = self._time_slot(lambda state, phase: replay(), max(1, round(calls / steps_per_replay)), discard, filling)
        if steps_per_replay == 1:
            return slot
        # A replay runs several steps without time stamps between them, so each step gets their mean time.
        steps = tuple(_divide_step_intervals(step, steps_per_replay) for step in slot.steps)
        return replace(slot, steps=steps, host_seconds=slot.host_seconds / steps_per_replay)

    def _time_slot(
        self, take_step: Callable[[Any, Phases], object], calls: int, discard: int, filling: Filling | None
    ) -> RawSlot:
        # Look functions up before a step runs, so that a step that replaces them cannot affect its slot.
        clock, begin, end, now = self.clock, self.clock.begin, self.clock.end, time.perf_counter
        make_state_ready = self._prepare_next_step
        prepare_call_on_device = self._prepare_call_on_device
        late_slots = self._late_slots
        steps_per_marked_step = self.steps_per_marked_step
        silent_phases = SilentPhases()
        # Free the step's return value within the timed part: the builtin `id` keeps no reference to it.
        keep_answer, slot_inspection = (
            (id, nullcontext()) if late_slots is None else (late_slots.keep, late_slots.slot())
        )
        phase_marks: list[tuple[list[int], list[Any]]] = []
        call_seconds: list[float] = []
        quantiser_calls = fusing.count_calls()
        with self._watching_steps(), slot_inspection:
            self.wait_for_ranks()
            retries_before = self.device.retried(self.index)
            # read the host's counters before the discarded calls, because reading leaves the caches cold
            host_counters_at_start = read_counters()
            for _ in range(discard):
                state = make_state_ready()
                begin()
                keep_answer(take_step(state, clock))
                end()
            self.device.synchronise(self.index)
            cpu_seconds_at_start = time.process_time()
            thread_seconds_at_start = time.thread_time()
            wall_seconds_at_start = time.perf_counter()
            for call_number in range(calls):
                state = prepare_call_on_device(call_number, filling)
                call_start_seconds = now()
                begin()
                keep_answer(take_step(state, silent_phases if call_number % steps_per_marked_step else clock))
                phase_marks.append(end())
                call_seconds.append(now() - call_start_seconds)
            host_seconds = time.perf_counter() - wall_seconds_at_start
            host_counters_at_end = host_counters_at_start if self._between_calls is None else read_counters()
            self.device.synchronise(self.index)
            wall_seconds = time.perf_counter() - wall_seconds_at_start
            thread_cpu_seconds = time.thread_time() - thread_seconds_at_start
            cpu_seconds = time.process_time() - cpu_seconds_at_start
            host_counters_after = read_counters()
            host_counter_growth = subtract_counters(host_counters_at_start, host_counters_after)
            retries_after = self.device.retried(self.index)
        steps = tuple(RawStep(tuple(codes), tuple(self.stamper.intervals_ns(stamps))) for codes, stamps in phase_marks)
        self.stamper.recycle()
        self._mark_fewer_steps(steps)
        if late_slots is not None:
            late_slots.add_slot([step.seconds for step in steps], discard)
        if self._between_calls is None:
            self._unexplained_slot_seconds.append(min(map(_compute_unexplained_call_time, call_seconds, steps)))
        else:
            # If the host was waiting for a core when the device finished, the slot seems longer by this wait.
            late_seconds = _get_number(subtract_counters(host_counters_at_end, host_counters_after)["waited"]) or 0.0
            seconds_between_calls = max(0.0, host_seconds - sum(call_seconds)) + self._between_calls.seconds()
            self._unexplained_slot_seconds.append(
                _compute_unexplained_slot_time(wall_seconds, seconds_between_calls + late_seconds, steps)
            )
        eager_calls, fused_calls = fusing.count_calls_since(quantiser_calls)
        preemptions = _get_number(host_counter_growth["preemptions"])
        return RawSlot(
            steps,
            wall_seconds,
            cpu_seconds,
            min(call_seconds),
            eager_calls,
            sum(fused_calls.values()),
            thread_cpu_seconds,
            None if preemptions is None else int(preemptions),
            _get_number(host_counter_growth["steal"]),
            self._limit_waited_seconds(_get_number(host_counter_growth["waited"]), wall_seconds - thread_cpu_seconds),
            tuple(bits for bits in sorted(fused_calls) if bits),
            memory_retries=None if retries_before is None or retries_after is None else retries_after - retries_before,
        )

    def _mark_fewer_steps(self, steps: Sequence[RawStep]) -> None:
        """Marks phases in fewer steps on an accelerator if time stamps take more than MARKS_SHARE of a step. With
        several ranks, phases are marked in all steps, because waiting for other ranks is a phase of every step.
        """
        if self._between_calls is None or self.wait_for_ranks is not skip_rank_barrier or not steps:
            return
        fastest_step = min(steps, key=lambda step: step.seconds)
        time_stamp_count = max(len(step.codes) for step in steps) - 1
        time_stamp_cost_share = stamp_cost(self.device, self.index) * time_stamp_count / max(fastest_step.seconds, 1e-7)
        steps_per_marked_step = min(_MAX_STEPS_PER_MARKED_STEP, math.ceil(time_stamp_cost_share / MARKS_SHARE))
        self.steps_per_marked_step = max(self.steps_per_marked_step, steps_per_marked_step)

    @contextmanager
    def _watching_steps(self) -> Iterator[None]:
        """Sets the switches of the case's precision for timed steps in the `with` block. Raises an error if a step
        prints, changes switches or clocks, or leaves threads running.
        """
        switch_restorer = restore_switches(self._initial_switch_values)
        with (
            precision_scope(self.precision),
            without_garbage_collection(),
            switch_restorer as switch_values,
            require_silent_step(),
            require_agreeing_clocks(self._checked_clocks),
        ):
            self._initial_switch_values = switch_values if owns_process() else None
            yield

    def _prepare_call_on_device(self, number: int, filling: Filling | None) -> Any:
        """Prepares the call with the index `number`, and returns its state. With `filling`, keeps the device busy
        before every `filling.calls`-th call, so that the host can queue work ahead. On an accelerator, the time that
        the device works on this preparation is measured.
        """
        fills_queue = filling is not None and number % filling.calls == 0
        between_calls = self._between_calls if fills_queue or self.flush_cache is not None or self.loaded else None
        if between_calls is not None:
            between_calls.mark()
        state = self._prepare_next_step()
        if fills_queue and filling is not None:
            self.device.occupy(self.index, filling.seconds)
        if between_calls is not None:
            between_calls.mark()
        return state

    def _limit_waited_seconds(self, counted_seconds: float | None, off_core_seconds: float) -> float | None:
        """Returns how many seconds timed calls waited for a core; None if unknown, as on an accelerator, or with cache
        flushes between calls. The result is at most `off_core_seconds`, the time that timed calls spent without a core,
        because `counted_seconds` also contains the waits of discarded calls.
        """
        if counted_seconds is None or self.device.kind != "cpu" or self.flush_cache is not None:
            return None
        return max(0.0, min(counted_seconds, off_core_seconds))

    def begin_late(self) -> None:
        """Begins to inspect steps after the timing. Until `end_late`, all slots use the first state."""
        from fp8bench.worker.late_slots import LateStepInspection

        uses_tf32 = self.precision.float32_products != "highest"
        self._late_slots = LateStepInspection(self.state, self.states[0].finite.inputs, self.device, uses_tf32)

    @property
    def is_late_due(self) -> bool:
        return self._late_slots is not None and self._late_slots.is_due

    def end_late(self) -> LateSteps:
        """Ends the inspection of steps after the timing, and restores the state. Returns the observations."""
        late_slots = self._late_slots
        self._late_slots = None
        return LateSteps() if late_slots is None else late_slots.end()

    def check(self) -> StateCheck:
        """Checks the time stamps and the workload's states, and counts numbers that are not finite."""
        if self.is_true_on_any_rank(self._has_wrong_stamps()):
            # Take more slots before the verdict, because load may lengthen most slots of a short run. All ranks take
            # as many slots as the slowest rank needs.
            deadline = time.perf_counter() + _ACCUSING_SECONDS
            while self.is_true_on_any_rank(self._needs_more_slots(deadline)):
                self.slot(4, 0)
        if self._has_wrong_stamps():
            return StateCheck(_WRONG_PHASE_STAMPS_REASON)
        with restore_switches(), guard_untimed_pass():
            state_checks = [self._check_state(state) for state in self.states]
        return next(
            (check for check in state_checks if check.wrong), max(state_checks, key=lambda check: check.not_finite)
        )

    def _has_wrong_stamps(self) -> bool:
        # An interruption before a call's first time stamp lengthens only a few slots, so judge by the median slot.
        return bool(self._unexplained_slot_seconds) and median(self._unexplained_slot_seconds) > 0

    def _needs_more_slots(self, deadline: float) -> bool:
        slot_count = len(self._unexplained_slot_seconds)
        return slot_count < _MIN_ACCUSING_SLOTS or (slot_count < _ACCUSING_SLOTS and time.perf_counter() < deadline)

    def _check_state(self, state: State) -> StateCheck:
        state_fault_text = require_check_text(self.workload.check(state.held))
        lost_finite_elements = state.finite.find_lost_numbers(state.held)
        if self.workload.may_diverge:
            return StateCheck(state_fault_text, lost_finite_elements.share)
        return StateCheck(state_fault_text or str(lost_finite_elements))

    def loop(self, steps: int) -> float:
        """Returns the seconds of `steps` steps that run back to back, without time stamps for phases. The time includes
        waiting for the device.
        """
        silent_phases = SilentPhases()
        with precision_scope(self.precision), restore_switches(), require_silent_step():
            self.wait_for_ranks()
            start = time.perf_counter()
            for _ in range(steps):
                self.workload.step(self._prepare_next_step(), silent_phases)
            self.device.synchronise(self.index)
            return time.perf_counter() - start

    def hold_phase(self, phase: str, most_bytes: int) -> RawReplay:
        """Stores the inputs of one phase of a step, at most `most_bytes`, so that the phase can be repeated alone."""
        self.held = None
        self.loaded = self.loaded or (phase == Phase.DATA_LOAD and bool(self.workload.loads))
        with precision_scope(self.precision), restore_switches(), guard_untimed_pass():
            state = self._prepare_next_step()
            held_phase_or_reason = store_phase_inputs(self.workload, state, self.device, self.index, phase, most_bytes)
            if isinstance(held_phase_or_reason, RawReplay):
                return held_phase_or_reason
            self.held = held_phase_or_reason
            return held_phase_or_reason.warm_up()

    def loop_phase(self, times: int) -> float:
        assert self.held is not None, "no phase is held"
        with precision_scope(self.precision), restore_switches(), require_silent_step():
            return self.held.loop(times)

    def drop_phase(self) -> str:
        """Frees the phase's stored inputs. Returns a sentence if memory that it wrote is no longer finite, or ''."""
        held_phase = self.held
        self.held = None
        return held_phase.replay.find_lost_values() if held_phase is not None else ""


_WRONG_PHASE_STAMPS_REASON = (
    "its steps take a different time than the phase clock counted: a step changes the clock's stamps, or leaves work "
    "on a stream that it opens. Mark phases only by `with phase.gemm:` and the like, wait for streams, and measure "
    "again."
)


def _divide_step_intervals(step: RawStep, count: int) -> RawStep:
    return replace(step, intervals_ns=tuple(round(interval / count) for interval in step.intervals_ns))


def _compute_unexplained_call_time(call_seconds: float, step: RawStep) -> float:
    """Returns by how many seconds, beyond a tolerance, a call's time differs from the time between its stamps."""
    allowed_seconds = max(_ALLOWED_CALL_SECONDS + _ALLOWED_MARK_SECONDS * len(step.codes), _CALL_SHARE * call_seconds)
    return abs(call_seconds - sum(step.intervals_ns) * 1e-9) - allowed_seconds


def _compute_unexplained_slot_time(wall_seconds: float, untimed_seconds: float, steps: Sequence[RawStep]) -> float:
    """Returns by how many seconds, beyond a tolerance, the time stamps of a slot contradict its wall time. Either the
    stamped time is longer than the slot, or stamped and untimed time together are shorter. An accelerator may be late
    or idle for a while, but not for most of a slot.
    """
    stamped_seconds = sum(step.seconds for step in steps)
    allowed_seconds = max(_ALLOWED_SLOT_SECONDS + _ALLOWED_CALL_SECONDS * len(steps), _SLOT_SHARE * wall_seconds)
    return max(stamped_seconds - wall_seconds, wall_seconds - untimed_seconds - stamped_seconds) - allowed_seconds


def _get_number(read: ReadingOrUnavailable) -> float | None:
    return read.number if isinstance(read, Reading) else None
