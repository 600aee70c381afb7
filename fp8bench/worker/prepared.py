"""A case that is ready to be timed: its states, the clock that its steps write into, and slots of steps."""

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
from fp8bench.model.readings import Read, Reading, grown
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
from fp8bench.protocols.axes import CACHE_TIMES
from fp8bench.worker import fusing
from fp8bench.worker.checked_results import wrong_of
from fp8bench.worker.clock import BetweenCalls, PhaseClock, agreeing, stamp_cost
from fp8bench.worker.finite import FiniteState
from fp8bench.worker.held_phase import HeldPhase, held_phase
from fp8bench.worker.host_counters import counters
from fp8bench.worker.state_tensors import address_of, tensors_of
from fp8bench.worker.static_scales import step
from fp8bench.worker.step_guards import Running, apart, owns_this_process, silent_step
from fp8bench.worker.switches import collected_by_hand, restore_switches, under

if TYPE_CHECKING:
    from fp8bench.worker.late_slots import LateSlots

# The allowed time of a call beyond its step: the clock's work, in seconds per call and per mark, and a share of the
# step.
_CALL_SECONDS, _MARK_SECONDS, _CALL_SHARE = 20e-6, 0.2e-6, 0.05
# The same for a whole slot on an accelerator, whose queue begins and ends at uncertain times.
_SLOT_SECONDS, _SLOT_SHARE = 1e-3, 0.25
# A step is accused of moved stamps by the median of this many slots, or of fewer that fit into the seconds.
_SLOTS_TO_ACCUSE, _SLOTS_OF_SLOW_STEPS, _SECOND_LOOK_SECONDS = 31, 5, 0.5
# Replays with marks, of which the fastest counts.
_MARKED_REPLAYS = 10
# At least one step in this many is marked, however much marks take.
_MOST_STEPS_PER_MARKED_STEP = 32


def begins_alone() -> None:
    """Returns at once: without other ranks there is nobody to wait for."""


def asks_nobody(here: bool) -> bool:
    """Returns this process's answer, the only one without ranks."""
    return here


class State(NamedTuple):
    """A prepared state of a workload; the book of its scales, if any; the check of its finiteness; and the arithmetics
    that it was prepared with."""

    held: Any
    scales: ScaleBook | None
    finite: FiniteState
    arithmetics: tuple[Arithmetic, ...]


# With more states, preparing takes longer than measuring.
MOST_STATES = 256


