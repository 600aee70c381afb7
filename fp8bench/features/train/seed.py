"""Trains one seed: its arms take turns of a few steps, until the last step. The lines of a turn are stored before the
next turn starts. If the worker is lost, a fresh one repeats the steps since the last checkpoint. An arm that loses
its worker twice is excluded, and the other arms continue.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from fp8bench.errors import StoreError, WorkerError, WorkerFault
from fp8bench.features.train.arms import select_arms_of_seed
from fp8bench.features.train.health.health import TrainingHealth
from fp8bench.features.train.kind import ResumePoint, TrainingWriter, load_training
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.values import (
    BYTES_PER_PARAMETER,
    Arm,
    ArmRole,
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
from fp8bench.measure.sensors.nvml import DeviceReader
from fp8bench.model.readings import Reading

# The number of steps in an arm's turn. Turns are short, so that a slow phase of the machine slows all arms.
STEPS_PER_ARM_TURN = 5
# The time limit in seconds of the first turn, whose duration is unknown and includes compiling.
FIRST_CALL_SECONDS = 1800.0
_MAX_FAILURES = 2
# A driver's utilization is an average over about this many seconds.
_UTILIZATION_WINDOW_SECONDS = 1.0


@dataclass
class SeedPace:
    """Stores the longest time of a step until now, and derives the time limit of the worker's calls from it."""

    slowest_step: float = 0.0

    def time_limit(self, steps: int) -> float:
        return max(HANG_SECONDS, HANG_STEPS * self.slowest_step * steps) if self.slowest_step else FIRST_CALL_SECONDS

    def record(self, seconds: float, steps: int) -> None:
        self.slowest_step = max(self.slowest_step, seconds / steps)


def call_lab(worker: Worker, seconds: float) -> Lab:
    return cast(Lab, worker.with_time_limit(seconds))


class _WorkerLost(Exception):
    """Raised when the worker was lost. `arm` is the arm on which it was working; None if it was working on all arms."""

    def __init__(self, arm: Arm | None, error: WorkerError) -> None:
        super().__init__(str(error))
        self.arm = arm
        self.error = error


@dataclass
class TrainingRun:
    """A training in progress: its worker, the file of its lines, and its observer."""

    training: Training
    worker: Worker
    writer: TrainingWriter
    observer: TrainingObserver


