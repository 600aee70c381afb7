"""A case in the rounds: its state or states in the worker, and the slots measured up to now."""

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
from fp8bench.measure.limits import HANG_SECONDS, USUAL, Limits
from fp8bench.measure.slots import (
    REPEAT_BELOW_SECONDS,
    Segmentation,
    block_length,
    by_phase,
    by_phase_totals,
    filling_of,
    segment,
    shape_of,
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
class Quantisers:
    """How a run executes its quantisers. `why_eager` is '' while they are compiled.

    An emulated cast is a dozen operations in a row, or one kernel that torch.compile makes of them: the same numbers
    bit for bit, and much faster. Compiling takes seconds, so it is never timed. If compiling ends a worker, `why_eager`
    is set for the rest of the run, because it would end the next worker as well.
    """

    why_eager: str = ""


# Two states of one code differ by where their memory lies, for as long as they live: products of 0.3 ms by 0.25% in the
# ratio on one processor, by more than the band on another. So a short step has several, and each round takes one.
STATES = 4
# A step this long is timed well enough by its first call.
LONG_SECONDS = 5.0
_CALIBRATING_CALLS = 3
_MORE_COMPILATIONS = 2
# The codes of a step whose phases were not marked.
_NO_MARKS = (CELL_PHASES.index(UNATTRIBUTED),)
_FIRST_ASKED_LATE = "they were first asked for while it was timed"

# Receives an arm and what is being done with it.
Tell = Callable[["MeasuredArm", str], None]


@dataclass
class MeasuredArm:
    """One entry in the rounds: its state or states in the worker, and its slots."""

    key: str
    planned: PlannedCase
    facts: DeviceFacts
    limits: Limits = USUAL
    calls: int = 1
    discard: int = 0
    step_seconds: float = 0.0
    host_seconds: float = 0.0
    filling: Filling | None = None
    rotation: Rotation | None = None
    calibrated: RawStep | None = None
    segmentation: Segmentation | None = None
    varying: bool = False
    more_keys: list[str] = field(default_factory=list)
    slots: list[SlotSample] = field(default_factory=list)
    scales: tuple[LayerScale, ...] = ()
    not_finite: float = 0.0
    why_eager: str | None = None
    ran_eager: bool = False
    ran_fused: bool = False
    vector_bits: frozenset[int] = frozenset()

    @property
    def is_emulated(self) -> bool:
        return self.planned.support.is_emulated

    @property
    def cache(self) -> str:
        return str(CACHE.of(dict(self.planned.case.params)))

    @property
    def queues(self) -> bool:
        """Whether calls are enqueued on a device whose time is measured: the time of an emulated case is no figure."""
        return self.facts.accelerated and not self.is_emulated

    def prepare(self, worker: Worker, quantisers: Quantisers | None = None, tell: Tell | None = None) -> None:
        """Builds the state, compiles its quantisers, then times a few steps to size the slots and cut the cells.

        Those steps may need other quantisers than the untimed step, which had no earlier scale. Without `quantisers`,
        nothing is compiled and `why_eager` stays None.
        """
        # 1. Find static scales ahead of everything else: the state that is built next uses them.
        limit = self.limits.first(self.planned.work)
        static = self.planned.case.static
        if static is not None:
            worker.within(self.limits.first(self.planned.work, static.batches)).calibrate(self.planned.case, self.facts)
        # 2. Build the state, and compile what it asks for.
        worker.within(limit).prepare(self.key, self.planned.case, self.facts)
        self._compile(worker, quantisers, tell)
        best = self._fastest_of_a_few(worker, limit)
        # 3. A first timed step may ask for other quantisers than the untimed one did; a few tries settle this.
        for _ in range(_MORE_COMPILATIONS):
            if not self._compile(worker, quantisers, tell):
                break
            best = self._fastest_of_a_few(worker, limit)
        # 4. Size the slots by the fastest step, because a disturbed one would make them too short.
        self.step_seconds = max(best.seconds, 1e-7)
        self.calibrated = best
        self.segmentation = segment(best.codes, best.intervals_ns, part_ends=self._part_ends)
        shape = shape_of(self.step_seconds, self.host_seconds, self.cache, self.queues)
        self.calls, self.discard, self.filling = shape.calls, shape.discard, shape.filling
        if self.cache == ROTATING:
            self.rotation = worker.within(HANG_SECONDS).rotation(self.key)

    def prepare_more(self, worker: Worker) -> None:
        """Prepares more states of a short step, elsewhere in memory, as long as there is room.

        Not on an accelerator, where even a short step may hold gigabytes that others need; nor where preparing takes
        long because it compiles.
        """
        short = self.step_seconds < REPEAT_BELOW_SECONDS and not self.planned.work.setup_seconds
        several = short and not self.is_emulated and not self.facts.accelerated and self.rotation is None
        limit = self.limits.first(self.planned.work)
        for number in range(1, STATES if several else 1):
            try:
                worker.within(limit).prepare(f"{self.key} #{number}", self.planned.case, self.facts)
            except WorkerFault as fault:
                if not fault.out_of_memory:
                    raise
                return
            self.more_keys.append(f"{self.key} #{number}")

    def _compile(self, worker: Worker, quantisers: Quantisers | None, tell: Tell | None) -> bool:
        """Compiles the quantisers that the state has asked for; False where none waited."""
        if quantisers is None or quantisers.why_eager:
            self.why_eager = None if quantisers is None else quantisers.why_eager
            return False
        waiting, self.why_eager = worker.within(HANG_SECONDS).quantisers()
        if not waiting:
            return False
        if tell is not None:
            tell(self, f"compiling {waiting} quantiser{'s' * (waiting != 1)}")
        limit = self.limits.compiling(self.planned.work, waiting)
        try:
            worker.within(limit).compile_quantisers(self.key)
        except (WorkerLost, WorkerHung) as error:
            hung = isinstance(error, WorkerHung)
            quantisers.why_eager = f"compiling took more than {limit:g} s" if hung else f"compiling failed: {error}"
            raise CompilingFailed(self) from error
        self.why_eager = worker.within(HANG_SECONDS).quantisers()[1]
        return True

    def _fastest_of_a_few(self, worker: Worker, limit: float) -> RawStep:
        first = worker.within(limit).slot(self.key, 1, 0, None)
        raw = first
        # An emulated step's time is only shown.
        if first.steps[0].seconds < LONG_SECONDS and not self.is_emulated:
            limit = self.limits.slot(first.steps[0].seconds, _CALIBRATING_CALLS)
            filling = filling_of(first.host_seconds, _CALIBRATING_CALLS) if self.queues else None
            raw = worker.within(limit).slot(self.key, _CALIBRATING_CALLS, 0, filling)
        self.host_seconds = raw.host_seconds
        most_marks = max(len(step.codes) for step in raw.steps)
        return min((step for step in raw.steps if len(step.codes) == most_marks), key=lambda step: step.seconds)

    def cut_like(self, leader: MeasuredArm) -> None:
        """Takes the lead's cells if the marks are the same, else cuts into stretches of the same share of the step.

        Best cases add the fastest of each cell, so an arm that is cut finer would look faster for that alone.
        """
        assert self.calibrated is not None and leader.calibrated is not None and leader.segmentation is not None
        if self.calibrated.codes == leader.calibrated.codes:
            self.segmentation = leader.segmentation
            return
        own_ns, lead_ns = sum(self.calibrated.intervals_ns), sum(leader.calibrated.intervals_ns)
        block_ns = max(1, round(block_length(lead_ns) * own_ns / max(lead_ns, 1)))
        self.segmentation = segment(self.calibrated.codes, self.calibrated.intervals_ns, block_ns, self._part_ends)

    def run(self, worker: Worker, round_number: int, place: int | None = None) -> None:
        """Runs one slot; `place` is its position within the round.

        Where calls are discarded, one more is discarded at random: with a fixed slot length, something that happens
        every n calls would always hit discarded ones, or never.
        """
        draw = random.Random(f"{self.key} {round_number}")
        discard = self.discard and self.discard + draw.randrange(2)
        limit = self.limits.slot(self.step_seconds, self.calls + discard)
        state = draw.choice([self.key, *self.more_keys])
        self.add(worker.within(limit).slot(state, self.calls, discard, self.filling), round_number, place)

    def check(self, worker: Worker) -> None:
        """Raises WorkerFault if the steps have spoilt the state: numbers that are not finite may take another time."""
        for key in (self.key, *self.more_keys):
            state = worker.within(self.limits.numbers(self.planned.work)).check(key)
            if state.wrong:
                raise WorkerFault("after its steps", state.wrong)
            self.not_finite = max(self.not_finite, state.not_finite)
        if self.planned.case.static is not None or precisions.get(self.planned.case.precision).whole_layers:
            self.scales = worker.within(self.limits.numbers(self.planned.work)).scales(self.key)

    @property
    def _part_ends(self) -> str:
        return workloads.get(self.planned.case.workload).part_ends

    def work_fields(self, worker: Worker) -> dict[str, Any]:
        """The record's fields about the work of timed steps; a field is missing where the worker has no answer. The
        state is chosen at random, so that a step cannot know which one is checked."""
        work, case = self.planned.work, self.planned.case
        if case.ranks > 1:
            return {}
        # Later sessions have new states; a suite that cheats in one state alone is caught in some sessions.
        bench, key = worker.within(self.limits.numbers(work)), random.choice([self.key, *self.more_keys])
        late = LateSteps()
        with suppress(WorkerFault):
            try:
                # Slots go on unrecorded until the worker has looked at as many late steps as it wants.
                bench.begin_late(key)
                while bench.is_late_due(key):
                    bench.slot(key, self.calls, self.discard, self.filling)
            finally:
                late = bench.end_late(key)
        counts: dict[str, Any] = {"late": late}
        # Work that varies from step to step has no one count.
        if late.flops is not None and not late.varies:
            counts["late_flops"] = round(late.flops)
        if late.told_apart:
            counts["effect"] = StepEffect(False, late.told_apart)
        return counts

    def release(self, worker: Worker) -> ArmFailed | None:
        """Gives the states back; returns a failure if threads of theirs still run, which would disturb what follows."""
        running = [thread for key in (self.key, *self.more_keys) for thread in worker.release(key)]
        if not running:
            return None
        names = ", ".join(running[:5])
        return ArmFailed(
            self,
            WorkerFault(
                "LeftRunning",
                f"{len(running)} started while preparing still run after the state was given back ({names})",
            ),
        )

    def add(self, raw: RawSlot, round_number: int, place: int | None = None) -> None:
        """Keeps a slot as cells. If the marks of steps vary, this slot and all earlier ones are kept by phase."""
        assert self.segmentation is not None
        # A single eager step marks the whole case: a reader must know of it.
        self.ran_eager |= raw.eager_quantisers > 0
        self.ran_fused |= raw.fused_quantisers > 0
        self.vector_bits |= set(raw.vector_bits)
        rows = _rows(raw.steps, self.segmentation.cells)
        # Cells need the same marks in every step. One step with others sends all slots to totals by phase.
        if self.varying or any(row is None for row in rows):
            self._vary()
            rows = _rows(raw.steps, by_phase_totals)
        calls = tuple(row for row in rows if row is not None)
        self.slots.append(
            SlotSample(
                round_number,
                calls,
                raw.wall_seconds,
                raw.cpu_seconds,
                raw.host_seconds,
                raw.thread_seconds,
                raw.preemptions,
                raw.stolen_seconds,
                raw.waited_seconds,
                place,
                ranks=raw.ranks,
                memory_retries=raw.memory_retries,
            )
        )

    def _vary(self) -> None:
        if self.varying:
            return
        assert self.segmentation is not None
        codes = [CELL_PHASES.index(phase) for phase in self.segmentation.segments.phases]
        totals = partial(by_phase_totals, codes)
        self.slots = [replace(slot, calls_ns=tuple(map(totals, slot.calls_ns))) for slot in self.slots]
        self.segmentation = by_phase(self.segmentation.codes)
        self.varying = True

    def record_fields(self) -> dict[str, Any]:
        names = ("scales", "not_finite", "rotation")
        return {"timing": self.timing(), **{name: getattr(self, name) for name in names}}

    def timing(self) -> Timing:
        segments = self.segmentation.segments if self.segmentation else Segments((), ())
        codes = Counter(self.segmentation.codes if self.segmentation else ())
        entries = tuple((CELL_PHASES[code], count) for code, count in sorted(codes.items()))
        eager = (self.why_eager or _FIRST_ASKED_LATE) if self.ran_eager and self.why_eager is not None else ""
        slots, bits = tuple(self.slots), tuple(sorted(self.vector_bits))
        return Timing(segments, slots, entries, self.varying, eager, self.ran_fused, bits)


def _rows(
    steps: Sequence[RawStep], cut: Callable[[Sequence[int], Sequence[int]], tuple[int, ...] | None]
) -> list[tuple[int, ...] | None]:
    """Returns the cells of each step. A step without marks is divided like the last marked step before it."""
    rows: list[tuple[int, ...] | None] = []
    last_marked: tuple[int, ...] | None = None
    for step in steps:
        if step.codes == _NO_MARKS and last_marked is not None:
            rows.append(_proportional(sum(step.intervals_ns), last_marked))
        else:
            last_marked = cut(step.codes, step.intervals_ns)
            rows.append(last_marked)
    return rows


def _proportional(total: int, cells: tuple[int, ...]) -> tuple[int, ...]:
    """Divides whole nanoseconds like `cells`; what rounding leaves goes to the largest."""
    whole = max(sum(cells), 1)
    parts = [total * cell // whole for cell in cells]
    parts[parts.index(max(parts))] += total - sum(parts)
    return tuple(parts)


class CompilingFailed(Exception):
    """The worker did not survive compiling an arm's quantisers. The arm can do without them."""

    def __init__(self, arm: MeasuredArm) -> None:
        super().__init__(arm.key)
        self.arm = arm


class ArmFailed(Exception):
    """An arm could not be prepared or run; `cause` is the worker's error."""

    def __init__(self, arm: MeasuredArm, cause: WorkerError) -> None:
        super().__init__(str(cause))
        self.arm = arm
        self.cause = cause


@contextmanager
def guarding(arm: MeasuredArm) -> Iterator[None]:
    try:
        yield
    except WorkerError as error:
        raise ArmFailed(arm, error) from error
