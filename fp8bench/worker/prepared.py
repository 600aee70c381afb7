"""A case that is ready to be timed: its states, the clock for their phases, and slots of steps."""

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
from fp8bench.model.readings import Read, Reading, subtract_counters
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
from fp8bench.worker.checked_results import check_verdict
from fp8bench.worker.clock import BetweenCalls, PhaseClock, require_agreeing_clocks, stamp_cost
from fp8bench.worker.finite import FiniteState
from fp8bench.worker.held_phase import HeldPhase, store_phase_inputs
from fp8bench.worker.host_counters import counters
from fp8bench.worker.state_tensors import get_address, iterate_tensors
from fp8bench.worker.static_scales import step
from fp8bench.worker.step_guards import Running, owns_process, silent_step, untimed_pass
from fp8bench.worker.switches import precision_scope, restore_switches, without_garbage_collection

if TYPE_CHECKING:
    from fp8bench.worker.late_slots import LateSlots

# The time of a call that may be missing in the stamps of its step, because the clock works: seconds per call, seconds
# per mark, and a part of the step's time.
_CALL_SECONDS, _MARK_SECONDS, _CALL_SHARE = 20e-6, 0.2e-6, 0.05
# The time of a slot on an accelerator that may be missing in the stamps of its steps, in seconds and as a part of the
# slot. When its queue begins and ends is uncertain.
_SLOT_SECONDS, _SLOT_SHARE = 1e-3, 0.25
# A step counts as moving stamps only if the median over this many slots shows it. If they do not fit into
# _ACCUSING_SECONDS, fewer slots are enough, but at least _MIN_ACCUSING_SLOTS.
_ACCUSING_SLOTS, _MIN_ACCUSING_SLOTS, _ACCUSING_SECONDS = 31, 5, 0.5
# The number of replays with marks; the fastest one is used.
_MARKED_REPLAYS = 10
# At least one of this many steps has marks, even if marks take long.
_MAX_STEPS_PER_MARKED_STEP = 32


def begin_without_ranks() -> None:
    """Does nothing, because without other ranks a slot begins at once."""


class State(NamedTuple):
    """A prepared state: its content, its book of scales (or None), its check for finite numbers, its arithmetics."""

    held: Any
    scales: ScaleBook | None
    finite: FiniteState
    arithmetics: tuple[Arithmetic, ...]


# The most states of a case. Preparing more states would take longer than timing them.
MAX_STATES = 256