def flush_of(facts: DeviceFacts) -> Callable[[], Any]:
    """Returns a function that overwrites the whole cache, in order with the device's other work. It reads what it
    writes, because zeros alone may bypass a cache. It uses integers, which no precision's switch affects."""
    import torch

    covering = torch.zeros(CACHE_TIMES * facts.cache_bytes // 4, dtype=torch.int32, device=facts.key)
    return partial(covering.add_, 1)


def bytes_of(state: object) -> int:
    return sum({address_of(part): part.untyped_storage().nbytes() for part in tensors_of(state)}.values())


def rotation(first: State, make: Callable[[], State], facts: DeviceFacts, device: Device) -> tuple[State, ...]:
    """Returns the first state and more, until each has left the cache when it is used again. At least one more; fewer
    than needed if memory runs out."""
    wanted = max(2, math.ceil(CACHE_TIMES * facts.cache_bytes / max(bytes_of(first.held), 1)))
    states = [first]
    while len(states) < min(wanted, MOST_STATES):
        try:
            states.append(make())
        except Exception as error:
            if not device.is_out_of_memory(error):
                raise
            break
    return tuple(states)


@dataclass
class Prepared:
    """A case ready for timing. `started` is what preparing has left running. Calls use the `states` in turn; a replay
    steps them all. `flush` and the loading of data ahead of a replay run before each call and are not timed. `meet`
    waits for other ranks that begin a slot or a loop at the same time; `is_so_anywhere` asks all of them."""

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
    # Phases are marked in one of this many steps.
    steps_per_marked_step: int = 1
    held: HeldPhase | None = None
    meet: Callable[[], object] = begins_alone
    is_so_anywhere: Callable[[bool], bool] = asks_nobody
    # The least unexplained seconds of each slot, which are neither in the stamps of steps nor the clock's work.
    _missing: list[float] = field(default_factory=list)
    # Values of the switches before the first slot, which every slot must preserve: nothing else runs in between.
    _switches: Sequence[Any] | None = None
    _late: LateSlots | None = None
    _between: BetweenCalls | None = None
    _next: Callable[[], State] = field(init=False)

    def __post_init__(self) -> None:
        self._next = partial(next, cycle(self.states))
        if self.device.kind != "cpu":
            self._between = BetweenCalls(self.device.stamper(self.index))

    @property
    def state(self) -> Any:
        return self.states[0].held

    @property
    def scales(self) -> ScaleBook | None:
        return self.states[0].scales

    def _ready(self) -> Any:
        """Does the untimed preparations of a step; returns the state to step."""
        state = self._next() if self._late is None else self.states[0]
        if self.flush is not None:
            self.flush()
        if state.scales is not None:
            state.scales.begin_step()
        if self.loaded:
            self.workload.load(state.held)
        if self._late is not None:
            self._late.begin_call()
        return state.held

    @property
    def _clocks(self) -> dict[str, Callable[[], float]]:
        clocks: dict[str, Callable[[], float]] = {"time.perf_counter": lambda: time.perf_counter() * 1e9}
        if self.device.kind == "cpu":
            clocks["the clock of phases"] = self.clock.now
        return clocks

    def capture(self) -> str:
        """Captures a step of each state, so that `replay` does all in one launch; returns why that is impossible, or
        ''. Several states must not fit into the last cache, where each would find what the previous replay left."""
        from fp8bench.numerics.operands import needs_host

        if len(self.states) > 1 and (held := sum(bytes_of(state.held) for state in self.states)) <= self.cache_bytes:
            return f"its {len(self.states)} states have {held} bytes, and fit the last cache of {self.cache_bytes}"

        def again() -> None:
            for state in self.states:
                step(self.workload, state.held, state.scales, SilentPhases())

        with under(self.precision), restore_switches(), silent_step():
            self.loaded = bool(self.workload.loads)
            if self.loaded:
                self.workload.load(self.state)
            if why := needs_host(again):
                return why
            try:
                self.replay = self.device.captured(self.index, again)
            except CannotCapture as error:
                return str(error)
        return ""

    def replay_phases(self) -> RawStep | None:
        """Captures a step again, with its marks as events of the graph; returns the fastest of a few replays, or None
        where a device has no such events."""
        stamper = self.device.captured_stamper(self.index)
        if stamper is None:
            return None
        clock = PhaseClock(stamper)
        marks: tuple[list[int], list[Any]] = [], []

        def marked() -> None:
            nonlocal marks
            clock.begin()
            step(self.workload, self.state, self.scales, clock)
            marks = clock.end()

        with under(self.precision), restore_switches(), silent_step():
            try:
                replay = self.device.captured(self.index, marked)
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
        return self._slot(self.workload.step, calls, discard, filling)

    def replay_slot(self, calls: int, discard: int, filling: Filling | None) -> RawSlot:
        assert self.replay is not None, "nothing was captured"
        replay, states = self.replay, len(self.states)
        raw = self._slot(lambda state, phase: replay(), max(1, round(calls / states)), discard, filling)
        if states == 1:
            return raw
        # The steps of one replay follow each other without a stamp: each counts as their mean.
        steps = tuple(_divide_step(step, states) for step in raw.steps)
        return replace(raw, steps=steps, host_seconds=raw.host_seconds / states)

    def _slot(
        self, timed: Callable[[Any, Phases], object], calls: int, discard: int, filling: Filling | None
    ) -> RawSlot:
        # Bound before a step runs, so that a step that replaces functions of the clock cannot affect its own slot.
        clock, begin, end, ready, now = self.clock, self.clock.begin, self.clock.end, self._ready, time.perf_counter
        late, spacing, unmarked = self._late, self.steps_per_marked_step, SilentPhases()
        # Answers are freed within the timing; `id` does nothing else to them.
        keep, looked_at = (id, nullcontext()) if late is None else (late.keep, late.slot())
        marks: list[tuple[list[int], list[Any]]] = []
        calls_seconds: list[float] = []
        quantised = fusing.calls()
        with self._watched(), looked_at:
            self.meet()
            retried = self.device.retried(self.index)
            before = counters()  # ahead of the discarded calls: reading it leaves caches cold
            for _ in range(discard):
                state = ready()
                begin()
                keep(timed(state, clock))
                end()
            self.device.synchronise(self.index)
            cpu, thread, wall = time.process_time(), time.thread_time(), time.perf_counter()
            for number in range(calls):
                state = self._ready_on_device(number, filling)
                started = now()
                begin()
                keep(timed(state, unmarked if number % spacing else clock))
                marks.append(end())
                calls_seconds.append(now() - started)
            host = time.perf_counter() - wall
            at_end = before if self._between is None else counters()
            self.device.synchronise(self.index)
            wall, thread, cpu = (
                time.perf_counter() - wall,
                time.thread_time() - thread,
                time.process_time() - cpu,
            )
            after = counters()
            counted = grown(before, after)
            retried_now = self.device.retried(self.index)
        steps = tuple(RawStep(tuple(codes), tuple(self.stamper.intervals_ns(stamps))) for codes, stamps in marks)
        self.stamper.recycle()
        self._space_marks(steps)
        if late is not None:
            late.add([step.seconds for step in steps], discard)
        gaps = max(0.0, host - sum(calls_seconds))
        # A host that waits for a core notices late that the device is done.
        late_seconds = _number_or_none(grown(at_end, after)["waited"]) or 0.0
        self._missing.append(
            min(map(_missing_seconds, calls_seconds, steps))
            if self._between is None
            else _missing_of_slot(wall, gaps + self._between.seconds() + late_seconds, steps)
        )
        eager, fused = fusing.calls_since(quantised)
        preemptions = _number_or_none(counted["preemptions"])
        return RawSlot(
            steps,
            wall,
            cpu,
            min(calls_seconds),
            eager,
            sum(fused.values()),
            thread,
            None if preemptions is None else int(preemptions),
            _number_or_none(counted["steal"]),
            self._waited(_number_or_none(counted["waited"]), wall - thread),
            tuple(bits for bits in sorted(fused) if bits),
            memory_retries=None if retried is None or retried_now is None else retried_now - retried,
        )

    def _space_marks(self, steps: Sequence[RawStep]) -> None:
        """Marks fewer steps on an accelerator if stamps take more than MARKS_SHARE of a step.

        Ranks go on with all marks, because what they wait for each other is a phase of every step.
        """
        if self._between is None or self.meet is not begins_alone or not steps:
            return
        fastest = min(steps, key=lambda step: step.seconds)
        stamps = max(len(step.codes) for step in steps) - 1
        cost = stamp_cost(self.device, self.index) * stamps / max(fastest.seconds, 1e-7)
        spacing = min(_MOST_STEPS_PER_MARKED_STEP, math.ceil(cost / MARKS_SHARE))
        self.steps_per_marked_step = max(self.steps_per_marked_step, spacing)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Runs timed steps under their precision, and raises for forbidden side effects."""
        watched = restore_switches(self._switches)
        with under(self.precision), collected_by_hand(), watched as known, silent_step(), agreeing(self._clocks):
            self._switches = known if owns_this_process() else None
            yield

    def _ready_on_device(self, number: int, filling: Filling | None) -> Any:
        """Returns the state to step; on an accelerator it marks the device's work before the step."""
        fills = filling is not None and number % filling.calls == 0
        between = self._between if fills or self.flush is not None or self.loaded else None
        if between is not None:
            between.mark()
        state = self._ready()
        if fills and filling is not None:
            self.device.occupy(self.index, filling.seconds)
        if between is not None:
            between.mark()
        return state

    def _waited(self, counted: float | None, off_core: float) -> float | None:
        """Returns how long the timed calls waited for a core, None if unknown. `counted` includes the discarded calls,
        so it is limited by the time that the timed ones spent off the core. On an accelerator, or if a cache is flushed
        between calls, it is unknown which part waited."""
        unknown = counted is None or self.device.kind != "cpu" or self.flush is not None
        return None if unknown or counted is None else max(0.0, min(counted, off_core))

    def begin_late(self) -> None:
        """Begins to inspect steps after their timing. Slots use the first state, with other numbers, until
        `end_late`."""
        from fp8bench.worker.late_slots import LateSlots

        tf32 = self.precision.float32_products != "highest"
        self._late = LateSlots(self.state, self.states[0].finite.inputs, self.device, tf32)

    @property
    def is_late_due(self) -> bool:
        return self._late is not None and self._late.is_due

    def end_late(self) -> LateSteps:
        """Restores the state; returns what its late steps did."""
        late, self._late = self._late, None
        return LateSteps() if late is None else late.end()

    def check(self) -> StateCheck:
        """Returns errors of the clock, the workload's opinion of its states after the steps, and whether they are
        finite."""
        if self.is_so_anywhere(self._stamps_are_wrong()):
            self._take_more_slots()
        if self._stamps_are_wrong():
            return StateCheck(_STAMPS_MOVED)
        with restore_switches(), apart():
            checks = [self._checked(state) for state in self.states]
        return next((check for check in checks if check.wrong), max(checks, key=lambda check: check.not_finite))

    def _stamps_are_wrong(self) -> bool:
        # An interruption between a call's start and its first stamp lengthens one slot, never most of many.
        return bool(self._missing) and median(self._missing) > 0

    def _take_more_slots(self) -> None:
        """Takes more slots before a step is accused: a loaded machine can lengthen two of the three slots of a short
        run. Ranks take as many as the slowest of them needs."""
        until = time.perf_counter() + _SECOND_LOOK_SECONDS
        while self.is_so_anywhere(self._needs_more_slots(until)):
            self.slot(4, 0)

    def _needs_more_slots(self, until: float) -> bool:
        taken = len(self._missing)
        return taken < _SLOTS_OF_SLOW_STEPS or (taken < _SLOTS_TO_ACCUSE and time.perf_counter() < until)

    def _checked(self, state: State) -> StateCheck:
        wrong = wrong_of(self.workload.check(state.held))
        lost = state.finite.lost(state.held)
        if self.workload.may_diverge:
            return StateCheck(wrong, lost.share)
        return StateCheck(wrong or str(lost))

    def loop(self, steps: int) -> float:
        """Runs steps back to back and waits for them; returns the seconds of all. No clock runs within them."""
        silent = SilentPhases()
        with under(self.precision), restore_switches(), silent_step():
            self.meet()
            start = time.perf_counter()
            for _ in range(steps):
                self.workload.step(self._ready(), silent)
            self.device.synchronise(self.index)
            return time.perf_counter() - start

    def hold_phase(self, phase: str, most_bytes: int) -> RawReplay:
        """Keeps the inputs of one phase of a step, `most_bytes` at most, so that it can be repeated alone."""
        self.held = None
        self.loaded = self.loaded or (phase == Phase.DATA_LOAD and bool(self.workload.loads))
        with under(self.precision), restore_switches(), apart():
            state = self._ready()
            held = held_phase(self.workload, state, self.device, self.index, phase, most_bytes)
            if isinstance(held, RawReplay):
                return held
            self.held = held
            return held.warmed_up()

    def loop_phase(self, times: int) -> float:
        assert self.held is not None, "no phase is held"
        with under(self.precision), restore_switches(), silent_step():
            return self.held.loop(times)

    def drop_phase(self) -> str:
        """Frees what is kept for a phase; returns what repeating it has spoiled, or ''."""
        held, self.held = self.held, None
        return held.replay.lost() if held is not None else ""


_STAMPS_MOVED = (
    "its steps take another time than the phase clock has counted: a step changes the clock's stamps, or leaves work "
    "on a stream that it opens. Mark phases only by `with phase.gemm:` and the like, wait for streams, and measure "
    "again."
)


def _divide_step(step: RawStep, count: int) -> RawStep:
    return replace(step, intervals_ns=tuple(round(interval / count) for interval in step.intervals_ns))


def _missing_seconds(call_seconds: float, step: RawStep) -> float:
    """Returns by how much a call's time differs from its step's stamps, beyond the allowance for the clock's work."""
    allowed = max(_CALL_SECONDS + _MARK_SECONDS * len(step.codes), _CALL_SHARE * call_seconds)
    return abs(call_seconds - sum(step.intervals_ns) * 1e-9) - allowed


def _missing_of_slot(wall: float, untimed: float, steps: Sequence[RawStep]) -> float:
    """Returns by how much a slot on an accelerator differs from its steps' stamps and the times between them: the
    device may be late, or idle for a while, but not for most of a slot."""
    stamped = sum(step.seconds for step in steps)
    allowed = max(_SLOT_SECONDS + _CALL_SECONDS * len(steps), _SLOT_SHARE * wall)
    return max(stamped - wall, wall - untimed - stamped) - allowed


def _number_or_none(read: Read) -> float | None:
    return read.number if isinstance(read, Reading) else None
