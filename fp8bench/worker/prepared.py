"""A case that is ready to be timed: its states, the clock that its steps write into, and slots of steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8bench.model import UNATTRIBUTED, DeviceFacts, Phase
from fp8bench.model.raw import Filling, RawReplay, RawSlot, RawStep, StateCheck
from fp8bench.model.readings import Read, Reading, grown
from fp8bench.protocols import (
    Arithmetic,
    CannotCapture,
    Device,
    Markers,
    Phases,
    Precision,
    ScaleBook,
    SilentPhases,
    Stamper,
    TellingMarker,
    Workload,
)
from fp8bench.protocols.axes import CACHE_TIMES
from fp8bench.worker import fusing
from fp8bench.worker.checked_results import wrong_of
from fp8bench.worker.clock import PhaseClock, agreeing
from fp8bench.worker.finite import FiniteState
from fp8bench.worker.fusing import uncompiled
from fp8bench.worker.host_counters import counters
from fp8bench.worker.state_tensors import address_of, tensors_of
from fp8bench.worker.static_scales import step
from fp8bench.worker.step_guards import Running, apart, owns_this_process, silent_step
from fp8bench.worker.switches import collected_by_hand, unchanged, under

if TYPE_CHECKING:
    from fp8bench.tape.replay import Replay
    from fp8bench.worker.step_effect import Beginning, Slot

# What a call may take besides its step: the clock's own work, in seconds a call and a mark, and a share of the step.
_CALL_SECONDS, _MARK_SECONDS, _CALL_SHARE = 20e-6, 0.2e-6, 0.05
# A phase is repeated for so long, in pieces, before its window: clocks and power are its own then, its time is known.
WARM_SECONDS = 0.3
_PIECE_SECONDS = 0.05
_NO_LOAD = "its data are loaded by code of its suite, which has no `load` that does nothing else"


@dataclass(frozen=True)
class HeldPhase:
    """A phase of a step, with the inputs it had in that step. Data are loaded by the workload itself."""

    workload: Workload
    state: Any
    device: Device
    index: int
    replay: Replay
    loads: bool

    def loop(self, times: int) -> float:
        """Repeats the phase back to back and waits for the device; returns the seconds of all."""
        with self.replay.random_kept():
            start = time.perf_counter()
            if self.loads:
                for _ in range(times):
                    self.workload.load(self.state)
                    self.replay.run()
            else:
                self.replay.run(times)
            self.device.synchronise(self.index)
            return time.perf_counter() - start

    def warmed_up(self) -> RawReplay:
        """Repeats the phase for a while from its inputs, which are then restored; returns its time and size."""
        end, times, seconds = time.perf_counter() + WARM_SECONDS, 1, self.loop(1)
        while time.perf_counter() < end:
            times = max(1, round(times * _PIECE_SECONDS / max(seconds, 1e-7)))
            seconds = self.loop(times)
        self.replay.restore()
        return RawReplay(seconds / times, len(self.replay.calls), self.replay.bytes)


def held_phase(
    workload: Workload,
    state: Any,
    device: Device,
    index: int,
    phase: str,
    most_bytes: int,
) -> HeldPhase | RawReplay:
    """Returns the phase as a step of the state does it, or why it cannot be done by itself. On a processor the
    repetition has to give the step's numbers bit for bit. A GPU may add up in another order each time."""
    from fp8bench.tape.replay import CannotReplay, Recording

    loads = phase == Phase.DATA_LOAD
    if loads and not workload.loads:
        return RawReplay(why=_NO_LOAD)
    stack: list[str] = [UNATTRIBUTED]  # backward may run on another thread: phases share it
    recording = Recording(phase, stack, most_bytes, check=device.kind == "cpu")
    with recording:
        workload.step(state, Markers(lambda name: TellingMarker(name, stack, lambda told: None)))
    device.synchronise(index)
    try:
        replay = recording.replay()
    except CannotReplay as cannot:
        return RawReplay(why=str(cannot))
    if why := replay.differs():
        return RawReplay(why=why)
    return HeldPhase(workload, state, device, index, replay, loads)


def begins_alone() -> None:
    """Waits for nobody."""


class State(NamedTuple):
    """What a workload has prepared; the book of its scales, if any; the check of its finiteness; and the arithmetics
    that it was prepared with."""

    held: Any
    scales: ScaleBook | None
    finite: FiniteState
    arithmetics: tuple[Arithmetic, ...]


# With more states preparing takes longer than measuring.
MOST_STATES = 256