def make_cache_flush(facts: DeviceFacts) -> Callable[[], Any]:
    """Returns a function that overwrites the whole cache, between the device's earlier and later work.

    It also reads, because writing zeros alone may bypass a cache. Its numbers are integers, which no precision
    affects.
    """
    import torch

    buffer = torch.zeros(CACHE_FLUSH_FACTOR * facts.cache_bytes // 4, dtype=torch.int32, device=facts.key)
    return partial(buffer.add_, 1)


def count_bytes(state: object) -> int:
    return sum({get_address(part): part.untyped_storage().nbytes() for part in iterate_tensors(state)}.values())


def make_rotation(
    first: State, make_state: Callable[[], State], facts: DeviceFacts, device: Device
) -> tuple[State, ...]:
    """Returns the first state and further states. There are enough states that each has left the cache when it is
    used again.

    There is at least one further state. If memory runs out, there are fewer states than needed.
    """
    needed_count = max(2, math.ceil(CACHE_FLUSH_FACTOR * facts.cache_bytes / max(count_bytes(first.held), 1)))
    states = [first]
    while len(states) < min(needed_count, MAX_STATES):
        try:
            states.append(make_state())
        except Exception as error:
            if not device.is_out_of_memory(error):
                raise
            break
    return tuple(states)


@dataclass
class Prepared:
    """A case that is ready to be timed.

    `started` are the threads and processes that its preparation has started. Calls use the `states` in turn, and a
    replay steps all of them. Before each call, outside of the timing, `flush` runs and the data of a replay is
    loaded. `meet` waits for the other ranks, so that all begin a slot at the same time. `any_rank` returns whether
    the answer of any rank is true.
    """

    workload: Workload
    precision: Precision
    device: Device
    index: int
    states: tuple[State, ...]
    clock: PhaseClock
    stamper: Stamper
    started: Running
    flush: Callable[[], Any] | None = None
    cache_bytes: int = 0
    replay: Callable[[], object] | None = None
    loaded: bool = False
    # One of this many steps has marks of its phases.
    steps_per_marked_step: int = 1
    held: HeldPhase | None = None
    meet: Callable[[], object] = begin_without_ranks
    any_rank: Callable[[bool], bool] = bool
    # For each slot, the least seconds of a call that neither the stamps of its step nor the clock's work explain.
    _missing: list[float] = field(default_factory=list)
    # The switches' values before the first slot. Nothing runs between slots, so each slot must preserve them.
    _switches: Sequence[Any] | None = None
    _late_slots: LateSlots | None = None
    _between_calls: BetweenCalls | None = None
    _next_state: Callable[[], State] = field(init=False)

    def __post_init__(self) -> None:
        self._next_state = partial(next, cycle(self.states))
        if self.device.kind != "cpu":
            self._between_calls = BetweenCalls(self.device.stamper(self.index))

    @property
    def state(self) -> Any:
        return self.states[0].held

    @property
    def scales(self) -> ScaleBook | None:
        return self.states[0].scales

    def _make_ready(self) -> Any:
        """Prepares a step outside of the timing, and returns the state for the step."""
        state = self._next_state() if self._late_slots is None else self.states[0]
        if self.flush is not None:
            self.flush()
        if state.scales is not None:
            state.scales.begin_step()
        if self.loaded:
            self.workload.load(state.held)
        if self._late_slots is not None:
            self._late_slots.begin_call()
        return state.held

    @property
    def _checked_clocks(self) -> dict[str, Callable[[], float]]:
        clocks: dict[str, Callable[[], float]] = {"time.perf_counter": lambda: time.perf_counter() * 1e9}
        if self.device.kind == "cpu":
            clocks["the clock of phases"] = self.clock.now
        return clocks

    def capture(self) -> str:
        """Captures a step of each state, so that `replay` runs all in one launch. Returns why this is impossible, or
        ''.

        Several states together must be larger than the last cache, or each would find its data in the cache.
        """
        from fp8bench.numerics.operands import explain_host_dependence

        if len(self.states) > 1 and (held := sum(count_bytes(state.held) for state in self.states)) <= self.cache_bytes:
            return f"its {len(self.states)} states have {held} bytes, and fit the last cache of {self.cache_bytes}"

        def take_steps() -> None:
            for state in self.states:
                step(self.workload, state.held, state.scales, SilentPhases())

        with precision_scope(self.precision), restore_switches(), silent_step():
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
        """Captures a step again, with its marks as events of the graph. Returns the fastest of a few replays.

        Returns None if the device does not have such events.
        """
        stamper = self.device.captured_stamper(self.index)
        if stamper is None:
            return None
        clock = PhaseClock(stamper)
        marks: tuple[list[int], list[Any]] = [], []

        def take_marked_step() -> None:
            nonlocal marks
            clock.begin()
            step(self.workload, self.state, self.scales, clock)
            marks = clock.end()

        with precision_scope(self.precision), restore_switches(), silent_step():
            try:
                replay = self.device.captured(self.index, take_marked_step)
            except CannotCapture:
                return None
            replays = []
            for _ in range(_MARKED_REPLAYS):
                if self.loaded:
                    self.workload.load(self.state)
                replay()
                self.device.synchronise(self.index)
                replays.append(RawStep(tuple(marks[0]), tuple(stamper.intervals_ns(marks[1]))))
        return min(replays, key=lambda step: step.seconds)

    def slot(self, calls: int, discard: int, filling: Filling | None = None) -> RawSlot:
        return self._time_slot(self.workload.step, calls, discard, filling)

    def replay_slot(self, calls: int, discard: int, filling: Filling | None) -> RawSlot:
        assert self.replay is not None, "nothing was captured"
        replay = self.replay
        state_count = len(self.states)
        slot = self._time_slot(lambda state, phase: replay(), max(1, round(calls / state_count)), discard, filling)
        if state_count == 1:
            return slot
        # No stamp separates the steps of a replay, so each step gets their mean time.
        steps = tuple(_divide_step(step, state_count) for step in slot.steps)
        return replace(slot, steps=steps, host_seconds=slot.host_seconds / state_count)

    def _time_slot(
        self, take_step: Callable[[Any, Phases], object], calls: int, discard: int, filling: Filling | None
    ) -> RawSlot:
        # Look functions up before a step runs, so that a step that replaces them cannot affect its slot.
        clock, begin, end, now = self.clock, self.clock.begin, self.clock.end, time.perf_counter
        make_ready = self._make_ready
        make_ready_on_device = self._make_ready_on_device
        late_slots = self._late_slots
        steps_per_mark = self.steps_per_marked_step
        silent_phases = SilentPhases()
        # The answer of a step is freed within the timed part: `id` does not keep the answer.
        keep_answer, slot_inspection = (
            (id, nullcontext()) if late_slots is None else (late_slots.keep, late_slots.slot())
        )
        marks: list[tuple[list[int], list[Any]]] = []
        calls_seconds: list[float] = []
        quantiser_calls = fusing.count_calls()
        with self._watching_steps(), slot_inspection:
            self.meet()
            retries_before = self.device.retried(self.index)
            # read these counters before the discarded calls, because reading leaves the caches cold
            counters_before = counters()
            for _ in range(discard):
                state = make_ready()
                begin()
                keep_answer(take_step(state, clock))
                end()
            self.device.synchronise(self.index)
            cpu_start = time.process_time()
            thread_start = time.thread_time()
            wall_start = time.perf_counter()
            for number in range(calls):
                state = make_ready_on_device(number, filling)
                call_start = now()
                begin()
                keep_answer(take_step(state, silent_phases if number % steps_per_mark else clock))
                marks.append(end())
                calls_seconds.append(now() - call_start)
            host_seconds = time.perf_counter() - wall_start
            counters_at_end = counters_before if self._between_calls is None else counters()
            self.device.synchronise(self.index)
            wall_seconds = time.perf_counter() - wall_start
            thread_seconds = time.thread_time() - thread_start
            cpu_seconds = time.process_time() - cpu_start
            counters_after = counters()
            counter_growth = subtract_counters(counters_before, counters_after)
            retries_after = self.device.retried(self.index)
        steps = tuple(RawStep(tuple(codes), tuple(self.stamper.intervals_ns(stamps))) for codes, stamps in marks)
        self.stamper.recycle()
        self._space_marks(steps)
        if late_slots is not None:
            late_slots.add_slot([step.seconds for step in steps], discard)
        if self._between_calls is None:
            self._missing.append(min(map(_compute_missing_in_call, calls_seconds, steps)))
        else:
            # If the host had to wait for a core, it noticed too late that the device was done.
            late_seconds = _get_number(subtract_counters(counters_at_end, counters_after)["waited"]) or 0.0
            between_seconds = max(0.0, host_seconds - sum(calls_seconds)) + self._between_calls.seconds()
            self._missing.append(_compute_missing_in_slot(wall_seconds, between_seconds + late_seconds, steps))
        eager_calls, fused_calls = fusing.count_calls_since(quantiser_calls)
        preemptions = _get_number(counter_growth["preemptions"])
        return RawSlot(
            steps,
            wall_seconds,
            cpu_seconds,
            min(calls_seconds),
            eager_calls,
            sum(fused_calls.values()),
            thread_seconds,
            None if preemptions is None else int(preemptions),
            _get_number(counter_growth["steal"]),
            self._limit_waited_seconds(_get_number(counter_growth["waited"]), wall_seconds - thread_seconds),
            tuple(bits for bits in sorted(fused_calls) if bits),
            memory_retries=None if retries_before is None or retries_after is None else retries_after - retries_before,
        )

    def _space_marks(self, steps: Sequence[RawStep]) -> None:
        """Leaves steps without marks on an accelerator, if time stamps would take more than MARKS_SHARE of a step.
        With several ranks all steps have marks, because waiting for other ranks is a phase of every step.
        """
        if self._between_calls is None or self.meet is not begin_without_ranks or not steps:
            return
        fastest_step = min(steps, key=lambda step: step.seconds)
        stamp_count = max(len(step.codes) for step in steps) - 1
        marks_share = stamp_cost(self.device, self.index) * stamp_count / max(fastest_step.seconds, 1e-7)
        steps_per_mark = min(_MAX_STEPS_PER_MARKED_STEP, math.ceil(marks_share / MARKS_SHARE))
        self.steps_per_marked_step = max(self.steps_per_marked_step, steps_per_mark)

    @contextmanager
    def _watching_steps(self) -> Iterator[None]:
        """Runs timed steps in their precision. Raises an error if the steps have forbidden side effects."""
        watched_switches = restore_switches(self._switches)
        with (
            precision_scope(self.precision),
            without_garbage_collection(),
            watched_switches as switch_values,
            silent_step(),
            require_agreeing_clocks(self._checked_clocks),
        ):
            self._switches = switch_values if owns_process() else None
            yield

    def _make_ready_on_device(self, number: int, filling: Filling | None) -> Any:
        """Prepares a step, and returns its state. On an accelerator, may also measure how long the device works on the
        preparation. With `filling`, keeps the device busy before every `filling.calls`-th step, so that the host can
        queue work ahead.
        """
        fills_queue = filling is not None and number % filling.calls == 0
        between_calls = self._between_calls if fills_queue or self.flush is not None or self.loaded else None
        if between_calls is not None:
            between_calls.mark()
        state = self._make_ready()
        if fills_queue and filling is not None:
            self.device.occupy(self.index, filling.seconds)
        if between_calls is not None:
            between_calls.mark()
        return state

    def _limit_waited_seconds(self, counted_seconds: float | None, off_core_seconds: float) -> float | None:
        """Returns the seconds that timed calls waited for a core, or None if unknown. `counted_seconds` includes
        discarded calls, so it is limited by the time of the timed calls off the core. The time is unknown on an
        accelerator, and with cache flushes between calls.
        """
        if counted_seconds is None or self.device.kind != "cpu" or self.flush is not None:
            return None
        return max(0.0, min(counted_seconds, off_core_seconds))

    def begin_late(self) -> None:
        """Begins to inspect steps after the timing. Until `end_late`, slots use the first state with new numbers."""
        from fp8bench.worker.late_slots import LateSlots

        uses_tf32 = self.precision.float32_products != "highest"
        self._late_slots = LateSlots(self.state, self.states[0].finite.inputs, self.device, uses_tf32)

    @property
    def is_late_due(self) -> bool:
        return self._late_slots is not None and self._late_slots.is_due

    def end_late(self) -> LateSteps:
        """Restores the state, and returns what the inspected steps did."""
        late_slots = self._late_slots
        self._late_slots = None
        return LateSteps() if late_slots is None else late_slots.end()

    def check(self) -> StateCheck:
        """Checks the clock's stamps, lets the workload check its states, and counts numbers that are not finite."""
        if self.any_rank(self._has_wrong_stamps()):
            # Take more slots first, because load may lengthen most slots of a short run. All ranks take as many slots
            # as the slowest rank needs.
            deadline = time.perf_counter() + _ACCUSING_SECONDS
            while self.any_rank(self._needs_more_slots(deadline)):
                self.slot(4, 0)
        if self._has_wrong_stamps():
            return StateCheck(_MOVED_STAMPS_REASON)
        with restore_switches(), untimed_pass():
            state_checks = [self._check_state(state) for state in self.states]
        return next(
            (check for check in state_checks if check.wrong), max(state_checks, key=lambda check: check.not_finite)
        )

    def _has_wrong_stamps(self) -> bool:
        # An interruption before a call's first stamp lengthens single slots, but not most of many slots.
        return bool(self._missing) and median(self._missing) > 0

    def _needs_more_slots(self, deadline: float) -> bool:
        slot_count = len(self._missing)
        return slot_count < _MIN_ACCUSING_SLOTS or (slot_count < _ACCUSING_SLOTS and time.perf_counter() < deadline)

    def _check_state(self, state: State) -> StateCheck:
        state_verdict = check_verdict(self.workload.check(state.held))
        lost_numbers = state.finite.find_lost(state.held)
        if self.workload.may_diverge:
            return StateCheck(state_verdict, lost_numbers.share)
        return StateCheck(state_verdict or str(lost_numbers))

    def loop(self, steps: int) -> float:
        """Returns the seconds of `steps` steps that run back to back, without a clock for phases. The time includes
        waiting for the device.
        """
        silent_phases = SilentPhases()
        with precision_scope(self.precision), restore_switches(), silent_step():
            self.meet()
            start = time.perf_counter()
            for _ in range(steps):
                self.workload.step(self._make_ready(), silent_phases)
            self.device.synchronise(self.index)
            return time.perf_counter() - start

    def hold_phase(self, phase: str, most_bytes: int) -> RawReplay:
        """Stores the inputs of one phase of a step, at most `most_bytes`, so that the phase can be repeated alone."""
        self.held = None
        self.loaded = self.loaded or (phase == Phase.DATA_LOAD and bool(self.workload.loads))
        with precision_scope(self.precision), restore_switches(), untimed_pass():
            state = self._make_ready()
            held_phase_or_reason = store_phase_inputs(self.workload, state, self.device, self.index, phase, most_bytes)
            if isinstance(held_phase_or_reason, RawReplay):
                return held_phase_or_reason
            self.held = held_phase_or_reason
            return held_phase_or_reason.warm_up()

    def loop_phase(self, times: int) -> float:
        assert self.held is not None, "no phase is held"
        with precision_scope(self.precision), restore_switches(), silent_step():
            return self.held.loop(times)

    def drop_phase(self) -> str:
        """Frees the stored inputs of the phase. Returns which of its numbers are no longer finite, or ''."""
        held_phase = self.held
        self.held = None
        return held_phase.replay.find_lost_values() if held_phase is not None else ""


_MOVED_STAMPS_REASON = (
    "its steps take another time than the phase clock has counted: a step changes the clock's stamps, or leaves work "
    "on a stream that it opens. Mark phases only by `with phase.gemm:` and the like, wait for streams, and measure "
    "again."
)


def _divide_step(step: RawStep, count: int) -> RawStep:
    return replace(step, intervals_ns=tuple(round(interval / count) for interval in step.intervals_ns))


def _compute_missing_in_call(call_seconds: float, step: RawStep) -> float:
    """Returns by how much a call's time differs from the time between its step's stamps, beyond the time that the
    clock may take.
    """
    allowed_seconds = max(_CALL_SECONDS + _MARK_SECONDS * len(step.codes), _CALL_SHARE * call_seconds)
    return abs(call_seconds - sum(step.intervals_ns) * 1e-9) - allowed_seconds


def _compute_missing_in_slot(wall_seconds: float, untimed_seconds: float, steps: Sequence[RawStep]) -> float:
    """Returns by how much a slot's time differs from its stamped and untimed parts, beyond the allowed time: the
    stamped parts are longer than the slot, or both together are shorter. An accelerator may be late or idle for a
    while, but not for most of a slot.
    """
    stamped_seconds = sum(step.seconds for step in steps)
    allowed_seconds = max(_SLOT_SECONDS + _CALL_SECONDS * len(steps), _SLOT_SHARE * wall_seconds)
    return max(stamped_seconds - wall_seconds, wall_seconds - untimed_seconds - stamped_seconds) - allowed_seconds


def _get_number(read: Read) -> float | None:
    return read.number if isinstance(read, Reading) else None
