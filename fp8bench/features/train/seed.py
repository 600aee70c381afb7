"""Trains one seed: all its arms take turns in slices of a few steps, until the last step.

Every slice is kept before the next one starts. After a lost worker, a fresh one repeats what no checkpoint had; an arm
in whose slice that happens twice is out, and the others go on.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from fp8bench.errors import StoreError, WorkerError, WorkerFault
from fp8bench.features.train.arms import Turn, arms_of_seed
from fp8bench.features.train.health.health import AFTER, Health, RemedyTrial, outcome, trials_of
from fp8bench.features.train.kind import ResumePlace, TrainingWriter, load_training
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.values import (
    ARRIVED,
    BYTES_PER_PARAMETER,
    NOT_FINITE,
    REFERENCE_SECONDS,
    REWOUND,
    UNPAIRED,
    Arm,
    ArmRole,
    ArmState,
    SeedTask,
    StepFigure,
    StepRow,
    StreamLine,
    Training,
    TrainingEvent,
    TrainingObserver,
    Validation,
)
from fp8bench.features.train.verdicts.curves import HELD_OUT
from fp8bench.measure.handle import START_SECONDS, Worker
from fp8bench.measure.interrupts import held_back
from fp8bench.measure.limits import HANG_SECONDS, HANG_STEPS
from fp8bench.measure.sensors.driver import Looks
from fp8bench.model.readings import Reading
from fp8bench.report.words.naming import many

# Steps of an arm before the next arm's turn: a machine that is slow for a while slows all of them.
SLICE = 5
# Limit for the first slice, whose time is unknown and includes compiling.
FIRST_SECONDS = 1800.0
_FAILURES = 2
# A driver's figure of how busy the device is covers about so long.
_LOOK_SECONDS = 1.0
# A rewind soon after another one skips so many times as many batches: the trouble began earlier.
_WIDER = 4


@dataclass
class SeedPace:
    """The most seconds that a step has taken so far, from which follows when a worker counts as hung."""

    slowest: float = 0.0

    def limit(self, steps: int) -> float:
        return max(HANG_SECONDS, HANG_STEPS * self.slowest * steps) if self.slowest else FIRST_SECONDS

    def took(self, seconds: float, steps: int) -> None:
        self.slowest = max(self.slowest, seconds / steps)


def lab_of(worker: Worker, seconds: float) -> Lab:
    return cast(Lab, worker.within(seconds))


class _Lost(Exception):
    """The worker was lost in a request: of `arm`, or of all arms where that is None."""

    def __init__(self, arm: Arm | None, error: WorkerError) -> None:
        super().__init__(str(error))
        self.arm, self.error = arm, error


@dataclass
class TrainingRun:
    """A training under way: its worker, the file that keeps its lines, and who is told of it."""

    training: Training
    worker: Worker
    writer: TrainingWriter
    observer: TrainingObserver


@dataclass
class SeedRun(TrainingRun):
    """Runs one turn: all arms of a seed where they fit into memory, else some of them. `place` counts turns from 0.
    `out` says why arms are no longer trained. `device` reads how busy the device is, where that is possible."""

    place: int
    turn: Turn
    pace: SeedPace
    out: dict[str, str]
    device: Looks | None = None
    _looked: float = -math.inf
    _failures: dict[str, int] = field(default_factory=dict)
    _health: Health = field(init=False)
    _tried: set[str] = field(default_factory=set)
    _stopped: set[str] = field(default_factory=set)

    def run(self, from_start: bool) -> None:
        """Train from the first step, or from the newest place that can be resumed, to the last step."""
        self._health = Health(self.training.arms, self.training.request.settings)
        if from_start:
            self.writer.keep(self.place, 0, None, tuple(self.out.items()))
        while True:
            try:
                self._rounds(self._begin())
                return
            except _Lost as lost:
                self._go_back(lost)

    @property
    def seed(self) -> int:
        return self.training.request.seed + self.turn.number

    @property
    def _again(self) -> str:
        """The reference's name where it was trained in this seed before: of its steps only the times are new."""
        lead = self.turn.arms[0]
        return lead.name if lead.role is ArmRole.REFERENCE and not self.turn.first else ""

    @property
    def task(self) -> SeedTask:
        """The arms that began the seed, including those that are out: checkpoints are of all of them."""
        gone = dict(self.writer.places[0].out)
        return self.training.task(tuple(arm for arm in self.turn.arms if arm.name not in gone), self.turn.number)

    @property
    def _alive(self) -> list[Arm]:
        return [arm for arm in self.task.arms if arm.name not in self.out]

    def _begin(self) -> int:
        """Build the arms and restore the newest sound checkpoint; returns the next step."""
        lab = lab_of(self.worker, START_SECONDS)
        with _faults():
            states = lab.begin(self.task)
        if not states:  # no arm could be built although the worker is empty: a fresh one would fail, too
            lab.validate(self.task.arms[0].name)
        place = self._restored(lab)
        self.writer.go_back(place)
        events = [line for line in self._restart_health() if isinstance(line, TrainingEvent)]
        self._tried |= {event.arm for event in events if event.kind == "tried-fix"}
        self._stopped = {event.arm for event in events if event.kind == "stopped"}
        if not place.step:
            self._keep_lines(tuple(self._first_lines(states)), 0)
        for arm in self.task.arms:
            if arm.name in self.out:
                lab.drop(arm.name)
        return place.step

    def _restart_health(self) -> list[StreamLine]:
        """Give new health rules the kept lines of this seed, and return these."""
        lines = [line for line in load_training(self.writer.path).lines if line.seed == self.seed]
        self._health = Health(arms_of_seed(self.training.arms, self.turn.number), self.training.request.settings)
        self._health.see(lines)
        return lines

    def _restored(self, lab: Lab) -> ResumePlace:
        first, *checkpoints = self.writer.places
        for place in reversed(checkpoints):
            try:
                with _faults():
                    lab.restore(str(self.writer.folder_of(place)))
                return place
            except StoreError as error:
                self.observer.note(f"{error} The checkpoint before it is used.")
        return first

    def _rounds(self, step: int) -> None:
        """Give every arm a slice, in an order drawn from the seed, until the last step or the loss asked for."""
        request = self.training.request
        if step == 0:
            self._validate(step)
        while step < request.steps:
            until = min(step + SLICE, request.steps, _next(step, request.evaluate), _next(step, request.keep))
            arms = self._alive
            # The order is the same whether or not the training was resumed.
            random.Random(f"{self.seed}/{step}").shuffle(arms)
            for arm in arms:
                self._advance(arm, step, until)
            step = until
            if use := tuple(self._device_use(step)):
                self._keep_lines(use, step)
            if step == request.steps or step % request.evaluate == 0:
                losses = self._validate(step)
                if step < request.steps and self._arrived(losses):
                    self._end(step)
                    return
            if step < request.steps and step % request.keep == 0:
                self._checkpoint(step)

    def _device_use(self, step: int) -> Iterator[StepFigure]:
        """The driver's figures for about the last second, whichever arms ran in it."""
        if self.device is None or time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        for name, read in self.device.state().items():
            if name in ("use", "memory_use") and isinstance(read, Reading):
                yield StepFigure("", self.seed, step - 1, f"device_{name}", float(read.number))

    def _advance(self, arm: Arm, step: int, until: int) -> None:
        """Take an arm's steps before `until`; what follows a rewind, validations included, is repeated."""
        request = self.training.request
        while step < until:
            count = min(SLICE, until - step, _next(step, request.evaluate) - step)
            lines = self._ask(arm, count, "advance", arm.name, count)
            self._keep_lines(lines, step + count)
            events = (line for line in lines if isinstance(line, TrainingEvent))
            failed = next((event.step for event in events if event.kind == NOT_FINITE), None)
            if failed is not None and arm.taken(request.settings).on_nan == "rewind":
                step = self._rewind(arm, failed, until)
                continue
            step += count
            if step < until and step % request.evaluate == 0 and arm.name != self._again:
                self._keep_lines(self._ask(arm, 0, "validate", arm.name), step)

    def _rewind(self, arm: Arm, failed: int, until: int) -> int:
        """Go back to the newest checkpoint before the batches to skip: the failing step's, and more if rewinds follow
        closely. Returns the next step. An arm that has used up its rewinds stops."""
        allowed = arm.taken(self.training.request.settings).rewinds
        before = self._ask(arm, 0, "rewinds", arm.name)
        if len(before) == allowed:
            words = f"the arm is stopped: {many(allowed, 'rewind')}, all that --rewinds allows, did not help"
            self._keep_lines((TrainingEvent(arm.name, self.seed, failed, "stopped", words),), until)
            return until
        close = sum(failed - last <= self.training.request.keep for _, last in before)
        first = max(0, failed + 1 - _WIDER**close)
        (step,) = self._from_checkpoint(arm, first, [("rewind", arm.name, (*before, (first, failed)))])
        batches = f"the batch of step {failed}" if first == failed else f"the batches of steps {first} to {failed}"
        words = f"rewind {len(before) + 1} of {allowed}: back to before step {step}, and past {batches}"
        values = (("to", step), ("first", first))
        self._keep_lines((TrainingEvent(arm.name, self.seed, failed, REWOUND, words, values=values),), until)
        self._restart_health()
        return step

    def _validate(self, step: int) -> dict[str, float]:
        lines: list[StreamLine] = []
        for arm in self._alive:
            if arm.name != self._again:
                lines += (own := self._ask(arm, 0, "validate", arm.name))
                self._keep_lines(own, step)
        return {line.arm: line.loss for line in lines if isinstance(line, Validation) and line.of == HELD_OUT}

    def _arrived(self, losses: dict[str, float]) -> bool:
        """Whether all arms but bands have reached the loss asked for. Never where arms are trained in pairs."""
        until = self.training.request.until
        names = {arm.name for arm in self._alive if not arm.is_band} - self._stopped
        seed_names = {arm.name for arm in arms_of_seed(self.training.arms, self.turn.number)} - set(self.out)
        if until is None or not names or not seed_names <= {arm.name for arm in self.turn.arms}:
            return False
        return all(losses.get(name, math.inf) <= until for name in names)

    def _end(self, step: int) -> None:
        for arm in self._alive:
            looks = self._ask(arm, 0, "validate", arm.name, True)
            self._keep_lines([look for look in looks if getattr(look, "of", "") != HELD_OUT], step)
        words = f"all arms have come to a loss of {self.training.request.until:g} on held-out text: the seed ends here"
        self._keep_lines((TrainingEvent("", self.seed, step, ARRIVED, words),), step)

    def _first_lines(self, states: Sequence[ArmState]) -> Iterator[StreamLine]:
        """Figures of what each arm keeps between steps, and an event where the reference is not trained alongside."""
        for state in states:
            for role, size in state.bytes_per_parameter:
                yield StepFigure(state.arm, self.seed, 0, BYTES_PER_PARAMETER, size, role)
        if self.turn.arms[0].role is not ArmRole.REFERENCE:
            words = "it does not fit into memory beside the reference, so that their times do not compare"
            yield TrainingEvent(self.turn.arms[0].name, self.seed, 0, UNPAIRED, words)

    def _new(self, lines: Sequence[StreamLine]) -> Iterator[StreamLine]:
        """The lines; if the reference is trained again, only its times, as figures of the arm it is paired with."""
        for line in lines:
            if line.arm != self._again or not self._again:
                yield line
            elif isinstance(line, StepRow) and line.seconds > 0:
                yield StepFigure(self.turn.arms[-1].name, line.seed, line.step, REFERENCE_SECONDS, line.seconds)

    def _ask(self, arm: Arm, steps: int, name: str, *arguments: Any) -> Any:
        """Call the lab; `steps` are those that the call takes."""
        began = time.monotonic()
        with _faults(arm):
            answer = getattr(lab_of(self.worker, self.pace.limit(max(steps, SLICE))), name)(*arguments)
        if steps:
            self.pace.took(time.monotonic() - began, steps)
        return answer

    def _keep_lines(self, lines: Sequence[StreamLine], step: int) -> None:
        lines = tuple(self._new(lines))
        alarms = self._health.see(lines)
        lines = (*lines, *alarms)
        with held_back():
            self.writer.append(lines)
        self._stopped |= {line.arm for line in lines if isinstance(line, TrainingEvent) and line.kind == "stopped"}
        self.observer.trained(self.turn.number, step, lines)
        if self.training.request.try_fix:
            for alarm in alarms:
                self._try_fix(alarm, step)

    def _try_fix(self, alarm: TrainingEvent, step: int) -> None:
        """Try remedies, once an arm, and keep the outcome. Bands of the reference would show the same."""
        task = self.task
        arm = next(arm for arm in task.arms if arm.name == alarm.arm)
        if arm.name in self._tried or arm.is_band:
            return
        self._tried.add(arm.name)
        trials = trials_of(alarm, arm, task.settings)
        begun = self._from_checkpoint(
            arm, alarm.step, [("branch", arm.name, trial.arm, trial.settings) for trial in trials]
        )[0]
        until = min(task.steps, alarm.step + AFTER)
        lines: dict[RemedyTrial, list[StreamLine]] = {trial: [] for trial in trials}
        for start in range(begun, until, SLICE):
            count = min(SLICE, until - start)
            for trial in trials:
                lines[trial] += self._ask(arm, count, "advance", trial.arm.name, count)
        for trial in trials:
            self._ask(arm, 0, "drop", trial.arm.name)
        before = load_training(self.writer.path).lines
        self._keep_lines((outcome(alarm, begun, before, lines),), step)

    def _from_checkpoint(self, arm: Arm, until: int, requests: Sequence[tuple[Any, ...]]) -> list[int]:
        """From the newest sound checkpoint up to `until` that has the arm, else the first step. Returns the next
        steps."""
        kept = [self.writer.folder_of(place) for place in reversed(self.writer.places[1:]) if place.step <= until]
        for folder in (*map(str, kept), ""):
            with contextlib.suppress(StoreError):
                return [int(self._ask(arm, 0, name, folder, *rest)) for name, *rest in requests]
        raise AssertionError("the first step needs no checkpoint")

    def _checkpoint(self, step: int) -> None:
        folder = self.writer.checkpoint(self.place, step)
        with _faults():
            lab_of(self.worker, START_SECONDS).save(str(folder))
        with held_back():
            self.writer.keep(self.place, step, folder, tuple(self.out.items()))

    def _go_back(self, lost: _Lost) -> None:
        """Start a fresh worker, without the arm if it failed before. The reference cannot be left out."""
        name = lost.arm.name if lost.arm is not None else ""
        self._failures[name] = self._failures.get(name, 0) + 1
        self.worker.restart()
        kind, words = "restarted", f"{lost.error}; a fresh worker goes on from the last checkpoint"
        if self._failures[name] == _FAILURES:
            if lost.arm is None or lost.arm.role is ArmRole.REFERENCE:
                raise lost.error
            self.out[name] = str(lost.error)
            kind, words = "out", f"{lost.error}; it is trained no further"
        place = self.writer.places[-1]
        self.writer.go_back(place)
        self._keep_lines((TrainingEvent(name, self.seed, place.step, kind, words),), place.step)


def _next(step: int, every: int) -> int:
    return (step // every + 1) * every


@contextlib.contextmanager
def _faults(arm: Arm | None = None) -> Iterator[None]:
    """Turns a worker's StoreError into the parent's own; any other error means that the arm, or all arms, are lost."""
    try:
        yield
    except WorkerError as error:
        if isinstance(error, WorkerFault) and error.kind == StoreError.__name__:
            raise StoreError(str(error).removeprefix(f"{error.kind}: ")) from None
        raise _Lost(arm, error) from None