def flush_of(facts: DeviceFacts) -> Callable[[], Any]:
    """Returns a function that overwrites the whole cache, in order with the device's other work. It reads what it
    writes, because zeros alone may bypass a cache. It uses integers, which no precision's switch concerns."""
    import torch

    covering = torch.zeros(CACHE_TIMES * facts.cache_bytes // 4, dtype=torch.int32, device=facts.key)
    return partial(covering.add_, 1)


def bytes_of(state: object) -> int:
    return sum({address_of(part): part.untyped_storage().nbytes() for part in tensors_of(state)}.values())


def rotation(first: State, make: Callable[[], State], facts: DeviceFacts, device: Device) -> tuple[State, ...]:
    """Returns the first state and more, until each has left the cache when its turn comes again. At least one more;
    fewer than needed if memory ends."""
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
    """`started` is what preparing has left running. Calls take the `states` in turn. `flush` and the loading of data
    ahead of a replay run before each call and are not timed. `meet` waits for whoever else begins a slot or a loop at
    the same time."""

    workload: Workload
    precision: Precision
    device: Device
    index: int
    states: tuple[State, ...]
    clock: PhaseClock
    stamper: Stamper
    started: Running
    flush: Callable[[], Any] | None = None
    replay: Callable[[], object] | None = None
    loaded: bool = False
    held: HeldPhase | None = None
    meet: Callable[[], object] = begins_alone
    # By slot: seconds of a call that are neither in its step's stamps nor the clock's own work, at least. On a CPU.
    _missing: list[float] = field(default_factory=list)
    # Values of the switches before the first slot, which every slot must leave: nothing else runs in between.
    _switches: Sequence[Any] | None = None
    _next: Callable[[], State] = field(init=False)

    def __post_init__(self) -> None:
        self._next = partial(next, cycle(self.states))

    @property
    def state(self) -> Any:
        return self.states[0].held

    @property
    def scales(self) -> ScaleBook | None:
        return self.states[0].scales

    def _ready(self) -> Any:
        """Does what comes before a step and is not timed; returns the state to step."""
        state = self._next()
        if self.flush is not None:
            self.flush()
        if state.scales is not None:
            state.scales.begin_step()
        if self.loaded:
            self.workload.load(state.held)
        return state.held

    @property
    def _clocks(self) -> dict[str, Callable[[], float]]:
        own = {"time.perf_counter": lambda: time.perf_counter() * 1e9}
        return {**own, "the clock of phases": self.clock.now} if self.device.kind == "cpu" else own

    def capture(self) -> str:
        """Captures a step, so that `replay` does it in one launch; returns why that is impossible, or ''."""
        from fp8bench.numerics.operands import needs_host

        again = partial(step, self.workload, self.state, self.scales, SilentPhases())
        with under(self.precision), unchanged(), silent_step():
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

    def slot(self, calls: int, discard: int, filling: Filling | None = None) -> RawSlot:
        return self._slot(self.workload.step, calls, discard, filling)

    def replayed(self, calls: int, discard: int, filling: Filling | None) -> RawSlot:
        assert self.replay is not None, "nothing was captured"
        replay = self.replay
        return self._slot(lambda state, phase: replay(), calls, discard, filling)

    def _slot(
        self, timed: Callable[[Any, Phases], object], calls: int, discard: int, filling: Filling | None
    ) -> RawSlot:
        clock, begin, ready = self.clock, self.clock.begin, self._ready
        marks: list[tuple[list[int], list[Any]]] = []
        calls_seconds: list[float] = []
        quantised = fusing.calls()
        watched = unchanged(self._switches)
        with under(self.precision), collected_by_hand(), watched as known, silent_step(), agreeing(self._clocks):
            self._switches = known if owns_this_process() else None
            self.meet()
            retried = self.device.retried(self.index)
            before = counters()  # ahead of the discarded calls: reading it leaves caches cold
            for _ in range(discard):
                state = ready()
                begin()
                timed(state, clock)
                clock.end()
            self.device.synchronise(self.index)
            cpu, thread, wall = time.process_time(), time.thread_time(), time.perf_counter()
            for number in range(calls):
                state = ready()
                if filling is not None and number % filling.calls == 0:
                    self.device.occupy(self.index, filling.seconds)
                started = time.perf_counter()
                begin()
                timed(state, clock)
                marks.append(clock.end())
                calls_seconds.append(time.perf_counter() - started)
            self.device.synchronise(self.index)
            wall, thread, cpu = (
                time.perf_counter() - wall, time.thread_time() - thread, time.process_time() - cpu,
            )  # fmt: skip
            counted = grown(before, counters())
            retried_now = self.device.retried(self.index)
        steps = tuple(RawStep(tuple(codes), tuple(self.stamper.intervals_ns(stamps))) for codes, stamps in marks)
        self.stamper.recycle()
        if self.device.kind == "cpu":
            self._missing.append(min(map(_missing_seconds, calls_seconds, steps)))
        eager, fused = fusing.calls_since(quantised)
        preemptions = _known(counted["preemptions"])
        return RawSlot(
            steps, wall, cpu, min(calls_seconds), eager, sum(fused.values()), thread,
            None if preemptions is None else int(preemptions), _known(counted["steal"]),
            self._waited(_known(counted["waited"]), wall - thread),
            tuple(bits for bits in sorted(fused) if bits),
            memory_retries=None if retried is None or retried_now is None else retried_now - retried,
        )  # fmt: skip

    def _waited(self, counted: float | None, off_core: float) -> float | None:
        """Returns how long the timed calls waited for a core, None where nobody can tell. `counted` includes the
        discarded calls, so it is limited by the time that the timed ones spent off the core. On an accelerator, or if a
        cache is flushed between calls, it is unknown which part waited."""
        unknown = counted is None or self.device.kind != "cpu" or self.flush is not None
        return None if unknown or counted is None else max(0.0, min(counted, off_core))

    def late_flops(self) -> int | None:
        """Returns the FLOPs of a step's products under the clock that has timed others; None where two steps differ or
        nobody knows. A step may know that it is timed by the clock it is given, or by how many came before."""
        from fp8bench.tape.counting import counted
        from fp8bench.tape.recorder import OperatorTape

        counts = set[int | None]()
        for _ in range(2):
            mode = OperatorTape()
            with under(self.precision), unchanged(), apart(), uncompiled() as compiled:
                state = self._ready()
                self.clock.begin()
                with mode:
                    self.workload.step(state, self.clock)
                self.clock.end()
            self.stamper.recycle()
            tape = counted(mode.calls)
            counts.add(None if compiled or not tape.complete else tape.flops)
        return counts.pop() if len(counts) == 1 else None

    def told_apart(self, calls: int, discard: int) -> str:
        """Returns how timed slots differ from slots whose operators are counted; '' if they do not or nobody knows."""
        from fp8bench.worker import step_effect

        turns, state = self._next, self.states[0]
        self._next = lambda: state
        try:
            with apart(), step_effect.as_they_were(state.held, state.finite.inputs) as beginning:
                return step_effect.told_apart(partial(self._slot_with, beginning, calls, discard))
        finally:
            self._next = turns

    def _slot_with(self, beginning: Beginning, calls: int, discard: int, timed: bool) -> Slot | None:
        """Runs a slot, timed as all are or with its operators counted; returns None where its steps are compiled."""
        from fp8bench.tape.recorder import OperatorTape
        from fp8bench.worker.step_effect import slot_of

        answer: list[Any] = []
        compiled: list[Any] = []
        modes: list[OperatorTape] = []

        def step(held: Any, phase: Phases) -> None:
            answer.clear()
            if timed:
                answer.append(self.workload.step(held, phase))
                return
            modes.append(OperatorTape())
            with uncompiled() as called, modes[-1]:
                answer.append(self.workload.step(held, phase))
            compiled.extend(called)

        beginning.again()
        slot = self._slot(step, calls, discard, None)
        seconds = [mode.seconds for mode in modes or slot.steps]
        return None if compiled else slot_of(seconds, len(modes[-1].calls) if modes else 0, beginning.left(answer))

    def check(self) -> StateCheck:
        """Returns what is wrong with the clock, what the workload says of its states after the steps, and whether they
        are finite."""
        # An interruption between a call's start and its first stamp lengthens one slot, never most of them.
        if self._missing and median(self._missing) > 0:
            return StateCheck(_STAMPS_MOVED)
        with unchanged(), apart():
            checks = [self._checked(state) for state in self.states]
        return next((check for check in checks if check.wrong), max(checks, key=lambda check: check.not_finite))

    def _checked(self, state: State) -> StateCheck:
        wrong = wrong_of(self.workload.check(state.held))
        lost = state.finite.lost(state.held)
        if self.workload.may_diverge:
            return StateCheck(wrong, lost.share)
        return StateCheck(wrong or str(lost))

    def loop(self, steps: int) -> float:
        """Runs steps back to back and waits for them; returns the seconds of all. No clock runs within them."""
        silent = SilentPhases()
        with under(self.precision), unchanged(), silent_step():
            self.meet()
            start = time.perf_counter()
            for _ in range(steps):
                self.workload.step(self._ready(), silent)
            self.device.synchronise(self.index)
            return time.perf_counter() - start

    def hold_phase(self, phase: str, most_bytes: int) -> RawReplay:
        """Keeps the inputs of one phase of a step, `most_bytes` at most, so that it can be done by itself."""
        self.held = None
        self.loaded = self.loaded or (phase == Phase.DATA_LOAD and bool(self.workload.loads))
        with under(self.precision), unchanged(), apart():
            state = self._ready()
            held = held_phase(self.workload, state, self.device, self.index, phase, most_bytes)
            if isinstance(held, RawReplay):
                return held
            self.held = held
            return held.warmed_up()

    def loop_phase(self, times: int) -> float:
        assert self.held is not None, "no phase is held"
        with under(self.precision), unchanged(), silent_step():
            return self.held.loop(times)

    def drop_phase(self) -> str:
        """Frees what is kept for a phase; returns what doing it has spoilt, or ''."""
        held, self.held = self.held, None
        return held.replay.lost() if held is not None else ""


_STAMPS_MOVED = (
    "its steps take another time than the phase clock has counted: a step changes the clock's stamps. "
    "Mark phases by `with phase.gemm:` and its like alone, and measure again."
)


def _missing_seconds(call_seconds: float, step: RawStep) -> float:
    """Returns by how much a call's own time differs from its step's stamps, beyond what the clock's work may take."""
    allowed = max(_CALL_SECONDS + _MARK_SECONDS * len(step.codes), _CALL_SHARE * call_seconds)
    return abs(call_seconds - sum(step.intervals_ns) * 1e-9) - allowed


def _known(read: Read) -> float | None:
    return read.number if isinstance(read, Reading) else None
