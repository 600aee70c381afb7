"""Trains one seed: its arms run in turns of a few steps, until the last step.

Every slice is stored before the next one starts. After a lost worker, a fresh one repeats the steps since the last
checkpoint; an arm that loses its worker twice is excluded, and the others continue.
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
from fp8bench.features.train.arms import arms_of_seed
from fp8bench.features.train.health.health import Health
from fp8bench.features.train.kind import ResumePlace, TrainingWriter, load_training
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.values import (
    BYTES_PER_PARAMETER,
    Arm,
    ArmRole,
    ArmState,
    Lines,
    SeedTask,
    StepFigure,
    StreamLine,
    Training,
    TrainingEvent,
    TrainingObserver,
)
from fp8bench.measure.handle import START_SECONDS, Worker
from fp8bench.measure.interrupts import hold_back_interrupts
from fp8bench.measure.limits import HANG_SECONDS, HANG_STEPS
from fp8bench.measure.sensors.driver import Looks
from fp8bench.model.readings import Reading

# Steps of an arm before the next arm's turn, so that a temporarily slow machine slows all of them.
SLICE = 5
# Limit in seconds for the first slice, whose time is unknown and includes compiling.
FIRST_SECONDS = 1800.0
_FAILURES = 2
# A driver's utilization figure covers about this many seconds.
_LOOK_SECONDS = 1.0


@dataclass
class SeedPace:
    """The longest time of a step until now, from which the time limit of a worker follows."""

    slowest: float = 0.0

    def limit(self, steps: int) -> float:
        return max(HANG_SECONDS, HANG_STEPS * self.slowest * steps) if self.slowest else FIRST_SECONDS

    def took(self, seconds: float, steps: int) -> None:
        self.slowest = max(self.slowest, seconds / steps)


def lab_of(worker: Worker, seconds: float) -> Lab:
    return cast(Lab, worker.within(seconds))


class _Lost(Exception):
    """The worker was lost in a request: of `arm`, or of all arms if that is None."""

    def __init__(self, arm: Arm | None, error: WorkerError) -> None:
        super().__init__(str(error))
        self.arm, self.error = arm, error


@dataclass
class TrainingRun:
    """A running training: its worker, the file for its lines, and its observer."""

    training: Training
    worker: Worker
    writer: TrainingWriter
    observer: TrainingObserver


@dataclass
class SeedRun(TrainingRun):
    """Runs all arms of seed `number`, counted from 0. `out` has why arms are no longer trained; `device` reads the
    device's utilization, if possible."""

    number: int
    pace: SeedPace
    out: dict[str, str]
    device: Looks | None = None
    _looked: float = -math.inf
    _failures: dict[str, int] = field(default_factory=dict)
    _health: Health = field(init=False)

    def run(self, from_start: bool) -> None:
        """Trains from the first step, or from the newest place that can be resumed, to the last step."""
        self._health = Health(self.training.arms, self.training.request.settings)
        if from_start:
            self.writer.keep(self.number, 0, None, tuple(self.out.items()))
        while True:
            try:
                self._rounds(self._begin())
                return
            except _Lost as lost:
                self._go_back(lost)

    @property
    def seed(self) -> int:
        return self.training.request.seed + self.number

    @property
    def _arms(self) -> tuple[Arm, ...]:
        return arms_of_seed(self.training.arms, self.number)

    @property
    def task(self) -> SeedTask:
        """The arms that began the seed, including excluded ones: checkpoints cover all of them."""
        out_before = dict(self.writer.places[0].out)
        return self.training.task(tuple(arm for arm in self._arms if arm.name not in out_before), self.number)

    @property
    def _alive(self) -> list[Arm]:
        return [arm for arm in self.task.arms if arm.name not in self.out]

    def _begin(self) -> int:
        """Builds the arms and restores the newest sound checkpoint; returns the next step."""
        lab = lab_of(self.worker, START_SECONDS)
        with _faults():
            states = lab.begin(self.task)
        if not states:  # no arm could be built in an empty worker: a fresh one would fail, too
            lab.validate(self.task.arms[0].name)
        place = self._restore(lab)
        self.writer.go_back(place)
        self._health = Health(self._arms, self.training.request.settings)
        # Rules must see the lines before the place where training continues.
        self._health.see(line for line in load_training(self.writer.path).lines if line.seed == self.seed)
        if not place.step:
            self._keep_lines(tuple(self._first_lines(states)), 0)
        for arm in self.task.arms:
            if arm.name in self.out:
                lab.drop(arm.name)
        return place.step

    def _restore(self, lab: Lab) -> ResumePlace:
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
        """Runs a slice of every arm, in an order drawn from the seed, until the last step."""
        request = self.training.request
        if step == 0:
            self._validate(step)
        while step < request.steps:
            # A slice ends where a validation or a checkpoint is due.
            until = min(step + SLICE, request.steps, _next(step, request.evaluate), _next(step, request.keep))
            arms = self._alive
            # The order is the same whether or not the training was resumed.
            random.Random(f"{self.seed}/{step}").shuffle(arms)
            count, step = until - step, until
            for arm in arms:
                self._keep_lines(self._ask(arm, count, "advance", arm.name, count), step)
            if use := tuple(self._device_use(step)):
                self._keep_lines(use, step)
            if step == request.steps or step % request.evaluate == 0:
                self._validate(step)
            if step < request.steps and step % request.keep == 0:
                self._checkpoint(step)

    def _device_use(self, step: int) -> Iterator[StepFigure]:
        """Yields the driver's figures for about the last second, regardless of arms."""
        if self.device is None or time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        for name, read in self.device.state().items():
            if name in ("use", "memory_use") and isinstance(read, Reading):
                yield StepFigure("", self.seed, step - 1, f"device_{name}", float(read.number))

    def _validate(self, step: int) -> None:
        for arm in self._alive:
            self._keep_lines(self._ask(arm, 0, "validate", arm.name), step)

    def _first_lines(self, states: Sequence[ArmState]) -> Iterator[StreamLine]:
        """Yields figures of what each arm keeps in memory between steps."""
        for state in states:
            for role, size in state.bytes_per_parameter:
                yield StepFigure(state.arm, self.seed, 0, BYTES_PER_PARAMETER, size, role)

    def _ask(self, arm: Arm, steps: int, name: str, *arguments: Any) -> Any:
        """Calls a method of the lab; `steps` is the number of training steps in the call, for its time limit."""
        began = time.monotonic()
        with _faults(arm):
            # The limit follows the slowest step, so that a slow machine is not mistaken for a hung one.
            answer = getattr(lab_of(self.worker, self.pace.limit(max(steps, SLICE))), name)(*arguments)
        if steps:
            self.pace.took(time.monotonic() - began, steps)
        return answer

    def _keep_lines(self, lines: Lines, step: int) -> None:
        # Alarms are stored after the lines that raised them, so that a resume finds both.
        lines = (*lines, *self._health.see(lines))
        with hold_back_interrupts():
            self.writer.append(lines)
        self.observer.trained(self.number, step, lines)

    def _checkpoint(self, step: int) -> None:
        folder = self.writer.checkpoint(self.number, step)
        with _faults():
            lab_of(self.worker, START_SECONDS).save(str(folder))
        with hold_back_interrupts():
            self.writer.keep(self.number, step, folder, tuple(self.out.items()))

    def _go_back(self, lost: _Lost) -> None:
        """Starts a fresh worker, without the arm if it failed before. The reference cannot be excluded."""
        name = lost.arm.name if lost.arm is not None else ""
        self._failures[name] = self._failures.get(name, 0) + 1
        # The lost worker may hang, so only a fresh one has a known state.
        self.worker.restart()
        # A first loss may be the machine's fault; a second one in the same arm is the arm's.
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
    """Converts a worker's StoreError to the parent's; any other error means that the arm, or all arms, are lost."""
    try:
        yield
    except WorkerError as error:
        if isinstance(error, WorkerFault) and error.kind == StoreError.__name__:
            raise StoreError(str(error).removeprefix(f"{error.kind}: ")) from None
        raise _Lost(arm, error) from None