@dataclass
class SeedRun(TrainingRun):
    """Trains all arms of one seed. `number` is the number of the seed, counted from 0. `exclusion_reason_by_arm` has
    the reasons why some arms are no longer trained. `device` reads the device's utilization; None if there is none, as
    on a CPU.
    """

    number: int
    pace: SeedPace
    exclusion_reason_by_arm: dict[str, str]
    device: DeviceReader | None = None
    _last_device_reading_time: float = -math.inf
    _failures_by_arm: dict[str, int] = field(default_factory=dict)
    _training_health: TrainingHealth = field(init=False)

    def run(self, from_start: bool) -> None:
        """Trains to the last step. Begins at the first step, or at the newest checkpoint that can be used."""
        self._training_health = TrainingHealth(self.training.arms, self.training.request.settings)
        if from_start:
            self.writer.store_point(self.number, 0, None, tuple(self.exclusion_reason_by_arm.items()))
        while True:
            try:
                self._train_arms_in_turns(self._begin_seed())
                return
            except _WorkerLost as lost:
                self._restart_worker(lost)

    @property
    def seed(self) -> int:
        return self.training.request.seed + self.number

    @property
    def _arms_of_seed(self) -> tuple[Arm, ...]:
        return select_arms_of_seed(self.training.arms, self.number)

    @property
    def task(self) -> SeedTask:
        """Returns the task with all arms that began the seed, including arms that were excluded later. Checkpoints have
        the states of all of these arms.
        """
        initially_excluded_arms = dict(self.writer.points[0].out)
        return self.training.make_task(
            tuple(arm for arm in self._arms_of_seed if arm.name not in initially_excluded_arms), self.number
        )

    @property
    def _active_arms(self) -> list[Arm]:
        return [arm for arm in self.task.arms if arm.name not in self.exclusion_reason_by_arm]

    def _begin_seed(self) -> int:
        """Builds the arms, restores the newest usable checkpoint, and returns the next step."""
        lab = call_lab(self.worker, START_SECONDS)
        with _convert_worker_errors():
            arm_states = lab.begin(self.task)
        if not arm_states:  # no arm could be built although none was loaded, so a fresh worker would fail as well
            lab.validate(self.task.arms[0].name)
        point = self._restore_checkpoint(lab)
        self.writer.truncate_at_resume_point(point)
        self._training_health = TrainingHealth(self._arms_of_seed, self.training.request.settings)
        # Health rules need the earlier lines of the seed too, so replay the stored lines.
        self._training_health.find_alarms(
            line for line in load_training(self.writer.path).lines if line.seed == self.seed
        )
        if not point.step:
            lines: list[StreamLine] = []
            for state in arm_states:
                for role, byte_count in state.bytes_per_parameter:
                    lines.append(StepFigure(state.arm, self.seed, 0, BYTES_PER_PARAMETER, byte_count, role))
            self._store_lines(lines, 0)
        # Excluded arms had to be built, because the checkpoint has their states.
        for arm in self.task.arms:
            if arm.name in self.exclusion_reason_by_arm:
                lab.drop(arm.name)
        return point.step

    def _restore_checkpoint(self, lab: Lab) -> ResumePoint:
        seed_start, *checkpoints = self.writer.points
        for point in reversed(checkpoints):
            try:
                with _convert_worker_errors():
                    lab.restore(str(self.writer.checkpoint_folder(point)))
                return point
            except StoreError as error:
                self.observer.note(f"{error} The previous checkpoint is used.")
        return seed_start

    def _train_arms_in_turns(self, step: int) -> None:
        """Trains every arm in turns until the last step. The order of arms in a round is drawn from the seed."""
        request = self.training.request
        if step == 0:
            self._validate_arms(step)
        while step < request.steps:
            # An arm's turn ends early if a validation or a checkpoint is due.
            turn_end_step = min(
                step + STEPS_PER_ARM_TURN,
                request.steps,
                _find_next_multiple(step, request.evaluate),
                _find_next_multiple(step, request.keep),
            )
            arms = self._active_arms
            # The order depends only on seed and step, so that a resumed training has the same order.
            random.Random(f"{self.seed}/{step}").shuffle(arms)
            step_count = turn_end_step - step
            step = turn_end_step
            for arm in arms:
                self._store_lines(self._call_lab(arm, step_count, "advance", arm.name, step_count), step)
            if utilization := tuple(self._yield_utilization_figures(step)):
                self._store_lines(utilization, step)
            if step == request.steps or step % request.evaluate == 0:
                self._validate_arms(step)
            if step < request.steps and step % request.keep == 0:
                self._save_checkpoint(step)

    def _yield_utilization_figures(self, step: int) -> Iterator[StepFigure]:
        """Yields the device's utilization, as its driver reports it: averages over about the last second. They belong
        to all arms together, so the figures name no arm.
        """
        if self.device is None or time.monotonic() - self._last_device_reading_time < _UTILIZATION_WINDOW_SECONDS:
            return
        self._last_device_reading_time = time.monotonic()
        for name, reading in self.device.state().items():
            if name in ("use", "memory_use") and isinstance(reading, Reading):
                yield StepFigure("", self.seed, step - 1, f"device_{name}", float(reading.number))

    def _validate_arms(self, step: int) -> None:
        for arm in self._active_arms:
            self._store_lines(self._call_lab(arm, 0, "validate", arm.name), step)

    def _call_lab(self, arm: Arm, steps: int, name: str, *arguments: Any) -> Any:
        """Calls a method of the lab. `steps` is the number of training steps in the call, which sets the time limit."""
        start = time.monotonic()
        with _convert_worker_errors(arm):
            # The slowest step sets the time limit, so that a slow machine does not seem to hang.
            answer = getattr(call_lab(self.worker, self.pace.time_limit(max(steps, STEPS_PER_ARM_TURN))), name)(
                *arguments
            )
        if steps:
            self.pace.record(time.monotonic() - start, steps)
        return answer

    def _store_lines(self, lines: Lines, step: int) -> None:
        # Alarms are stored with the lines that caused them, so that a resumed training has both.
        lines = (*lines, *self._training_health.find_alarms(lines))
        with hold_back_interrupts():
            self.writer.append(lines)
        self.observer.trained(self.number, step, lines)

    def _save_checkpoint(self, step: int) -> None:
        folder = self.writer.make_checkpoint_folder(self.number, step)
        with _convert_worker_errors():
            call_lab(self.worker, START_SECONDS).save(str(folder))
        with hold_back_interrupts():
            self.writer.store_point(self.number, step, folder, tuple(self.exclusion_reason_by_arm.items()))

    def _restart_worker(self, lost: _WorkerLost) -> None:
        """Starts a fresh worker. Excludes an arm that fails for the second time. If this is the reference, or no
        particular arm, raises the error instead.
        """
        name = lost.arm.name if lost.arm is not None else ""
        self._failures_by_arm[name] = self._failures_by_arm.get(name, 0) + 1
        # The lost worker may hang, and only a fresh one has a known state.
        self.worker.restart()
        # The machine may have caused the first failure of an arm. After the second failure the arm is excluded.
        kind = "restarted"
        sentence = f"{lost.error}; a fresh worker continues from the last checkpoint"
        if self._failures_by_arm[name] == _MAX_FAILURES:
            if lost.arm is None or lost.arm.role is ArmRole.REFERENCE:
                raise lost.error
            self.exclusion_reason_by_arm[name] = str(lost.error)
            kind = "out"
            sentence = f"{lost.error}; this arm is excluded"
        # The fresh worker repeats the steps since the last checkpoint, so drop their lines.
        point = self.writer.points[-1]
        self.writer.truncate_at_resume_point(point)
        self._store_lines((TrainingEvent(name, self.seed, point.step, kind, sentence),), point.step)


def _find_next_multiple(step: int, interval: int) -> int:
    return (step // interval + 1) * interval


@contextlib.contextmanager
def _convert_worker_errors(arm: Arm | None = None) -> Iterator[None]:
    """Converts errors that a worker raises inside the `with` block. A StoreError is raised again in this process. Any
    other error is raised as _WorkerLost, for `arm` or for all arms.
    """
    try:
        yield
    except WorkerError as error:
        if isinstance(error, WorkerFault) and error.kind == StoreError.__name__:
            raise StoreError(str(error).removeprefix(f"{error.kind}: ")) from None
        raise _WorkerLost(arm, error) from None
